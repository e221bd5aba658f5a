"""Values as they are stored, and back: JSON, bytes, and U64 counters.

A value that would not be read back equal is refused. JSON libraries silently turn sets into lists, datetimes into
strings, NaN into null and `{1: …}` into `{"1": …}`; so each value is decoded and compared before it is stored. Tuples
are the one exception: they are stored as lists, and read back as lists.
"""

import base64
import contextlib
import json
import math
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import msgspec

from keyloft import limits
from keyloft.core import integers
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


LOST = -1
"""Instead of an encoding: the value is missing from the database."""

JSON, BYTES, COUNTER = Encoding.JSON, Encoding.BYTES, Encoding.U64

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode
_TOO_DEEP = f"value: nests more than {limits.VALUE_DEPTH} lists and dicts, which is the limit; flatten it"
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
        if len(data) > limit:
            raise ValueTooLarge(len(data), limit)
    except ValueTooLarge as error:
        raise ValueTooLarge(error.size, limit, f"{error}; max_value_bytes in keyloft.open sets the limit") from None
    return data, encoding


def decode(data: bytes, encoding: int) -> Any:
    """The value of its stored form.

    Raises:
        Undecodable: These bytes are not of that encoding.
    """
    if encoding == 0:
        return decode_json(data)
    if encoding == 1:
        return data
    if encoding == 2 and len(data) == 8:
        return U64(unpack_counter(data))
    if encoding == LOST:
        raise Undecodable("the stored value is lost")
    raise Undecodable(f"a stored value of {len(data):,} bytes does not have the encoding it is marked with, {encoding}")


def encode_json(value: object, limit: int) -> bytes:
    """Compact JSON in UTF-8, from which an equal value can be read again."""
    try:
        data = _to_json(value)
        faithful = _from_json(data) == value
    except Exception:  # a value's own __eq__ may raise anything
        faithful = False
    if not faithful:
        # Slow and exact: accepts tuples and very long ints, and explains what is wrong with all else.
        data = _to_json(_plain(value, "value", (), _LongInts(limit)))
    elif may_be_deep(data):
        _check_depth(value)
    return data


def may_be_deep(data: bytes) -> bool:
    """Whether JSON has enough brackets to be nested too deep; if not, no walk through the value is needed."""
    if len(data) <= 2 * limits.VALUE_DEPTH:
        return False
    # `find` is several times as fast as `count`. The outermost bracket is the first character.
    return 1 + sum([data.count(bracket) for bracket in (b"[", b"{") if data.find(bracket, 1) > 0]) > limits.VALUE_DEPTH


def decode_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        Undecodable: It is not JSON.
    """
    try:
        return _from_json(data)
    except RecursionError:
        if not may_be_deep(data):
            raise  # the caller's stack is nearly used up
        reason = "nests too deep"
    except (msgspec.MsgspecError, ValueError):
        if _long_digits(data):
            # msgspec applies Python's limit on the digits of an int; Keyloft's limit is the size of the value.
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(data.decode(), parse_int=integers.parse, parse_float=_finite, parse_constant=_finite)
        reason = "is not JSON"
    raise Undecodable(f"a stored value of {len(data):,} bytes {reason}")


def decode_json_many(many: Iterable[bytes]) -> list[Any]:
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


def _plain(value: object, where: str, parents: tuple[int, ...], ints: "_LongInts") -> object:
    """A copy made of what JSON can hold.

    Args:
        value: What to copy.
        where: Its path within the caller's argument, as in `value[1]['name']`, for messages.
        parents: The ids of the containers around it.
        ints: Writes its ints, and counts their digits.

    Raises:
        InvalidValue: Something in it can't be JSON; the message names its path.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value, where)
    if isinstance(value, int):
        return ints.write(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidValue(f"{where}: {float(value)} is not JSON; use None, or a str")
        return float(value)
    if id(value) in parents:
        raise InvalidValue(f"{where}: contains itself; JSON can't hold that")
    if len(parents) >= limits.VALUE_DEPTH:
        raise InvalidValue(_TOO_DEEP)
    parents = (*parents, id(value))
    if isinstance(value, dict):
        return {
            _plain_name(name, where): _plain(item, _inside(where, name), parents, ints) for name, item in value.items()
        }
    if isinstance(value, list) or type(value) is tuple:
        return [_plain(item, f"{where}[{index}]", parents, ints) for index, item in enumerate(value)]
    raise InvalidValueType(
        f"{where}: the type {type(value).__name__} would not be read back equal; JSON has None, bool, int, float, str, "
        "list, and dict with str keys; store a datetime as .isoformat(), a set as a list, a dataclass as "
        "dataclasses.asdict(…), and bytes or a U64 only as a whole value of the tuple store"
    )


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


def _plain_name(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise InvalidValueType(f"{where}: a dict key of type {type(name).__name__}, and JSON has str keys; use a str")
    return _plain_text(name, f"{where}: a dict key")


def _plain_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue(f"{where}: holds a lone surrogate, which is not Unicode text") from None
    return str.__str__(text)


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(limits.VALUE_DEPTH + 1):
        containers = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not containers:
            return
        level = [item for outer in containers for item in (outer.values() if isinstance(outer, dict) else outer)]
    raise InvalidValue(_TOO_DEEP)


def _inside(where: str, name: object) -> str:
    shown = ascii(name)
    return f"{where}[{shown if len(shown) <= 40 else shown[:37] + '…'}]"


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("NaN and Infinity are not JSON, and a larger number is out of the range of a float")
    return number
