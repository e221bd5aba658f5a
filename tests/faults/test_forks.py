"""A child process opens the file that its parent had open, and nothing that either of them writes is lost."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import keyloft
from keyloft import ManualClock, limits
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.inherited import lock_of


class Turn:
    """Passes from one process to another by a pipe."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def give(self) -> None:
        os.write(self._writing, b"x")

    def take(self) -> None:
        assert os.read(self._reading, 1) == b"x"


def forked(child: Callable[[], None]) -> int:
    """Run a function in a child; returns its pid. Its exit code is 1 if the function has raised."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("is_viewing", [False, True])
def test_what_a_child_writes_after_its_parent_has_closed_the_file_is_kept(is_viewing: bool, tmp_path: Path) -> None:
    path, has_written, is_closed = tmp_path / "app.db", Turn(), Turn()

    def child() -> None:
        kv = keyloft.open_sync(path)
        kv.set(("k",), 1)
        has_written.give()
        is_closed.take()
        kv.set(("k",), 2)

    kv = keyloft.open_sync(path)
    kv.set(("k",), 0)
    if is_viewing:  # several gets within a millisecond read from one view
        for _ in range(5):
            kv.get(("k",))
    pid = forked(child)
    has_written.take()
    kv.close()
    is_closed.give()
    assert exit_code(pid) == 0
    with keyloft.open_sync(path) as kv:
        assert kv.get(("k",)).value == 2


def test_children_beside_each_other_and_their_parent_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "app.db"

    def child(number: int) -> None:
        with keyloft.open_sync(path) as kv:
            for _ in range(20):
                kv.increment(("all",))
            kv.set(("child", number), True)

    with keyloft.open_sync(path) as kv:
        pids = []
        for number in range(4):
            kv.increment(("all",))
            pids.append(forked(lambda number=number: child(number)))  # type: ignore[misc]
        for _ in range(20):
            kv.increment(("all",))
        assert [exit_code(pid) for pid in pids] == [0] * 4
    with keyloft.open_sync(path) as kv:
        assert kv.get(("all",)).value == 4 + 5 * 20
        assert kv.count(prefix=("child",)) == 4


async def test_a_child_of_an_async_store_opens_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "app.db"

    def child() -> None:
        with keyloft.open_sync(path) as kv:
            assert kv.get(("k",)).value == 0
            kv.set(("k",), 1)

    async with keyloft.open(path) as kv:
        await kv.set(("k",), 0)
        assert await asyncio.to_thread(exit_code, forked(child)) == 0
        await kv.set(("own",), 1)
    async with keyloft.open(path) as kv:
        assert ((await kv.get(("k",))).value, (await kv.get(("own",))).value) == (1, 1)


class HeldClock(ManualClock):
    """The next commit waits here, in the middle of its transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.may_go_on = threading.Event(), threading.Event()
        self.holds = False

    def now(self) -> int:
        if self.holds:
            self.is_held.set()
            assert self.may_go_on.wait(60)
        return super().now()


def test_a_file_to_which_another_thread_writes_at_the_fork_is_refused_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FORK_SECONDS", 0.05)
    path, clock = tmp_path / "app.db", HeldClock()
    with keyloft.open_sync(path, clock=clock, sweep_every=None) as kv:
        kv.set(("k",), 0)
        clock.holds = True
        writer = threading.Thread(target=kv.set, args=(("k",), 1))
        writer.start()
        assert clock.is_held.wait(60)

        def child() -> None:
            with pytest.raises(keyloft.CannotOpen, match="another thread of the parent process was using this file"):
                keyloft.open_sync(path)

        assert exit_code(forked(child)) == 0
        clock.holds = False
        clock.may_go_on.set()
        writer.join()
        assert kv.get(("k",)).value == 1


def test_a_file_that_another_thread_reads_at_the_fork_is_refused_in_the_child(tmp_path: Path) -> None:
    path, is_in_query, may_end = tmp_path / "app.db", threading.Event(), threading.Event()

    def held(*_: object) -> bool:
        is_in_query.set()
        return may_end.wait(60)

    with keyloft.open_sync(path, sweep_every=None) as kv:
        connection: apsw.Connection = kv.engine.connection  # type: ignore[attr-defined]
        connection.create_scalar_function("held", held)

        def read() -> None:
            with lock_of(connection):
                connection.execute("SELECT held()").fetchall()

        reader = threading.Thread(target=read)
        reader.start()
        assert is_in_query.wait(60)

        def child() -> None:
            with pytest.raises(keyloft.CannotOpen, match="another thread of the parent process was using this file"):
                keyloft.open_sync(path)

        try:
            assert exit_code(forked(child)) == 0
        finally:
            may_end.set()
            reader.join()


async def test_a_file_that_the_event_loop_reads_while_another_thread_forks_is_refused_in_the_child(
    tmp_path: Path,
) -> None:
    path, codes = tmp_path / "app.db", list[int]()

    def child() -> None:
        with pytest.raises(keyloft.CannotOpen, match="another thread of the parent process was using this file"):
            keyloft.open_sync(path)

    async with keyloft.open(path) as kv:
        await kv.set(("k",), 0)
        await asyncio.sleep(0)
        await kv.get(("k",))  # its view is open until the end of this iteration of the event loop
        thread = threading.Thread(target=lambda: codes.append(exit_code(forked(child))))
        thread.start()
        thread.join()
    assert codes == [0]


class ClosingVFS(apsw.VFS):
    """Calls a function once, in the middle of the closing of a connection."""

    def __init__(self, name: str) -> None:
        self.vfs_name = name
        self.in_close: Callable[[], None] | None = None
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "ClosingFile":  # noqa: N802
        return ClosingFile(self, name, flags)


class ClosingFile(apsw.VFSFile):
    def __init__(self, vfs: ClosingVFS, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._vfs = vfs

    def xClose(self) -> None:  # noqa: N802
        call, self._vfs.in_close = self._vfs.in_close, None
        if call is not None:
            call()
        super().xClose()


async def test_a_file_that_an_event_loop_closes_while_another_thread_forks_is_refused_in_the_child(
    tmp_path: Path,
) -> None:
    path, codes, vfs = tmp_path / "app.db", list[int](), ClosingVFS("closing")

    def child() -> None:
        with pytest.raises(keyloft.CannotOpen, match="another thread of the parent process was using this file"):
            keyloft.open_sync(path)

    def fork() -> None:
        thread = threading.Thread(target=lambda: codes.append(exit_code(forked(child))))
        thread.start()
        thread.join()

    engine = await SqliteEngine.open(SqliteFile(str(path), vfs=vfs.vfs_name), ManualClock())
    vfs.in_close = fork
    await engine.aclose()
    assert codes == [0]


async def test_a_fork_on_another_thread_waits_for_the_end_of_the_iteration_that_reads(tmp_path: Path) -> None:
    path = tmp_path / "app.db"

    def child() -> None:
        with keyloft.open_sync(path) as kv:
            kv.increment(("children",))

    async with keyloft.open(path) as kv:
        await kv.set(("k",), 0)
        for _ in range(10):
            pids = list[int]()
            await kv.get(("k",))  # its view is open until this coroutine waits
            forking = threading.Thread(target=lambda pids=pids: pids.append(forked(child)))
            forking.start()
            while forking.is_alive():  # not joined in a thread: an executor can't be used during a fork
                await asyncio.sleep(0.001)
            assert await asyncio.to_thread(exit_code, pids[0]) == 0
        assert (await kv.get(("children",))).value == 10
