"""Values as they are stored, and back: JSON, bytes, and U64 counters.

Whatever would not come back equal is refused. JSON libraries turn sets into lists, datetimes into strings, NaN into
null and `{1: …}` into `{"1": …}` without a word; so each value is decoded again before it is stored, and compared.
Tuples are the one exception: they are stored as lists, and come back as lists.
"""

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
    """How the bytes of a stored value are to be read."""

    JSON = 0
    BYTES = 1
    U64 = 2


class U64(int):
    """An unsigned 64-bit counter, for `sum`, `min` and `max`; otherwise an int like any other."""

    __slots__ = ()

    def __new__(cls, value: int = 0) -> "U64":
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidValueType(f"a U64 is made of an int, not of {type(value).__name__}")
        if not 0 <= value <= limits.U64_MAX:
            raise InvalidValue("a U64 is between 0 and 2**64 - 1")
        return super().__new__(cls, value)

    def __repr__(self) -> str:
        return f"U64({int(self)})"

    __str__ = int.__repr__


LOST = -1
"""In place of an encoding: the value is gone from the database."""

JSON, BYTES, COUNTER = Encoding.JSON, Encoding.BYTES, Encoding.U64

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode
_TOO_DEEP = f"the value nests more than {limits.VALUE_DEPTH} lists and dicts"
_long_digits = re.compile(rb"[0-9]{600}").search


def encode(value: object, limit: int) -> tuple[bytes, Encoding]:
    """The stored form of a value.

    Raises:
        InvalidValue: It would not come back equal.
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
        raise Undecodable("its value is lost")
    raise Undecodable(f"a stored value of {len(data):,} bytes is marked with encoding {encoding}, which it is not")


def encode_json(value: object, limit: int) -> bytes:
    """Compact JSON in UTF-8, from which an equal value can be read again."""
    try:
        data = _to_json(value)
        faithful = _from_json(data) == value
    except Exception:  # whatever a value's own __eq__ may raise, too
        faithful = False
    if not faithful:
        # Slow and exact: allows what is allowed after all (tuples, very long ints), explains what is not.
        data = _to_json(_plain(value, "the value", (), _Budget(limit)))
    if may_be_deep(data):
        _check_depth(value)
    return data


def may_be_deep(data: bytes) -> bool:
    """Whether JSON has enough brackets to be nested too deep: few are proof that it is not, and spare the walk."""
    if len(data) <= 2 * limits.VALUE_DEPTH:
        return False
    # To find takes 2 µs for 64 KiB, to count 18. The outermost bracket is the first character.
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
            raise  # the caller's own stack is nearly used up
        reason = "nests too deep"
    except (msgspec.MsgspecError, ValueError):
        if _long_digits(data):
            # msgspec keeps to Python's limit on the digits of an int (640 at the lowest); ours is the value's size.
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(
                    data.decode(), parse_int=integers.parse, parse_float=_finite, parse_constant=_no_constant
                )
        reason = "is not JSON"
    raise Undecodable(f"a stored value of {len(data):,} bytes {reason}")


def decode_json_many(many: Iterable[bytes]) -> list[Any]:
    """The values of several JSON texts."""
    try:
        return list(map(_from_json, many))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return [decode_json(data) for data in many]


def pack_counter(number: int) -> bytes:
    return number.to_bytes(8, "little")


def unpack_counter(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _plain(value: object, where: str, parents: tuple[int, ...], budget: "_Budget") -> object:
    """A copy made of what JSON can hold, or the error that names the place of what it can't."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value, where)
    if isinstance(value, int):
        return _plain_int(int(value), budget)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidValue(f"{where} is {float(value)}, which JSON does not have")
        return float(value)
    if id(value) in parents:
        raise InvalidValue(f"{where} contains itself")
    if len(parents) >= limits.VALUE_DEPTH:
        raise InvalidValue(_TOO_DEEP)
    parents = (*parents, id(value))
    if isinstance(value, dict):
        return {
            _plain_name(name, where): _plain(item, _inside(where, name), parents, budget)
            for name, item in value.items()
        }
    if isinstance(value, list) or type(value) is tuple:
        return [_plain(item, f"{where}[{index}]", parents, budget) for index, item in enumerate(value)]
    raise InvalidValueType(
        f"{where} is of type {type(value).__name__} and would not come back equal; JSON has "
        "None, bool, int, float, str, list, dict with str keys; a datetime goes as .isoformat(), a set as a list, "
        "a dataclass as dataclasses.asdict(…), bytes and U64 as a whole value of the tuple store only"
    )


def _plain_int(number: int, budget: "_Budget") -> object:
    if number.bit_length() <= integers.SHORT_BITS:
        return number
    budget.spend(integers.digits_at_least(number))  # before it is written out, which takes long
    return msgspec.Raw(integers.write(number).encode())


class _Budget:
    """How many digits of long ints a value may have before it is over the limit for that alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    def spend(self, digits: int) -> None:
        self._spent += digits
        if self._spent > self._limit:
            raise ValueTooLarge(self._spent, self._limit)


def _plain_name(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise InvalidValueType(
            f"{where} has a dict key of type {type(name).__name__}; JSON would turn it into a str, so use a str"
        )
    return _plain_text(name, f"a dict key of {where}")


def _plain_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue(f"{where} holds a lone surrogate, which is no Unicode text") from None
    return str.__str__(text)


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(limits.VALUE_DEPTH):
        containers = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not containers:
            return
        level = [item for outer in containers for item in (outer.values() if isinstance(outer, dict) else outer)]
    if any(isinstance(item, (dict, list, tuple)) for item in level):
        raise InvalidValue(_TOO_DEEP)


def _inside(where: str, name: object) -> str:
    shown = ascii(name)
    return f"{where}[{shown if len(shown) <= 40 else shown[:37] + '…'}]"


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of the range of a float")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
