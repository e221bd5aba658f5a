"""Updates of one entry from tasks, threads and processes at once: none is lost."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import keyloft

from .children import child

_TASKS, _PROCESSES, _THREADS, _TIMES = 50, 4, 4, 1


@pytest.mark.slow
async def test_no_update_of_50_tasks_and_of_16_threads_in_4_processes_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv, AsyncExitStack() as ends:
        processes = [
            await ends.enter_async_context(child("updater", path, str(_THREADS), str(_TIMES)))
            for _ in range(_PROCESSES)
        ]
        for process in processes:
            assert await process.line() == "ready"
        for process in processes:
            process.tell("go")

        async def count() -> None:
            for _ in range(_TIMES):
                await kv.update(("counted",), lambda seen: {"times": seen["times"] + 1}, default={"times": 0})

        await asyncio.gather(*[count() for _ in range(_TASKS)])
        for process in processes:
            assert await process.ended() == (0, "")
        assert (await kv.get(("counted",))).value == {"times": _TIMES * (_TASKS + _PROCESSES * _THREADS)}
