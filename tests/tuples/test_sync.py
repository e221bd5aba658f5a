"""The synchronous store as its users meet it: names, threads, iterators, sweeping, and servers behind a loop."""

import asyncio
import gc
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import keyloft
from keyloft import Closed, InvalidArgument, ManualClock, Store, SyncStore
from keyloft.core.drivers import LoopThread
from keyloft.core.driving import run_to_end
from keyloft.core.records import Expired, Space
from keyloft.engines.sqlite.inherited import identity
from keyloft.errors import ReentrantCall
from keyloft.semantic import SyncSemanticStore
from keyloft.semantic.sync.workflows import SyncCheckpoint, SyncDeadLetters, SyncFlags, SyncIndexVersion
from keyloft.tuples.sync.atomic import SyncAtomic
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


def test_open_sync_takes_the_arguments_of_open_but_sync(url: str | None) -> None:
    arguments = dict(inspect.signature(keyloft.open).parameters)
    del arguments["sync"]
    assert dict(inspect.signature(keyloft.open_sync).parameters) == arguments
    wrong: Any = "nearest"
    with pytest.raises(keyloft.InvalidArgument, match=r"^reads: "):
        keyloft.open_sync(url, reads=wrong)
    with keyloft.open_sync(url, reads="standby", max_lag=1) as kv:
        kv.set(("k",), 1)
        assert kv.get(("k",)).value == 1


def test_every_name_of_a_store_is_there() -> None:
    names = {name for name, _ in inspect.getmembers(Store) if not name.startswith("_")}
    assert names - {"aclose"} <= set(dir(SyncStore))


@pytest.mark.parametrize(
    "kind", [SyncStore, SyncAtomic, SyncSemanticStore, SyncCheckpoint, SyncFlags, SyncIndexVersion, SyncDeadLetters]
)
def test_every_method_says_what_it_does_without_await(kind: type) -> None:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            assert method.__doc__, name
            assert "await " not in method.__doc__, name
    assert "awaitable" not in str(SyncStore.update.__doc__), "an async function is refused"


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
        unread: Any = kv.list(("many",))
        with pytest.raises(TypeError, match=r"take the length of all\(\)"):
            len(unread)
        with pytest.raises(TypeError, match=r"take an item of all\(\)"):
            unread[0]
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


def test_an_entry_of_a_scoped_store_is_checked_there(url: str | None) -> None:
    with keyloft.open_sync(url) as kv:
        below = kv.scoped(("app",))
        below.set(("k",), 1)
        for entry in (below.get(("k",)), *below.list(), below.get(("absent",))):
            with pytest.raises(InvalidArgument, match="check: this entry was read from another store"):
                kv.atomic().check(entry)
            with pytest.raises(InvalidArgument, match="check: this entry was read from another store"):
                below.scoped(("x",)).atomic().check(entry)
            assert below.atomic().check(entry).set(("n",), 1).commit()
        with pytest.raises(InvalidArgument, match="check: this entry was read from another store"):
            below.atomic().check(kv.get(("app", "k")))


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


class PausingClock(ManualClock):
    """Who reads it first calls a handler, in the middle of a call of the store."""

    handler: Callable[[], object] | None = None

    def now(self) -> int:
        if (handler := self.handler) is not None and self.may_call():
            self.handler = None
            handler()
        return super().now()

    def may_call(self) -> bool:
        return True


class InterruptingClock(PausingClock):
    """Reading it is like a signal, which reaches the main thread alone: watches read the clock on one of their own."""

    def may_call(self) -> bool:
        return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_signal_handler_that_uses_a_store_in_the_middle_of_a_call_never_hangs(
    in_memory: bool, tmp_path: Path
) -> None:
    clock = InterruptingClock()
    with keyloft.open_sync(None if in_memory else tmp_path / "app.db", clock=clock, sweep_every=None) as kv:
        watching = kv.watch(("k",))
        next(watching)
        kv.set(("k",), 1)
        refused: list[Callable[[], object]] = [
            lambda: kv.set(("k",), 2),
            lambda: kv.increment(("n",)),
            lambda: kv.watch(prefix=()),
            lambda: next(watching),
            watching.close,
            kv.close,
        ]
        reads: list[Callable[[], object]] = [lambda: kv.get(("k",)), lambda: kv.get_many([("k",), ("n",)]), kv.count]
        for call in [*refused, *(reads if in_memory else [])]:

            def handler(call: Callable[[], object] = call) -> None:
                with pytest.raises(keyloft.ReentrantCall, match="signal's handler"):
                    call()

            clock.handler = handler
            kv.set(("k",), 3)
            assert clock.handler is None, "nothing was interrupted"
        if not in_memory:  # other connections answer
            found: list[object] = []
            for call in reads:
                clock.handler = lambda call=call: found.append(call())
                kv.set(("k",), 4)
            assert getattr(found[0], "value", None) == 3
            assert found[2] == 1
        assert [entry.value for entry in next(watching)] == [3 if in_memory else 4]


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_a_signal_handler_raises_reaches_the_interrupted_caller(in_memory: bool, tmp_path: Path) -> None:
    """A handler of SIGALRM that raises TimeoutError, for example, is common."""

    def give_up() -> None:
        raise TimeoutError("the handler's")

    clock = InterruptingClock()
    with keyloft.open_sync(None if in_memory else tmp_path / "app.db", clock=clock, sweep_every=None) as kv:
        calls: list[Callable[[], object]] = [
            lambda: kv.set(("k",), 1),
            lambda: kv.increment(("k",)),
            lambda: kv.atomic().check(("k",), None).set(("k",), 1).commit(),
        ]
        for call in calls:
            clock.handler = give_up
            with pytest.raises(TimeoutError, match="the handler's"):
                call()
            assert not kv.get(("k",)).exists
        kv.set(("k",), 1)


class Signalling(dict[str, int]):
    """A value whose comparison is interrupted by a signal, once."""

    signals = 1

    def __eq__(self, other: object) -> bool:
        if self.signals:
            self.signals = 0
            signal.raise_signal(signal.SIGUSR1)
        return super().__eq__(other)

    __hash__ = None


class Incomparable(dict[str, int]):
    """A value whose comparison fails; the second one is interrupted by a signal."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        self.comparisons += 1
        if self.comparisons == 2:
            signal.raise_signal(signal.SIGUSR1)
        raise ZeroDivisionError

    __hash__ = None


@dataclass
class Slow:
    """A type whose objects take a while to make: a signal comes meanwhile, once."""

    number: int

    def __post_init__(self) -> None:
        if self.number in signals_to_come:
            signals_to_come.remove(self.number)
            signal.raise_signal(signal.SIGUSR1)


class SignallingPath:
    """A path whose reader is interrupted by a signal."""

    def __fspath__(self) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "app.db"


signals_to_come: set[int] = set()


@pytest.fixture
def _handler_that_raises() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError("the handler's")

    before = signal.signal(signal.SIGUSR1, give_up)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_handler_that_raises")
def test_what_a_signal_handler_raises_while_a_value_is_encoded_or_decoded_reaches_the_caller() -> None:
    with keyloft.open_sync() as kv:
        calls: list[Callable[[], object]] = [
            lambda: kv.set(("k",), Signalling(a=1)),
            lambda: kv.set(("k",), Incomparable(a=1)),
            lambda: kv.set(("k",), slow, type=Slow),
            lambda: kv.get(("slow",), type=Slow),
            lambda: kv.list(("many",), type=Slow).all(),
        ]
        slow = Slow(1)
        kv.set(("slow",), slow, type=Slow)
        kv.set_many({("many", number): Slow(number) for number in range(3)}, type=Slow)
        for call in calls:
            signals_to_come.add(1)
            with pytest.raises(TimeoutError, match="the handler's"):
                call()
            signals_to_come.clear()
        assert not kv.get(("k",)).exists
        assert kv.get(("slow",), type=Slow).value == slow
        for value in ({"a": {1}}, Slow(1)):
            with pytest.raises(keyloft.InvalidValue):
                kv.set(("k",), value)


@pytest.mark.usefixtures("_handler_that_raises")
def test_what_a_signal_handler_raises_while_a_file_is_looked_for_is_not_taken_for_its_absence(tmp_path: Path) -> None:
    path, interrupted = tmp_path / "app.db", SignallingPath()
    path.touch()
    with pytest.raises(TimeoutError, match="the handler's"):
        identity(interrupted)  # type: ignore[arg-type]
    assert identity(str(path)) is not None
    assert identity(str(tmp_path / "none")) is None


def test_an_interrupted_write_that_another_thread_commits_is_decided_when_its_caller_goes_on(tmp_path: Path) -> None:
    """Otherwise the caller reads the old value, and a moment later the one that it has given up."""
    held, both_wait, is_interrupted, has_read = (threading.Event() for _ in range(4))
    main = threading.main_thread()

    def interrupt(*_: object) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def first_commit() -> None:
        held.set()
        assert both_wait.wait(LONGEST_SECONDS)

    def group() -> None:
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
        assert is_interrupted.wait(LONGEST_SECONDS)
        has_read.wait(0.2)  # a caller that does not wait for this commit reads now

    clock, earlier = PausingClock(), signal.signal(signal.SIGUSR1, interrupt)
    try:
        with keyloft.open_sync(tmp_path / "app.db", clock=clock, sweep_every=None) as kv:
            queue = kv.engine.queue  # type: ignore[attr-defined]
            clock.handler = first_commit
            threads = [threading.Thread(target=kv.set, args=((name,), 1)) for name in ("a", "b")]
            threads[0].start()
            assert held.wait(LONGEST_SECONDS)
            threads[1].start()
            while len(queue.waiting) < 1:
                pass
            clock.handler = group

            def release() -> None:
                while len(queue.waiting) < 2:
                    pass
                both_wait.set()

            threads.append(threading.Thread(target=release))
            threads[2].start()
            with pytest.raises(KeyboardInterrupt):
                kv.set(("mine",), 1)
            seen = kv.get(("mine",)).exists
            has_read.set()
            for thread in threads:
                thread.join(LONGEST_SECONDS)
            assert kv.get(("mine",)).exists == seen
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.parametrize("work", ["pass", "watching = kv.watch(prefix=())", "semantic = SyncSemanticStore(kv)"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_program_that_closes_nothing_ends(in_memory: bool, work: str, tmp_path: Path) -> None:
    script = f"""
import keyloft
from keyloft.semantic import SyncSemanticStore
kv = keyloft.open_sync({"" if in_memory else "'app.db'"})
kv.set(("k",), 1)
{work}
raise SystemExit(3)
"""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    assert done.returncode == 3, done.stderr
    if not in_memory:
        with keyloft.open_sync(tmp_path / "app.db") as kv:
            assert kv.get(("k",)).value == 1


def test_a_child_can_open_the_file_that_threads_of_its_parent_were_writing_to(tmp_path: Path) -> None:
    """SQLite would remember the lock of a commit that was under way in the parent, and refuse the child for ever."""
    script = """
import os, sys, threading, keyloft
kv, stop = keyloft.open_sync("app.db"), threading.Event()
def write():
    while not stop.is_set():
        kv.increment(("n",))
threads = [threading.Thread(target=write) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if not child:
        with keyloft.open_sync("app.db") as own:
            own.increment(("children",))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
assert kv.get(("children",)).value == 20
kv.close()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_checkpoints_go_on_after_an_interrupted_start_of_their_thread(tmp_path: Path) -> None:
    """An exception within Thread.start can end the new thread before its first line."""
    original = threading.Thread.start

    def ends_at_once(thread: threading.Thread) -> None:
        thread.run = lambda: None  # type: ignore[method-assign]
        original(thread)
        thread.join()
        raise TimeoutError

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "housekeeping" in thread.name]

    with keyloft.open_sync(tmp_path / "app.db", sweep_every=None) as kv:
        before = len(threads())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", ends_at_once)
            with pytest.raises(TimeoutError):
                kv.set(("k",), 1)
        kv.set(("k",), 2)
        assert len(threads()) == before + 1
    assert len(threads()) == before


def test_interrupted_watches_start_no_thread_twice() -> None:
    """The exception comes between the start of a thread and the line that would remember it."""
    original = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        original(thread)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with keyloft.open_sync(sweep_every=None) as kv:
        before = {*threading.enumerate()}
        kept: list[object] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            for _ in range(5):
                try:
                    kept.append(kv.watch(prefix=()))
                except KeyboardInterrupt as error:
                    kept.append(error)  # its traceback has the watch, which goes on
        with kv.watch(prefix=()) as watching:
            kv.set(("k",), 1)
            assert [entry.value for entry in next(watching)] == [1]
            names = sorted([thread.name for thread in {*threading.enumerate()} - before])
            assert names == ["keyloft polls for watches", "keyloft watches"]


def test_a_signal_handler_may_call_a_store_on_a_loop_that_its_thread_waits_for() -> None:
    driver = LoopThread("test")
    is_answered = asyncio.Event()

    async def answer() -> None:
        is_answered.set()

    async def ask() -> str:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        await is_answered.wait()
        return "answered"

    before = signal.signal(signal.SIGUSR1, lambda *_: driver.run(answer()))
    try:
        assert driver.run(ask()) == "answered"
    finally:
        signal.signal(signal.SIGUSR1, before)
        driver.close()


def test_a_call_that_can_t_be_cancelled_does_not_hold_up_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyloft.limits.LOOP_END_SECONDS", 0.01)
    driver, has_begun = LoopThread("test"), threading.Event()
    is_over = False

    async def stubborn() -> None:
        while not is_over:
            has_begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(LONGEST_SECONDS)

    refused: list[Closed] = []

    def call() -> None:
        try:
            driver.run(stubborn())
        except Closed as error:
            refused.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    has_begun.wait(LONGEST_SECONDS)
    driver.close()
    is_over = True
    caller.join(LONGEST_SECONDS)
    assert len(refused) == 1


def opened_file(link: Path) -> str:
    with suppress(FileNotFoundError):  # the descriptor that lists them
        return str(link.readlink())
    return ""


def test_a_store_that_is_dropped_without_being_closed_warns_and_leaves_nothing_open(tmp_path: Path) -> None:
    path, before = tmp_path / "app.db", set(threading.enumerate())

    def use() -> None:
        kv = keyloft.open_sync(path)
        SyncSemanticStore(kv).flags("acme", "web")
        for entry in keyloft.open_sync(path).list():
            raise AssertionError(entry)
        kv.set(("k",), 1)
        next(kv.watch(("k",)))
        del kv
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"unclosed store .*app\.db: call close") as warned:
        use()
    assert len(warned) == 3  # the semantic store has a loop of its own
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("keyloft"):
            thread.join(LONGEST_SECONDS)
            assert not thread.is_alive(), thread.name
    if sys.platform == "linux":
        assert not [link for link in Path("/proc/self/fd").iterdir() if opened_file(link).startswith(str(path))]
    with keyloft.open_sync(path) as kv:
        assert kv.get(("k",)).value == 1


def test_a_closed_store_can_t_be_entered(tmp_path: Path) -> None:
    kv = keyloft.open_sync(tmp_path / "app.db")
    below, watching = kv.scoped(("a",)), kv.watch(prefix=())
    kv.close()
    for closed in (kv, below):
        with pytest.raises(Closed, match="open it again"), closed:
            pass
    with pytest.raises(Closed):
        SyncSemanticStore(kv)
    watching.close()


def test_an_update_with_a_coroutine_function_is_refused(url: str | None) -> None:
    async def change(value: object) -> object:
        await asyncio.sleep(0.01)
        return value

    with keyloft.open_sync(url) as kv:
        with pytest.raises(InvalidArgument, match=r"^fn: .*plain function"):
            kv.update(("k",), change)
        assert not kv.get(("k",))


def test_an_update_that_changes_a_list_in_place_and_returns_nothing_is_refused(url: str | None) -> None:
    with keyloft.open_sync(url) as kv:
        kv.set(("k",), [1])
        with pytest.raises(InvalidArgument, match=r"^fn: .*in place and returned None"):
            kv.update(("k",), lambda numbers: numbers.append(2))
        assert kv.get(("k",)).value == [1]


def test_an_update_that_needs_a_value_where_nothing_is_stored_names_the_default(url: str | None) -> None:
    with keyloft.open_sync(url) as kv:
        with pytest.raises(TypeError) as raised:
            kv.update(("absent",), lambda n: n + 1)
        assert "pass default=" in raised.value.__notes__[0]


def test_an_update_whose_function_writes_the_entry_itself_is_refused(url: str | None) -> None:
    with keyloft.open_sync(url) as kv:
        ways: list[Callable[[Any], Any]] = [
            lambda value: kv.set(("k",), value + 1),
            lambda value: kv.atomic().set(("k",), value + 1).commit().versionstamp,
            lambda _: kv.increment(("k",)),
            lambda _: kv.update(("k",), lambda inner: inner + 1).value,
        ]
        for way in ways:
            kv.set(("k",), 1)
            with pytest.raises(
                (InvalidArgument, ReentrantCall), match=r"^(fn: .*return the new value|a function that)"
            ):
                kv.update(("k",), way)


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
            if run_to_end(kv.engine.read(Expired(Space.TUPLES, 1))) == [[]]:
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
