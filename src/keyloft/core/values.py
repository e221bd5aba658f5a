"""Values as they are stored, and back: JSON, bytes, and U64 counters.

A value that would not be read back equal is refused. JSON libraries silently turn sets into lists, datetimes into
strings, NaN into null and `{1: …}` into `{"1": …}`; so each value is decoded and compared before it is stored. Tuples
are the one exception: they are stored as lists, and read back as lists.
"""

import base64
import collections
import datetime
import decimal
import enum
import inspect
import json
import math
import pathlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from keyloft import limits
from keyloft.core import integers, json_text
from keyloft.core.interrupts import raised_by_a_handler
from keyloft.core.keys import InnerKey
from keyloft.errors import InvalidValue, InvalidValueType, Undecodable, ValueTooLarge


class Encoding(IntEnum):
    """The format of a stored value."""

    JSON = 0
    BYTES = 1
    U64 = 2


class U64(int):
    """An unsigned 64-bit counter, for `sum`, `min` and `max`; otherwise an int like any other."""

    __slots__ = ()

    def __new__(cls, value: int = 0) -> "U64":
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidValueType(f"value: expected an int for a U64, got {type(value).__name__}")
        if not 0 <= value <= limits.U64_MAX:
            raise InvalidValue("value: a U64 is between 0 and 2**64 - 1")
        return super().__new__(cls, value)

    def __repr__(self) -> str:
        return f"U64({int(self)})"

    __str__ = int.__repr__

    def __eq__(self, other: object) -> bool:
        global _u64_comparisons
        _u64_comparisons += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


_u64_comparisons = 0
"""How often a U64 was compared. `encode_json` compares a value with its JSON, and so notices a U64 inside."""

LOST = -1
"""Instead of an encoding: the value is missing from the database."""

DAMAGED = -2
"""Instead of an encoding: the value is not what was written."""

JSON, BYTES, COUNTER = Encoding.JSON, Encoding.BYTES, Encoding.U64

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode
_MUCH = limits.GC_PAUSE_BYTES
_long_digits = re.compile(rb"[0-9]{600}").search


def encode(value: object, limit: int) -> tuple[bytes, Encoding]:
    """The stored form of a value.

    Raises:
        InvalidValue: It would not be read back equal.
        ValueTooLarge: Its stored form has more than `limit` bytes.
    """
    try:
        if type(value) is bytes:
            data, encoding = value, BYTES
        elif type(value) is U64:
            data, encoding = pack_counter(value), COUNTER
        else:
            data, encoding = encode_json(value, limit), JSON
    except ValueTooLarge as error:
        raise _too_large(error) from None
    if len(data) > limit:
        raise _too_large(ValueTooLarge(len(data), limit))
    return data, encoding


def check_json(data: bytes, limit: int) -> None:
    """Refuse the JSON of a value that is too large, or nests too deep.

    Raises:
        InvalidValue: It is too large, or nests too deep.
    """
    if len(data) > limit:
        raise _too_large(ValueTooLarge(len(data), limit))
    if len(data) > 2 * limits.VALUE_DEPTH and json_text.is_deeper(data, limits.VALUE_DEPTH):
        raise _too_deep(limits.VALUE_DEPTH)


def _too_large(error: ValueTooLarge) -> ValueTooLarge:
    advice = "max_value_bytes in keyloft.open sets the limit, but not over HTTP"
    return ValueTooLarge(error.size, error.limit, f"{error}; {advice}")


def decode(data: bytes, encoding: int) -> Any:
    """The value of its stored form.

    Raises:
        Undecodable: The bytes don't have this encoding.
    """
    if encoding == 0:
        return decode_json(data)
    if encoding == 1:
        return data
    if encoding == 2 and len(data) == 8:
        return U64(unpack_counter(data))
    if encoding == LOST:
        raise Undecodable("the stored value is lost")
    if encoding == DAMAGED:
        raise Undecodable("the stored value does not match its checksum; restore it from a backup")
    raise Undecodable(f"a stored value of {len(data):,} bytes does not have the encoding it is marked with, {encoding}")


def encode_json(value: object, limit: int, most_levels: int = limits.VALUE_DEPTH) -> bytes:
    """Compact JSON in UTF-8, from which an equal value can be read again.

    Args:
        value: What to encode.
        limit: How many bytes the value may have; this function checks only its long ints against it.
        most_levels: How deep its lists and dicts may nest.
    """
    compared = _u64_comparisons
    try:
        data = _to_json(value)
        faithful = (_from_json(data) if len(data) < _MUCH else read_json(_from_json, data)) == value
    except Exception as error:  # a value's own __eq__ may raise anything
        if raised_by_a_handler(error, lambda: _from_json(_to_json(value)) == value):
            raise
        faithful = False
    if not faithful or compared != _u64_comparisons:
        # Slow and exact: accepts tuples and very long ints, and explains what is wrong with other values.
        data = json_text.on_any_stack(_to_json, _plain(value, limit, most_levels))
    elif len(data) > 2 * most_levels and json_text.is_deeper(data, most_levels):
        raise _too_deep(most_levels)
    return data


def decode_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        Undecodable: It is not JSON.
    """
    try:
        return _from_json(data) if len(data) < _MUCH else read_json(_from_json, data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        return json_text.on_any_stack(_from_json_with_long_ints if _long_digits(data) else _from_json, data)
    except RecursionError:
        if not json_text.is_deeper(data, limits.PLUGIN_VALUE_DEPTH):
            raise  # the caller's stack is used up
        reason = "nests too deep"
    except (msgspec.MsgspecError, ValueError):
        reason = "is not JSON"
    raise Undecodable(f"a stored value of {len(data):,} bytes {reason}")


def read_json(read: Callable[[bytes], Any], data: bytes) -> Any:
    """What `read` makes of JSON; for much JSON the garbage collector is off, because it would double the time."""
    if len(data) < _MUCH:
        return read(data)
    with json_text.collecting_no_garbage(data):
        return read(data)


def _from_json_with_long_ints(data: bytes) -> Any:
    """Decode JSON with ints of any length: msgspec has Python's limit on digits, Keyloft only that on the size."""
    return json.loads(data.decode(), parse_int=integers.parse, parse_float=_finite, parse_constant=_finite)


def decode_json_many(many: Sequence[bytes]) -> list[Any]:
    """The values of several JSON texts."""
    try:
        return list(map(_from_json, many))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return [decode_json(data) for data in many]


def to_builtin(value: Any) -> Any:
    """A value, or a part of a key, in JSON: bytes as {"bytes": "<base64>"}, a U64 as an int, inf as {"float":"inf"}."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return int(value) if isinstance(value, U64) else value


def pack_counter(number: int) -> bytes:
    return number.to_bytes(8, "little")


def unpack_counter(data: bytes) -> int:
    return int.from_bytes(data, "little")


class _Container:
    """A list or dict of which a copy is being made."""

    def __init__(self, original: object, items: Iterator[tuple[Any, object]], copy: Any) -> None:
        self.original = original
        self.items = items
        self.copy = copy
        self.place: Any = None
        """Where the item that is being copied is: an index, or a name."""

    def add(self, item: object) -> None:
        if isinstance(self.copy, dict):
            self.copy[self.place] = item
        else:
            self.copy.append(item)


def _plain(value: object, limit: int, most_levels: int) -> object:
    """A copy that consists of what JSON can hold; made without recursion, because a value may nest deeper than a stack.

    Raises:
        InvalidValue: A part of the value can't be JSON; the message names its path.
    """
    ints = _LongInts(limit)
    whole = _Container(None, iter([(None, value)]), [])
    around, ids = [whole], set[int]()
    while around:
        inner = around[-1]
        for place, item in inner.items:
            inner.place = _plain_name(place, around) if isinstance(inner.copy, dict) else place
            copy: Any
            if isinstance(item, dict):
                copy, items = {}, iter(item.items())
            elif isinstance(item, list) or type(item) is tuple or type(item) is InnerKey:
                copy, items = [], iter(enumerate(item))
            else:
                inner.add(_plain_scalar(item, around, ints))
                continue
            if id(item) in ids:
                raise InvalidValue(f"{_path(around)}: contains itself; JSON can't hold that")
            if len(around) > most_levels:
                raise _too_deep(most_levels)
            inner.add(copy)
            ids.add(id(item))
            around.append(_Container(item, items, copy))
            break
        else:
            around.pop()
            ids.discard(id(inner.original))
    return whole.copy[0]


def _plain_scalar(value: object, around: list[_Container], ints: "_LongInts") -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value, around)
    if isinstance(value, int) and type(value) is not U64:
        return ints.write(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidValue(f"{_path(around)}: {float(value)} is not JSON; use None, or a str")
        return float(value)
    what = f"{_path(around)}: the type {type(value).__name__}"
    if inspect.isawaitable(value):
        raise InvalidValueType(f"{what} is not a value: await it, and store what it returns")
    raise InvalidValueType(
        f"{what} would not be read back equal; {cure_of(value)}. The tuple store also takes typed objects, with "
        "datetimes, sets and bytes in them: set(key, value, type=…)"
    )


_OF_OTHERS: Final = "JSON has None, bool, int, float, str, list, and dict with str keys"


def cure_of(value: object, otherwise: str = _OF_OTHERS) -> str:
    """What to store instead of a value that JSON does not have, for messages."""
    return next((cure for kinds, cure in _CURES if isinstance(value, kinds)), otherwise)


_CURES: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((datetime.date, datetime.time), "store its .isoformat()"),
    ((datetime.timedelta,), "store its .total_seconds()"),
    ((set, frozenset, collections.deque), "store a list"),
    (
        (bytes, bytearray, memoryview),
        "bytes are stored only as a whole value of the tuple store; in JSON, store text in base64",
    ),
    ((U64,), "a U64 is stored only as a whole value of the tuple store; in JSON, store an int"),
    ((enum.Enum,), "store its .value"),
    ((decimal.Decimal, uuid.UUID, pathlib.PurePath), "store it as a str"),
)
"""What to store instead of a value that JSON does not have, by its type; the first that fits."""


class _LongInts:
    """Writes the ints of a value, unless the digits of the long ones alone exceed its size limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._digits = 0

    def write(self, number: int) -> object:
        if number.bit_length() <= integers.SHORT_BITS:
            return number
        self._digits += integers.digits_at_least(number)
        if self._digits > self._limit:  # before the slow conversion
            raise ValueTooLarge(self._digits, self._limit)
        return msgspec.Raw(integers.write(number).encode())


def _plain_name(name: object, around: list[_Container]) -> str:
    if not isinstance(name, str):
        where, kind = _path(around[:-1]), type(name).__name__
        raise InvalidValueType(
            f"{where}: a dict key of type {kind}, and JSON has str keys; use a str, or in the tuple store name the "
            f"type of the value, as in set(key, value, type=dict[{kind}, …])"
        )
    return _plain_text(name, around, is_name=True)


def _plain_text(text: str, around: list[_Container], *, is_name: bool = False) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        where = f"{_path(around[:-1])}: a dict key" if is_name else _path(around)
        raise InvalidValue(f"{where}: holds a lone surrogate, which is not Unicode text") from None
    return str.__str__(text)


def _path(containers: list[_Container]) -> str:
    """The path of an item within the caller's argument, as in `value[1]['name']`, for messages."""
    return "value" + "".join([shown_place(container.place) for container in containers[1:]])


def shown_place(place: object) -> str:
    """An index or a name, as it stands in a path, for messages."""
    shown = ascii(place)
    return f"[{shown if len(shown) <= 40 else shown[:37] + '…'}]"


def _too_deep(most_levels: int) -> InvalidValue:
    return InvalidValue(f"value: nests more than {most_levels} lists and dicts, which is the limit; flatten it")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("NaN and Infinity are not JSON, and a larger number is out of the range of a float")
    return number
