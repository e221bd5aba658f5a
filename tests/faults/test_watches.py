"""Watches miss nothing: what they report, with what a list after `watch` has shown, is always the current state."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import keyloft
from keyloft import HistoryGone, Store, limits
from keyloft.core.keys import TupleKey
from tests.support.examples import rounds

from .children import child
from .children.churn import KEYS

pytestmark = pytest.mark.slow

State = dict[TupleKey, int]
"""Versionstamps by key."""

_SECONDS = 1.5


async def state_of(kv: Store) -> State:
    return {entry.key: entry.versionstamp or 0 for entry in await kv.list(prefix=("w",))}


class Follower:
    """Knows what is stored, by a watch and one list."""

    def __init__(self, kv: Store) -> None:
        self._kv = kv
        self.known: State = {}
        self.reported: dict[TupleKey, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, follow: Callable[[], Awaitable[None]]) -> "Follower":
        self._task = asyncio.ensure_future(follow())
        return self

    def by_prefix(self) -> "Follower":
        return self.start(self._by_prefix)

    def since_the_beginning(self) -> "Follower":
        return self.start(self._since_the_beginning)

    def by_key(self, number: int) -> "Follower":
        return self.start(lambda: self._by_key(("w", number)))

    async def _by_prefix(self) -> None:
        watch = self._kv.watch(prefix=("w",))
        self.known = await state_of(self._kv)
        async for entries in watch:
            self._apply(entries)

    async def _since_the_beginning(self) -> None:
        async for entries in self._kv.watch(prefix=("w",), since=0):
            self._apply(entries)

    async def _by_key(self, key: TupleKey) -> None:
        async for entries in self._kv.watch(key):
            self._apply(entries)

    def _apply(self, entries: list[Any]) -> None:
        for entry in entries:
            if entry.exists:
                assert entry.versionstamp >= self.reported.get(entry.key, 0), "a state older than one reported before"
                self.reported[entry.key] = self.known[entry.key] = entry.versionstamp
            else:
                self.known.pop(entry.key, None)

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        [result] = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result


async def check_all(url: str | Path, seed: int) -> None:
    chance = random.Random(seed)
    async with keyloft.open(url, sweep_every=None) as kv:
        followers = [Follower(kv).since_the_beginning()]
        by_key = {number: Follower(kv).by_key(number) for number in range(0, KEYS, 37)}
        async with (
            child("churn", str(url), str(seed), str(_SECONDS)) as a,
            child("churn", str(url), str(seed + 1), str(_SECONDS)) as b,
        ):
            assert [await a.line(), await b.line()] == ["writing", "writing"]
            while len(followers) < 25:
                followers.append(Follower(kv).by_prefix())
                await asyncio.sleep(chance.random() * 0.06)
                await kv.set(("w", chance.randrange(KEYS)), 0, expire_in=chance.choice((None, 0.05)))
                await kv.delete(("w", chance.randrange(KEYS)))
            assert [await a.line(), await b.line()] == ["done", "done"]
        async with asyncio.timeout(60):
            # No entry lives longer than 0.3 s from here on, but those without an expiry.
            while True:
                stored = await state_of(kv)
                wrong = [number for number, follower in enumerate(followers) if follower.known != stored]
                wrong += [
                    number
                    for number, follower in by_key.items()
                    if follower.known != {key: stamp for key, stamp in stored.items() if key == ("w", number)}
                ]
                if not wrong:
                    break
                await asyncio.sleep(0.05)
        for follower in [*followers, *by_key.values()]:
            await follower.stop()


@pytest.mark.parametrize("seed", rounds(1))
async def test_two_processes_write_and_expire_while_watchers_list_and_watch(tmp_path: Path, seed: int) -> None:
    await check_all(tmp_path / "app.db", 100 * seed)


async def test_two_processes_write_and_expire_while_watchers_list_and_watch_on_postgres(postgres_url: str) -> None:
    await check_all(postgres_url, 7)


async def test_two_processes_write_and_expire_while_watchers_list_and_watch_on_etcd(etcd_url: str) -> None:
    await check_all(etcd_url, 8)


async def test_a_watch_that_is_slower_than_the_log_raises_history_gone(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db", history_seconds=0, durability="relaxed") as kv:
        first = await kv.set(("w", 0), 0)
        for number in range(600):
            await kv.set(("w", number), number)
        with pytest.raises(HistoryGone, match="list the entries, then watch again"):
            await anext(kv.watch(prefix=("w",), since=first))
        with pytest.raises(HistoryGone):
            await anext(kv.watch(("w", 5), since=first))
        last = await kv.set(("w", 1), 1)
        watch = kv.watch(prefix=("w",), since=last)
        await kv.set(("w", 2), 2)
        [entry] = await anext(watch)
        assert entry.key == ("w", 2)


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_watches_go_on_while_a_write_of_their_process_waits_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sync: bool
) -> None:
    monkeypatch.setattr(limits, "WATCH_POLL_SECONDS", 0.25)  # so that the write waits before the next poll
    monkeypatch.setattr(limits, "WATCH_CHECK_SECONDS", 0.0)
    path = tmp_path / "app.db"
    async with keyloft.open(path) as other, keyloft.open(path) as kv, asyncio.timeout(60):
        sync, lock = keyloft.open_sync(path), apsw.Connection(str(path))
        watch = kv.watch(prefix=("seen",))
        watch_of_threads = sync.watch(prefix=("seen",))
        await other.set(("seen", 1), 1)
        lock.execute("BEGIN IMMEDIATE")
        write = asyncio.to_thread(sync.set, ("own",), 1) if is_sync else kv.set(("own",), 1)
        step = asyncio.to_thread(next, watch_of_threads) if is_sync else anext(watch)
        writing, reported = asyncio.create_task(write), asyncio.create_task(step)
        try:
            await asyncio.wait([reported], timeout=limits.BUSY_SECONDS / 4)
            assert reported.done(), "the write made the watch wait"
            assert [entry.value for entry in await reported] == [1]
            assert not writing.done()
        finally:
            lock.close()
            await asyncio.gather(writing, reported, return_exceptions=True)
            await asyncio.to_thread(sync.close)
