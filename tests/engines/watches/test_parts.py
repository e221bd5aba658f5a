"""A watch reports large values in parts: whatever happens between two parts, it ends with what is stored."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyloft
from keyloft import DatabaseError, ManualClock, Store, limits
from keyloft.core.engine import Engine, write
from keyloft.core.keys import TupleKey
from keyloft.core.records import ChangeKind, Latest, LoggedChange, Scan, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.memory import MemoryEngine
from tests.support.examples import examples

State = dict[TupleKey, int]
"""Versionstamps by key."""

numbers = st.integers(0, 11)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), numbers, st.integers(0, 40), st.sampled_from([None, 0.5, 1])),
        st.tuples(st.just("set many"), st.sets(numbers, min_size=3), st.integers(0, 20), st.sampled_from([None, 0.5])),
        st.tuples(st.just("delete"), numbers),
        st.tuples(st.just("touch"), numbers, st.sampled_from([None, 1])),
        st.tuples(st.just("advance"), st.sampled_from([0.1, 0.5, 1])),
        st.tuples(st.just("sweep")),
        st.tuples(st.just("step")),
        st.tuples(st.just("fail")),
        st.tuples(st.just("resume")),
    ),
    min_size=5,
    max_size=60,
)


FAILURE = "what a read raises in this test"


class ModelWatcher:
    """Knows what is stored by a watch alone, which it closes and continues now and then."""

    def __init__(self, kv: Store) -> None:
        self._kv = kv
        self._watch = kv.watch(prefix=("w",), since=0)
        self.known: State = {}
        self._newest: State = {}

    async def step(self, seconds: float = 0.002) -> bool:
        """Take what there is; returns whether there was anything."""
        try:
            async with asyncio.timeout(seconds):
                entries = await anext(self._watch)
        except TimeoutError:
            return False
        size = sum([len(entry.value) + 2 for entry in entries if entry.exists])
        assert size <= limits.WATCH_REPORT_BYTES + 42, "one value more than the bound"
        for entry in entries:
            if entry.exists:
                assert entry.versionstamp is not None
                assert entry.versionstamp >= self._newest.get(entry.key, 0), "a state older than one reported before"
                self._newest[entry.key] = self.known[entry.key] = entry.versionstamp
            else:
                self.known.pop(entry.key, None)
        return True

    async def fail(self) -> None:
        """Let the next read of entries fail half-way through what is to be reported."""
        read, left = self._kv.engine.read, 2

        async def failing_once(*asks: Any) -> list[Any]:
            nonlocal left
            left -= 1
            if not left:
                raise DatabaseError(FAILURE)  # the feed, which may meet it, too, reads again
            return list(await read(*asks))

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(self._kv.engine, "read", failing_once)
            try:
                await self.step()
            except DatabaseError as error:
                if str(error) != FAILURE:
                    raise

    async def resume(self) -> None:
        since = self._watch.reported_to
        await self._watch.aclose()
        self._watch = self._kv.watch(prefix=("w",), since=since)
        # One that resumes may have a state reported once more, but of no key an older one than is stored.
        self._newest = {}

    async def aclose(self) -> None:
        await self._watch.aclose()


async def follow(path: Path | None, script: list[Any]) -> None:
    clock = ManualClock()
    async with keyloft.open(path, clock=clock, sweep_every=None, durability="relaxed") as kv:
        watcher = ModelWatcher(kv)
        for step in script:
            match step:
                case ("set", number, size, expire_in):
                    await kv.set(("w", number), "x" * size, expire_in=expire_in)
                case ("set many", many, size, expire_in):
                    await kv.set_many({("w", number): "y" * size for number in many}, expire_in=expire_in)
                case ("delete", number):
                    await kv.delete(("w", number))
                case ("touch", number, expire_in):
                    await kv.touch(("w", number), expire_in=expire_in)
                case ("advance", seconds):
                    clock.advance(seconds)
                case ("sweep",):
                    await kv.sweep()
                case ("fail",):
                    await watcher.fail()
                case ("resume",):
                    await watcher.resume()
                case _:
                    await watcher.step()
        async with asyncio.timeout(30):
            while True:
                await watcher.step(0.01)
                stored = {entry.key: entry.versionstamp for entry in await kv.list(prefix=("w",))}
                if watcher.known == stored:
                    break
        await watcher.aclose()


def _with_tiny_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (
        ("WATCH_REPORT_BYTES", 24),
        ("WATCH_READ_KEYS", 3),
        ("WATCH_PENDING_KEYS", 6),
        ("WATCH_DUE_KEYS", 2),
        ("LOG_SLICE_ROWS", 2),
        ("LOG_SLICE_BYTES", 64),
        ("MEMORY_SLICE_CHANGES", 5),
    ):
        monkeypatch.setattr(limits, name, number)


@examples(150, deadline=None)
@given(steps)
def test_what_is_reported_in_parts_adds_up_to_what_is_stored(script: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        _with_tiny_bounds(patches)
        asyncio.run(follow(None, script))


@examples(30, deadline=None)
@given(steps)
def test_the_same_on_a_file(tmp_path_factory: pytest.TempPathFactory, script: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        _with_tiny_bounds(patches)
        asyncio.run(follow(tmp_path_factory.mktemp("parts") / "app.db", script))


async def peak_of(call: Callable[[], Awaitable[None]]) -> int:
    """How many bytes more than before were in use at a time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_behind", [False, True], ids=["pending", "backlog"])
async def test_a_watch_of_large_values_takes_little_memory(tmp_path: Path, is_behind: bool) -> None:
    async with keyloft.open(tmp_path / "app.db", durability="relaxed") as kv:
        first = await kv.set(("w", "first"), 1)
        live = kv.watch(prefix=("w",))
        for number in range(100):
            # Small ones between them: what is read first does not tell how large the others are.
            await kv.set(("w", number), b"s" if number < 40 else bytes(1_000_000))
        watch = kv.watch(prefix=("w",), since=first) if is_behind else live

        async def read_all() -> None:
            found = 0
            while found < 100:
                found += len(await anext(watch))

        assert await peak_of(read_all) < 40_000_000
        await live.aclose()
        await watch.aclose()


def test_the_same_for_threads(tmp_path: Path) -> None:
    with keyloft.open_sync(tmp_path / "app.db", durability="relaxed") as kv:
        first = kv.set(("w", "first"), 1)
        for number in range(60):
            kv.set(("w", number), bytes(1_000_000))

        async def read_all() -> None:
            found = 0
            for entries in kv.watch(prefix=("w",), since=first):
                found += len(entries)
                if found == 60:
                    break

        assert asyncio.run(peak_of(read_all)) < 40_000_000


@pytest.mark.parametrize("is_file", [False, True], ids=["memory", "file"])
async def test_many_small_entries_are_reported_in_parts_that_hold_the_event_loop_for_milliseconds(
    tmp_path: Path, *, is_file: bool
) -> None:
    path = tmp_path / "app.db" if is_file else None
    async with keyloft.open(path, durability="relaxed") as kv, kv.watch(prefix=()) as watch, asyncio.timeout(30):
        versions = {await kv.set_many({(commit, key): 1 for key in range(900)}): commit for commit in range(4)}
        seen: list[keyloft.Entry] = []
        while len(seen) < 4 * 900:
            entries = await anext(watch)
            assert len(entries) < limits.WATCH_REPORT_KEYS + limits.WATCH_READ_KEYS
            seen += entries
            whole = versions.get(watch.reported_to or 0, -1)
            assert {entry.key for entry in seen} >= {(commit, key) for commit in range(whole + 1) for key in range(900)}
        assert watch.reported_to == max(versions)
        assert len({entry.key for entry in seen}) == len(seen)


@pytest.mark.parametrize("is_file", [False, True], ids=["memory", "file"])
async def test_many_entries_that_expired_between_two_changes_are_reported_in_parts(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, *, is_file: bool
) -> None:
    monkeypatch.setattr(limits, "WATCH_DUE_KEYS", 10)
    engine: Engine = await open_engine(str(tmp_path / "app.db"), clock=clock) if is_file else MemoryEngine(clock)
    try:
        for number in range(1, 201):
            await write(engine, Set(Space.TUPLES, b"k%03d" % number, b"1", Encoding.JSON, expire_in=1000 * number))
        [since] = await engine.read(Latest())
        clock.advance(3600)
        await write(engine, Set(Space.TUPLES, b"last", b"1", Encoding.JSON))
        log = engine.follow(Scan(Space.TUPLES, b"a", b"z", 1000), woken=lambda: None, since=since)
        seen: list[LoggedChange] = []
        async with asyncio.timeout(30):
            while not seen or seen[-1].kind is ChangeKind.EXPIRED:
                changes = await log.take()
                assert len(changes) <= 2 * limits.WATCH_DUE_KEYS
                seen += changes
        assert [change.key for change in seen] == [*(b"k%03d" % number for number in range(1, 201)), b"last"]
        await log.aclose()
    finally:
        await engine.aclose()
