"""The log of a service, as text and as JSON."""

import json
import logging
import re
import sys
from typing import Any

import pytest

from keyloft.server.logging import JsonLines, TextLines


def record(message: str, *args: Any, exc_info: Any = None, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("keyloft.plugins.service", logging.DEBUG, "x.py", 1, message, args, exc_info)
    vars(made).update(fields)
    return made


def test_a_line_of_text_has_the_documented_form() -> None:
    line = TextLines().format(record("[KV] get: plugin=%s", "trivia"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d DEBUG \[keyloft\.plugins\.service\] \[KV\] get: plugin=trivia", line
    )


def test_a_message_can_not_pretend_to_be_two_lines() -> None:
    assert TextLines().format(record("one\r\ntwo")).endswith(r"one\r\ntwo")


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x9b31m", "\x00", "\x7f", "\x85", "\u2028", "\u202e", "\u200b", "\ud800"], ids=ascii
)
@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_no_character_commands_the_terminal_whatever_the_call(form: type[logging.Formatter], text: str) -> None:
    calls = [
        record(text),
        record("%s %r", text, text),
        record("%(key)s", {"key": text}),
        record("x", key=text, keys=[text]),
        record("x", **{text: 1}),
    ]
    for made in calls:
        assert form().format(made).isprintable()


def test_a_line_break_in_an_error_begins_no_line_of_the_log() -> None:
    forged = "2026-03-01 10:30:45 INFO [keyloft.server.app] all is well"
    try:
        raise ValueError(f"no\r\n{forged}\n\x1b[2J")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    made.exc_text = "what another handler has formatted\x1b[2J"
    made.stack_info = f"Stack (most recent call last):\n{forged}"
    first, *others = TextLines().format(made).split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert f"    {forged}" in others
    assert r"    \x1b[2J" in others


def test_a_line_of_json_has_the_fields_of_its_record() -> None:
    line = json.loads(JsonLines().format(record("text", operation="kv_set", plugin="trivia", key="é", latency_ms=3.2)))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "DEBUG",
        "logger": "keyloft.plugins.service",
        "message": "text",
        "operation": "kv_set",
        "plugin": "trivia",
        "key": "é",
        "latency_ms": 3.2,
    }


def test_json_has_an_exception_in_one_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        text = JsonLines().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in text
    assert "ValueError: no\nway" in json.loads(text)["exception"]


def test_json_has_a_field_of_any_type() -> None:
    assert json.loads(JsonLines().format(record("text", thing=object, where={1, 2})))["where"] == [1, 2]
    assert "ud800" in json.loads(JsonLines().format(record("text", key="\ud800")))["key"]
