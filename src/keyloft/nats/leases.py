"""Stored leases of watches: whose changes are published where, by which instance, and from which version.

They are rows of the semantic space behind bytes that no other row begins with. A lease is a row that expires unless its
client renews it. It names the instance of the service that publishes its events. An instance counts as alive until its
heartbeat row expires; then another instance takes its leases over. The instance's progress row says how far it has
published for all of its leases.
"""

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from keyloft import limits
from keyloft.core.records import SERVICE_ROWS, Set, Space
from keyloft.core.values import Encoding
from keyloft.errors import Undecodable

SPACE: Final = Space.SEMANTIC

_LEASE: Final = b"l"
_HEARTBEAT: Final = b"b"
_PROGRESS: Final = b"p"


class Lease(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A watch of a client, as stored."""

    subject: str
    """Where its events are published."""
    names: tuple[str, ...]
    """Whose changes: a plugin, or a tenant and a project."""
    publisher: str
    """The id of the instance that publishes."""
    since: int
    """Changes after this version are to be published."""
    run: int = 0
    """It grows whenever publishing begins again. It is 0 until the first renewal, by which the client says that it has
    subscribed."""
    prefix: str | None = None
    keys: tuple[str, ...] | None = None
    gone: str | None = None
    """Why there is nothing more to publish: the change log no longer reaches back so far."""

    @property
    def size(self) -> int:
        """How many bytes its keys take."""
        return watched_bytes(self.keys)


class PublishedProgress(Struct, frozen=True):
    """How far an instance has published."""

    reached: int = 0
    """All changes up to this version are published, for each lease whose row is not newer than `known`."""
    known: int = 0
    """The version up to which the instance knew the stored leases."""


_encode: Final = msgspec.json.Encoder().encode
_decode_lease: Final = msgspec.json.Decoder(Lease).decode
_decode_progress: Final = msgspec.json.Decoder(PublishedProgress).decode


def new_id() -> str:
    """A random id, of a lease or an instance."""
    return secrets.token_hex(12)


def watched_bytes(keys: Sequence[str] | None) -> int:
    """About how many bytes the keys of a watch take in the memory of a service."""
    return sum([len(key.encode()) + limits.LEASE_KEY_BYTES for key in keys or ()])


def read_lease(value: bytes) -> Lease:
    """A stored lease.

    Raises:
        Undecodable: The row can't be read.
    """
    try:
        return _decode_lease(value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Undecodable("a row of a watch's lease can't be read") from error


def read_progress(value: bytes) -> PublishedProgress:
    """A stored progress.

    Raises:
        Undecodable: The row can't be read.
    """
    try:
        return _decode_progress(value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Undecodable("a row of a service's progress can't be read") from error


def stored(
    row: bytes, content: Lease | PublishedProgress, *, expire_in: int | None = None, expire_at: int | None = None
) -> Set:
    """The write that stores a lease or a progress."""
    return Set(SPACE, row, _encode(content), Encoding.JSON, expire_in, expire_at)


class LeaseRows:
    """The rows of one service's leases and instances."""

    def __init__(self, service: str) -> None:
        self._before = SERVICE_ROWS + service.encode() + b"\x00"

    @property
    def all(self) -> tuple[bytes, bytes]:
        """The range of all these rows."""
        return self._before, self._before[:-1] + b"\x01"

    def lease(self, names: Sequence[str], lease_id: str) -> bytes:
        return b"%b%b%b\x00%b" % (self._before, _LEASE, ".".join(names).encode(), lease_id.encode())

    def heartbeat(self, instance: str) -> bytes:
        return self._before + _HEARTBEAT + instance.encode()

    def progress(self, instance: str) -> bytes:
        return self._before + _PROGRESS + instance.encode()

    def is_lease(self, row: bytes) -> bool:
        return row.startswith(_LEASE, len(self._before))

    def is_heartbeat(self, row: bytes) -> bool:
        return row.startswith(_HEARTBEAT, len(self._before))

    def instance(self, row: bytes) -> str:
        """Whose heartbeat or progress a row is."""
        return row[len(self._before) + 1 :].decode()
