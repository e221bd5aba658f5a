"""A thread that does blocking work for an event loop, one job at a time, in the order given."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A daemon thread, so that a process that forgets to close its store can still end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run a job that doesn't raise, then call `done` with its result on the event loop."""
        self._jobs.put(lambda: self._report(done, job()))

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job and wait for what it returns or raises. Cancelling the caller doesn't stop a job that runs."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        return await asyncio.wrap_future(future)

    def stop(self, last: Callable[[], object] | None = None) -> None:
        """End the thread after the jobs that are already queued, and after `last`."""
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)

    def __del__(self) -> None:
        self.stop()  # the thread of a store that was dropped without being closed

    def _report(self, done: Callable[[T], None], result: T) -> None:
        try:
            self._loop.call_soon_threadsafe(done, result)
        except RuntimeError:
            # If the event loop has ended without closing the store, there are no callers left.
            if not self._loop.is_closed():
                raise


def _run(jobs: SimpleQueue[Callable[[], object] | None]) -> None:
    """Do the jobs; the thread does not refer to the worker, which can be freed with the store that it belongs to."""
    while (job := jobs.get()) is not None:
        job()
        # Otherwise what the job refers to would be freed with the next job, at once, while the event loop waits.
        del job
