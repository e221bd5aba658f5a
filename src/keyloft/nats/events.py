"""Events of a watch as they travel: what a service publishes to the subject of a lease.

Every message has a run and a sequence. A run is one service's continuous publishing; its messages are numbered from 1
on, and the first one names the version from which the run goes on. So a subscriber notices every message it missed.
"""

from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

WATCH: Final = "watch"
"""The operation that asks for events."""
EVENTS: Final = "events"
"""The part of a subject between the owner and the id of a lease."""


class Event(Struct, frozen=True, gc=False):
    """A change: a put, or, if `deleted`, a delete or an expiry."""

    key: str
    version: int
    """The version of the commit; for an expiry, the version up to which all changes were reported before it."""
    deleted: bool = False


class EventMessage(Struct, kw_only=True, omit_defaults=True, gc=False):
    """An event; without a key, a report that all events up to a version were published; or an error."""

    key: str | UnsetType = UNSET
    version: int
    deleted: bool | UnsetType = UNSET
    run: int
    sequence: int
    more: bool = False
    """Whether another event of the same version may follow."""
    error_code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


encode: Final = msgspec.json.Encoder().encode
decode: Final = msgspec.json.Decoder(EventMessage).decode
