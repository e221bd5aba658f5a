"""The synchronous store as its users meet it: names, threads, iterators, sweeping, and servers behind a loop."""

import asyncio
import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import keyloft
from keyloft import Closed, InvalidArgument, ManualClock, Store, SyncStore
from keyloft.core.drivers import LoopThread
from keyloft.core.driving import run_to_end
from keyloft.core.records import Expired, Space
from tests.support.postgres import database_url
from tools import sync_classes

LONGEST_SECONDS = 60


@pytest.fixture(params=["memory", "sqlite file", "postgresql", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


def test_synchronous_names_and_signatures_are_those_of_the_asynchronous_ones() -> None:
    """If not: `scripts/reference` writes them again."""
    for path, wanted in sync_classes.modules().items():
        assert sync_classes.shape(path.read_text()) == sync_classes.shape(wanted), path


def test_every_name_of_a_store_is_there() -> None:
    names = {name for name, _ in inspect.getmembers(Store) if not name.startswith("_")}
    assert names - {"aclose"} <= set(dir(SyncStore))


def test_everyday_calls_on_every_engine(url: str | None) -> None:
    with keyloft.open_sync(url) as kv:
        stamp = kv.set(("users", "alice"), {"name": "Alice"})
        assert kv.get(("users", "alice")).versionstamp == stamp
        watching = kv.watch(prefix=("users",), since=stamp)
        done = kv.atomic().check(("users", "bob"), None).set(("users", "bob"), 1).sum(("sum",), 2).commit()
        assert done.ok
        assert not kv.atomic().check(("users", "bob"), None).delete(("users", "bob")).commit()
        assert [entry.key for entry in next(watching)] == [("users", "bob")]
        assert watching.reported_to is not None
        kv.set_many({("many", number): number for number in range(300)})
        assert [entry.value for entry in kv.list(("many",))] == list(range(300))
        page = kv.list(("many",), limit=10).all()
        assert [*kv.keys(("many",), limit=1, cursor=page.cursor)] == [("many", 10)]
        ended: list[object] = []
        waiting = threading.Thread(target=lambda: ended.append(next(watching, "ended")))
        waiting.start()
        watching.close()
        waiting.join(LONGEST_SECONDS)
        assert ended == ["ended"]
    with pytest.raises(Closed):
        kv.get(("users", "alice"))
    kv.close()


def test_closing_the_store_ends_its_watches_and_threads(url: str | None) -> None:
    before = set(threading.enumerate())
    kv = keyloft.open_sync(url)
    watching, _never_read = kv.watch(("k",)), kv.watch(prefix=("p",))
    assert [entry.exists for entry in next(watching)] == [False]
    ended: list[object] = []
    waiting = threading.Thread(target=lambda: ended.append(next(watching, "ended")))
    waiting.start()
    kv.close()
    waiting.join(LONGEST_SECONDS)
    assert ended == ["ended"]
    watching.close()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("keyloft"):
            thread.join(LONGEST_SECONDS)
            assert not thread.is_alive(), thread.name


def test_calls_beside_a_close_end_as_closed() -> None:
    for _ in range(20):
        driver = LoopThread("test")
        refused: list[Closed] = []

        def call(driver: LoopThread = driver, refused: list[Closed] = refused) -> None:
            try:
                while True:
                    driver.run(asyncio.sleep(0))
            except Closed as error:
                refused.append(error)

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        driver.close()
        for caller in callers:
            caller.join(LONGEST_SECONDS)
        assert len(refused) == len(callers)


def test_no_event_loop_takes_part_on_a_file_and_in_memory(tmp_path: Path) -> None:
    script = """
import asyncio, sys, keyloft
def refused(*_): raise AssertionError("an event loop was made")
asyncio.new_event_loop = asyncio.get_running_loop = asyncio.events.new_event_loop = refused
for url in (sys.argv[1], None):
    with keyloft.open_sync(url) as kv:
        watching = kv.watch(prefix=())
        kv.set_many({(number,): number for number in range(1000)}, expire_in=60)
        assert kv.get((7,)).value == 7 and len(next(watching)) == kv.count() == len(kv.list().all()) == 1000
        assert kv.delete_range(()) == 1000 and kv.sweep() == 0
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "app.db"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_expired_entries_are_swept_without_a_loop(tmp_path: Path) -> None:
    clock = ManualClock()
    with keyloft.open_sync(tmp_path / "app.db", clock=clock, sweep_every=0.01) as kv:
        kv.set(("gone",), 1, expire_in=1)
        watching = kv.watch(("gone",))
        assert next(watching)[0].exists
        clock.advance(1)
        assert not next(watching)[0].exists
        waiting = threading.Event()
        for _ in range(100 * LONGEST_SECONDS):
            if run_to_end(kv._inner.engine.read(Expired(Space.TUPLES, 1))) == [[]]:
                break
            waiting.wait(0.01)
        else:
            pytest.fail("it was not swept")


async def test_an_async_store_in_a_thread_names_open_sync() -> None:
    async with keyloft.open() as kv:

        def use() -> None:
            with pytest.raises(keyloft.WrongLoop, match=r"keyloft\.open_sync"):
                asyncio.run(kv.get(("k",)))

        await asyncio.to_thread(use)


def test_a_synchronous_store_works_within_an_event_loop(tmp_path: Path) -> None:
    """As in a notebook: it blocks that loop, and needs nothing of it."""

    async def cell() -> None:
        with keyloft.open_sync(tmp_path / "app.db") as kv:
            kv.set(("k",), 1)
            assert [entry.value for entry in kv.list()] == [1]

    asyncio.run(cell())


def test_bad_options_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="sweep_every"):
        keyloft.open_sync(tmp_path / "app.db", sweep_every=0)
    with pytest.raises(InvalidArgument, match="durability"):
        keyloft.open_sync(tmp_path / "app.db", durability="none")  # type: ignore[arg-type]
