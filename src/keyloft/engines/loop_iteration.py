"""Follows the iterations of the event loop, for reads that share something within one of them."""

import asyncio
import time
from collections.abc import Callable

from keyloft import limits
from keyloft.errors import WrongLoop


class LoopIteration:
    """The current iteration of an event loop, from the first read in it to its end."""

    def __init__(
        self, at_end: Callable[[], None] | None = None, *, at_start: Callable[[float], object] | None = None
    ) -> None:
        """`at_start` is called with the time of the first read of each iteration."""
        self._loop = asyncio.get_running_loop()
        self._at_end = at_end
        self._at_start = at_start
        self._began: float | None = None

    def enter(self) -> bool:
        """Read in this iteration; returns whether it has lasted so long that other tasks should run first.

        Raises:
            WrongLoop: The running event loop is another one.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        now = time.monotonic()
        if self._began is None:
            # Before `_began` is set: an exception of a signal's handler between the two must not leave it set for ever.
            self._loop.call_soon(self._end)
            self._began = now
            if self._at_start is not None:
                self._at_start(now)
        return now - self._began > limits.LOOP_ITERATION_SECONDS

    def _end(self) -> None:
        self._began = None
        if self._at_end is not None:
            self._at_end()
