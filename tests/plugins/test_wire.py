"""Reading requests: the fast reader and the careful one agree on every input."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyloft import InvalidArgument, InvalidJson, KeyloftError, MissingField, ValueTooLarge
from keyloft.core.records import AtKey, Count, Get, Record, Scan, Set, Space
from keyloft.core.values import Encoding, decode_json
from keyloft.nats import payloads
from keyloft.nats.errors import wire_code
from keyloft.nats.requests import Variant
from keyloft.plugins import replies, rules, wire
from keyloft.plugins.rules import ConditionalSet, ManyKeys, ManyValues, PrefixDelete
from tests.core.test_json_text import exact, json_bytes, reference, run_in_thread
from tests.core.test_json_text import outcome as written_outcome
from tests.support.examples import examples

texts = st.text(st.sampled_from('ab"\\{}[]:, \n\x00é\ud800\U0001f600'), max_size=6) | st.sampled_from(
    ["key", "value", "ttl"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
names = st.sampled_from(["key", "value", "ttl", "ttl_seconds", "limit", "prefix", "other", 'k"', "Key", "ttlSeconds"])
more_names = st.sampled_from(
    ["if_absent", "expected_version", "keep_ttl", "meta", "by", "keys", "entries", "values", "after", "ifAbsent", "By"]
)
fitting = st.booleans() | st.integers(-1, 3) | st.lists(texts, max_size=3) | st.dictionaries(texts, values, max_size=3)
fields = st.lists(st.tuples(names, values) | st.tuples(names | more_names, values | fitting | texts), max_size=5)
READERS = (
    wire.setting,
    wire.getting,
    wire.deleting,
    wire.listing,
    wire.incrementing,
    wire.getting_many,
    wire.setting_many,
    wire.deleting_many,
    wire.counting,
    wire.touching,
    wire.using,
)


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """Objects written in many ways: spaced, escaped or not, with names twice, cut short, or with a byte changed."""
    pairs = draw(fields)
    ascii_only, space = draw(st.booleans()), draw(st.sampled_from(["", " ", "\n\t"]))
    written = [
        f"{json.dumps(name)}{space}:{space}{json.dumps(value, ensure_ascii=ascii_only)}" for name, value in pairs
    ]
    data = ("{" + f"{space},{space}".join(written) + "}").encode(errors="surrogatepass")
    if draw(st.integers(0, 3)) == 0 and data:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(max_size=1)) + data[at + 1 :]
    return data


def outcome(read: Callable[[], Any]) -> Any:
    try:
        found = read()
    except KeyloftError as error:
        return type(error), str(error)
    except Variant as asked:
        return asked.name, asked.content
    return (found.key, found.value, found.expire_in) if isinstance(found, Set) else found


@examples(40)
@given(written())
@example(b'{"key":"a","value":1,"value":2}')
@example(b'{"key":"a","value":{"x":1,"x":2}}')
@example(b'{"key":"a","value":"\\ud800"}')
@example(b'{"key":"a","value":1,"ttl":null,"ttl_seconds":5}')
@example(b'{"key":"a","value":-0.0}')
@example(b'{"key":"a","value":1e999}')
@example(b'{"key":"a","value":123456789012345678901234567890}')
@example(b'{"key":"a","value":1,"if_absent":true}')
@example(b'{"key":"a","value":1e15}')
@example(b'{"key":"a\\u0000","value":[1e15]}')
@example(b'{"key":"a","value":1e15,"k":1000000000000000.0}')
@example(b'{"value":{"a":1},"key":"a"}')
@example(b'{"key":"\xc3\xa9"}')
@example(b'{"key":"a\\n"}')
@example(b'{"key":""}')
@example(b'{"key":"a","by":2,"by":3}')
@example(b'{"key":"a","by":9223372036854775808,"ttl":1}')
@example(b'{"key":"a","by":2,"other":3}')
@pytest.mark.slow
def test_the_fast_way_and_the_careful_way_agree(data: bytes) -> None:
    assert outcome(lambda: wire.setting("p", data)) == outcome(lambda: wire.set_carefully("p", data))
    assert outcome(lambda: wire.getting("p", data)) == outcome(lambda: wire.get_carefully("p", data))
    assert outcome(lambda: wire.deleting("p", data)) == outcome(lambda: wire.delete_carefully("p", data))
    assert outcome(lambda: wire.incrementing("p", data)) == outcome(lambda: wire.increment_carefully("p", data))


@examples(100)
@given(st.binary(max_size=40) | written())
@pytest.mark.slow
def test_whatever_arrives_is_read_or_refused_with_a_code(data: bytes) -> None:
    for read in READERS:
        try:
            found: Any = read("p", data)
        except KeyloftError as error:
            found = wire_code(error)
        except Variant as asked:
            found = asked.content
        assert found not in ("INTERNAL_ERROR", "DATABASE_ERROR")
        assert isinstance(found, (AtKey, ConditionalSet, Count, ManyKeys, ManyValues, PrefixDelete, Scan, str))


@given(values)
def test_what_was_set_is_what_is_got(value: Any) -> None:
    try:
        data = json.dumps({"key": "k", "value": value}, allow_nan=False).encode()
        stored = wire.setting("p", data).value
    except (KeyloftError, ValueError):
        return
    record = Record(("p", "k"), stored, Encoding.JSON, 1, None)
    assert json.loads(replies.got(Get(Space.PLUGINS, record.key), record)) == {
        "success": True,
        "exists": True,
        "value": value,
    }


@pytest.mark.parametrize("value", [b"9" * 70_000, b"[" + b"9" * 60_000 + b"," + b"9" * 60_000 + b"]"])
def test_the_digits_of_an_int_count(value: bytes) -> None:
    with pytest.raises(ValueTooLarge, match="65,536 allowed"):
        wire.setting("p", b'{"key":"k","value":' + value + b"}")


@pytest.mark.parametrize("value", [b"[" + b"[]," * 340_000 + b"[]]", b"[1" + b",1" * 500_000 + b"]"])
def test_what_is_far_too_large_is_not_read(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "read", lambda data: pytest.fail("it was"))
    with pytest.raises(ValueTooLarge, match="65,536 allowed"):
        wire.setting("p", b'{"key":"k","value":' + value + b"}")


@pytest.mark.parametrize("escape", [b"", b"\\n", b'\\"', b"\\\\", b"\\u0022"])
def test_an_ordinary_set_with_escapes_is_read_at_once(escape: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "set_carefully", lambda plugin, data: pytest.fail("it was read twice"))
    data = b'{"key":"k","value":{"a":"' + escape + b'x"},"ttl":5}'
    assert json.loads(wire.setting("p", data).value) == json.loads(data)["value"]


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize("levels", [1, 128, 129, 899, 900])
def test_a_value_of_900_levels_is_set_and_got_whatever_the_caller_s_stack(levels: int) -> None:
    value = nested(levels)

    def descend(frames: int) -> None:
        if frames:
            return descend(frames - 1)
        stored = wire.setting("p", b'{"key":"k","value":' + value + b"}").value
        assert stored == value
        record = Record(("p", "k"), stored, Encoding.JSON, 1, None)
        assert replies.got(Get(Space.PLUGINS, record.key), record).endswith(b":" + value + b"}")
        return None

    run_in_thread(lambda: descend(0))
    run_in_thread(lambda: descend(sys.getrecursionlimit() - 150))


@pytest.mark.parametrize("levels", [901, 1000, 5000, 30_000])
def test_deeper_values_are_refused_by_their_depth(levels: int) -> None:
    for value in (nested(levels), b"[" * levels):
        with pytest.raises(InvalidArgument, match="900 levels") as raised:
            wire.setting("p", b'{"key":"k","value":' + value + b"}")
        assert raised.value.code == "VALIDATION_ERROR"


@pytest.mark.parametrize("payload", [b"", b"  ", b" \r\n\t", b"{}"])
def test_an_empty_payload_lists_all_and_is_no_other_request(payload: bytes) -> None:
    assert wire.listing("p", payload) == rules.listing("p", None, None, None)
    for read in (wire.setting, wire.getting, wire.deleting):
        with pytest.raises((InvalidJson, MissingField), match=r"empty|Missing"):
            read("p", payload)


@examples(150)
@given(json_bytes(), st.sampled_from(["value", "other"]), st.booleans())
@pytest.mark.slow
def test_a_set_is_read_as_a_slow_and_strict_reader_reads_it(data: bytes, name: str, is_large: bool) -> None:
    """In the field `other` it is ignored, if it is JSON at all."""
    before = b'{"key":"k","value":' if name == "value" else b'{"key":"k","value":1,"other":'
    sent = before + data + b" " * 2000 * is_large + b"}"
    expected = reference(sent)
    if isinstance(expected, dict) and expected["value"].keys() <= {"key", "value", "other"}:
        expected = {"value": expected["value"]["value"]}
        assert exact(written_outcome(lambda: decode_json(wire.setting("p", sent).value))) == exact(expected)
    elif isinstance(expected, str):
        assert written_outcome(lambda: wire.setting("p", sent)) == expected


def test_a_large_request_for_a_key_is_not_read_either() -> None:
    padding = b'"' + b"x" * 20_000 + b'"'
    for read in (wire.deleting, wire.listing):
        for data in (b'{"key":"k","other":' + padding + b"}", b"x" * 20_000):
            with pytest.raises(InvalidArgument, match="at most 16384"):
                read("p", data)
    for data in (b'{"key":"k","value":' + b"[" * 500_000, b"x" * 500_000):
        with pytest.raises(ValueTooLarge, match="bytes as sent, 65,536 allowed"):
            wire.setting("p", data)


@pytest.mark.parametrize("name", ["Key", "KEY", "_key", "k_e_y", "\u212aey"])
def test_a_field_in_another_spelling_is_refused_beside_the_right_one_too(name: str) -> None:
    """The fast reader leaves it to the careful one."""
    for read in (wire.setting, wire.getting, wire.deleting):
        with pytest.raises(InvalidArgument, match="this field is called key") as raised:
            read("p", json.dumps({"key": "k", "value": 1, name: "k"}, ensure_ascii=False).encode())
        assert raised.value.code == "VALIDATION_ERROR"


def test_a_field_in_another_spelling_is_found_beside_names_that_hold_every_character() -> None:
    every = "".join([chr(code) for code in range(0x11_0000) if not 0xD800 <= code < 0xE000])
    for names in (["\x00key", "key\x00"], ["\x00"], [every[:3000]], [*every[:300]]):
        fields = {"key": "k"} | dict.fromkeys(names, 1)
        assert wire.getting("p", json.dumps(fields, ensure_ascii=False).encode()).key == ("p", "k")
        with pytest.raises(InvalidArgument, match="this field is called key"):
            wire.getting("p", json.dumps(fields | {"KEY": 1}, ensure_ascii=False).encode())


def test_other_unknown_fields_are_ignored_and_no_error_is_long() -> None:
    for name in ("keys", "ky", "expires", "value", "prefix"):
        assert wire.getting("p", json.dumps({"key": "k", name: 1}).encode()).key == ("p", "k")
    with pytest.raises(InvalidArgument) as raised:
        wire.getting("p", json.dumps({"key": "k", "_" * 10_000 + "key": 1}).encode())
    assert len(str(raised.value)) < 100


def test_a_parse_error_does_not_show_the_value() -> None:
    with pytest.raises(InvalidJson) as raised:
        wire.setting("p", b'{"key":"k","value":"secret"')
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("most", "shown"), [(10_000, 100), (600, 48), (1, 1)])
def test_a_list_fits_into_a_message(most: int, shown: int) -> None:
    reply = json.loads(replies.listed([f"key-{number:05d}" for number in range(100)], False, most))
    assert reply["count"] == len(reply["keys"])
    assert reply["truncated"] is (shown < 100)
    assert 0 < reply["count"] <= shown


ordinary = st.builds(
    lambda key, value: json.dumps({"key": key, "value": value}, ensure_ascii=False).encode(errors="surrogatepass"),
    texts,
    values,
)


def _many(sets: Sequence[bytes]) -> bytes:
    return b'{"parts":true,"requests":[%b]}' % b",".join([b'{"op":"set",' + one[1:] for one in sets])


@examples(40)
@given(st.lists(ordinary | written(), min_size=1, max_size=3))
@example([b'{"key":"a","value":1}', b'{"key":"a","value":{"x":1,"x":2}}'])
@example([b'{"key":"a","value":"x","value":"y"}'])
@example([b'{"key":"a","value":"\xff"}'])
@example([b'{"key":"","value":1}'])
@example([b'{"key":"a","value":' + b"[" * 901 + b"]" * 901 + b"}"])
def test_the_sets_of_a_many_are_read_as_each_alone_is(sets: list[bytes]) -> None:
    found = wire.setting_each("trivia", _many(sets))
    if found is not None:
        assert found == [wire.setting("trivia", one) for one in sets]


def test_ordinary_sets_of_a_many_are_read_together() -> None:
    sets = [b'{"key":"a","value":{"x":["y",1.5,null]}}', '{"key":"ж","value": "é"}'.encode()]
    assert wire.setting_each("trivia", _many(sets)) == [wire.setting("trivia", one) for one in sets]
    assert wire.setting_each("trivia", _many([b'{"key":"a","value":1,"ttl":5}'])) is None
