"""What all tests share: a clock that stands still, and a guard against blocking the event loop."""

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from keyloft import ManualClock

pytest_plugins = ["pytester", "tests.support.nats", "tests.support.postgres"]

# A busy machine is no reason to fail: how fast something is belongs in the benchmarks.
settings.register_profile("keyloft", deadline=None)
settings.load_profile("keyloft")

# Far above what any callback of Keyloft takes, far below what a user would forgive, and out of a noisy machine's reach.
LONGEST_CALLBACK_SECONDS = 0.75 if sys.gettrace() is None else 2.0  # measuring coverage takes its time


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(autouse=True)
def _event_loop_is_never_blocked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which one callback held the event loop for long; `blocks_the_loop` marks a test that may."""
    longest = 0.0
    culprit = ""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest, culprit
        began = time.perf_counter()
        run(handle)
        took = time.perf_counter() - began
        if took > longest:
            longest, culprit = took, repr(handle)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    yield
    if request.node.get_closest_marker("blocks_the_loop") is None and longest > LONGEST_CALLBACK_SECONDS:
        pytest.fail(f"the event loop was blocked for {longest:.2f} s by {culprit}")
