"""An entry that is alive again because the clock was set back, and is read then, is reported when it expires again."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from threading import Timer

import pytest

import keyloft
from keyloft import ManualClock, limits
from keyloft.core.engine import write
from keyloft.core.records import ChangeKind, Scan, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines.memory import MemoryEngine


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "app.db" if request.param == "file" else None


# Whether the clock is set right at once, so that no timer can fire before.
_BACK, _FORTH, _RIGHT = -30, 30, 60
_STEPS = pytest.mark.parametrize("step", [_FORTH, _RIGHT], ids=["in time", "late"])
_KEYS = [("k",), ("other",)]


def news(entries: list[keyloft.Entry]) -> list[bool]:
    """Which of the keys have an entry."""
    return [entry.exists for entry in entries]


@_STEPS
async def test_of_a_task(path: Path | None, clock: ManualClock, step: int) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        kv = await stack.enter_async_context(keyloft.open(path, clock=clock, sweep_every=None))
        other = (
            kv if path is None else await stack.enter_async_context(keyloft.open(path, clock=clock, sweep_every=None))
        )
        await kv.set_many({("k",): 1, ("other",): 2})
        await kv.touch(("k",), expire_in=60)
        watch = await stack.enter_async_context(kv.watch(prefix=()))
        clock.advance(60)
        assert [entry.key for entry in await anext(watch)] == [("k",)]
        clock.advance(_BACK)
        # A process that waits for another one to commit has polled the file meanwhile.
        await other.delete(("other",))
        assert [entry.key for entry in await anext(watch)] == [("other",)]
        assert [entry.key for entry in await kv.list()] == [("k",)]
        clock.advance(step)
        assert [(entry.key, entry.exists) for entry in await anext(watch)] == [(("k",), False)]
        assert await kv.list() == []


@_STEPS
async def test_of_keys(path: Path | None, clock: ManualClock, step: int) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        kv = await stack.enter_async_context(keyloft.open(path, clock=clock, sweep_every=None))
        other = (
            kv if path is None else await stack.enter_async_context(keyloft.open(path, clock=clock, sweep_every=None))
        )
        await kv.set_many(dict.fromkeys(_KEYS, 1))
        await kv.touch(("k",), expire_in=60)
        watch = await stack.enter_async_context(kv.watch(*_KEYS))
        marker = await stack.enter_async_context(kv.watch(("marker",)))
        assert news(await anext(watch)) == [True, True]
        assert news(await anext(marker)) == [False]
        await kv.set(("marker",), 1)
        assert news(await anext(marker)) == [True]
        clock.advance(60)
        assert news(await anext(watch)) == [False, True]
        clock.advance(_BACK)
        await other.delete(("marker",))
        while news(await anext(marker)) != [False]:
            pass  # after a clock was set back, a state may be reported twice
        assert (await kv.get(("k",))).exists
        clock.advance(step)
        assert news(await anext(watch)) == [False, True]


@_STEPS
def test_of_a_thread(tmp_path: Path, clock: ManualClock, step: int) -> None:
    with ExitStack() as stack:
        stores = [
            stack.enter_context(keyloft.open_sync(tmp_path / "app.db", clock=clock, sweep_every=None)) for _ in "12"
        ]
        kv, other = stores
        kv.set_many({("k",): 1, ("other",): 2})
        kv.touch(("k",), expire_in=60)
        watch = stack.enter_context(kv.watch(prefix=()))
        deadline = Timer(30, watch.close)
        deadline.start()
        stack.callback(deadline.cancel)
        clock.advance(60)
        assert [entry.key for entry in next(watch)] == [("k",)]
        clock.advance(_BACK)
        other.delete(("other",))
        assert [entry.key for entry in next(watch)] == [("other",)]
        assert [entry.key for entry in kv.list()] == [("k",)]
        clock.advance(step)
        assert [(entry.key, entry.exists) for entry in next(watch)] == [(("k",), False)]
        assert list(kv.list()) == []


async def test_of_a_follower_that_catches_up(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It meets a late commit of an entry that was written again, and has expired since."""
    monkeypatch.setattr(limits, "WATCH_DUE_KEYS", 1)
    engine = MemoryEngine(clock)

    def put(key: bytes, expire_in: int | None) -> Set:
        return Set(Space.TUPLES, key, b"1", Encoding.JSON, expire_in)

    try:
        first = await write(engine, put(b"a", 8000), put(b"b", 8500))
        clock.advance(10)
        log = engine.follow(Scan(Space.TUPLES, b"a", b"z", 1), woken=lambda: None, since=first.version)
        seen = await log.take()
        clock.advance(-6)
        await write(engine, put(b"k", 1000))
        clock.advance(6)
        again = await write(engine, put(b"b", None), put(b"k", 1000))
        clock.advance(1)
        async with asyncio.timeout(5):
            while not seen or (seen[-1].key, seen[-1].kind, seen[-1].version) != (
                b"k",
                ChangeKind.EXPIRED,
                again.version,
            ):
                seen += await log.take()
                await asyncio.sleep(0)
        await log.aclose()
    finally:
        await engine.aclose()
