"""Bounds how many lines a second go to the log: a flood of bad requests must not fill the disk."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

_SECOND: Final = 1.0


class LogRate:
    """Allows this many lines a second, and announces how many it left out when the second is over, or at close."""

    def __init__(self, lines: int, on_left_out: Callable[[int], None]) -> None:
        """Args:
        lines: How many lines a second may have.
        on_left_out: Called with the number of lines that a second left out.
        """
        self._lines = lines
        self._on_left_out = on_left_out
        self._began = 0.0
        self._wanted = 0
        self._timer: asyncio.TimerHandle | None = None

    def allows(self) -> bool:
        """Count a line that is due; returns whether it may be written."""
        now = time.monotonic()
        if now - self._began >= _SECOND:
            self.close()
            self._began, self._wanted = now, 0
        self._wanted += 1
        if self._wanted <= self._lines:
            return True
        if self._timer is None:
            self._timer = self._announce_later(self._began + _SECOND - now)
        return False

    def close(self) -> None:
        """Announce what was left out and not yet announced. More lines may follow."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        left_out, self._wanted = self._wanted - self._lines, min(self._wanted, self._lines)
        if left_out > 0:
            self._on_left_out(left_out)

    def _announce_later(self, seconds: float) -> asyncio.TimerHandle | None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None  # the program has no event loop: the next line announces how many were left out
        return loop.call_later(seconds, self.close)
