"""The replies of the plugin service: values that are sent alone are those that each reply would show."""

import json

from hypothesis import given
from hypothesis import strategies as st

from keyloft.core.records import Get, Record, Space
from keyloft.plugins import replies
from tests.support.examples import examples

KEY = ("trivia", "k")
PIECES = [
    b"1",
    b"1,2",
    b"[1",
    b"2]",
    b'"a',
    b'b"',
    b'"a","b"',
    b" 3",
    b"4 ",
    b"",
    b"{}",
    b'"\xc3\xa9"',
    b'"\xc3',
    b"NaN",
]


@given(st.lists(st.none() | st.sampled_from(PIECES) | st.integers().map(lambda n: b"%d" % n), min_size=1, max_size=8))
@examples(300)
def test_values_are_sent_alone_only_if_each_get_would_be_answered_with_its_value(stored: list[bytes | None]) -> None:
    records = [None if value is None else Record(KEY, value, 0, 1, None) for value in stored]
    joined = replies.values_found(records)
    alone = [json.loads(replies.got(Get(Space.PLUGINS, KEY), record)) for record in records]
    if joined is not None:
        expected = [{"success": True, "exists": True, "value": value} for value in json.loads(b"[%b]" % joined)]
        assert alone == expected
    else:
        has_spaces = any(value is not None and value != value.strip() for value in stored)
        assert has_spaces or not all(one["exists"] for one in alone)
