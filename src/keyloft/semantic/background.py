"""Runs jobs that no caller waits for; closing the store or client that began them waits for their end."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundJobs:
    """Jobs that run in the background."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a job; it handles its errors itself."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for the end of all jobs."""
        if self._tasks:
            await asyncio.wait(self._tasks)
