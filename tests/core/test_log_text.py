"""Text in a log: nothing that a sender chose looks like a command of the terminal, a line or a field."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft.core.log_text import field, printable, printable_json

HOSTILE = {
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\x00": r"\x00",
    "\x1b[2J": r"\x1b[2J",
    "\x7f": r"\x7f",
    "\x9b31m": r"\x9b31m",  # CSI as one character of C1
    "\x85": r"\x85",
    "\u2028": r"\u2028",
    "\u202e": r"\u202e",  # writes from right to left
    "\u2066": r"\u2066",
    "\u200b": r"\u200b",
    "\ud800": r"\ud800",
    "\U000e0041": r"\U000e0041",
}


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_does_not_print_is_escaped(text: str) -> None:
    assert printable(f"a{text}b") == f"a{HOSTILE[text]}b"


@pytest.mark.parametrize("text", ["", "plain text", "é 名 «…» 🎉", r"C:\new"])
def test_what_prints_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("key", ["score", "user:42", "é/名", "a-b_c.d", "🎉"])
def test_an_ordinary_key_is_shown_bare(key: str) -> None:
    assert field(key) == key


@pytest.mark.parametrize(
    "key", ["", "a b", "a plugin=other", "x=y", "'a'", 'a"', "a\\n", "a\u00a0b", *HOSTILE], ids=ascii
)
def test_any_other_key_is_quoted(key: str) -> None:
    assert field(key) == repr(key)


@given(st.text())
def test_a_field_is_printable_and_can_be_read_back(key: str) -> None:
    shown = field(key)
    assert shown.isprintable()
    assert (ast.literal_eval(shown) if shown[0] in "'\"" else shown) == key
    assert shown[0] in "'\"" or " " not in shown


@given(st.text())
def test_json_keeps_its_content_and_has_no_raw_control_character(text: str) -> None:
    document = printable_json(json.dumps({"key": text}, ensure_ascii=False))
    assert document.isprintable()
    assert json.loads(document) == {"key": text}
