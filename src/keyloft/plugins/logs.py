"""Tells the log what a plugin service does: each operation, or a sample when there are many. Never a value."""

import logging
import time
from typing import Final

from keyloft import limits
from keyloft.errors import DatabaseError, KeyloftError

_BUSY_PER_SECOND: Final = 1000
_SAMPLE: Final = 100
_LINES_PER_SECOND: Final = 20


class OperationLog:
    """Writes lines like `[KV] get: plugin=trivia key='score' hit=true`, with the same as fields of the record."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._second = 0.0
        self._operations = 0
        self._before = 0
        self._lines = 0
        self._unsaid = 0

    def operation(self, name: str, plugin: str, key: str, seconds: float, **details: int | None) -> None:
        """An operation is done. Above 1000 a second, one in a hundred is told. A slow one is a warning."""
        slow = seconds > limits.SLOW_SECONDS
        self._turn()
        self._operations += 1
        busy = max(self._operations, self._before) > _BUSY_PER_SECOND
        if not self._may_say() if slow else busy and self._operations % _SAMPLE:
            return
        self._logger.log(
            logging.WARNING if slow else logging.DEBUG,
            "[KV] %s%s: plugin=%s key=%r %s latency_ms=%.1f",
            "slow " if slow else "",
            name,
            plugin,
            key,
            " ".join([f"{detail}={_shown(value)}" for detail, value in details.items()]),
            seconds * 1000,
            extra={
                "operation": f"kv_{name}",
                "plugin": plugin,
                "key": key,
                **details,
                "latency_ms": round(seconds * 1000, 2),
            },
        )

    def refusal(self, name: str, plugin: str, key: str, code: str, message: str, *, level: int, times: int = 1) -> None:
        """A request was refused or failed, or several were for the same reason."""
        self._turn()
        said = min(times, max(0, _LINES_PER_SECOND - self._lines))
        self._lines += times
        self._unsaid += times - said
        for _ in range(said):
            self._logger.log(
                level,
                "[KV] %s failed: plugin=%s error=%s %s",
                name or "request",
                plugin,
                code,
                message,
                extra={"operation": f"kv_{name}", "plugin": plugin, "key": key, "error_code": code},
            )

    def failure(self, requests: int, error: Exception) -> None:
        """Requests came to nothing, because the database failed or something unexpected happened."""
        self._turn()
        if self._may_say():
            code = error.code if isinstance(error, KeyloftError) else type(error).__name__
            # Whatever has a name of its own says more than where in the code it was noticed.
            is_named = isinstance(error, DatabaseError) and type(error) is not DatabaseError
            traceback = None if is_named else error
            self._logger.error("[KV] %d requests failed (%s): %s", requests, code, error, exc_info=traceback)

    def lost_reply(self, error: Exception) -> None:
        """A reply could not be sent. Whoever asked will run into their time-out."""
        self._turn()
        if self._may_say():
            self._logger.error("[KV] a reply could not be sent: %s", str(error) or type(error).__name__)

    def _may_say(self) -> bool:
        """A flood of errors, or of slow operations, must not become a flood of lines: 20 a second are told."""
        self._lines += 1
        if self._lines > _LINES_PER_SECOND:
            self._unsaid += 1
        return self._lines <= _LINES_PER_SECOND

    def _turn(self) -> None:
        now = time.monotonic()
        if now - self._second < 1.0:
            return
        # What was counted long ago says nothing of now.
        self._before = self._operations if now - self._second < 2.0 else 0
        self._second, self._operations, self._lines = now, 0, 0
        if self._unsaid:
            self._logger.warning("[KV] %d more requests failed or were slow within a second", self._unsaid)
            self._unsaid = 0


def _shown(value: int | None) -> str:
    return "null" if value is None else str(value).lower()
