"""Bounds how many lines a second go to the log: a flood of bad requests must not fill the disk."""

import time
from collections.abc import Callable


class LogRate:
    """Allows so many lines a second."""

    def __init__(self, lines: int, on_left_out: Callable[[int], None] | None = None) -> None:
        """Args:
        lines: How many lines a second may have.
        on_left_out: Called with the number of lines that a second left out, when the next line is due.
        """
        self._lines = lines
        self._on_left_out = on_left_out
        self._second = 0.0
        self._wanted = 0

    def allows(self, lines: int = 1) -> int:
        """Count lines that are due; returns how many of them may be written."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            left_out, self._second, self._wanted = self._wanted - self._lines, now, 0
            if left_out > 0 and self._on_left_out is not None:
                self._on_left_out(left_out)
        allowed = min(lines, max(0, self._lines - self._wanted))
        self._wanted += lines
        return allowed
