"""Opening a store: which URL leads where, and the error if it leads nowhere."""

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import keyloft
from keyloft import CannotOpen, Closed, Entry, InvalidArgument, KeyloftError, ManualClock, Store, WrongLoop
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite.engine import SqliteEngine
from tests.support.postgres import database_url


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("url", [None, ":memory:", "memory://"])
async def test_nothing_means_memory(url: str | None) -> None:
    async with keyloft.open(url) as kv:
        assert isinstance(kv.engine, MemoryEngine)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite+aiosqlite:///:memory:"])
async def test_sqlite_in_memory(url: str) -> None:
    async with keyloft.open(url) as kv:
        assert isinstance(kv.engine, SqliteEngine)
        await kv.set(("k",), 1)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "app.db",
        Path("app.db"),
        "sqlite:///app.db",
        "sqlite+aiosqlite:///app.db",
        "SQLite:///app.db",
        "./app.db",
        "absolute",
    ],
)
async def test_every_way_to_name_a_file(url: str | Path, tmp_path: Path) -> None:
    for target in (f"sqlite:///{tmp_path}/app.db", str(tmp_path / "app.db")) if url == "absolute" else (url,):
        async with keyloft.open(target) as kv:
            await kv.set(("k",), 1)
    assert (tmp_path / "app.db").exists()
    async with keyloft.open("app.db") as kv:
        assert (await kv.get(("k",))).value == 1


async def test_a_file_stays_the_same_when_the_working_directory_changes(tmp_path: Path) -> None:
    async with keyloft.open("app.db") as kv:
        (tmp_path / "elsewhere").mkdir()
        os.chdir("elsewhere")
        await kv.set(("k",), 1)
        assert await kv.count() == 1
    assert [path.name for path in Path().iterdir()] == []


async def test_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with keyloft.open("~/app.db"):
        assert (tmp_path / "app.db").exists()


async def test_await_opens_too() -> None:
    kv = await keyloft.open("app.db")
    await kv.set(("k",), 1)
    await kv.aclose()
    with pytest.raises(Closed, match="closed"):
        await kv.get(("k",))


async def test_an_open_store_can_be_entered() -> None:
    kv = await keyloft.open("app.db")
    async with kv as same:
        assert same is kv
    with pytest.raises(Closed):
        await kv.get(("k",))


async def test_an_opening_can_be_used_again_but_not_twice_at_once() -> None:
    opening = keyloft.open("app.db")
    for _ in range(2):
        async with opening as kv:
            await kv.set(("k",), 1)
            with pytest.raises(InvalidArgument, match="entered already"):
                await opening.__aenter__()


def test_a_store_that_was_never_closed_leaves_no_thread_behind_once_its_event_loop_has_ended() -> None:
    async def write() -> list[threading.Thread]:
        before = {*threading.enumerate()}
        kv = await keyloft.open("app.db")
        await kv.set(("k",), 1)
        return [*{*threading.enumerate()} - before]

    threads = asyncio.run(write())
    assert threads, "a file has a thread that writes"
    for thread in threads:
        for _ in range(100):
            gc.collect()  # again, because the thread's last job may have been under way
            thread.join(0.1)
            if not thread.is_alive():
                break
        else:
            raise AssertionError(f"{thread.name} is left")


def test_a_forgotten_await_is_explained() -> None:
    with pytest.raises(AttributeError, match="not open yet, so it has no set: write `async with"):
        keyloft.open().set(("k",), 1)  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", "sqlite file", "postgresql", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path, tables=False)


def test_a_store_belongs_to_its_event_loop(url: str | None) -> None:
    async def opened() -> Store:
        return await keyloft.open(url, sweep_every=None)

    with asyncio.Runner() as own:
        kv = own.run(opened())
        own.run(kv.set(("k",), 1))

        async def watched(*keys: tuple[str], prefix: tuple[()] | None = None) -> list[Entry]:
            return await anext(kv.watch(*keys, prefix=prefix))

        for work in (
            kv.get(("k",)),
            kv.set(("k",), 2),
            kv.count(),
            watched(("k",)),
            watched(prefix=()),
            kv.aclose(),
        ):
            with pytest.raises(
                WrongLoop, match=r"call asyncio\.run once .*asyncio\.run_coroutine_threadsafe"
            ) as raised:
                asyncio.run(asyncio.wait_for(work, 10))
            assert isinstance(raised.value, RuntimeError)
        assert own.run(kv.get(("k",))).value == 1
        [still] = own.run(watched(("k",)))
        assert still.value == 1
        own.run(kv.aclose())


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("redis://localhost", CannotOpen, "no engine for redis://…"),
        ("mysql+driver://user:secret@host/db", CannotOpen, "no engine for mysql"),
        ("sqlite://app.db", InvalidArgument, "sqlite:///app.db"),
        ("a" * 300, CannotOpen, "File name too long"),
        ("missing/app.db", CannotOpen, "the folder .*missing does not exist; make it first"),
        (".", CannotOpen, r"it is a folder; name a file in it, as in /.*/app\.db"),
        (5, InvalidArgument, "a path or a URL, got int"),
    ],
)
async def test_a_wrong_name_is_explained(url: Any, error: type[KeyloftError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        await keyloft.open(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"durability": "none"}, "full.*relaxed"),
        ({"max_value_bytes": 0}, "max_value_bytes"),
        ({"max_value_bytes": 2.5}, "max_value_bytes"),
        ({"max_value_bytes": 2**31}, "max_value_bytes"),
        ({"sweep_every": 0}, "sweep_every"),
        ({"sweep_every": "60"}, "sweep_every"),
        ({"sweep_every": True}, "sweep_every"),
        ({"clock": 5}, r"^clock: expected an object with now\(\) and call_at\(\)"),
        ({"clock": ManualClock}, r"^clock: expected an object .*, such as ManualClock\(\)"),
    ],
)
async def test_a_wrong_option_is_explained(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        await keyloft.open("app.db", **options)
    assert list(Path().iterdir()) == []


def test_opening_without_an_event_loop_of_asyncio_says_what_to_use() -> None:
    with pytest.raises(WrongLoop, match=r"of asyncio, .*such as trio, use keyloft\.open_sync"):
        next(keyloft.open().__await__())


async def test_the_value_limit_can_be_moved() -> None:
    async with keyloft.open(max_value_bytes=10) as kv:
        await kv.set(("k",), "x" * 8)
        with pytest.raises(
            keyloft.ValueTooLarge,
            match=r"10-byte limit: 11 bytes as stored, 10 allowed; max_value_bytes in keyloft\.open",
        ):
            await kv.set(("k",), "x" * 9)


@pytest.mark.parametrize("database", ["sqlite file", "postgresql"])
def test_a_store_used_in_a_forked_process_says_to_open_another(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    script = """
import asyncio, os, sys, keyloft

async def use(kv):
    for call in (lambda: kv.get(("k",)), lambda: kv.set(("k",), 2), kv.count):
        try:
            await call()
        except keyloft.Closed as error:
            assert "before a fork" in str(error)
        else:
            os._exit(1)
    await kv.aclose()
    async with keyloft.open(sys.argv[1]) as own:
        await own.set(("child",), 1)

async def main():
    async with keyloft.open(sys.argv[1]) as kv:
        await kv.set(("k",), 1)
        child = os.fork()
        if not child:
            asyncio.events._set_running_loop(None)
            asyncio.run(use(kv))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (await kv.get(("child",))).value == 1
        await kv.set(("k",), 3)

asyncio.run(main())
"""
    arguments = [sys.executable, "-c", script, str(database_url(database, request, tmp_path, tables=False))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


async def test_neither_a_store_nor_a_list_of_it_can_be_copied_and_the_message_says_what_to_do() -> None:
    """`multiprocessing` pickles the arguments of a process that it spawns."""
    with keyloft.open_sync() as sync:
        async with keyloft.open() as kv:
            stores = (kv, sync, kv.scoped(("a",)), sync.scoped(("a",)), kv.watch(("a",)))
            of_stores = (kv.list(), sync.list(), kv.children(), kv.atomic(), sync.atomic())
            for store in (*stores, *of_stores):
                for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                    with pytest.raises(TypeError, match=r"can't be copied or passed to another process: open the data"):
                        copied(store)


async def test_a_store_in_memory_is_refused_after_a_fork() -> None:
    """It would be a second one, whose writes the parent never sees."""
    async with keyloft.open(sweep_every=None) as kv:
        await kv.set(("k",), 1)
        if (child := os.fork()) == 0:
            try:
                await kv.get(("k",))
            except Closed as error:
                os._exit(0 if "before a fork" in str(error) else 1)
            os._exit(1)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert (await kv.get(("k",))).value == 1


async def test_what_newcomers_write_is_answered_with_what_to_write(tmp_path: Path) -> None:
    opening: Any = keyloft.open(tmp_path / "app.db")
    with (
        pytest.raises(TypeError, match=r"write `async with keyloft\.open\(…\) as kv:`, or use keyloft\.open_sync"),
        opening,
    ):
        pass
    kv: Any
    with keyloft.open_sync(tmp_path / "app.db") as kv:
        with pytest.raises(TypeError, match="this SyncStore is synchronous: write `with`"):
            async with kv:
                pass
        kv.set(("k",), 1)
        stores = [kv]
        async with keyloft.open(tmp_path / "app.db") as kv:
            for store in (*stores, kv):
                with pytest.raises(TypeError, match=r"a store is not a dict: get\(key\) reads"):
                    store["k"]
                with pytest.raises(TypeError, match="a store is not a dict"):
                    store["k"] = 1
                with pytest.raises(TypeError, match="a store is not a dict"):
                    del store["k"]
                with pytest.raises(TypeError, match="a store is not a dict"):
                    assert "k" in store
                with pytest.raises(TypeError, match="a store is not a dict"):
                    list(store)
            with pytest.raises(TypeError, match="this Store is asynchronous: write `async with`"), kv:
                pass
            with pytest.raises(TypeError, match="this list of entries is asynchronous: await it"):
                list(kv.list())
            assert len(await kv.list()) == 1
