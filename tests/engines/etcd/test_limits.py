"""What does not fit into one request of etcd, what etcd compacts, and what processes leave that end at a bad moment."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import keyloft
from keyloft import ClockSetBack, HistoryGone, InvalidArgument, ManualClock, limits
from keyloft.core.maintenance import Range
from keyloft.core.records import (
    Batch,
    Changes,
    Committed,
    Count,
    Delete,
    Get,
    Latest,
    LogPosition,
    Page,
    Scan,
    Set,
    Space,
    Touch,
)
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import Encoding
from keyloft.engines import open_engine, open_maintenance
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.etcd import large_values, messages, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.engine import EtcdEngine
from keyloft.engines.etcd.layout import KeyLayout
from keyloft.engines.etcd.views import RevisionView, RevisionViews

A = Space.TUPLES


def put(key: bytes, value: bytes) -> Set:
    return Set(A, key, value, Encoding.BYTES)


@pytest.fixture
async def engine(etcd_url: str, clock: ManualClock) -> AsyncIterator[EtcdEngine]:
    engine = await open_engine(etcd_url, clock)
    assert isinstance(engine, EtcdEngine)
    yield engine
    await engine.aclose()


@pytest.fixture
async def cluster(etcd_url: str, clock: ManualClock) -> AsyncIterator[EtcdCluster]:
    address = DatabaseUrl.parse(etcd_url).etcd
    assert address is not None
    cluster = EtcdCluster(address, clock)
    yield cluster
    await cluster.aclose()


async def view_of(cluster: EtcdCluster) -> RevisionView:
    view, _ = await RevisionViews(cluster).fetch()
    return view


async def chunks(cluster: EtcdCluster) -> int:
    view = await view_of(cluster)
    return int((await view.range(*view.keys.chunk_range, count_only=True)).count)


async def compact(cluster: EtcdCluster) -> None:
    """Let etcd forget all revisions but the newest one."""
    revision = (await view_of(cluster)).revision
    await cluster.call("Compact", messages.CompactionRequest(revision=revision, physical=True), 10)


async def test_values_beyond_a_request_are_stored_in_chunks(engine: EtcdEngine, cluster: EtcdCluster) -> None:
    large = bytes(range(256)) * 12_000  # 3 MB
    assert isinstance(await engine.commit(Batch((put(b"a", large), put(b"b", b"small")))), Committed)
    [a, b] = await engine.read(Get(A, b"a"), Get(A, b"b"))
    assert a is not None
    assert b is not None
    assert (a.value == large, b.value) == (True, b"small")
    [page] = await engine.read(Scan(A, b"a", b"c", 10))
    assert [len(value) for value in page.values] == [len(large), 5]
    await engine.commit(Batch((Touch(A, b"a", 60_000),)))
    [touched] = await engine.read(Get(A, b"a"))
    assert touched is not None
    assert (touched.value == large, touched.version, touched.expires_at is None) == (True, a.version, False)
    assert await chunks(cluster) == 7
    await engine.commit(Batch((put(b"a", b"small"),)))
    assert await chunks(cluster) == 0


async def test_a_batch_of_many_middle_sized_values_is_one_commit(
    engine: EtcdEngine, cluster: EtcdCluster, etcd_url: str
) -> None:
    values = {b"%03d" % number: b"%d" % number * 20_000 for number in range(100, 150)}  # 3 MB
    done = await engine.commit(Batch(tuple(put(key, value) for key, value in values.items())))
    assert isinstance(done, Committed)
    [page] = await engine.read(Scan(A, b"0", b"9", 1000))
    assert dict(zip(page.keys, page.values, strict=True)) == values
    assert set(page.versions) == {done.version}
    assert await chunks(cluster) > 0
    maintenance = await open_maintenance(etcd_url)
    async with maintenance.snapshot() as snapshot:
        slices = [{row.key: row.value for row in rows} async for rows in snapshot.rows(Range(A))]
    await maintenance.aclose()
    assert {key: value for rows in slices for key, value in rows.items()} == values
    assert max(sum(map(len, rows.values())) for rows in slices) <= limits.SCAN_BYTES
    await engine.commit(Batch(tuple(Delete(A, key) for key in values)))
    assert await chunks(cluster) == 0


@pytest.mark.parametrize(
    ("count", "key_bytes", "value_bytes"), [(3000, 8, 800), (500, 2000, 10)], ids=["small values", "long keys"]
)
async def test_a_batch_beyond_a_request_is_one_commit(
    engine: EtcdEngine, cluster: EtcdCluster, count: int, key_bytes: int, value_bytes: int
) -> None:
    values = {b"%0*d" % (key_bytes, number): b"%0*d" % (value_bytes, number) for number in range(count)}
    done = await engine.commit(Batch(tuple(put(key, value) for key, value in values.items())))
    assert isinstance(done, Committed)
    [page] = await engine.read(Scan(A, b"0", b"9", count))
    assert dict(zip(page.keys, page.values, strict=True)) == values
    assert set(page.versions) == {done.version}
    [piece] = await engine.read(Changes(LogPosition(done.version - 1)))
    assert len(piece.changes) > 0
    await engine.commit(Batch(tuple(Delete(A, key) for key in values)))
    assert await engine.read(Count(A, b"", b"\xff")) == [0]


async def test_a_batch_beyond_all_bounds_is_refused_and_harms_no_other(engine: EtcdEngine) -> None:
    mutations = tuple(put(b"%0200d" % number, b"") for number in range(6000))
    huge, small = await asyncio.gather(
        engine.commit(Batch(mutations)), engine.commit(Batch((put(b"k", b"1"),))), return_exceptions=True
    )
    assert isinstance(huge, InvalidArgument)
    assert "too large for one commit" in str(huge)
    assert "several batches" in str(huge)
    assert isinstance(small, Committed)
    assert await engine.read(Count(A, b"", b"\xff")) == [1]


@pytest.mark.parametrize("others", [(), (Delete(A, b"other"),)])
async def test_a_batch_beyond_all_bounds_is_refused_before_what_is_stored_is_read(
    engine: EtcdEngine, others: tuple[Delete, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    read = transactions.read

    def counted(key: bytes, **options: Any) -> object:
        asked.append(key)
        return read(key, **options)

    monkeypatch.setattr(transactions, "read", counted)
    mutations = tuple(put(b"%0200d" % number, b"") for number in range(6000))
    with pytest.raises(InvalidArgument, match="6,000 operations of 1,584,000 bytes"):
        await engine.commit(Batch((*mutations, *others)))
    assert asked == []


async def test_sets_that_are_deleted_again_in_their_batch_take_no_space(engine: EtcdEngine) -> None:
    keys = [b"%0200d" % number for number in range(6000)]
    done = await engine.commit(Batch((*[put(key, b"") for key in keys], *[Delete(A, key) for key in keys])))
    assert isinstance(done, Committed)
    assert await engine.read(Count(A, b"", b"\xff")) == [0]


async def test_chunks_that_no_entry_refers_to_are_swept_once_they_are_old(
    engine: EtcdEngine, cluster: EtcdCluster, clock: ManualClock
) -> None:
    await engine.commit(Batch((put(b"kept", b"1" * 2_000_000),)))
    kept = await chunks(cluster)
    view = await view_of(cluster)
    await large_values.store(
        cluster, view.keys, {view.keys.data(A, b"lost"): b"2" * 600_000}, view.now, asyncio.get_running_loop().time()
    )
    assert await large_values.sweep(await view_of(cluster)) == 0
    clock.advance(limits.ETCD_ORPHAN_SECONDS + 1)
    assert await large_values.sweep(await view_of(cluster)) == 1
    assert await chunks(cluster) == kept
    [record] = await engine.read(Get(A, b"kept"))
    assert record is not None
    assert len(record.value) == 2_000_000


async def test_a_commit_that_fails_leaves_no_chunks(engine: EtcdEngine, cluster: EtcdCluster) -> None:
    mutations = tuple(put(b"%01000d" % number, b"") for number in range(3000))
    with pytest.raises(InvalidArgument):
        await engine.commit(Batch((*mutations, put(b"large", b"1" * 2_000_000))))
    assert await chunks(cluster) == 0


@pytest.mark.parametrize("keys", ["dense", "skewed"])
async def test_the_last_entries_of_a_long_range_are_those_of_the_range(engine: EtcdEngine, keys: str) -> None:
    made = [b"%06d" % number if keys == "dense" else b"a" * (number % 40) + b"%05d" % number for number in range(3000)]
    for first in range(0, len(made), 1000):
        await engine.commit(Batch(tuple(put(key, b"") for key in made[first : first + 1000])))
    wanted = sorted(made, reverse=True)
    for start, limit in ((0, 1), (0, 300), (1500, 10), (2995, 10)):
        [page] = await engine.read(Scan(A, b"", wanted[start], limit, reverse=True))
        assert list(page.keys) == wanted[start + 1 :][:limit]


async def test_a_read_that_etcd_compacts_begins_again(
    engine: EtcdEngine, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_PAGE_ROWS", 10)
    await engine.commit(Batch(tuple(put(b"%03d" % number, b"") for number in range(100))))
    pages = 0
    ask = RevisionView.range

    async def compacting(view: RevisionView, start: bytes, end: bytes, **options: object) -> object:
        nonlocal pages
        pages += 1
        if pages == 3:
            await engine.commit(Batch((put(b"050", b"new"),)))
            await compact(cluster)
        return await ask(view, start, end, **options)

    monkeypatch.setattr(RevisionView, "range", compacting)
    [page] = await engine.read(Scan(A, b"", b"\xff", 1000))
    assert isinstance(page, Page)
    assert len(page) == 100
    assert page[50].value == b"new"


async def test_history_is_kept_through_compactions_of_etcd_and_trimmed_by_age(
    etcd_url: str, cluster: EtcdCluster, clock: ManualClock
) -> None:
    engine = await open_engine(etcd_url, clock, history=KeptHistory(seconds=600))
    await engine.commit(Batch((put(b"k", b"1"),)))
    [since] = await engine.read(Latest())
    await engine.commit(Batch((put(b"k", b"2"),)))
    await compact(cluster)
    [piece] = await engine.read(Changes(LogPosition(since)))
    assert [change.key for change in piece.changes] == [b"k"]
    clock.advance(1000)
    for _ in range(2):  # trimming happens beside the commits
        await asyncio.gather(*[engine.commit(Batch((put(b"%d" % number, b""),))) for number in range(300)])
    async with asyncio.timeout(30):
        while True:
            try:
                await engine.read(Changes(LogPosition(since)))
            except HistoryGone:
                break
            await engine.commit(Batch((put(b"n", b""),)))
    await engine.aclose()


async def test_a_clock_far_behind_the_last_commit_refuses_writes(etcd_url: str, clock: ManualClock) -> None:
    ahead = ManualClock(clock.now() + 1_000_000)
    first, second = await open_engine(etcd_url, ahead), await open_engine(etcd_url, clock)
    await first.commit(Batch((Set(A, b"k", b"1", Encoding.JSON, 1000),)))
    with pytest.raises(ClockSetBack, match="ahead of this machine's clock"):
        await second.commit(Batch((put(b"l", b"1"),)))
    clock.advance(995)
    # Within the bound, the latest clock of all writers counts: no expired entry comes back to life.
    done = await second.commit(Batch((put(b"l", b"1"),)))
    assert isinstance(done, Committed)
    assert done.at == ahead.now()
    ahead.advance(2)
    await first.commit(Batch((put(b"m", b"1"),)))
    assert await second.read(Get(A, b"k")) == [None]
    await first.aclose()
    await second.aclose()


async def test_a_lost_counter_is_named(engine: EtcdEngine, cluster: EtcdCluster) -> None:
    key = KeyLayout(cluster.address.prefix, 0).counter
    await cluster.ask("Txn", transactions.transaction((), [transactions.delete(key)]))
    for call in (engine.commit(Batch((put(b"k", b"1"),))), engine.read(Latest())):
        with pytest.raises(keyloft.DatabaseError, match="counter is gone"):
            await call
