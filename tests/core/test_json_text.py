"""JSON texts: what a slow and strict reader takes is taken, the same is stored, and all else is refused alike."""

import gc
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyloft import InvalidArgument, InvalidJson, KeyloftError, ValueTooLarge, limits
from keyloft.core import integers, json_text, values
from tests.support.examples import examples

LONG = limits.LONG_INT_DIGITS

# Many texts and names are equal, and many hold what JSON escapes, or what looks like its structure.
texts = st.text(st.sampled_from('a"\\{}[]:,0 \n\x00é\ud800\udc00\U0001f600'), max_size=5) | st.sampled_from(
    ["9" * LONG, "1", "\\u0061", "\\"]
)
numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.integers(LONG - 2, LONG + 2).map(lambda digits: 7 * 10**digits),
    st.integers(-5, 5).map(lambda offset: -(2**64) + offset),
)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


class Pairs(list[tuple[str, Any]]):
    """An object as it was written, names that are twice included."""


def written(draw: st.DrawFn, value: Any) -> str:
    """A value as one of the many texts that mean it, or mean nothing."""
    space = draw(st.sampled_from(["", "", " ", "\n\t\r "]))
    if isinstance(value, dict):
        pairs = list(value.items())
        if pairs and draw(st.integers(0, 5)) == 5:
            pairs.append(draw(st.sampled_from(pairs)))
        fields = [f"{space}{written(draw, name)}{space}:{space}{written(draw, item)}" for name, item in pairs]
        return "{" + ",".join(fields) + space + "}"
    if isinstance(value, list):
        return "[" + ",".join([f"{space}{written(draw, item)}{space}" for item in value]) + space + "]"
    if isinstance(value, str):
        how = draw(st.integers(0, 2))
        if how == 2:
            units = value.encode("utf-16-be", "surrogatepass")
            escapes = [f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2)]
            return '"' + "".join(escapes) + '"'
        return json.dumps(value, ensure_ascii=how == 1)
    if isinstance(value, float) and draw(st.booleans()):
        return draw(st.sampled_from(["1e400", "-1e999", "0.1" + "0" * LONG, "5" * LONG + ".0", f"1E-{'9' * 40}", "-0"]))
    return json.dumps(value)


@st.composite
def json_bytes(draw: st.DrawFn) -> bytes:
    """JSON, at times cut short, with a byte changed, or with something put into it."""
    data = written(draw, draw(json_values)).encode(errors="surrogatepass")
    while draw(st.integers(0, 3)) == 3:
        at, end = sorted([draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))])
        other = st.sampled_from([b"NaN", b"Infinity", b"0", b"-", b'"', b"\\", b"]", b"}", b",", b"\xff", b"1" * LONG])
        data = data[:at] + draw(other) + data[min(end, at + draw(st.integers(0, 2))) :]
    return data


def reference(data: bytes) -> Any:
    """What a text holds, or the code of its refusal: JSON first, then what a value can't hold, then names twice."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        value = json.loads(data.decode(), object_pairs_hook=Pairs, parse_constant=no_constant, parse_int=integers.parse)
    except ValueError:
        return "INVALID_JSON"
    parts = list(all_parts(value))
    if any(isinstance(part, float) and not math.isfinite(part) for part in parts) or any(
        "\ud800" <= letter <= "\udfff" for part in parts if isinstance(part, str) for letter in part
    ):
        return "VALIDATION_ERROR"
    if any(len(dict(part)) < len(part) for part in parts if isinstance(part, Pairs)):
        return "INVALID_JSON"
    return {"value": plain(value)}


def all_parts(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, Pairs):
        for name, item in value:
            yield name
            yield from all_parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from all_parts(item)


def plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {name: plain(item) for name, item in value}
    return [plain(item) for item in value] if isinstance(value, list) else value


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return {"value": read()}
    except KeyloftError as error:
        return error.code


def exact(value: Any) -> str:
    """Tells 1, 1.0 and True apart, and keeps the order of names."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return repr(value)
    finally:
        sys.set_int_max_str_digits(limit)


@examples(250)
@given(json_bytes())
@example(b'{"a":1,"\\u0061":2}')
@example(b'["\\\\","\\"",{"\\"":1,"\\u0022":2}]')
@example(b'{"\\\\":"\\\\\\"","a":{}}')
@example(b'["\\u003' + b"1" * LONG + b'"]')
@example(b"[0" + b"1" * LONG + b"]")
@example(b"[1e-" + b"0" * LONG + b"1]")
@example(b"[-" + b"1" * LONG + b',"' + b"2" * LONG + b'",' + b"3" * LONG + b"]")
@example(b"1" * LONG)
@example(b'"\\ud83d"')
@example(b'"\\\\ud83d"')
@example(b'["\\ud83d",NaN]')
@example(b"[1e400,NaN]")
@example(b'"\xed\xa0\x80"')
@example(b'{"\xff":1}')
@example(b"-0")
@example(b"\xef\xbb\xbf{}")
@pytest.mark.slow
def test_a_text_is_read_as_a_slow_and_strict_reader_reads_it(data: bytes) -> None:
    expected = reference(data)
    assert exact(outcome(lambda: values.decode_json(json_text.compact(data, 900)[1]))) == exact(expected)


@given(json_values)
def test_the_compact_form_is_what_encoding_the_value_gives(value: Any) -> None:
    data = json.dumps(value).encode() if _is_short(value) else b"0"
    if isinstance(expected := reference(data), dict):
        assert json_text.compact(data, 900)[1] == values.encode_json(expected["value"], 2**20)


_MANY_FLOATS = b"[%b]" % b",".join([b"0.5", b"-1.25", b"10.0"] * 500)


@pytest.mark.parametrize("lists", [1, 100])
def test_short_floats_stay_as_they_are(lists: int) -> None:
    data = b'{"a.1":[%b],"b":"0.5","c":0.50}' % b",".join([_MANY_FLOATS] * lists)
    content, text = json_text.compact(data, 900)
    assert text == data
    assert content == {"a.1": [[0.5, -1.25, 10.0] * 500] * lists, "b": "0.5", "c": 0.5}


def test_names_that_differ_in_digits_alone_are_not_doubled_beside_short_floats() -> None:
    data = b'{"a.1":%b,"a21":[1.50]}' % _MANY_FLOATS
    assert json_text.compact(data, 900)[1] == data.replace(b"1.50", b"1.5")


@pytest.mark.parametrize("doubled", [b'{"a":%b,"a":1}', b'[%b,{"a.1":1,"b":2,"a.1":3}]'])
def test_a_doubled_name_is_refused_beside_short_floats(doubled: bytes) -> None:
    with pytest.raises(InvalidJson, match="twice"):
        json_text.compact(doubled % _MANY_FLOATS, 900)


@pytest.mark.parametrize("broken", [b"[%b,1.]", b"[%b,.5]", b"[%b,1..5]", b"[%b,00.5]", b"[%b,NaN]"])
def test_what_is_not_json_is_refused_beside_short_floats(broken: bytes) -> None:
    with pytest.raises(InvalidJson):
        json_text.compact(broken % _MANY_FLOATS, 900)


def _is_short(value: Any) -> bool:
    """Python's own writer refuses longer ints."""
    return not any(isinstance(part, int) and part.bit_length() > 14_000 for part in all_parts(value))


@given(st.text(st.sampled_from('[]{}"a'), max_size=300), st.booleans())
@example('["[","]"]', False)
@example("", False)
def test_the_depth_is_that_of_a_walk_through_the_text(text: str, escaped: bool) -> None:
    levels = deepest = 0
    inside = False
    for letter in text:
        if letter == '"':
            inside = not inside
        elif not inside and letter in "[]{}":
            levels += 1 if letter in "[{" else -1
            deepest = max(deepest, levels)
    if escaped:
        text = text.replace("a", '\\"').replace('"[', '"\\\\\\"[')
    if not escaped or "a" not in text:
        assert json_text.depth(text.encode()) == deepest


@pytest.mark.parametrize("levels", [899, 900])
@pytest.mark.parametrize("brackets", [b"[]", b"{}"])
def test_the_deepest_text_is_read_and_written_on_any_stack(levels: int, brackets: bytes) -> None:
    before, after = (b"[", b"]") if brackets == b"[]" else (b'{"a":', b"}")
    data = before * (levels - 1) + brackets + after * (levels - 1)

    def descend(frames: int) -> None:
        if frames:
            return descend(frames - 1)
        assert json_text.compact(data, 900)[1] == data
        value = values.decode_json(data)
        assert values.encode_json(value, 2**20, 900) == data
        assert json_text.is_json(data)
        return None

    run_in_thread(lambda: descend(sys.getrecursionlimit() - 150))


def run_in_thread(work: Callable[[], None]) -> None:
    """In a thread with a stack of its own, whatever the test runner has used of it."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("levels", [901, 30_000, 500_000])
@pytest.mark.parametrize("closed", [True, False])
def test_a_deeper_text_is_refused_by_its_depth(levels: int, closed: bool) -> None:
    with pytest.raises(InvalidArgument, match="900 levels") as raised:
        json_text.compact(b"[" * levels + b"]" * levels * closed, 900)
    assert raised.value.code == "VALIDATION_ERROR"


def test_brackets_within_strings_are_no_levels() -> None:
    data = b'["' + b"[" * 2000 + b'",{"\\"' + b"{" * 2000 + b'":"\\\\"}]'
    assert json_text.depth(data) == 2
    assert json_text.compact(data, 900)[1] == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'["\xff"]', "Invalid JSON: it is not UTF-8 text"),
        (b"[1, NaN]", "Invalid JSON: JSON has no NaN (byte 4)"),
        (b"[-Infinity]", "Invalid JSON: JSON has no Infinity (byte 2)"),
        (b"[1", "Invalid JSON: it ends too early"),
        (b"", "Invalid JSON: there is none"),
        (b"[1 2]", "Invalid JSON: expected ',' or ']' (byte 3)"),
        (b"[" + b"1" * 500 + b" 2]", "Invalid JSON: expected ',' or ']' (byte 502)"),
        (b'{"a":1,"a":2}', "Invalid JSON: a name is twice in one object"),
    ],
)
def test_the_refusal_says_what_is_wrong_and_where(data: bytes, message: str) -> None:
    with pytest.raises(InvalidJson) as raised:
        json_text.compact(data, 900)
    assert str(raised.value) == message


def test_an_int_that_alone_is_too_large_is_refused_by_its_size() -> None:
    assert json_text.compact(b"-" + b"9" * 65_536, 900)[1] == b"-" + b"9" * 65_536
    with pytest.raises(ValueTooLarge, match="65,537 bytes"):
        json_text.compact(b"9" * 65_537, 900)


def test_ints_are_read_under_a_lowered_limit_of_the_interpreter() -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        data = b"[" + b",".join([b"7" * digits for digits in range(1, 1000, 50)]) + b"]"
        assert json_text.compact(data, 900)[1] == data
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_again_after_a_text_was_read_or_refused(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with json_text.collecting_no_garbage(b"[" * limits.GC_PAUSE_BYTES):
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
        with pytest.raises(InvalidJson), json_text.collecting_no_garbage(b"[" * limits.GC_PAUSE_BYTES):
            raise InvalidJson("no")
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
