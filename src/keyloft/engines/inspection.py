"""What a database shows to somebody who changes nothing in it."""

from msgspec import Struct


class Inspection(Struct, frozen=True, kw_only=True):
    """The state of a database, as far as it decides whether Keyloft can use it."""

    software: str
    """What keeps the data, and its version."""
    revision: str | None
    """The schema that it has; None in a database that is not Keyloft's yet."""
    wanted: str
    """The schema that this version of Keyloft reads and writes."""
    ahead: float | None = None
    """By how many seconds its clock is ahead of this machine's; None where it is this machine's."""
    obstacles: tuple[tuple[str, str], ...] = ()
    """What keeps this user from using it, each with what to do about it."""
