"""Which keys a list, a count or a range delete is about: prefix, start, end, direction and cursor."""

import base64
import binascii
import hashlib

from msgspec import Struct

from keyloft.core import keys
from keyloft.core.keys import KeyLike
from keyloft.core.records import EVERYTHING, Scan, Space
from keyloft.errors import InvalidArgument, InvalidCursor

_DIGEST_BYTES = 8


class Selector(Struct, frozen=True):
    """A checked range of encoded keys, `[start, end)`, read in one direction."""

    start: bytes
    end: bytes
    reverse: bool = False
    passed: bytes | None = None
    """The key up to which an earlier list got."""

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
        """Make a selector of what a caller passed.

        Raises:
            InvalidArgument: The parts contradict each other.
            InvalidCursor: The cursor belongs to another selector.
        """
        if type(reverse) is not bool:
            raise InvalidArgument(f"reverse is True or False, not {type(reverse).__name__}")
        within = keys.encode_prefix(prefix if prefix is not None else ())
        low, high = keys.below(within)
        if start is not None:
            low = _bound("start", start, within)
        if end is not None:
            high = _bound("end", end, within)
        if low > high:
            raise InvalidArgument("start comes after end; it is the first key of the range, whatever the direction")
        selector = cls(low, high, reverse)
        return selector if cursor is None else cls(low, high, reverse, selector._read(cursor))

    def scan(self, space: Space, limit: int = EVERYTHING, *, keys_only: bool = False) -> Scan:
        """What to ask an engine for."""
        if self.passed is None:
            return Scan(space, self.start, self.end, limit, self.reverse, keys_only)
        if self.reverse:
            return Scan(space, self.start, self.passed, limit, self.reverse, keys_only)
        return Scan(space, self.passed, self.end, limit, self.reverse, keys_only, after=True)

    def cursor_after(self, key: bytes) -> str:
        """Where to go on after `key`, as a text that fits this selector only."""
        return base64.urlsafe_b64encode(self._digest() + key).decode()

    def _read(self, cursor: str) -> bytes:
        try:
            raw = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError, AttributeError):
            raw = b""
        if len(raw) <= _DIGEST_BYTES:
            raise InvalidCursor("this is no cursor: pass the .cursor of an earlier list, or None to begin at the start")
        digest, key = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if digest != self._digest() or not self.start <= key < self.end:
            raise InvalidCursor(
                "this cursor belongs to another list: prefix, start, end and reverse must be the same; limit may differ"
            )
        return key

    def _digest(self) -> bytes:
        described = b"%d:%b%b%d" % (len(self.start), self.start, self.end, self.reverse)
        return hashlib.blake2b(described, digest_size=_DIGEST_BYTES).digest()


def _bound(name: str, key: KeyLike, within: bytes) -> bytes:
    encoded = keys.encode(key)
    if not encoded.startswith(within) or encoded == within:
        raise InvalidArgument(
            f"{name} lies outside the prefix: it is a whole key, which begins with the prefix and goes on"
        )
    return encoded
