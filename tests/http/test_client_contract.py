"""The rules of all engines, as far as they can hold over HTTP, on a real server."""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from msgspec.structs import replace

import keyloft.engines.remote.engine  # noqa: F401 (here: it takes the event loop of the first test too long)
from keyloft import CounterOutOfRange, ManualClock, NotACounter
from keyloft.core import keys
from keyloft.core.engine import Engine, Watch
from keyloft.core.records import Add, Count, Delete, Get, Scan, Set, Touch
from keyloft.core.urls import HttpAddress
from keyloft.core.values import Encoding, pack_counter
from keyloft.engines import open_service
from keyloft.engines.memory import MemoryEngine
from keyloft.tuples.named import InnerEngine, Operation
from tests.engines.contract import EngineContract
from tests.engines.contract.calls import END, START, A, get, next_of, put, stored, values_of, write
from tests.http.api import ADMIN_TOKEN, running_api

OTHER_SPACES: Final = (
    "test_many_gets_are_answered_in_their_order",
    "test_versions_of_different_spaces_are_one_sequence",
    "test_add_keeps_the_expiry_and_gives_one_to_a_new_counter",
    "test_an_expiry_can_be_absolute",
    "test_an_expiry_that_no_database_holds_is_refused_and_harms_no_other_batch",
    "test_what_is_appended_sorts_as_it_was_committed",
    "test_what_is_appended_expires_and_is_watched_like_all_else",
    "test_a_scan_tells_when_entries_were_made_and_last_written",
    "test_a_scan_of_the_semantic_space_tells_when_entries_were_written",
    "test_spaces_never_see_each_other",
    "test_one_batch_may_span_spaces_and_fails_in_all",
    "test_a_plugins_entry_is_written_read_and_removed",
    "test_plugins_keys_come_in_the_order_of_unicode",
    "test_a_plugins_entry_expires_to_the_millisecond",
    "test_touch_changes_the_expiry_of_a_plugins_entry",
    "test_usage_counts_what_lives_by_plugin",
    "test_usage_is_counted_slice_by_slice",
    "test_one_batch_spans_spaces_or_fails_in_all",
    "test_a_long_batch_stores_what_short_ones_store",
)
THE_CHANGE_LOG: Final = (
    "test_no_commit_gets_version_1_which_rows_by_hand_have",
    "test_the_log_tells_what_each_commit_changed",
    "test_a_position_within_a_group_leaves_out_what_came_before_it",
    "test_a_long_log_is_read_in_slices",
    "test_a_version_that_the_log_does_not_hold_is_history_gone",
    "test_who_follows_the_log_gets_each_change_in_order_without_touches",
    "test_many_who_watch_the_same_get_each_change_once",
    "test_who_follows_the_log_gets_an_expiry_after_the_put_that_it_ends",
    "test_who_follows_the_log_and_falls_behind_gets_no_older_change_after_a_newer_one",
    "test_all_up_to_where_a_follower_of_the_log_has_reached_was_reported",
    "test_a_follower_of_the_log_learns_of_an_entry_that_has_expired_when_it_is_written",
    "test_an_entry_that_one_batch_puts_and_touches_is_logged_as_put",
    "test_who_follows_the_log_from_a_version_gets_an_entry_that_a_long_batch_puts_and_touches",
    "test_who_follows_a_long_commit_in_slices_gets_expiries_after_the_puts_that_they_end",
    "test_who_follows_the_log_and_is_ended_again_and_again_learns_of_expiries_that_are_not_swept",
)
LATE_TOUCHES: Final = (
    "test_a_touch_that_is_seen_after_its_entrys_expiry_is_reported_as_a_put",
    "test_a_follower_that_continues_for_another_one_learns_of_the_touch",
    "test_a_follower_that_falls_behind_learns_of_the_touch",
    "test_a_follower_that_has_forgotten_what_it_reported_learns_of_the_touch",
    "test_a_touch_is_reported_after_a_clock_was_set_back_that_brings_an_expired_entry_back",
    "test_touches_in_time_are_not_reported_to_who_has_caught_up",
    "test_touches_of_a_backlog_are_reported_once_for_each_key",
)
WHAT_HAS_EXPIRED: Final = (
    "test_due_gives_what_expired_after_a_moment_and_what_is_next",
    "test_a_get_can_include_the_expired_record",
    "test_expired_lists_what_is_due_the_longest_overdue_first",
    "test_purge_removes_only_that_version_and_only_if_expired",
    "test_the_expiry_that_a_purge_names_decides_nothing",
    "test_a_check_can_ask_for_an_expired_entry",
)
READS_OF_SEVERAL_KINDS: Final = (
    "test_a_store_has_an_id_that_stays",
    "test_answers_come_in_the_order_asked",
    "test_several_asks_are_one_snapshot",
    "test_a_long_batch_that_fails_leaves_nothing",
    "test_the_time_is_that_by_which_entries_expire",
)
BOUNDS_OF_THIS_PROCESS: Final = ("test_large_values_are_reported_in_parts",)
"""The service has its own; tests/http/test_watch_memory.py is about those."""
CHANGES_REPORTED_ONCE: Final = ("test_a_watch_is_continued_from_the_last_version_that_was_seen",)
"""Watches share the last events of the service: one that goes on may get again what it knows."""
KEYS_THAT_ARE_NO_TUPLES: Final = ("test_binary_values_come_back_as_they_were",)


class ByteKeys(InnerEngine):
    """Shows keys of bytes, as the contract has them, and stores tuples: of each byte, a part."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, b"", "with keys of bytes")

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        [first, *_] = asks
        if isinstance(first, Scan) and first.start != START:  # all keys that begin so
            start, end = keys.below(_encoded(first.start))
            asks = (replace(first, start=_WITHIN + start, end=_WITHIN + end),)
        return super().watch(*asks, since=since)

    def _in_database(self, ask: Any) -> Any:
        match ask:
            case Get():
                return replace(ask, key=_encoded(ask.key))
            case Scan() | Count():
                return replace(ask, start=_bound(ask.start), end=_bound(ask.end))
        return ask

    def _inside(self, operation: Operation) -> Operation:
        return replace(operation, key=_encoded(operation.key))

    def _key(self, key: bytes) -> bytes:
        return b"".join(keys.decode(key))  # type: ignore[arg-type]


_WITHIN: Final = b"below"


def _encoded(key: bytes) -> bytes:
    return keys.encode_prefix(tuple([bytes([byte]) for byte in key]))


def _bound(key: bytes) -> bytes:
    if key.startswith(_WITHIN):
        return key.removeprefix(_WITHIN)
    return key if key in (START, END) else _encoded(key)


class TestClientContract(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        memory = MemoryEngine(clock)
        async with running_api(engine=memory) as api:
            engine = await open_service(HttpAddress(origin=f"http://127.0.0.1:{api.port}"), ADMIN_TOKEN)
            yield ByteKeys(engine)
            await engine.aclose()
        await memory.aclose()

    async def test_add_counts_long_json_integers_and_keeps_a_u64_one(self, engine: Engine) -> None:
        """By up to 2**64 - 1, as `increment` does."""
        await write(engine, put(b"big", str(10**30).encode()), Set(A, b"u", pack_counter(3), Encoding.U64))
        done = await write(engine, Add(A, b"big", 1), Add(A, b"u", -3))
        assert done.values == (10**30 + 1, 0)
        assert (await stored(engine, b"big")).value == str(10**30 + 1).encode()
        assert (await stored(engine, b"u")).encoding == Encoding.U64
        with pytest.raises(CounterOutOfRange):
            await write(engine, put(b"half"), Add(A, b"u", -1))
        await write(engine, put(b"text"))
        with pytest.raises(NotACounter):
            await write(engine, put(b"half"), Add(A, b"text", 1))
        assert await get(engine, b"half") is None

    # These engines report the same in fewer steps: what has arrived over HTTP is joined, what is under way comes next.

    async def test_watching_a_range_gives_the_changed_keys_only(self, engine: Engine) -> None:
        await write(engine, put(b"p1"), put(b"p2"), put(b"q"))
        watch = engine.watch(Scan(A, b"p", b"q", 1))
        await write(engine, put(b"p3", b"3"), put(b"q", b"4"))
        await reports(watch, {b"p3": b"3"})
        await write(engine, Delete(A, b"p1"))
        await write(engine, put(b"p2", b"2"))
        await reports(watch, {b"p1": None, b"p2": b"2"})

    async def test_watches_see_expiry_without_a_sweep(self, engine: Engine, clock: ManualClock) -> None:
        keys, everything = engine.watch(Get(A, b"k")), engine.watch(Scan(A, START, END, 1))
        await write(engine, put(b"k", b"1", expire_in=1000), put(b"l", b"2", expire_in=2000))
        await reports(keys, {b"k": b"1"})
        await reports(everything, {b"k": b"1", b"l": b"2"})
        clock.advance(1)
        await reports(keys, {b"k": None})
        await reports(everything, {b"k": None})
        clock.advance(1)
        await reports(everything, {b"l": None})

    async def test_a_touched_entry_expires_for_watchers_at_its_new_time(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        keys, everything = engine.watch(Get(A, b"k")), engine.watch(Scan(A, START, END, 1))
        await write(engine, put(b"k", b"1", expire_in=5000), put(b"l", b"2", expire_in=1000))
        await reports(keys, {b"k": b"1"})
        await reports(everything, {b"k": b"1", b"l": b"2"})
        await write(engine, Touch(A, b"k", 3000), Touch(A, b"l", 9000), put(b"seen"))
        await reports(everything, {b"k": b"1", b"l": b"2", b"seen": b'"v"'})
        clock.advance(3)
        await reports(keys, {b"k": None})
        await reports(everything, {b"k": None})

    async def test_a_slow_watcher_gets_the_latest_state(self, engine: Engine) -> None:
        watch = engine.watch(Get(A, b"k"))
        await next_of(watch)
        for number in range(100):
            await write(engine, put(b"k", b"%d" % number))
        await reports(watch, {b"k": b"99"})


async def reports(watch: Watch, expected: dict[bytes, bytes | None]) -> None:
    """A watch reports these states, in one step or in several, and nothing else at the end."""
    seen: dict[bytes, bytes | None] = {}
    while seen != expected:
        seen |= values_of(await next_of(watch))


for name in (
    *OTHER_SPACES,
    *THE_CHANGE_LOG,
    *LATE_TOUCHES,
    *WHAT_HAS_EXPIRED,
    *READS_OF_SEVERAL_KINDS,
    *BOUNDS_OF_THIS_PROCESS,
    *CHANGES_REPORTED_ONCE,
    *KEYS_THAT_ARE_NO_TUPLES,
):
    assert hasattr(EngineContract, name)
    setattr(TestClientContract, name, None)
