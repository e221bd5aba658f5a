"""Which watches a key concerns: the same as by comparing it with every one of them."""

import gc

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
