"""Log lines, counters and alerts of the semantic store.

Log lines carry writer, purpose and version; never a value.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.core.log_text import field
from keyloft.semantic.envelope import Semantics, StoredEntry
from keyloft.semantic.intents import FailedWrite, Intent
from keyloft.semantic.rules import directive_of

logger = logging.getLogger("keyloft.semantic")
"""The logger of all modules of the store."""

AlertName: TypeAlias = Literal["conflict_rate", "storage_outage"]
ALERTS: Final[tuple[AlertName, ...]] = ("conflict_rate", "storage_outage")

_WRITE: Final = "key=%(key)s directive=%(directive)s purpose=%(semantics.purpose)s requestId=%(requestId)s"
_EXPIRED: Final = (
    "[KV] expired: key=%(key)s directive=%(directive)s purpose=%(semantics.purpose)s producer=%(semantics.producer)s "
    "consumerHints=%(hints)s ttlSeconds=%(semantics.ttlSeconds)s version=%(version)s"
)


class Alert(Struct, frozen=True):
    """A condition that needs a person, raised or cleared."""

    name: AlertName
    is_raised: bool
    message: str


class Signals:
    """Counts and logs what a store does, and raises alerts."""

    def __init__(
        self,
        on_alert: Callable[[Alert], None] | None = None,
        *,
        conflict_rate: float = limits.CONFLICT_RATE,
        conflict_window: float = limits.CONFLICT_WINDOW_SECONDS,
        outage_after: float = limits.OUTAGE_SECONDS,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        """Args:
        on_alert: Called when an alert is raised and when it is cleared.
        conflict_rate: The share of writes that may meet conflicts, from 0 to 1.
        conflict_window: For how many seconds the share must be higher to raise an alert, and lower to clear it. With
            fewer than 10 writes in that time, the window is doubled until it has 10, up to 64 times as long.
        outage_after: After how many seconds of failures of the database an alert is raised.
        seconds: Replaces `time.monotonic`, for tests.
        """
        self.counts: Counter[tuple[str, str]] = Counter()
        """How often each outcome (success, conflict, expiry, failure) occurred, by outcome and purpose."""
        self.alerts: dict[AlertName, Alert] = {}
        """The alerts that are raised now."""
        self._on_alert = on_alert
        self._rate = conflict_rate
        self._window = conflict_window
        self._outage_after = outage_after
        self._seconds = seconds or time.monotonic
        self._step = conflict_window / limits.CONFLICT_WINDOW_STEPS
        self._longest_window = conflict_window * 2**limits.CONFLICT_WINDOW_DOUBLINGS
        self._kept = self._longest_window * (1 + 1 / limits.CONFLICT_WINDOW_PARTS)
        self._steps: deque[_Step] = deque()
        self._failing_since: float | None = None

    # What happened

    def success(self, intent: Intent, semantics: Semantics | None, request_id: str | None, version: int) -> None:
        """Count and log a put, delete or restore that was committed."""
        self._count("success", semantics)
        if logger.isEnabledFor(logging.INFO):
            fields = _fields(intent.action, intent.key, intent.writer, semantics, request_id, version)
            logger.info(f"[KV] {intent.action}: {_WRITE} version=%(version)s", _shown(fields), extra=fields)

    def conflict(self, intent: Intent, failed: FailedWrite, request_id: str | None, correlation_id: str) -> None:
        """Count and log a write that was refused because of what is stored."""
        semantics, version = intent.semantics, None
        if failed.current is not None:
            semantics, version = semantics or failed.current.semantics, failed.current.version
        self._count("conflict", semantics)
        fields = _fields(intent.action, intent.key, intent.writer, semantics, request_id, version)
        fields |= {"error_code": "VERSION_CONFLICT", "reason": failed.reason, "correlationId": correlation_id}
        outcome = "version=%(version)s correlationId=%(correlationId)s"
        logger.warning(f"[KV] {intent.action} conflict (%(reason)s): {_WRITE} {outcome}", _shown(fields), extra=fields)

    def expiry(self, key: str, was: StoredEntry, version: int) -> None:
        """Count and log an entry that has expired."""
        semantics = was.semantics
        hints = semantics.consumer_hints
        self.counts["expiry", semantics.purpose] += 1
        fields = _fields("expire", key, was.writer, semantics, was.request_id, version) | {
            "semantics.producer": semantics.producer,
            "semantics.consumerHints": [*hints],
            "semantics.ttlSeconds": semantics.ttl_seconds,
        }
        shown = _shown(fields) | {"hints": ",".join(map(field, hints))}
        logger.info(_EXPIRED, shown, extra=fields)

    def failure(self) -> None:
        """Count a failure of the database."""
        self.counts["failure", ""] += 1
        if self._failing_since is None:
            self._failing_since = self._seconds()
        self.check_alerts()

    def answered(self) -> None:
        """Note that the database has answered; a conflict is an answer, too."""
        if self._failing_since is not None:
            self._failing_since = None
            self.check_alerts()

    # Alerts

    def check_alerts(self) -> None:
        """Raise and clear the alerts that are due."""
        now = self._seconds()
        out = self._failing_since is not None and now - self._failing_since > self._outage_after
        failing = f"the database has been failing for more than {self._outage_after:g} s"
        self._set("storage_outage", out, failing if out else "the database answers")
        self._check_conflicts(now)

    def _check_conflicts(self, now: float) -> None:
        while self._steps and self._steps[0].began <= now - self._kept:
            self._steps.popleft()
        window, steps = self._recent(now)
        parts: dict[int, list[_Step]] = {}
        for step in steps:
            part = int(limits.CONFLICT_WINDOW_PARTS * (now - step.began) / window)
            parts.setdefault(min(part, limits.CONFLICT_WINDOW_PARTS - 1), []).append(step)
        writes, conflicts = sum(step.writes for step in steps), sum(step.conflicts for step in steps)
        # If there were no writes in the newest part of the window, the conflicts are over.
        high = 0 in parts and self._is_high(steps)
        is_everywhere = len(parts) == limits.CONFLICT_WINDOW_PARTS and all(map(self._is_high, parts.values()))
        enough = writes >= limits.CONFLICT_FEWEST_WRITES and now - self._steps[0].began >= window
        message = f"{conflicts} of {writes} writes within {window:g} s met conflicts"
        if high and is_everywhere and enough:
            self._set("conflict_rate", True, f"{message}, which is more than {self._rate:.0%}")
        elif not high:
            self._set("conflict_rate", False, message)

    def _recent(self, now: float) -> tuple[float, list["_Step"]]:
        """The shortest window with enough writes, and its steps; the longest one if none has."""
        window = self._window
        while True:
            steps = self._since(now - window - self._step)
            if sum(step.writes for step in steps) >= limits.CONFLICT_FEWEST_WRITES or window >= self._longest_window:
                return window, steps
            window *= 2

    def _since(self, moment: float) -> list["_Step"]:
        return list(takewhile(lambda step: step.began > moment, reversed(self._steps)))

    def _is_high(self, steps: Collection["_Step"]) -> bool:
        return sum(step.conflicts for step in steps) > self._rate * sum(step.writes for step in steps)

    def _count(self, outcome: Literal["success", "conflict"], semantics: Semantics | None) -> None:
        self.counts[outcome, "" if semantics is None else semantics.purpose] += 1
        now = self._seconds()
        if not self._steps or now - self._steps[-1].began >= self._step:
            self._check_conflicts(now)
            self._steps.append(_Step(now))
        step = self._steps[-1]
        step.writes += 1
        step.conflicts += outcome == "conflict"

    def _set(self, name: AlertName, is_raised: bool, message: str) -> None:
        if is_raised == (name in self.alerts):
            return
        alert = Alert(name, is_raised, message)
        if is_raised:
            self.alerts[name] = alert
        else:
            del self.alerts[name]
        level = logging.ERROR if is_raised else logging.INFO
        state = "raised" if is_raised else "cleared"
        logger.log(level, "[KV] alert %s %s: %s", name, state, message, extra={"alert": name, "is_raised": is_raised})
        if self._on_alert is not None:
            try:
                self._on_alert(alert)
            except Exception:
                logger.exception("[KV] the callback for alerts failed")


class _Step(Struct):
    """The writes of one step of the window."""

    began: float
    writes: int = 0
    conflicts: int = 0


def _shown(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields as a log line shows them, made printable: callers choose writers, request ids and producers."""
    return {name: field(content) for name, content in fields.items()}


def _fields(
    action: str, key: str, writer: str, semantics: Semantics | None, request_id: str | None, version: int | None
) -> dict[str, Any]:
    return {
        "operation": f"semantic_{action}",
        "directive": directive_of(writer),
        "writer": writer,
        "key": key,
        "semantics.purpose": "" if semantics is None else semantics.purpose,
        "requestId": request_id,
        "version": version,
    }
