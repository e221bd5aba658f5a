"""Two restores of a store in etcd at once don't mix what they restore."""

import asyncio
from contextlib import aclosing

import keyloft
from keyloft import ManualClock, admin
from keyloft.core.urls import DatabaseUrl
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.maintenance import EtcdMaintenance

_NAMES = ("one", "other")


async def opened(url: str, clock: ManualClock) -> EtcdMaintenance:
    address = DatabaseUrl.parse(url).etcd
    assert address is not None
    return await EtcdMaintenance.open(EtcdCluster(address, clock), make=True)


async def restore(url: str, source: str, clock: ManualClock) -> None:
    async with (
        aclosing(await opened(url, clock)) as target,
        aclosing(await opened(source, clock)) as read,
        read.snapshot() as snapshot,
    ):
        await target.become(snapshot, lambda done, total: None)


async def test_two_restores_that_begin_at_the_same_time_are_not_mixed(etcd_url: str) -> None:
    """As on machines whose clocks are behind the last commit: both take its time."""
    sources = [f"{etcd_url}-{name}" for name in _NAMES]
    for name, source in zip(_NAMES, sources, strict=True):
        async with keyloft.open(source) as kv:
            await kv.set_many({(name, number): name for number in range(1000)})
    async with keyloft.open(etcd_url) as kv:
        await kv.set(("before",), 1)
    clock = ManualClock(10**12)
    await asyncio.gather(*[restore(etcd_url, source, clock) for source in sources])
    async with keyloft.open(etcd_url) as kv:
        found = [entry.value for entry in await kv.list(prefix=())]
    assert found in [[name] * 1000 for name in _NAMES]
    assert (await admin.check(etcd_url)).findings == ()
