"""The log of a plugin service: each operation, or a sample when there are many. Never a value."""

import json
import logging
import time

from keyloft import limits
from keyloft.core.log_text import field, printable
from keyloft.errors import DatabaseError, KeyloftError, VersionConflict
from keyloft.nats.log_rate import LogRate


class OperationLog:
    """Writes lines like `[KV] get: plugin=trivia key=score hit=true`, with the same values as fields of the record."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rate = LogRate(limits.LOG_LINES_PER_SECOND, self._left_out)
        self._second = 0.0
        self._operations = 0
        self._before = 0

    def operation(self, name: str, plugin: str, key: str, seconds: float, **details: int | None) -> None:
        """Log an operation that is done. Above 1000 a second, one in a hundred is logged. A slow one is a warning."""
        slow = seconds > limits.SLOW_SECONDS
        if not (self._rate.allows() if slow else self._is_in_sample()):
            return
        level, title = (logging.WARNING, f"slow {name}") if slow else (logging.DEBUG, name)
        ms = seconds * 1000
        shown = {"key": field(key)} if key else {}
        shown |= {detail: json.dumps(value) for detail, value in details.items()}
        parts = "".join([f" {detail}={value}" for detail, value in shown.items()])
        fields = {"operation": f"kv_{name}", "plugin": plugin, "key": key, **details, "latency_ms": round(ms, 2)}
        text = "[KV] %s: plugin=%s%s latency_ms=%.1f"
        self._logger.log(level, text, title, plugin, parts, ms, extra=fields)

    def refusal(self, name: str, plugin: str, key: str, code: str, message: str) -> None:
        """Log a request that was refused or failed."""
        if code == VersionConflict.code and not self._logger.isEnabledFor(logging.DEBUG):
            return  # a lost race is not an operator's problem
        if self._rate.allows():
            level = logging.ERROR if code in (DatabaseError.code, KeyloftError.code) else logging.WARNING
            level = logging.DEBUG if code == VersionConflict.code else level
            fields = {"operation": f"kv_{name}", "plugin": plugin, "key": key, "error_code": code}
            text = "[KV] %s failed: plugin=%s error=%s %s"
            self._logger.log(level, text, name or "request", plugin, code, printable(message), extra=fields)

    def unexpected(self, error: Exception) -> None:
        """Log an error whose message is not enough to find its cause, with its traceback."""
        if self._rate.allows():
            text = "[KV] a request failed unexpectedly (%s): %s"
            self._logger.error(text, type(error).__name__, printable(str(error)), exc_info=error)

    def unsent(self, reason: str) -> None:
        """Log that replies could not be sent; the senders of the requests will time out."""
        if self._rate.allows():
            self._logger.error("[KV] a reply could not be sent: %s", reason)

    def _is_in_sample(self) -> bool:
        now = time.monotonic()
        if now - self._second >= 1.0:
            # The second that has just ended counts, too, so that the next one does not begin with logging everything.
            self._before = self._operations if now - self._second < 2.0 else 0
            self._second, self._operations = now, 0
        self._operations += 1
        is_busy = max(self._operations, self._before) > limits.LOGGED_OPERATIONS_PER_SECOND
        return not is_busy or self._operations % limits.LOGGED_SAMPLE == 0

    def _left_out(self, lines: int) -> None:
        self._logger.warning("[KV] %d more requests failed or were slow within a second", lines)

    def close(self) -> None:
        """Log how many lines were left out and not yet announced."""
        self._rate.close()
