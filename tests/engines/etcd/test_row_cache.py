"""Rows in the cache of a process decide a commit only as long as no other process has written them."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import keyloft
from keyloft import ManualClock, admin, limits
from keyloft.core.engine import Engine
from keyloft.core.keys import encode
from keyloft.core.records import Address, Batch, Committed, Delete, Get, Head, Record, Set, Space
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.etcd import layout
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.followed_commits import FollowedCommits
from keyloft.engines.etcd.group_commit import GroupCommit
from keyloft.engines.etcd.layout import StoredRow
from keyloft.engines.etcd.row_cache import RowCache
from keyloft.engines.etcd.views import RevisionView, RevisionViews
from keyloft.engines.etcd.writer_queue import WriterQueue
from keyloft.errors import Busy

_KEYS = [("k", number) for number in range(5)]
_VALUES = [1, {"some": "object"}, b"1" * (limits.ETCD_INLINE_BYTES + 1)]


async def test_sets_without_reading_leave_what_sets_after_reading_would(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes set, delete and let expire the same keys; what replaced rows had besides goes with them."""
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 0.0)  # they don't wait for each other, and remember all the same
    clock, rng = ManualClock(), random.Random(19)
    async with (
        keyloft.open(etcd_url, clock=clock, sweep_every=None) as one,
        keyloft.open(etcd_url, clock=clock, sweep_every=None) as other,
    ):
        model: dict[tuple[str, int], tuple[object, float | None]] = {}
        stores = [one] * 8 + [other]  # mostly one, so that it remembers
        for _ in range(80):
            clock.advance(1)
            kv, key = rng.choice(stores), rng.choice(_KEYS)
            if rng.random() < 0.2:
                await kv.delete(key)
                model.pop(key, None)
            else:
                value, expire_in = rng.choice(_VALUES), rng.choice([None, 5, 60])
                await kv.set(key, value, expire_in=expire_in)
                model[key] = value, None if expire_in is None else clock.now() / 1000 + expire_in
            alive = {key: value for key, (value, end) in model.items() if end is None or clock.now() / 1000 < end}
            for reader in (one, other):
                assert {entry.key: entry.value for entry in await reader.list(prefix=("k",))} == alive
        await one.sweep()
    assert (await admin.check(etcd_url)).findings == ()


@pytest.mark.parametrize("remembered", [limits.ETCD_REMEMBERED_ROWS, 4])
async def test_two_processes_that_write_at_once_replace_rows_as_they_are(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """Each knows from the other's notes what it replaces: the time of creation stays, expiries and chunks go.

    If it remembers few rows, it reads others while the other one commits.
    """
    monkeypatch.setattr(limits, "ETCD_REMEMBERED_ROWS", remembered)
    monkeypatch.setattr(limits, "ETCD_NOTES_READ", 4)  # and some gaps
    rng = random.Random(7)
    keys = [encode(key) for key in _KEYS]
    engines = [await open_engine(etcd_url) for _ in range(2)]
    try:
        await asyncio.gather(*[set_key(engines[0], key, b"0") for key in keys])
        created = {key: (await record_of(engines[0], key)).created_at for key in keys}

        async def write(engine: Engine) -> None:
            for _ in range(40):
                value = rng.choice([b"1", b"1" * (limits.ETCD_INLINE_BYTES + 1)])
                await set_key(engine, rng.choice(keys), value, expires_in=rng.choice([None, 3_600_000]))
                if rng.random() < 0.1:
                    await engine.commit(Batch((Delete(Space.TUPLES, b"another"),)))

        async with asyncio.timeout(60):
            await asyncio.gather(*[write(engine) for engine in engines for _ in range(8)])
        for engine in engines:
            assert {key: (await record_of(engine, key)).created_at for key in keys} == created
    finally:
        for engine in engines:
            await engine.aclose()
    assert (await admin.check(etcd_url)).findings == ()


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The rows that engines read before they write, as they read them."""
    found: list[Address] = []
    read = RowCache.read

    def noting(cache: RowCache, rows: Mapping[Address, StoredRow]) -> None:
        found.extend(rows)
        read(cache, rows)

    monkeypatch.setattr(RowCache, "read", noting)
    return found


async def write_keys(kv: keyloft.Store) -> None:
    for key in _KEYS:
        await kv.set(key, 1)


async def test_a_process_learns_what_another_one_wrote_without_reading_it(
    etcd_url: str, rows_read: list[Address]
) -> None:
    """Both set the same keys again and again: once each has met all of them, no rows are read."""
    async with (
        keyloft.open(etcd_url, sweep_every=None) as one,
        keyloft.open(etcd_url, sweep_every=None) as other,
    ):
        for _ in range(3):
            await write_keys(one)
            await write_keys(other)
        rows_read.clear()
        for _ in range(3):
            await write_keys(one)
            await write_keys(other)
    assert rows_read == []


async def test_the_first_commit_of_another_process_costs_no_one_its_cache(
    etcd_url: str, rows_read: list[Address]
) -> None:
    async with (
        keyloft.open(etcd_url, sweep_every=None) as one,
        keyloft.open(etcd_url, sweep_every=None) as other,
    ):
        await write_keys(one)
        await other.set(("another",), 1)
        await write_keys(one)
    assert rows_read == []


async def test_a_row_that_leaves_the_cache_for_the_notes_of_others_is_read(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was known when the read was planned, and is not when the reply was taken in."""
    monkeypatch.setattr(limits, "ETCD_REMEMBERED_ROWS", 4)
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 60.0)  # so that it reads before it writes
    key = _KEYS[0]
    async with (
        keyloft.open(etcd_url, sweep_every=None) as one,
        keyloft.open(etcd_url, sweep_every=None) as other,
    ):
        await one.set(key, 1, expire_in=3600)
        await other.set(("other", 0), 1)
        await one.set(("own",), 1)
        for number in range(1, 7):
            await other.set(("other", number), 1)
        await one.set(key, 2)
    # Of a row that is taken for absent, the entry in the index of expiries would be left behind.
    assert (await admin.check(etcd_url)).findings == ()


def row(key: bytes, version: int) -> StoredRow:
    return StoredRow(Head(key, b"", Encoding.JSON, version, None, 1, 1))


async def test_rows_that_were_read_beside_others_commits_replace_nothing_newer(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit has deleted one of them, and written another, after they were read."""
    await (await open_engine(etcd_url)).aclose()
    address = DatabaseUrl.parse(etcd_url).etcd
    assert address is not None
    cluster, cache = EtcdCluster(address), RowCache()
    view, _ = await RevisionViews(cluster).fetch()
    await cluster.aclose()
    cache.catch_up(view, [])
    read = {(Space.TUPLES, key): row(key, 1) for key in (b"deleted", b"written", b"unchanged")}
    newer = {(Space.TUPLES, b"deleted"): None, (Space.TUPLES, b"written"): row(b"written", 2)}
    forgotten, asked = cache.forgotten, [*read, (Space.TUPLES, b"absent")]
    cache.follow(view.counter_revision + 1, view.counter, layout.pack_written(view.counter_revision, newer))
    cache.learn(view, read, asked, forgotten)
    found, unknown = cache.known(asked)
    assert unknown == []
    assert {key: stored.record.version for (_, key), stored in found.items()} == {b"written": 2, b"unchanged": 1}
    # If it has forgotten rows meanwhile, it does not know what else was written.
    cache.follow(view.counter_revision + 3, view.counter, None)
    cache.learn(view, read, asked, forgotten)
    assert cache.known(asked)[1] == asked


async def test_rows_that_were_written_without_a_note_are_read_again(etcd_url: str, tmp_path: Path) -> None:
    """An import leaves none, and no new version either."""
    key = _KEYS[0]
    async with keyloft.open(etcd_url, sweep_every=None) as one:
        await one.set(key, 1, expire_in=3600)
        await admin.export(etcd_url, tmp_path / "lines")
        async with keyloft.open(etcd_url, sweep_every=None) as other:
            for kv in (one, other, one):
                await kv.set(key, 2)
            await admin.import_(tmp_path / "lines", etcd_url, existing="replace")
            await one.set(key, 3)
    assert (await admin.check(etcd_url)).findings == ()


async def test_after_a_restore_the_rows_of_the_replaced_store_are_forgotten(etcd_url: str, tmp_path: Path) -> None:
    async with keyloft.open(etcd_url, sweep_every=None) as kv:
        await kv.set(_KEYS[0], 1)
        await admin.backup(etcd_url, tmp_path / "backup.db")
        await kv.set(_KEYS[0], 2)
        await admin.restore(tmp_path / "backup.db", etcd_url, replace=True)
        async with asyncio.timeout(10):
            await kv.set(_KEYS[0], 3)
    assert (await admin.check(etcd_url)).findings == ()


async def test_a_process_writes_on_after_a_race_that_ended_in_a_conflict(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen the other's commit, has written nothing, and its cache is older than what it has seen."""
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 0.0)  # it takes itself for the only one that writes
    key = _KEYS[0]
    async with (
        keyloft.open(etcd_url, sweep_every=None) as one,
        keyloft.open(etcd_url, sweep_every=None) as other,
    ):
        await one.set(key, 1, expire_in=3600)
        entry = await one.get(key)
        async with other_is_faster(monkeypatch, lambda: other.set(key, 2, expire_in=3600)):
            assert not await one.atomic().check(entry).set(key, 3).commit()
        async with asyncio.timeout(10):
            await one.set(key, 4)
        assert (await other.get(key)).value == 4
    assert (await admin.check(etcd_url)).findings == ()


@asynccontextmanager
async def other_is_faster(monkeypatch: pytest.MonkeyPatch, commit: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Let another process commit between the reads and the write of the next commit."""
    call, is_over = EtcdCluster.call, False

    async def after_other(cluster: EtcdCluster, method: str, request: Any, *given: Any) -> Any:
        nonlocal is_over
        if method == "Txn" and request.compare and not is_over:
            is_over = True
            await commit()
        return await call(cluster, method, request, *given)

    with monkeypatch.context() as patched:
        patched.setattr(EtcdCluster, "call", after_other)
        yield
    assert is_over


async def test_a_process_writes_on_after_its_watch_has_reported_a_restore(
    etcd_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 60.0)  # so that the watch goes on, however long a restore takes
    address = DatabaseUrl.parse(etcd_url).etcd
    assert address is not None
    await (await open_engine(etcd_url)).aclose()
    cluster, cache = EtcdCluster(address), RowCache()
    views = RevisionViews(cluster)
    followed = FollowedCommits(views, cache)
    queue = WriterQueue(views, followed)

    async def write() -> None:
        time = asyncio.get_running_loop().time()
        batch = Batch((Set(Space.TUPLES, encode(_KEYS[0]), b"1", Encoding.JSON, 3_600_000),))
        [result] = (await GroupCommit(views, queue, followed, cache, [batch], time).run()).verdicts
        assert isinstance(result, Committed)

    try:
        async with asyncio.timeout(20):
            await write()
            followed.follow()
            while not followed.is_live:
                await followed.moves(0.05)
            await admin.backup(etcd_url, tmp_path / "backup.db")
            await admin.restore(tmp_path / "backup.db", etcd_url, replace=True)
            while not cache.counter_revision < followed.revision:
                await followed.moves(0.05)
            await write()
            followed.stop()
            await write()
    finally:
        await followed.aclose()
        await cluster.aclose()
    assert (await admin.check(etcd_url)).findings == ()


@pytest.fixture
async def lagging(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets members answer serializable reads with the counter of a new store; which reads of a counter were such."""
    await (await open_engine(etcd_url)).aclose()
    address = DatabaseUrl.parse(etcd_url).etcd
    assert address is not None
    cluster = EtcdCluster(address)
    old, _ = await RevisionViews(cluster).fetch()
    await cluster.aclose()
    fetch, asked = RevisionViews.fetch, []

    async def fetch_old(
        views: RevisionViews, *given: Any, serializable: bool = False
    ) -> tuple[RevisionView, list[Any]]:
        asked.append(serializable)
        view, found = await fetch(views, *given, serializable=serializable)
        return (replace(old, keys=view.keys) if serializable else view), found

    monkeypatch.setattr(RevisionViews, "fetch", fetch_old)
    return asked


_UNKNOWN = Batch(
    tuple(Set(Space.TUPLES, b"%d" % at, b"1", Encoding.JSON) for at in range(limits.ETCD_GUESSED_KEYS + 1))
)
"""Sets of keys that are not in a cache, and too many for guesses."""


async def test_a_member_that_lags_behind_the_cache_is_asked_once(etcd_url: str, lagging: list[bool]) -> None:
    engine = await open_engine(etcd_url)
    try:
        await set_key(engine, b"k", b"1")
        lagging.clear()
        assert isinstance(await engine.commit(_UNKNOWN), Committed)
    finally:
        await engine.aclose()
    assert lagging == [True, False]


async def test_reads_that_stay_older_than_the_cache_end_with_the_callers_patience(
    etcd_url: str, lagging: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await open_engine(etcd_url, patience=1.0)
    try:
        await set_key(engine, b"k", b"1")
        fetch_old = RevisionViews.fetch

        async def always_old(views: RevisionViews, *given: Any, serializable: bool = False) -> Any:
            return await fetch_old(views, *given, serializable=True)

        monkeypatch.setattr(RevisionViews, "fetch", always_old)
        async with asyncio.timeout(30):
            with pytest.raises(Busy):
                await engine.commit(_UNKNOWN)
    finally:
        await engine.aclose()


async def set_key(engine: Engine, key: bytes, value: bytes, expires_in: int | None = None) -> None:
    batch = Batch((Set(Space.TUPLES, key, value, Encoding.JSON, expires_in),))
    assert isinstance(await engine.commit(batch), Committed)


async def record_of(engine: Engine, key: bytes) -> Record:
    [record] = await engine.read(Get(Space.TUPLES, key))
    assert isinstance(record, Record)
    return record
