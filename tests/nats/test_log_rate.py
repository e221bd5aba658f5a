"""Lines that a flood leaves out of the log are announced: a second later, with the next line, or at close."""

import asyncio
from types import SimpleNamespace

import pytest

from keyloft.nats import log_rate
from keyloft.nats.log_rate import LogRate


async def test_what_was_left_out_is_announced_although_nothing_follows() -> None:
    announced: asyncio.Queue[int] = asyncio.Queue()
    rate = LogRate(2, announced.put_nowait)
    began = asyncio.get_running_loop().time()
    assert [rate.allows() for _ in range(7)] == [True] * 2 + [False] * 5
    async with asyncio.timeout(60):
        assert await announced.get() == 5
    assert asyncio.get_running_loop().time() - began > 0.9, "one line for all that a second left out"
    assert rate.allows(), "the next second"
    rate.close()
    assert announced.empty()


async def test_at_close_it_is_announced_at_once() -> None:
    announced: list[int] = []
    rate = LogRate(1, announced.append)
    assert [rate.allows() for _ in range(4)] == [True, False, False, False]
    rate.close()
    assert announced == [3]
    assert not rate.allows(), "the second is not over"
    rate.close()
    assert announced == [3, 1]


def test_without_an_event_loop_the_next_line_announces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, announced = 1000.0, list[int]()
    monkeypatch.setattr(log_rate, "time", SimpleNamespace(monotonic=lambda: now))
    rate = LogRate(1, announced.append)
    assert [rate.allows() for _ in range(3)] == [True, False, False]
    assert announced == []
    now += 1
    assert rate.allows()
    assert announced == [2]


def test_a_second_without_too_many_announces_nothing() -> None:
    announced: list[int] = []
    rate = LogRate(3, announced.append)
    assert all([rate.allows() for _ in range(3)])
    rate.close()
    assert announced == []
