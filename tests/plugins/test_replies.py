"""The replies of the plugin service: what is made for several gets together is what each of them would have."""

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
several = st.lists(st.none() | st.sampled_from(PIECES) | st.integers().map(lambda n: b"%d" % n), min_size=1, max_size=8)


@given(several)
@examples(300)
def test_replies_that_are_made_together_are_those_that_each_get_would_have(stored: list[bytes | None]) -> None:
    records = [None if value is None else Record(KEY, value, 0, 1, None) for value in stored]
    together = replies.got_each(records)
    assert together is None or together == [replies.got(Get(Space.PLUGINS, KEY), record) for record in records]


@given(several)
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
