"""Knows the turns of the event loop, for reads that run inline and wait for nothing."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from keyloft.errors import WrongLoop

_LONG_SECONDS: Final = 0.001


class LoopIteration:
    """The turn in which something is being read; over when the event loop comes round again."""

    def __init__(self, at_end: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._at_end = at_end
        self._began: float | None = None

    def enter(self) -> bool:
        """Read in this turn; returns whether it has lasted long, and other tasks and time-outs are to come first.

        Raises:
            WrongLoop: It is the turn of another event loop.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        now = time.monotonic()
        if self._began is None:
            self._loop.call_soon(self._end)  # first: a signal's exception between the two would make this turn endless
            self._began = now
        return now - self._began > _LONG_SECONDS

    def _end(self) -> None:
        self._began = None
        if self._at_end is not None:
            self._at_end()
