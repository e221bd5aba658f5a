"""What all tests share: a clock that stands still, and a guard against blocking the event loop."""

import asyncio
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import settings

from keyloft import ManualClock
from tests.support.examples import examples

pytest_plugins = [
    "pytester",
    "tests.support.temporary_files",
    "tests.support.processes",
    "tests.support.fork_server",
    "tests.support.nats",
    "tests.support.postgres",
    "tests.support.etcd",
]

# A busy machine is no reason to fail: how fast something is belongs in the benchmarks.
settings.register_profile("keyloft", examples(30, deadline=None))
settings.load_profile("keyloft")

# Far above what any callback of Keyloft takes, far below what a user would forgive, and out of a noisy machine's reach.
LONGEST_CALLBACK_SECONDS = 0.75 if sys.gettrace() is None else 2.0  # measuring coverage takes its time


LONGEST = (
    "tests/withstand/test_clusters.py",
    "tests/http/page/test_browser.py",
    "tests/http/test_watch_memory.py::test_a_service_that_is_asked_for_many_large_values_stays_small",
    "tests/docs/test_docs.py",
)
"""Modules and tests that come first: a run would wait for them in the end, or start a browser in each worker."""


REPEATED = {
    "tests/cli/": {"postgresql"},
    "tests/semantic/": {"postgresql", "etcd"},
    "tests/tuples/test_store.py": {"postgresql", "etcd"},
    "tests/tuples/test_conveniences.py": {"postgresql"},
    "tests/plugins/": {"etcd"},
    "tests/plugins/test_store.py": {"postgresql"},
    "tests/plugins/test_operations.py": {"postgresql"},
    "tests/plugins/test_service.py": {"postgresql"},
    "tests/plugins/test_usage.py": {"postgresql"},
}
"""Where a test repeats on a server what it shows on a file, or in memory.

These call the engine by its verbs, and the contract of engines tests the verbs on each of them.
"""
CONCURRENT = ("tests/semantic/test_locks.py", "tests/semantic/test_audit.py")
"""Here a server is more than one more place: what other connections commit meanwhile is seen in another way."""


def pytest_collection(session: pytest.Session) -> None:
    """Let each worker begin with other modules: in a fresh clone they share the work of compiling them."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = session.config.rootpath
    modules = sorted((root / "tests").rglob("test_*.py"))
    first = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for module in (*modules[first:], *modules[:first]):
        with suppress(Exception):  # collecting the module reports it
            importlib.import_module(".".join(module.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the order of tests, and mark those that use servers.

    A test on PostgreSQL or etcd uses a server, and counts as slow.
    """
    elsewhere = {_function_of(item) for item in items if not _parameters(item) & {"postgresql", "etcd"}}
    for item in items:
        names = (item.nodeid, *getattr(item, "fixturenames", ()))
        if any(server in name for server in ("postgres", "etcd") for name in names):
            item.add_marker("slow")
        servers = {server for folder, found in REPEATED.items() if item.nodeid.startswith(folder) for server in found}
        is_repeated = servers & _parameters(item) and _function_of(item) in elsewhere
        if is_repeated and not item.nodeid.startswith(CONCURRENT):
            item.add_marker("repeats")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _parameters(item: pytest.Item) -> set[str]:
    given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return {value for value in given if isinstance(value, str)}


# What collecting the tests makes is much, and stays until the end: to look for garbage in it takes a second.
gc.disable()


def pytest_collection_finish() -> None:
    """Take all that exists by now out of garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class _RunQueue:
    """How long this thread has waited for a processor while other programs used it; 0 where the system doesn't say."""

    _SAMPLE_SECONDS: Final = 0.02

    def __init__(self) -> None:
        self._sampled_at = 0.0
        self._sample = 0.0

    def sample(self, now: float) -> None:
        """Remember the waiting time so far, unless it was read a moment ago: reading it for each callback is slow."""
        if now - self._sampled_at > self._SAMPLE_SECONDS:
            self._sampled_at, self._sample = now, self._read()

    def seconds_since_sample(self) -> float:
        return self._read() - self._sample

    @staticmethod
    def _read() -> float:
        try:
            file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            return 0.0
        try:
            return int(os.read(file, 100).split()[1]) / 1e9
        finally:
            os.close(file)


@pytest.fixture(autouse=True)
def _event_loop_is_never_blocked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which one callback held the event loop for long; `blocks_the_loop` marks a test that may.

    Time that the thread spent waiting for a processor does not count: other programs took it, not the callback.
    """
    longest = 0.0
    culprit = ""
    run = asyncio.Handle._run
    run_queue = _RunQueue()

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest, culprit
        began = time.perf_counter()
        run_queue.sample(began)
        run(handle)
        took = time.perf_counter() - began
        if took > LONGEST_CALLBACK_SECONDS:
            took -= run_queue.seconds_since_sample()
        if took > longest:
            longest, culprit = took, repr(handle)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    yield
    if request.node.get_closest_marker("blocks_the_loop") is None and longest > LONGEST_CALLBACK_SECONDS:
        pytest.fail(f"the event loop was blocked for {longest:.2f} s by {culprit}")
