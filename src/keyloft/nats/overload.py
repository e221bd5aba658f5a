"""Logs what a service refuses because too much is waiting: a line with a count per owner and second."""

import asyncio
import logging
from collections import Counter

from keyloft import limits
from keyloft.errors import Busy


class OverloadLog:
    """Counts requests that were answered BUSY and messages that were dropped, by owner, until the next line is due."""

    def __init__(self, logger: logging.Logger, kind: str) -> None:
        """`kind` is what a line calls an owner: plugin or tenant."""
        self._logger = logger
        self._kind = kind
        self._answered: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, name: str, answered: int, dropped: int) -> None:
        """Count requests of an owner that were answered BUSY, and published messages of it that were dropped."""
        if answered:
            self._answered[name] += answered
        if dropped:
            self._dropped[name] += dropped
        if self._timer is None:
            self._log()

    def close(self) -> None:
        """Log what is not yet logged."""
        if self._timer is not None:
            self._timer.cancel()
        self._log()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log(self) -> None:
        self._timer = None
        if not self._answered and not self._dropped:
            return
        answered, self._answered = self._answered, Counter()
        dropped, self._dropped = self._dropped, Counter()
        self._log_answered(answered)
        if dropped:
            self._log_dropped(dropped)
        self._timer = asyncio.get_running_loop().call_later(1.0, self._log)

    def _log_answered(self, counted: Counter[str]) -> None:
        named = counted.most_common(limits.LOG_LINES_PER_SECOND)
        for name, count in named:
            fields = {"operation": "refused", self._kind: name, "error_code": Busy.code, "requests": count}
            text = "[KV] refused: %s=%s error=%s requests=%d too much is waiting"
            self._logger.warning(text, self._kind, name, Busy.code, count, extra=fields)
        if others := len(counted) - len(named):
            left = counted.total() - sum([count for _, count in named])
            text = "[KV] refused: %d other %ss error=%s requests=%d too much is waiting"
            self._logger.warning(text, others, self._kind, Busy.code, left)

    def _log_dropped(self, counted: Counter[str]) -> None:
        [(name, most), *others] = counted.most_common()
        more = f", and {counted.total() - most} of {len(others)} others" if others else ""
        text = "[KV] dropped %d published messages of %s=%s%s: too much is waiting"
        fields = {"operation": "dropped", self._kind: name, "dropped": counted.total()}
        self._logger.error(text, most, self._kind, name, more, extra=fields)
