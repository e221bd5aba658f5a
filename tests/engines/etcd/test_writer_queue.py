"""Processes that write into one store commit one after the other: none is starved, or waits for one that is gone."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Committed, Set, Space
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.etcd import layout, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.followed_commits import FollowedCommits
from keyloft.engines.etcd.layout import StoreState
from keyloft.engines.etcd.messages import KeyValue, RangeRequest
from keyloft.engines.etcd.row_cache import RowCache
from keyloft.engines.etcd.views import RevisionViews
from keyloft.engines.etcd.writer_queue import WriterQueue


@pytest.fixture
async def two(etcd_url: str) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines on one store, as two processes have them."""
    async with AsyncExitStack() as stack:
        engines = [await open_engine(etcd_url) for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.aclose)
        yield engines[0], engines[1]


@pytest.fixture
async def views(etcd_url: str) -> AsyncIterator[RevisionViews]:
    address = DatabaseUrl.parse(etcd_url).etcd
    assert address is not None
    cluster = EtcdCluster(address)
    yield RevisionViews(cluster)
    await cluster.aclose()


@pytest.fixture
async def queue(etcd_url: str, views: RevisionViews) -> AsyncIterator[WriterQueue]:
    """The place of one process among those that write into a new store."""
    await (await open_engine(etcd_url)).aclose()
    followed = FollowedCommits(views, RowCache())
    yield WriterQueue(views, followed)
    await followed.aclose()


async def set_key(engine: Engine, name: bytes) -> None:
    assert isinstance(await engine.commit(Batch((Set(Space.TUPLES, name, b"1", Encoding.JSON),))), Committed)


async def counter_of(views: RevisionViews) -> StoreState:
    view, _ = await views.fetch()
    return view.counter


async def store_counter(views: RevisionViews, counter: StoreState) -> int:
    """Write the counter, as a commit does; returns the revision."""
    written = transactions.put(views.keys.counter, layout.pack_state(counter))
    response = await views.cluster.ask("Txn", transactions.transaction((), [written]))
    return int(response.header.revision)


async def test_a_process_that_commits_all_the_time_leaves_others_their_turn(
    two: tuple[Engine, Engine], views: RevisionViews
) -> None:
    """Many callers of one process, and one caller of another: small commits are faster, and would win each race."""
    large, small = two
    written = {large: 0, small: 0}
    queued: set[str] = set()

    def goes_on() -> bool:
        return min(written.values()) < 60 or len(queued) < 2

    async def write(engine: Engine, name: bytes) -> None:
        while goes_on():
            await set_key(engine, name)
            written[engine] += 1

    async def observe() -> None:
        while goes_on():
            queued.update((await counter_of(views)).queue)
            await asyncio.sleep(0.005)

    async with asyncio.timeout(60):
        await asyncio.gather(observe(), write(small, b"small"), *[write(large, b"%d" % at) for at in range(32)])


async def test_processes_that_write_all_the_time_lose_no_races(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they have met, each commits when the one before it has."""
    monkeypatch.setattr(limits, "ETCD_QUIET_SECONDS", 1.0)  # however busy the machine is
    for limit in ("ETCD_LONGEST_TURNS_SECONDS", "ETCD_TURN_PAUSE_SECONDS", "ETCD_RIVAL_SECONDS"):
        monkeypatch.setattr(limits, limit, 30.0)
    writers: dict[int, str] = {}
    """Which process has committed, by revision."""
    lost: list[int] = []
    """What commits have met that lost a race."""

    def committed(queue: WriterQueue, revision: int, counter: StoreState, made: Any = WriterQueue.committed) -> None:
        writers[revision] = counter.writer
        made(queue, revision, counter)

    def noting(queue: WriterQueue, counter: StoreState, losing: Any = WriterQueue.lost) -> None:
        lost.append(max(writers, default=0))
        losing(queue, counter)

    monkeypatch.setattr(WriterQueue, "committed", committed)
    monkeypatch.setattr(WriterQueue, "lost", noting)

    def order(since: int) -> list[str]:
        return [writers[revision] for revision in sorted(writers) if revision > since]

    async def write(engine: Engine, name: bytes) -> int:
        """Write until all three have met; returns the revision then, and goes on for a while."""
        while len(set(last := order(0)[-6:])) < 3 or last[:3] != last[3:]:
            await set_key(engine, name)
        met = max(writers)
        for _ in range(15):
            await set_key(engine, name)
        return met

    engines = [await open_engine(etcd_url) for _ in range(3)]
    try:
        async with asyncio.timeout(60):
            began = await asyncio.gather(*[write(engine, b"%d" % number) for number, engine in enumerate(engines)])
    finally:
        for engine in engines:
            await engine.aclose()
    assert max(lost, default=0) <= max(began)
    found = order(max(began))[:27]
    assert found == found[:3] * 9


async def test_a_process_that_is_next_and_gone_holds_up_no_one(views: RevisionViews, queue: WriterQueue) -> None:
    view, _ = await views.fetch()
    queue.after(view.counter, 0)
    gone = replace(view.counter, version=2, writer="gone", queue=("gone", views.writer))
    queue.lost(gone)
    await store_counter(views, gone)
    async with asyncio.timeout(60):
        await queue.wait(asyncio.get_running_loop().time())
    # The commit that passes it over takes its place away: no one waits for it again.
    newer = await counter_of(views)
    assert queue.after(newer, asyncio.get_running_loop().time(), limits.ETCD_FEW_BATCHES + 1) == (views.writer,)


async def test_a_commit_that_loses_a_race_asks_for_a_place(two: tuple[Engine, Engine], views: RevisionViews) -> None:
    """Else the process that wins would never notice it."""
    one, other = two
    await set_key(one, b"k")
    await set_key(other, b"k")
    start, end = views.keys.waiting_range
    asked = RangeRequest(key=start, range_end=end)
    assert not (await views.cluster.ask("Range", asked)).kvs
    await set_key(one, b"k")  # as it remembers the store, which the other one has changed
    [waiting] = (await views.cluster.ask("Range", asked)).kvs
    assert waiting.value.decode() == (await counter_of(views)).writer


async def test_all_that_have_asked_since_the_last_commit_get_a_place(views: RevisionViews, queue: WriterQueue) -> None:
    """Not only the one that asked last: others would wait for as long as a commit waits for its turn."""

    async def ask(*names: str) -> int:
        asking = [transactions.put(views.keys.waiting(name), name.encode()) for name in names]
        return int((await views.cluster.ask("Txn", transactions.transaction((), asking))).header.revision)

    # The own name is random, and names that end alike share a key.
    earlier, one, other = [f"0{digit}" for digit in "0123" if digit != views.writer[-1]][:3]
    before = await ask(earlier)
    await ask(one, other, views.writer)
    counter = StoreState(store_id="s", version=2, writer=views.writer)
    queue.after(counter, 0)
    read = transactions.transaction((), [queue.asking(views.keys, since=before)])
    [reply] = transactions.replies(await views.cluster.ask("Txn", read))
    queue.saw_asking(reply.kvs)
    assert queue.after(counter, 0) == (one, other)


async def test_a_process_that_wrote_alone_gives_way_to_one_that_asks(views: RevisionViews, queue: WriterQueue) -> None:
    view, _ = await views.fetch()
    own = replace(view.counter, version=2, writer=views.writer)
    arrived = asyncio.get_running_loop().time()
    assert queue.after(view.counter, arrived, limits.ETCD_FEW_BATCHES + 1) == ()
    queue.committed(view.revision + 1, own)
    assert not queue.has_to_wait
    queue.saw_asking([KeyValue(value=b"other")])
    assert queue.has_to_wait
    assert queue.after(own, arrived, limits.ETCD_FEW_BATCHES + 1) == ("other", views.writer)


async def test_a_process_keeps_its_place_if_more_is_likely_to_follow(views: RevisionViews, queue: WriterQueue) -> None:
    queue.after(StoreState(store_id="s", version=1), 0)
    counter = StoreState(store_id="s", version=2, writer="other", queue=("other",))
    long_after = asyncio.get_running_loop().time() + 60
    assert queue.after(counter, long_after, limits.ETCD_FEW_BATCHES) == ("other",)
    assert queue.after(counter, long_after, limits.ETCD_FEW_BATCHES + 1) == ("other", views.writer)


async def test_a_process_that_waits_learns_that_it_is_next_without_reading(
    views: RevisionViews, queue: WriterQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("ETCD_QUIET_SECONDS", "ETCD_RIVAL_SECONDS", "ETCD_LONGEST_TURNS_SECONDS"):
        monkeypatch.setattr(limits, limit, 60.0)
    view, _ = await views.fetch()
    reads = 0
    fetch = views.fetch

    async def counting(*given: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return await fetch(*given, **options)

    monkeypatch.setattr(views, "fetch", counting)
    behind = replace(view.counter, version=2, writer="other", queue=("third", views.writer, "other"))
    queue.lost(behind)
    async with asyncio.timeout(20):
        await store_counter(views, behind)
        waiting, before = asyncio.create_task(queue.wait(asyncio.get_running_loop().time())), -1
        while before < reads:  # until the watch has begun
            before = reads
            await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        await store_counter(views, replace(behind, version=3, writer="third", queue=(views.writer, "other", "third")))
        await waiting
    assert reads == before


async def test_a_process_that_writes_no_more_does_not_follow_others(
    etcd_url: str, views: RevisionViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 0.1)
    await (await open_engine(etcd_url)).aclose()
    followed = FollowedCommits(views, RowCache())
    async with asyncio.timeout(20):
        for _ in range(2):  # it begins again if need be
            followed.follow()
            while not followed.is_live:
                await followed.moves(0.05)
            while followed.is_live:
                await followed.moves(0.05)
    await followed.aclose()


_BUSY = """
import asyncio, sys
import keyloft

async def main():
    async with keyloft.open(sys.argv[1], sweep_every=None) as kv:
        async def write(number):
            while True:
                await kv.set(("busy", number), 1)
        await asyncio.gather(*map(write, range(32)))

asyncio.run(main())
"""


async def test_a_process_that_is_stopped_while_it_is_next_delays_others_for_a_moment(
    etcd_url: str, views: RevisionViews
) -> None:
    engine = await open_engine(etcd_url)
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", _BUSY, etcd_url)
    try:
        async with asyncio.timeout(60):
            while not (await counter_of(views)).queue:
                await set_key(engine, b"own")  # they take turns once they have met
            busy.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        await asyncio.gather(*[set_key(engine, b"%d" % number) for number in range(32)])
        assert time.monotonic() < began + 10  # of which 0.5 s are the turn's; the rest is for a busy machine
    finally:
        busy.kill()
        await busy.wait()
        await engine.aclose()
