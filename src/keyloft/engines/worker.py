"""One thread that does blocking work for an event loop, a job at a time, in the order given."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_QUIET_SECONDS: Final = 0.02


class Worker:
    """A daemon thread: a process that forgets to close its store can still end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.chore: Callable[[bool], bool] | None = None
        """Called after each job, with False; if it returns True, again in the next quiet moment, with True."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run a job that doesn't raise, then call `done` with its result on the event loop."""
        self._jobs.put(lambda: self._report(done, job()))

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job and wait for what it returns or raises. Once it runs, cancelling the caller doesn't stop it."""
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

    def stop(self) -> None:
        """End the thread after the jobs that are already queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        wanted = False
        while True:
            try:
                job = self._jobs.get(timeout=_QUIET_SECONDS if wanted else None)
            except Empty:
                wanted = self._do_chore(quiet=True)
                continue
            if job is None:
                return
            job()
            wanted = self._do_chore(quiet=False)

    def _do_chore(self, *, quiet: bool) -> bool:
        try:
            return self.chore is not None and self.chore(quiet)
        except Exception:
            # Without this thread all later jobs would wait for ever; a chore can wait for the next time.
            logger.exception("a chore of the thread %s failed", threading.current_thread().name)
            return False

    def _report(self, done: Callable[[T], None], result: T) -> None:
        try:
            self._loop.call_soon_threadsafe(done, result)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop ended without closing the store: nobody is left to be told.
