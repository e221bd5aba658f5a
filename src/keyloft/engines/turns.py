"""Knows the turns of the event loop, for reads that run inline and wait for nothing."""

import asyncio
from collections.abc import Callable

from keyloft.errors import WrongLoop


class Turn:
    """The turn in which something is being read; over when the event loop comes round again."""

    def __init__(self, at_end: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._at_end = at_end
        self._began: int | None = None

    def is_long(self, now: int) -> bool:
        """Whether it has lasted over a millisecond: without a pause now, other tasks and time-outs would starve."""
        return self._began is not None and self._began != now

    def enter(self, now: int) -> None:
        """Read in this turn.

        Raises:
            WrongLoop: It is the turn of another event loop.
        """
        if self._began is None:
            self.check_loop()
            self._began = now
            self._loop.call_soon(self._end)

    def check_loop(self) -> None:
        """Refuse to work for another event loop.

        Raises:
            WrongLoop: This is not the loop of the one who made this.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop

    def _end(self) -> None:
        self._began = None
        if self._at_end is not None:
            self._at_end()
