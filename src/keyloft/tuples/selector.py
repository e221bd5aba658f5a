"""Which keys a list, a count or a range delete selects: prefix, start, end, direction and cursor."""

import base64
import binascii
import hashlib

from msgspec import Struct

from keyloft.core import keys
from keyloft.core.keys import KeyLike
from keyloft.core.records import NO_LIMIT, Scan, Space
from keyloft.errors import InvalidArgument, InvalidCursor

_DIGEST_BYTES = 8


class Selector(Struct, frozen=True):
    """A checked range of encoded keys, `[start, end)`, read in one direction."""

    start: bytes
    end: bytes
    reverse: bool = False
    cursor: str | None = None
    last_key: bytes | None = None
    """The key that the cursor stands for: the list continues after it."""

    @classmethod
    def of(
        cls,
        prefix: KeyLike | None,
        start: KeyLike | None,
        end: KeyLike | None,
        *,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> "Selector":
        """Check and encode the arguments of a caller.

        Raises:
            InvalidArgument: The arguments contradict each other.
            InvalidCursor: The cursor belongs to another selector.
        """
        if type(reverse) is not bool:
            raise InvalidArgument(f"reverse: expected True or False, got {type(reverse).__name__}")
        within = keys.encode_prefix(prefix if prefix is not None else ())
        low, high = keys.below(within)
        if start is not None:
            low = _bound("start", start, within)
        if end is not None:
            high = _bound("end", end, within)
        if low > high:
            raise InvalidArgument("start: comes after end; start is the lowest key of a range, also with reverse=True")
        selector = cls(low, high, reverse)
        return selector if cursor is None else cls(low, high, reverse, cursor, selector._read(cursor))

    def scan(self, limit: int = NO_LIMIT, *, keys_only: bool = False) -> Scan:
        """The read request for an engine."""
        if self.last_key is None:
            return Scan(Space.TUPLES, self.start, self.end, limit, self.reverse, keys_only)
        if self.reverse:
            return Scan(Space.TUPLES, self.start, self.last_key, limit, self.reverse, keys_only)
        return Scan(Space.TUPLES, self.last_key, self.end, limit, self.reverse, keys_only, after=True)

    def cursor_after(self, key: bytes) -> str:
        """A text from which a list with the same arguments continues after `key`."""
        return base64.urlsafe_b64encode(self._digest() + key).decode()

    def _read(self, cursor: str) -> bytes:
        try:
            raw = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError, AttributeError):
            raw = b""
        if len(raw) <= _DIGEST_BYTES:
            raise InvalidCursor("cursor: not one of Keyloft's; pass the .cursor of an earlier list, or leave it out")
        digest, key = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if digest != self._digest() or not self.start <= key < self.end:
            raise InvalidCursor("cursor: from a list with other arguments; keep prefix, start, end and reverse")
        return key

    def _digest(self) -> bytes:
        described = b"%d:%b%b%d" % (len(self.start), self.start, self.end, self.reverse)
        return hashlib.blake2b(described, digest_size=_DIGEST_BYTES).digest()


def _bound(name: str, key: KeyLike, within: bytes) -> bytes:
    encoded = keys.encode(key, name)
    if not encoded.startswith(within) or encoded == within:
        raise InvalidArgument(f"{name}: outside the prefix; expected a key that begins with it and has more parts")
    return encoded
