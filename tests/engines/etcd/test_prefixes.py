"""Stores whose prefixes begin alike share no keys."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import keyloft
from keyloft import admin
from keyloft.core.urls import DatabaseUrl
from keyloft.engines.etcd import layout, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.messages import RangeRequest
from keyloft.engines.etcd.views import RevisionViews

# Those of 16 digits are named like a generation: the one in use, and an older one.
_GENERATIONS = ["/0000000000000000", "/0000000000000001"]
_BELOW = ["/counter", "/waiting", "/c", "/counter/counter", "/counter/waiting", *_GENERATIONS, f"{_GENERATIONS[1]}/app"]
_ROUNDS = 10


@pytest.fixture
async def cluster(etcd_url: str) -> AsyncIterator[EtcdCluster]:
    address = DatabaseUrl.parse(etcd_url).etcd
    assert address is not None
    cluster = EtcdCluster(address)
    yield cluster
    await cluster.aclose()


async def write(url: str) -> None:
    """Write by two processes, which leave notes for each other and lose races, so that they ask for places."""
    async with keyloft.open(url, sweep_every=None) as one, keyloft.open(url, sweep_every=None) as other:
        for number in range(_ROUNDS):
            await asyncio.gather(one.set(("one", number), url), other.set(("other", number), url))


async def values_of(url: str) -> list[object]:
    async with keyloft.open(url, sweep_every=None) as kv:
        return [entry.value for entry in await kv.list(prefix=())]


async def keys_of(cluster: EtcdCluster, start: bytes, end: bytes) -> list[bytes]:
    reply = await cluster.ask("Range", RangeRequest(key=start, range_end=end, keys_only=True))
    return [kv.key for kv in reply.kvs]


async def test_stores_below_the_keys_of_another_one_stay_as_they_are(etcd_url: str, cluster: EtcdCluster) -> None:
    """The writers and the compaction of the outer store neither read nor change keys of the nested stores."""
    urls = [etcd_url, *[etcd_url + below for below in _BELOW]]
    async with asyncio.timeout(60):
        await asyncio.gather(*map(write, urls))
        keys = RevisionViews(cluster).keys
        assert await keys_of(cluster, *keys.written_range)
        assert await keys_of(cluster, *keys.waiting_range)
        below = [layout.store_prefix(cluster.address.prefix + name) for name in _BELOW]
        before = [await keys_of(cluster, *bounds) for bounds in below]
        await admin.compact(etcd_url)
        assert not await keys_of(cluster, *keys.written_range)
        assert [await keys_of(cluster, *bounds) for bounds in below] == before
        await asyncio.gather(*map(write, urls))
        for url in urls:
            assert await values_of(url) == [url] * 2 * _ROUNDS
            assert (await admin.check(url)).findings == ()


async def test_a_restore_leaves_stores_that_are_named_like_a_generation_as_they_are(
    etcd_url: str, cluster: EtcdCluster, tmp_path: Path
) -> None:
    """It removes the generation that it has replaced, and nothing else that is below its name."""
    below = etcd_url + _GENERATIONS[0]
    await write(etcd_url)
    await write(below)
    backup = str(tmp_path / "backup.db")
    await admin.backup(etcd_url, backup)
    replaced = RevisionViews(cluster).keys
    await admin.restore(backup, etcd_url, replace=True)
    assert [await keys_of(cluster, *bounds) for bounds in replaced.own_ranges] == [[]] * len(replaced.own_ranges)
    assert await values_of(below) == [below] * 2 * _ROUNDS
    assert await values_of(etcd_url) == [etcd_url] * 2 * _ROUNDS
    assert (await admin.check(below)).findings == ()


async def test_compaction_removes_what_an_interrupted_restore_has_left(etcd_url: str, cluster: EtcdCluster) -> None:
    """And no store that is named like its generation."""
    below = etcd_url + _GENERATIONS[1]
    await write(etcd_url)
    await write(below)
    keys = layout.KeyLayout(cluster.address.prefix, int(_GENERATIONS[1][1:], 16))
    left = [start + b"\x00" for start, _ in keys.own_ranges[:-1]] + [keys.under_way]
    await cluster.ask("Txn", transactions.transaction((), [transactions.put(key, b"") for key in left]))
    await admin.compact(etcd_url)
    assert [await keys_of(cluster, key, b"") for key in left] == [[]] * len(left)
    assert await values_of(below) == [below] * 2 * _ROUNDS


async def test_compaction_removes_notes_from_where_they_were_kept_before(etcd_url: str, cluster: EtcdCluster) -> None:
    """And from nowhere else: other keys that begin so belong to other stores."""
    await write(etcd_url)
    keys = RevisionViews(cluster).keys
    version = keys.written(2)[-8:]
    former = [keys.counter + b"/" + version, keys.base + b"w/" + version]
    others = [keys.counter + b"/counter", keys.counter + b"/app/counter"]
    puts = [transactions.put(key, b"") for key in former + others]
    await cluster.ask("Txn", transactions.transaction((), puts))
    await admin.compact(etcd_url)
    found = [await keys_of(cluster, key, b"") for key in former + others]
    assert found == [[], [], *[[key] for key in others]]
