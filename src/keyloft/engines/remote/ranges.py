"""The bounds of a scan as parameters of the HTTP API: prefix, start or cursor, and end.

start               means                                   parameter
a key               this key and what follows it            start, or with `after` of the scan: after
a key, then 00      what follows this key                   the prefix itself, or after
a key, then FF      what follows this key and all below it  past
end
a key               what comes before it                    end
a key, then FF      all that is below the key               the prefix itself
"""

from typing import Final

from keyloft.core import key_text, keys
from keyloft.core.keys import TupleKey
from keyloft.errors import InvalidArgument, Undecodable

_KEY: Final = ""
_FIRST, _LAST = "first", "last"


def parameters(start: bytes, end: bytes, *, after: bool = False) -> dict[str, str]:
    """The parameters that select the keys in `[start, end)`; `after` leaves `start` itself out.

    Raises:
        InvalidArgument: The API has no parameters for such bounds; a `Store` never makes them.
    """
    low, low_kind = _bound(start)
    high, high_kind = _bound(end)
    prefix = _shared(low if low_kind == _FIRST else low[:-1], high if high_kind == _LAST else high[:-1])
    made = {"prefix": key_text.write(prefix)} if prefix else {}
    if low_kind == _LAST:
        made["past"] = key_text.write(low)
    elif low_kind == _KEY:
        made["after" if after else "start"] = key_text.write(low)
    elif len(low) > len(prefix):
        made["after"] = key_text.write(low)
    if high_kind == _KEY:
        made["end"] = key_text.write(high)
    elif high_kind == _FIRST or len(high) > len(prefix):
        raise InvalidArgument("over HTTP, a range ends before a key, or with all that is below a prefix")
    return made


def prefix_of(start: bytes, end: bytes) -> str:
    """The prefix below which all keys of `[start, end)` are, and no others, as text.

    Raises:
        InvalidArgument: There is none.
    """
    made = parameters(start, end)
    if set(made) <= {"prefix"}:
        return made.get("prefix", "")
    raise InvalidArgument("over HTTP, keys or all that is below a prefix can be watched, and no other range")


def _bound(encoded: bytes) -> tuple[TupleKey, str]:
    """The key that a bound is, or begins with, and which byte follows it: none, 00 or FF."""
    try:
        if encoded:
            return keys.decode(encoded), _KEY
    except Undecodable:
        if encoded.endswith((keys.FIRST, keys.LAST)):
            return keys.decode(encoded[:-1]), _FIRST if encoded.endswith(keys.FIRST) else _LAST
        raise
    return (), _FIRST


def _shared(one: TupleKey, other: TupleKey) -> TupleKey:
    """The parts that two keys begin with."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if keys.encode_prefix((left,)) != keys.encode_prefix((right,)):  # True is not 1, and 1.0 is neither
            break
        shared += 1
    return one[:shared]
