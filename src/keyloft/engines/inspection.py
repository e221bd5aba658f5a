"""What an inspection finds out about a database without changing it."""

from msgspec import Struct

from keyloft.core.adoption import Adoption
from keyloft.core.health import ServerHealth


class Inspection(Struct, frozen=True, kw_only=True):
    """The state of a database, which decides whether Keyloft can use it."""

    software: str
    """The database software and its version."""
    revision: str | None
    """The revision of its schema; None in a database without Keyloft's tables."""
    wanted: str
    """The revision that this version of Keyloft reads and writes."""
    store: str | None = None
    """The id of the store; None in a database without Keyloft's tables."""
    ahead: float | None = None
    """By how many seconds its clock is ahead of this machine's; None where it is this machine's."""
    has_checksums: bool | None = None
    """Whether a server has checksums of its pages; None where Keyloft has its own, or a server does not say."""
    servers: ServerHealth | None = None
    """The hosts of the database, where there are several or they could be."""
    obstacles: tuple[tuple[str, str], ...] = ()
    """What prevents this user from using it, each with its remedy."""
    adoption: Adoption | None = None
    """What opening it would do with a plugins' table that another program made."""
