"""Logs which published messages a service had to drop: one line a second, whatever their number."""

import asyncio
import logging
from collections import Counter


class DroppedMessages:
    """Counts dropped messages by owner until the next line is due."""

    def __init__(self, logger: logging.Logger, kind: str) -> None:
        """`kind` is what a line calls an owner: plugin or tenant."""
        self._logger = logger
        self._kind = kind
        self._counted: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, name: str, times: int) -> None:
        """Count messages of an owner that were dropped."""
        self._counted[name] += times
        if self._timer is None:
            self._log()

    def close(self) -> None:
        """Log what is not yet logged."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._counted:
            self._log()

    def _log(self) -> None:
        self._timer = None
        if not self._counted:
            return
        counted, self._counted = self._counted, Counter()
        [(name, most), *others] = counted.most_common()
        more = f", and {counted.total() - most} of {len(others)} others" if others else ""
        text = "[KV] dropped %d published messages of %s=%s%s: too much is waiting"
        fields = {"operation": "dropped", self._kind: name, "dropped": counted.total()}
        self._logger.error(text, most, self._kind, name, more, extra=fields)
        self._timer = asyncio.get_running_loop().call_later(1.0, self._log)
