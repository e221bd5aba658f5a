"""Values: what is stored comes back equal, and what would not is refused."""

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import json
import math
import re
import sys
import uuid
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyloft import U64, InvalidValue, InvalidValueType, Undecodable, ValueTooLarge, limits
from keyloft.core import integers, values
from keyloft.core.values import Encoding

MEBIBYTE = 1024 * 1024

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def round_trip(value: object) -> Any:
    return values.decode(*values.encode(value, MEBIBYTE))


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: 1, 1.0 and True are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(json_values)
@pytest.mark.slow
def test_json_comes_back_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)


@given(json_values)
@example(1e-05)
@pytest.mark.slow
def test_stored_json_is_compact_and_not_escaped(value: Any) -> None:
    data, encoding = values.encode(value, MEBIBYTE)
    assert encoding == Encoding.JSON
    # Not to the byte for floats, which have several shortest texts.
    floats = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
    expected = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert same(json.loads(data), value)
    assert floats.sub(b"0", data).lower() == floats.sub(b"0", expected).lower()


@given(st.integers(1900, 60_000), st.integers(-5, 5), st.booleans())
def test_long_integers_are_written_and_parsed_like_short_ones(bits: int, offset: int, negative: bool) -> None:
    number = (2**bits + offset) * (-1 if negative else 1)
    text = integers.write(number)
    assert integers.parse(text) == number
    assert 0 <= len(text.lstrip("-")) - integers.digits_at_least(number) <= 1
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert text == str(number)
    finally:
        sys.set_int_max_str_digits(limit)


def test_an_integer_over_the_limit_is_refused_before_it_is_written_out() -> None:
    with pytest.raises(ValueTooLarge, match="30,103,000 bytes"):
        values.encode(1 << 100_000_000, MEBIBYTE)


def test_a_value_that_fails_to_compare_is_refused_without_a_word_of_it() -> None:
    class Secret(dict[str, Any]):
        __hash__ = None

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("hunter2")

    assert round_trip(Secret(a=1)) == {"a": 1}
    with pytest.raises(InvalidValue, match="nan is not JSON"):
        values.encode([Secret(a=math.nan)], MEBIBYTE)


def test_a_caller_deep_in_its_stack_gets_a_recursion_error_and_not_undecodable() -> None:
    data, encoding = values.encode(nested(120), MEBIBYTE)

    def descend() -> Any:
        try:
            return descend()
        except RecursionError:
            return values.decode(data, encoding)

    # A RecursionError is the truth, too; what it must not say is Undecodable.
    with contextlib.suppress(RecursionError):
        assert descend() == nested(120)


@given(st.binary())
def test_bytes_come_back_as_they_were(value: bytes) -> None:
    assert round_trip(value) == value


@given(st.integers(0, 2**64 - 1))
def test_a_counter_comes_back_as_a_counter(number: int) -> None:
    back = round_trip(U64(number))
    assert back == number
    assert type(back) is U64


@pytest.mark.parametrize(
    "number", [2**63, -(2**63) - 1, 2**64, 10**30, -(10**4300), 10**5000, 7**9999], ids=int.bit_length
)
def test_integers_of_any_size_come_back(number: int) -> None:
    assert round_trip([number, {"n": number}]) == [number, {"n": number}]


def test_integers_beyond_a_lowered_limit_of_the_interpreter_come_back() -> None:
    lowest = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert round_trip(10**700) == 10**700
    finally:
        sys.set_int_max_str_digits(lowest)


def test_a_tuple_comes_back_as_a_list() -> None:
    assert round_trip(("a", (1, [2]), {"b": ()})) == ["a", [1, [2]], {"b": []}]


class Text(str):
    pass


class Ratio(float):
    pass


class Colour(enum.StrEnum):
    RED = "red"


class Magnitude(enum.IntEnum):
    LARGE = 3


@pytest.mark.parametrize(
    "value",
    [
        Text("x"),
        Ratio(0.5),
        Colour.RED,
        Magnitude.LARGE,
        {Text("k"): Text("v")},
        collections.OrderedDict(a=1),
    ],
)
def test_subclasses_that_stay_equal_are_taken(value: object) -> None:
    assert round_trip(value) == value


@dataclasses.dataclass
class Point:
    x: int = 1


class Pair(NamedTuple):
    a: int = 1
    b: int = 2


class Plain(enum.Enum):
    ONE = 1


def circular_list() -> list[Any]:
    items: list[Any] = [1]
    items.append({"again": items})
    return items


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "^value: nan is not JSON"),
        ([1, {"x": math.inf}], r"value\[1\]\['x'\]: inf"),
        ({"a": [-math.inf]}, ": -inf"),
        ({1: "a"}, "dict key of type int"),
        ({"1": "a", 1: "b"}, "dict key of type int"),
        ({None: 1}, "dict key of type NoneType"),
        ({True: 1}, "dict key of type bool"),
        ({1.5: 1}, "dict key of type float"),
        ({("a", "b"): 1}, "dict key of type tuple"),
        ({uuid.UUID(int=1): 1}, "dict key of type UUID"),
        ({1, 2}, "type set"),
        ([frozenset()], r"value\[0\]: the type frozenset"),
        (datetime.datetime(2026, 1, 1), "type datetime"),
        (datetime.date(2026, 1, 1), "type date"),
        (datetime.timedelta(1), "type timedelta"),
        (decimal.Decimal("1.5"), "type Decimal"),
        (uuid.UUID(int=1), "type UUID"),
        (Point(), "type Point"),
        (Pair(), "type Pair"),
        (Plain.ONE, "type Plain"),
        ({"data": b"x"}, "type bytes"),
        (bytearray(b"x"), "type bytearray"),
        (memoryview(b"x"), "type memoryview"),
        (1j, "type complex"),
        (object(), "type object"),
        (range(3), "type range"),
        ((n for n in [1]), "type generator"),
        (..., "type ellipsis"),
        (len, "type builtin_function_or_method"),
        (collections.deque([1]), "type deque"),
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        (["ok", {"k": "a\ud83d"}], r"value\[1\]\['k'\]: holds a lone surrogate"),
        (circular_list(), "contains itself"),
        (nested(129), "nests more than 128"),
        (nested(100_000), "nests more than 128"),
        ([nested(128)], "nests more than 128"),
        ([[nested(127)] * 200] * 2, "nests more than 128"),
    ],
)
def test_what_would_not_come_back_equal_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        values.encode(value, MEBIBYTE)


@pytest.mark.parametrize("value", [nested(128), {"a": [nested(126)] * 200}])
def test_the_deepest_value_is_taken(value: Any) -> None:
    assert round_trip(value) == value


@pytest.mark.parametrize(
    ("value", "cure"),
    [
        ({"at": datetime.datetime(2026, 1, 1)}, r"^value\['at'\]: the type datetime .* store its \.isoformat\(\)\."),
        ([{1, 2}], r"^value\[0\]: the type set .* store a list\."),
        (datetime.timedelta(1), r"store its \.total_seconds\(\)\."),
        ({"data": b"x"}, "only as a whole value of the tuple store; in JSON, store text in base64"),
        ([values.U64(1)], "only as a whole value of the tuple store; in JSON, store an int"),
        (Plain.ONE, r"store its \.value\."),
        (uuid.UUID(int=1), "store it as a str"),
        (object(), "JSON has None, bool, int, float, str, list, and dict"),
    ],
)
def test_a_refusal_says_what_to_store_instead(value: Any, cure: str) -> None:
    with pytest.raises(InvalidValue, match=cure):
        values.encode(value, MEBIBYTE)


def test_a_forgotten_await_is_named() -> None:
    async def answer() -> int:
        return 1

    forgotten = answer()
    with pytest.raises(InvalidValue, match=r"^value: the type coroutine is not a value: await it"):
        values.encode(forgotten, MEBIBYTE)
    forgotten.close()


def test_refused_types_are_type_errors_too() -> None:
    with pytest.raises(TypeError):
        values.encode({1, 2}, MEBIBYTE)
    with pytest.raises(InvalidValueType):
        values.encode({1: 2}, MEBIBYTE)


@pytest.mark.parametrize("value", ["x" * 98, b"x" * 100, "ü" * 49, [10**97]])
def test_the_limit_counts_stored_bytes(value: object) -> None:
    size = len(values.encode(value, 100)[0])
    assert size == 100
    with pytest.raises(ValueTooLarge, match="99-byte limit: 100 bytes as stored, 99 allowed") as raised:
        values.encode(value, 99)
    assert (raised.value.size, raised.value.limit, raised.value.code) == (100, 99, "VALUE_TOO_LARGE")


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_counter_has_64_bits(number: int) -> None:
    with pytest.raises(InvalidValue, match="between 0 and"):
        U64(number)


@pytest.mark.parametrize("number", [1.5, "1", True, None])
def test_a_counter_is_made_of_an_int(number: Any) -> None:
    with pytest.raises(InvalidValueType):
        U64(number)


def test_a_counter_shows_itself_as_one() -> None:
    assert repr(U64(5)) == "U64(5)"
    assert f"{U64(5)} visits, {U64(5)!s}" == "5 visits, 5"
    assert U64(5) + 1 == 6


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"", 0),
        (b"{", 0),
        (b"NaN", 0),
        (b"1e999", 0),
        (b'"\xff"', 0),
        (b'"\\ud800"', 0),
        (b"1 2", 0),
        (b"1234567", 2),
        (b"x", 9),
        (b"[" * 5000, 0),
        (b"[NaN," + b"1" * 5000 + b"]", 0),
        (b"[1e999," + b"1" * 5000 + b"]", 0),
    ],
)
def test_damaged_values_are_named_by_size_and_never_shown(data: bytes, encoding: int) -> None:
    with pytest.raises(Undecodable, match=f"{len(data):,} bytes"):
        values.decode(data, encoding)


def test_every_limit_is_in_one_file() -> None:
    assert (limits.KEY_BYTES, limits.VALUE_BYTES) == (2048, MEBIBYTE)
