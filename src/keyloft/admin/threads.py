"""Runs blocking work in a thread that may be abandoned: a pipe or a network file system may never answer."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread. A cancelled caller does not wait for it, nor does the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="keyloft admin", daemon=True).start()
    return await asyncio.wrap_future(future)
