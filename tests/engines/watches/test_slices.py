"""Watches that read the same part of the change log."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from keyloft import ManualClock, limits
from keyloft.core.engine import Engine, LogWatch, write
from keyloft.core.records import NO_LIMIT, Ask, Delete, Get, LoggedChange, Scan, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.memory import MemoryEngine

PLUGINS = Space.PLUGINS


async def put(engine: Engine, plugin: str, key: str) -> int:
    return (await write(engine, Set(PLUGINS, (plugin, key), b"1", Encoding.JSON))).version


async def caught_up(watch: LogWatch) -> list[LoggedChange]:
    changes = []
    while watch.is_woken:
        changes += await watch.take()
    return changes


@pytest.mark.parametrize(
    "asks",
    [
        (Scan(PLUGINS, ("b", ""), ("b", "\U0010ffff"), NO_LIMIT),),
        (Get(PLUGINS, ("b", "k1")), Get(PLUGINS, ("b", "k2"))),
    ],
)
async def test_each_watch_reports_what_one_alone_would(asks: tuple[Get | Scan, ...], tmp_path: Path) -> None:
    engine = await open_engine(str(tmp_path / "x.db"))
    since = await put(engine, "a", "k1")
    for plugin in "abc":
        for key in ("k2", "k1", "k2"):
            await put(engine, plugin, key)
    await write(engine, Delete(PLUGINS, ("b", "k1")))
    watches = [engine.follow(*asks, woken=lambda: None, since=since) for _ in range(3)]
    first = await caught_up(watches[0])
    assert [(change.key[1], change.kind.name) for change in first] == [
        ("k2", "PUT"),
        ("k1", "PUT"),
        ("k2", "PUT"),
        ("k1", "DELETE"),
    ]
    assert [await caught_up(watch) for watch in watches[1:]] == [first, first]
    version = await put(engine, "b", "k1")
    for watch in watches:
        assert [change.version for change in await caught_up(watch)] == [version]
        await watch.aclose()
    await engine.aclose()


async def test_a_watch_that_reads_later_reports_what_was_committed_meanwhile(tmp_path: Path) -> None:
    engine = await open_engine(str(tmp_path / "x.db"))
    since = await put(engine, "a", "k")
    scan = Scan(PLUGINS, ("a", ""), ("b", ""), NO_LIMIT)
    early, late = [engine.follow(scan, woken=lambda: None, since=since) for _ in range(2)]
    versions = [await put(engine, "a", "k1")]
    await early.take()
    versions.append(await put(engine, "a", "k2"))
    assert [change.version for change in await caught_up(late)] == versions
    await early.aclose()
    await late.aclose()
    await engine.aclose()


class CountingEngine(MemoryEngine):
    """Counts how often it is read."""

    reads_made = 0

    async def read(self, *asks: Ask) -> list[Any]:
        self.reads_made += 1
        return await super().read(*asks)


async def test_who_follows_the_log_reads_many_keys_at_a_time_to_learn_which_have_expired(clock: ManualClock) -> None:
    """On a database server, each read is a round trip."""
    engine, keys = CountingEngine(clock), 10 * limits.WATCH_READ_KEYS
    log = engine.follow(Scan(PLUGINS, ("a", ""), ("b", ""), NO_LIMIT), woken=lambda: None)
    await write(engine, *[Set(PLUGINS, ("a", f"k{at}"), b"1", Encoding.JSON, expire_in=1000) for at in range(keys)])
    assert len(await caught_up(log)) == keys
    clock.advance(2)
    while not log.is_woken:
        await asyncio.sleep(0)
    before = engine.reads_made
    assert len(await caught_up(log)) == keys
    assert engine.reads_made - before <= 10
    await engine.aclose()
