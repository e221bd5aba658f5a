"""Keys: their bytes sort as the tuples do, come back as they were, and are refused where they can't."""

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft import InvalidKey, InvalidKeyType, KeyTooLarge, Undecodable
from keyloft.core import keys
from keyloft.core.keys import KeyLike, Part, TupleKey

ints = (
    st.integers()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([2**k + d for k in range(0, 80, 8) for d in (-1, 0, 1)])
)
parts = st.text() | st.binary() | ints | ints.map(lambda n: -n) | st.floats(allow_nan=False) | st.booleans()
tuples = st.lists(parts, min_size=1, max_size=5).map(tuple)

_RANK = {bytes: 0, str: 1, int: 2, float: 3, bool: 4}


def order(key: TupleKey) -> list[tuple[int, Any]]:
    """A Python sort key with the order that DESIGN promises: by type first, text by code point, -0.0 before 0.0."""
    return [(_RANK[type(part)], (part, math.copysign(1, part)) if type(part) is float else part) for part in key]


@given(tuples, tuples)
@pytest.mark.slow
def test_encoded_order_is_tuple_order(one: TupleKey, other: TupleKey) -> None:
    assert (keys.encode_prefix(one) < keys.encode_prefix(other)) == (order(one) < order(other))


@given(tuples)
def test_a_key_comes_back_with_its_types(key: TupleKey) -> None:
    decoded = keys.decode(keys.encode_prefix(key))
    assert decoded == key
    assert [type(part) for part in decoded] == [type(part) for part in key]


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b\x00", b"\x00\x02", 2, ""]), parts) | tuples)
    | st.lists(st.tuples(st.just("a"), st.text() | st.just("x\x00")))
    | st.lists(st.lists(st.just("a") | st.integers(0, 2**16), min_size=1, max_size=3).map(tuple))
    | st.lists(st.lists(st.sampled_from(["", "a", "\x02", "\x15\x02", 2, 0x0215, b"\x02"]), min_size=1).map(tuple))
)
def test_many_keys_encode_and_decode_as_each_alone(many: list[TupleKey]) -> None:
    not_empty = [key for key in many if key]
    assert keys.encode_many(not_empty) == [keys.encode(key) for key in not_empty]
    encoded = sorted(keys.encode_prefix(key) for key in many)
    for ordered in (encoded, encoded[::-1]):
        decoded = keys.decode_many(ordered)
        assert decoded == [keys.decode(each) for each in ordered]
        assert [keys.encode_prefix(key) for key in decoded] == ordered


@pytest.mark.parametrize(
    "many",
    [
        [],
        [("a", "b"), ("a\x01", "\x02"), ("", "")],
        [("a\x00\x02b",), ("c",)],
        [("a",), ("b\x00\x01\x02c",)],
        [["a"], ("b",)],
        [("a" * 1500,), ("b" * 1500,)],
        [("ä",), ("b",)],
    ],
)
def test_many_unusual_keys_encode_as_each_alone(many: list[KeyLike]) -> None:
    assert keys.encode_many(many) == [keys.encode(key) for key in many]


@pytest.mark.parametrize("wrong", [(), "ab", ("a", None), ("a" * 3000,), ("\ud800",), 1])
def test_one_of_many_keys_that_is_none_is_refused(wrong: KeyLike) -> None:
    for many in ([wrong], [("a",), wrong], [wrong, ("a",)]):
        with pytest.raises(InvalidKey, match=r"^key: "):
            keys.encode_many(many)


def test_a_key_that_has_lost_its_end_does_not_change_others() -> None:
    with pytest.raises(Undecodable):
        keys.decode_many([keys.encode(("a",)), b"\x02b", keys.encode(("c", "d"))])


@given(
    st.sampled_from([b"\x02a\x00\x02", b"\x02", b"\x01\xff\x00\x02", b"\x02\x00\x02"]),
    st.lists(st.text("\x00\x02a\xff", max_size=8).map(lambda text: text.encode("latin-1")), min_size=1, max_size=4),
)
def test_damaged_keys_decode_as_each_alone(head: bytes, tails: list[bytes]) -> None:
    damaged = sorted(head + tail for tail in tails)
    try:
        each_alone = [keys.decode(each) for each in damaged]
    except Undecodable:
        with pytest.raises(Undecodable):
            keys.decode_many(damaged)
    else:
        assert keys.decode_many(damaged) == each_alone


@given(tuples, tuples)
def test_a_prefix_covers_what_extends_it_and_nothing_else(prefix: TupleKey, key: TupleKey) -> None:
    start, end = keys.below(keys.encode_prefix(prefix))
    extends = len(key) > len(prefix) and [*map(order, (key[: len(prefix)],))] == [order(prefix)]
    assert (start <= keys.encode_prefix(key) < end) == extends
    assert start <= keys.encode_prefix(prefix + key) < end


@given(tuples)
def test_every_key_lies_between_first_and_last(key: TupleKey) -> None:
    assert keys.FIRST < keys.encode_prefix(key) < keys.LAST


@given(st.binary(max_size=40))
def test_foreign_bytes_decode_to_what_encodes_back_or_are_refused(data: bytes) -> None:
    try:
        decoded = keys.decode(data)
    except Undecodable:
        return
    # Some byte strings are no canonical encoding, but none may decode to a key that can't be encoded.
    assert isinstance(keys.encode_prefix(decoded), bytes)


@pytest.mark.parametrize(
    ("part", "encoded"),
    [
        (b"a\x00b", "01 61 00ff 62 00"),
        ("", "02 00"),
        ("a\x00b", "02 61 00ff 62 00"),
        ("ü", "02 c3bc 00"),
        (0, "14"),
        (1, "15 01"),
        (255, "15 ff"),
        (256, "16 0100"),
        (-1, "13 fe"),
        (-255, "13 00"),
        (-256, "12 feff"),
        (2**64 - 1, "1c ffffffffffffffff"),
        (2**64, "1d 09 010000000000000000"),
        (-(2**64 - 1), "0c 0000000000000000"),
        (-(2**64), "0b f6 feffffffffffffffff"),
        (0.0, "21 8000000000000000"),
        (-0.0, "21 7fffffffffffffff"),
        (1.5, "21 bff8000000000000"),
        (-1.5, "21 4007ffffffffffff"),
        (math.nan, "21 fff8000000000000"),
        (math.inf, "21 fff0000000000000"),
        (-math.inf, "21 000fffffffffffff"),
        (False, "26"),
        (True, "27"),
    ],
)
def test_the_encoding_is_that_of_deno_and_foundationdb(part: Part, encoded: str) -> None:
    assert keys.encode((part,)) == bytes.fromhex(encoded)
    [decoded] = keys.decode(bytes.fromhex(encoded))
    assert decoded == part or (decoded != decoded and part != part)


def test_there_is_one_nan() -> None:
    other = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert keys.encode((other,)) == keys.encode((math.nan,))


def test_a_list_is_a_key_too() -> None:
    assert keys.encode(["users", 1]) == keys.encode(("users", 1))


@pytest.mark.parametrize(
    ("key", "error", "says"),
    [
        ((), InvalidKey, "at least one part"),
        ("users", InvalidKeyType, r"key: expected a tuple of parts, got a bare str; write \(part,\)"),
        (b"users", InvalidKeyType, "got a bare bytes"),
        (7, InvalidKeyType, "got a bare int"),
        (None, InvalidKeyType, "got NoneType"),
        ({"a"}, InvalidKeyType, "got set"),
        (("a", None), InvalidKeyType, "key: part 2 is None"),
        (("a", ("b",)), InvalidKeyType, "key: part 2 is tuple"),
        ((object(),), InvalidKeyType, "key: part 1 is object"),
        ((bytearray(b"x"),), InvalidKeyType, "key: part 1 is bytearray"),
        (("a", "\ud800"), InvalidKey, "key: part 2 holds a lone surrogate"),
        (("\x00\ud800",), InvalidKey, "lone surrogate"),
        (("x" * 2047,), KeyTooLarge, "key: 2,049 bytes .* limit is 2,048"),
        ((2**2048,), InvalidKey, "at most 255 bytes"),
    ],
)
def test_a_bad_key_is_refused_with_its_reason(key: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        keys.encode(key)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, TypeError) == issubclass(error, TypeError)


def test_the_longest_key_is_taken() -> None:
    assert len(keys.encode(("x" * 2046,))) == 2048


@pytest.mark.parametrize("data", ["", "00", "ff", "02 61", "16 01", "21 00", "1d", "1d ff 01", "02 ff 00", "27 30"])
def test_damaged_keys_are_named(data: str) -> None:
    if not data:
        assert keys.decode(b"") == ()
        return
    with pytest.raises(Undecodable, match=bytes.fromhex(data).hex()):
        keys.decode(bytes.fromhex(data))


@pytest.mark.parametrize("damage", [None, 7, 1.5, "text"], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("last", [1, "a", True], ids=repr)
def test_a_stored_key_that_is_no_longer_bytes_is_undecodable(damage: Any, at: int, last: Part) -> None:
    """One changed bit of an SQLite row can change the type of its key."""
    stored: list[Any] = [keys.encode(("k", last))] * 3
    stored[at] = damage
    with pytest.raises(Undecodable, match="a stored key is not bytes"):
        keys.decode_many(stored)
