"""Turns for large parts of answers, and the log of failures."""

import asyncio
import logging

import pytest

from keyloft import limits
from keyloft.errors import Busy
from keyloft.http.failure_log import FailureLog
from keyloft.http.large_parts import LargeParts


async def test_turns_are_given_in_the_order_of_the_calls_and_one_after_the_other() -> None:
    parts = LargeParts()
    had: list[str] = []

    async def make(name: str) -> None:
        await parts.turn()
        had.append(name)

    waiting = [asyncio.create_task(make(name)) for name in "abc"]
    for number in range(1, 4):
        while len(had) < number:
            await asyncio.sleep(0)
        assert len(had) == number
    await asyncio.gather(*waiting)
    assert had == ["a", "b", "c"]


@pytest.mark.parametrize("cancelled", [0, 1], ids=["that has its turn", "that waits"])
async def test_a_cancelled_caller_passes_its_turn_on(cancelled: int) -> None:
    parts = LargeParts()
    waiting = [asyncio.create_task(parts.turn()) for _ in range(3)]
    await parts.turn()
    await asyncio.sleep(0)  # the first one has been given its turn, and has not run yet
    waiting[cancelled].cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(waiting)
        await parts.turn()
    assert [each.cancelled() for each in waiting] == [at == cancelled for at in range(3)]


async def test_failures_in_a_flood_are_counted_and_not_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    with caplog.at_level(logging.ERROR, logger="keyloft.http.failure_log"):
        for _ in range(limits.LOG_LINES_PER_SECOND + 80):
            log.failed("a request", Busy("too many watches at a time"))
        log.close()
    assert len(caplog.messages) == limits.LOG_LINES_PER_SECOND + 1
    assert caplog.messages[0] == "a request over HTTP failed: BUSY: too many watches at a time"
    assert caplog.messages[-1] == "80 further requests and watches over HTTP failed within this second"
