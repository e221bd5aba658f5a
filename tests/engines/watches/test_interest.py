"""Which watches a key concerns: the same as by comparing it with every one of them."""

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft.core.records import Get, Scan, Space
from keyloft.engines.watches.interest import Interest

spaces = st.sampled_from([Space.TUPLES, Space.SEMANTIC])
keys = st.binary(max_size=2)
asks = st.one_of(
    st.lists(st.builds(Get, spaces, keys), min_size=1, max_size=3),
    st.builds(lambda space, start, end: [Scan(space, start, end, 1)], spaces, keys, keys),
)


class AnyWatch:
    """What a watch is to the interest: an object that may go."""


def concerns(wanted: list[Get | Scan], space: Space, key: bytes) -> bool:
    return any(
        ask.space is space and (ask.key == key if isinstance(ask, Get) else ask.start <= key < ask.end)
        for ask in wanted
    )


@given(st.lists(st.tuples(asks, st.booleans()), max_size=12), st.lists(st.tuples(spaces, keys), max_size=12))
def test_a_key_finds_the_watches_it_concerns(
    made: list[tuple[list[Get | Scan], bool]], looked_up: list[tuple[Space, bytes]]
) -> None:
    interest: Interest[AnyWatch] = Interest()
    kept = []
    for wanted, stays in made:
        watch = AnyWatch()
        registration = interest.add(watch, wanted)
        kept.append((watch, wanted, registration, stays))
    for _, _, registration, stays in kept:
        if not stays:
            interest.remove(registration)
            interest.remove(registration)
    for space, key in looked_up:
        expected = {watch for watch, wanted, _, stays in kept if stays and concerns(wanted, space, key)}
        found = interest.of(space, key)
        assert len(found) == len(set(found))
        assert set(found) == expected
    assert set(interest.spaces()) == {ask.space for _, wanted, _, stays in kept if stays for ask in wanted}
    for _, _, registration, _ in kept:
        interest.remove(registration)
    assert not interest
    assert interest.spaces() == []
    assert all(interest.of(space, key) == [] for space, key in looked_up)


def test_a_watch_that_was_dropped_is_forgotten() -> None:
    interest: Interest[AnyWatch] = Interest()
    watch = AnyWatch()
    interest.add(watch, [Scan(Space.TUPLES, b"a", b"b", 1)])
    assert interest.of(Space.TUPLES, b"aa") == [watch]
    del watch
    gc.collect()
    assert not interest
    assert interest.of(Space.TUPLES, b"aa") == []


class _Interruption(BaseException):
    """What a signal's handler raises."""


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Call it, and raise before a line of interest.py, counted from the first one on; returns whether there was one."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith("interest.py"):
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise _Interruption
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except _Interruption:
        return True
    finally:
        sys.settrace(earlier)
    return False


@pytest.mark.parametrize(
    "wanted",
    [[Get(Space.TUPLES, b"k"), Get(Space.TUPLES, b"x")], [Scan(Space.TUPLES, b"f", b"p", 1)]],
    ids=["keys", "range"],
)
def test_an_interrupted_watch_leaves_the_others_as_they_are(wanted: list[Get | Scan]) -> None:
    def check_others() -> None:
        for key in (b"f", b"k", b"o", b"x"):
            assert set(interest.of(Space.TUPLES, key)) == {
                watch for watch, asks in others.items() if concerns(asks, Space.TUPLES, key)
            }
        assert interest.spaces() == [Space.TUPLES]

    interest: Interest[AnyWatch] = Interest()
    everything = [Scan(Space.TUPLES, b"a", b"z", 1)], [Scan(Space.TUPLES, b"h", b"p", 1)], [Get(Space.TUPLES, b"k")]
    others: dict[AnyWatch, list[Get | Scan]] = {AnyWatch(): list(asks) for asks in everything}
    kept = [interest.add(watch, asks) for watch, asks in others.items()]
    line, was_interrupted = 0, True
    while was_interrupted:
        line += 1
        watch = AnyWatch()
        was_interrupted = interrupted_at(line, partial(interest.add, watch, wanted))
        del watch
        gc.collect(1)  # what was made just now; to go through all objects takes far longer
        assert interest
        check_others()
    assert line > 5, "nothing was interrupted"
    line, was_interrupted = 0, True
    while was_interrupted:
        line += 1
        watch = AnyWatch()
        registration = interest.add(watch, wanted)
        was_interrupted = interrupted_at(line, partial(interest.remove, registration))
        del watch
        gc.collect(1)  # what was made just now; to go through all objects takes far longer
        assert interest
        check_others()
    for registration in kept:
        interest.remove(registration)
    assert not interest
