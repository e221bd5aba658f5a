"""How much a service takes in before it answers BUSY."""

from msgspec import Struct

from keyloft import limits


class IntakeBounds(Struct, frozen=True, kw_only=True):
    """The bounds of an intake, for one owner and for all together."""

    owner_bytes: int = limits.OWNER_BYTES
    """How many bytes the unanswered requests of one owner may have."""
    all_bytes: int = limits.INTAKE_BYTES
    """How many bytes all owners together may have; a quarter of it is for the replies that are being made."""
    requests_per_second: float | None = None
    """How many requests one owner may send a second; None for any number."""

    @property
    def request_bytes(self) -> int:
        """How many bytes the unanswered requests of all owners may have."""
        return self.all_bytes * 5 // 8

    @property
    def reserve_bytes(self) -> int:
        """How many more bytes are kept for owners with little unanswered, so that a few can't shut out all others."""
        return self.all_bytes // 8

    @property
    def reply_bytes(self) -> int:
        """With this many bytes of replies that are being made or sent, the next requests wait."""
        return self.all_bytes // 4
