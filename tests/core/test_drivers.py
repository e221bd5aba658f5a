"""Drivers of synchronous objects."""

import sys
from collections.abc import Iterator

import pytest

from keyloft.core.drivers import LoopThread


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns after a microsecond, so that each pair of steps is torn apart sometimes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_call_that_ends_while_its_caller_wakes_is_not_taken_for_a_cancelled_one(hasty_threads: None) -> None:
    async def answer(number: int) -> int:
        return number

    loop = LoopThread("calls")
    try:
        for number in range(5000):
            assert loop.run(answer(number)) == number
    finally:
        loop.close()
