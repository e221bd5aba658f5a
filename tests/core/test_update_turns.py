"""Turns of updates: what they keep in memory."""

import asyncio

from keyloft.core.update_turns import UpdateTurns


async def test_a_task_keeps_no_calls_that_have_returned() -> None:
    """Each function begins the task of the next update, which inherits its context."""
    turns, ended = UpdateTurns(), asyncio.Event()
    tasks = list[asyncio.Task[None]]()

    async def update(number: int) -> None:
        async with turns.take(str(number), "fn") as turn:
            with turn.function():
                if number < 50:
                    tasks.append(asyncio.create_task(after(tasks[-1], number + 1)))
        if number == 50:
            ended.set()

    async def after(earlier: asyncio.Task[None], number: int) -> None:
        await earlier  # its function has returned
        await update(number)

    async with asyncio.timeout(20):
        tasks.append(asyncio.create_task(update(0)))
        await ended.wait()
    assert len(turns.keys_in_use) <= 2
