"""Processes that write into one store take turns: none is starved, and none waits for one that is gone."""

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
from keyloft.engines.etcd.layout import StoreState
from keyloft.engines.etcd.messages import KeyValue, RangeRequest
from keyloft.engines.etcd.views import RevisionViews
from keyloft.engines.etcd.writer_turns import WriterTurns


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


async def set_key(engine: Engine, name: bytes) -> None:
    assert isinstance(await engine.commit(Batch((Set(Space.TUPLES, name, b"1", Encoding.JSON),))), Committed)


async def counter_of(views: RevisionViews) -> StoreState:
    view, _ = await views.fetch()
    return view.counter


async def test_a_process_that_commits_all_the_time_leaves_others_their_turn(
    two: tuple[Engine, Engine], views: RevisionViews
) -> None:
    """Many callers of one process, and one caller of another: small commits are faster, and would win each race."""
    large, small = two
    written = {large: 0, small: 0}
    asked: set[str] = set()
    """Which of them have asked the other one to wait."""

    def goes_on() -> bool:
        return min(written.values()) < 60 or len(asked) < 2

    async def write(engine: Engine, name: bytes) -> None:
        while goes_on():
            await set_key(engine, name)
            written[engine] += 1

    async def observe() -> None:
        while goes_on():
            counter = await counter_of(views)
            if counter.turn_left:
                asked.add(counter.writer)
            await asyncio.sleep(0.005)

    async with asyncio.timeout(60):
        await asyncio.gather(observe(), write(small, b"small"), *[write(large, b"%d" % at) for at in range(32)])


async def test_the_turn_of_a_process_that_is_gone_holds_up_no_one(
    two: tuple[Engine, Engine], views: RevisionViews
) -> None:
    engine, _ = two
    await set_key(engine, b"k")
    assert (await counter_of(views)).turn_left == 0  # alone, a process asks no one to wait
    view, _ = await views.fetch()
    gone = layout.pack_counter(replace(view.counter, writer="gone", turn_left=3_600_000))
    await views.cluster.ask("Txn", transactions.transaction((), [transactions.put(view.keys.counter, gone)]))
    async with asyncio.timeout(60):
        turns = WriterTurns(views)  # of one that has lost a race against it
        turns.left(view.counter, 0)
        turns.left(replace(view.counter, writer="gone", version=view.counter.version + 1), 0)
        await turns.wait(asyncio.get_running_loop().time())
        await set_key(engine, b"k")


async def test_a_commit_that_loses_a_race_asks_for_a_turn(two: tuple[Engine, Engine], views: RevisionViews) -> None:
    """Else the process that wins would never notice it."""
    one, other = two
    await set_key(one, b"k")
    await set_key(other, b"k")
    asked = RangeRequest(key=views.keys.waiting)
    assert not (await views.cluster.ask("Range", asked)).kvs
    await set_key(one, b"k")  # as it remembers the store, which the other one has changed
    [waiting] = (await views.cluster.ask("Range", asked)).kvs
    assert waiting.value.decode() == (await counter_of(views)).writer


async def test_a_process_that_wrote_alone_gives_way_to_one_that_asks(etcd_url: str, views: RevisionViews) -> None:
    await (await open_engine(etcd_url)).aclose()
    view, _ = await views.fetch()
    turns, arrived = WriterTurns(views), asyncio.get_running_loop().time()
    turns.committed(turns.left(replace(view.counter, writer=views.writer), arrived))
    assert not await turns.give_way(arrived)
    asked = KeyValue(key=view.keys.waiting, value=b"other", mod_revision=view.revision)
    turns.saw_waiting(asked, since=view.revision)  # before its last commit
    assert not await turns.give_way(arrived)
    turns.saw_waiting(asked, since=view.revision - 1)
    assert await turns.give_way(arrived)
    await turns.aclose()


async def test_a_process_asks_others_to_wait_if_more_is_likely_to_follow(views: RevisionViews) -> None:
    turns = WriterTurns(views)
    turns.left(StoreState(store_id="s", version=1), 0)
    counter = StoreState(store_id="s", version=2, writer="other")
    long_after = asyncio.get_running_loop().time() + 60
    assert turns.left(counter, long_after, limits.ETCD_FEW_BATCHES) == 0
    assert turns.left(counter, long_after, limits.ETCD_FEW_BATCHES + 1) > 0


async def test_a_process_that_waits_learns_of_the_end_of_a_turn_without_reading(
    etcd_url: str, views: RevisionViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_QUIET_SECONDS", 30.0)
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 60.0)
    monkeypatch.setattr(limits, "ETCD_LONGEST_TURNS_SECONDS", 30.0)
    await (await open_engine(etcd_url)).aclose()
    view, _ = await views.fetch()
    reads = 0
    fetch = views.fetch

    async def counting(*given: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return await fetch(*given, **options)

    monkeypatch.setattr(views, "fetch", counting)

    async def commit_of_another(turn_left: int) -> None:
        counter = layout.pack_counter(replace(view.counter, version=2, writer="other", turn_left=turn_left))
        await views.cluster.ask("Txn", transactions.transaction((), [transactions.put(view.keys.counter, counter)]))

    turns, arrived = WriterTurns(views), asyncio.get_running_loop().time()
    turns.left(view.counter, arrived)
    turns.left(replace(view.counter, version=2, writer="other"), arrived)
    async with asyncio.timeout(20):
        await commit_of_another(turn_left=1000)
        waiting, before = asyncio.create_task(turns.wait(arrived)), -1
        while before < reads:  # until the watch has begun
            before = reads
            await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        await commit_of_another(turn_left=0)
        await waiting
    assert reads == before
    await turns.aclose()


async def test_a_process_waits_once_for_others_that_have_stopped_writing(
    etcd_url: str, views: RevisionViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before each further commit, for as long as it remembers them: that would leave a few commits in a second."""
    monkeypatch.setattr(limits, "ETCD_TURN_SECONDS", 0.0)
    engine = await open_engine(etcd_url)
    await engine.aclose()
    view, _ = await views.fetch()
    own = replace(view.counter, writer=views.writer)
    stored = transactions.put(view.keys.counter, layout.pack_counter(own))
    await views.cluster.ask("Txn", transactions.transaction((), [stored]))
    turns, arrived = WriterTurns(views), asyncio.get_running_loop().time()

    def commit(counter: StoreState) -> None:
        turns.committed(turns.left(counter, arrived))

    commit(own)
    commit(replace(own, writer="other", version=own.version + 1))
    commit(own)
    assert await turns.give_way(arrived)
    commit(own)
    assert not await turns.give_way(arrived)
    await turns.aclose()


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


async def test_a_process_that_is_stopped_within_its_turn_delays_others_for_a_moment(
    etcd_url: str, views: RevisionViews
) -> None:
    engine = await open_engine(etcd_url)
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", _BUSY, etcd_url)
    try:
        async with asyncio.timeout(60):
            while (counter := await counter_of(views)).writer == "" or not counter.turn_left:
                await set_key(engine, b"own")  # it takes turns once it has met another one
            busy.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        await asyncio.gather(*[set_key(engine, b"%d" % number) for number in range(32)])
        assert time.monotonic() < began + 2  # of which 0.5 s are the turn's; the rest is for a busy machine
    finally:
        busy.kill()
        await busy.wait()
        await engine.aclose()
