"""What the semantic store tells of itself: a log line per change, counters, and alerts that are raised and cleared.

Log lines carry who, what for and which version; never a value.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.semantic.envelope import Semantics, directive_of

logger = logging.getLogger("keyloft.semantic")

AlertName: TypeAlias = Literal["conflict_rate", "storage_outage"]
ALERTS: Final[tuple[AlertName, ...]] = ("conflict_rate", "storage_outage")

_STEPS: Final = 12
"""Into how many parts the window of the conflict rate is divided."""

_PARTS: Final = 3
"""In how many parts of the window the rate has to be too high, so that a burst within one is none that lasts."""

_FEWEST_WRITES: Final = 10
"""Of fewer writes in a window, a share says nothing."""


class Alert(Struct, frozen=True):
    """Something that a person should look at, or that has passed."""

    name: AlertName
    is_raised: bool
    message: str


class Signals:
    """Counts what a store does, tells the log, and raises alerts."""

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
        conflict_window: For how many seconds it has to be higher to raise an alert, and lower to clear it.
        outage_after: After how many seconds without the database an alert is raised.
        seconds: A clock that never goes back; tests bring their own.
        """
        self.counts: Counter[tuple[str, str]] = Counter()
        """How often, by outcome (success, conflict, expiry, failure) and purpose."""
        self.alerts: dict[AlertName, Alert] = {}
        """The alerts that are raised now."""
        self._on_alert = on_alert
        self._rate = conflict_rate
        self._window = conflict_window
        self._outage_after = outage_after
        self._seconds = seconds or time.monotonic
        self._steps: deque[_Step] = deque()
        self._busy_since = 0.0
        self._failing_since: float | None = None

    # What happened

    def success(
        self, action: str, key: str, writer: str, semantics: Semantics | None, request_id: str | None, version: int
    ) -> None:
        """A put, delete or restore was made."""
        purpose = "" if semantics is None else semantics.purpose
        self.counts["success", purpose] += 1
        self._count(conflict=False)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "[KV] %s: key=%s directive=%s purpose=%s requestId=%s version=%d",
                action,
                key,
                directive_of(writer),
                purpose,
                request_id,
                version,
                extra=_fields(action, key, writer, purpose, request_id, version),
            )

    def conflict(
        self,
        action: str,
        key: str,
        writer: str,
        semantics: Semantics | None,
        request_id: str | None,
        version: int | None,
        *,
        reason: str,
        correlation_id: str,
    ) -> None:
        """A write was refused because of what is there; `version` is what is there."""
        purpose = "" if semantics is None else semantics.purpose
        self.counts["conflict", purpose] += 1
        self._count(conflict=True)
        logger.warning(
            "[KV] %s conflict (%s): key=%s directive=%s purpose=%s requestId=%s version=%s correlationId=%s",
            action,
            reason,
            key,
            directive_of(writer),
            purpose,
            request_id,
            version,
            correlation_id,
            extra=_fields(action, key, writer, purpose, request_id, version)
            | {"error_code": "VERSION_CONFLICT", "reason": reason, "correlationId": correlation_id},
        )

    def expiry(self, key: str, writer: str, semantics: Semantics, request_id: str | None, version: int) -> None:
        """An entry has expired and was put aside."""
        self.counts["expiry", semantics.purpose] += 1
        logger.info(
            "[KV] expired: key=%s directive=%s purpose=%s producer=%s consumerHints=%s ttlSeconds=%s version=%d",
            key,
            directive_of(writer),
            semantics.purpose,
            semantics.producer,
            ",".join(semantics.consumer_hints),
            semantics.ttl_seconds,
            version,
            extra=_fields("expire", key, writer, semantics.purpose, request_id, version)
            | {
                "semantics.producer": semantics.producer,
                "semantics.consumerHints": list(semantics.consumer_hints),
                "semantics.ttlSeconds": semantics.ttl_seconds,
            },
        )

    def failure(self) -> None:
        """The database failed."""
        self.counts["failure", ""] += 1
        if self._failing_since is None:
            self._failing_since = self._seconds()
        self.look()

    def answered(self) -> None:
        """The database has answered, be it with a conflict."""
        if self._failing_since is not None:
            self._failing_since = None
            self.look()

    # Alerts

    def look(self) -> None:
        """Raise and clear what is due by now."""
        now = self._seconds()
        out = self._failing_since is not None and now - self._failing_since > self._outage_after
        self._set(
            "storage_outage",
            out,
            f"the database has been failing for more than {self._outage_after:g} s" if out else "the database is back",
        )
        self._look_at_conflicts(now)

    def _look_at_conflicts(self, now: float) -> None:
        steps = self._steps
        while steps and steps[0].began <= now - self._window - self._window / _STEPS:
            steps.popleft()
        writes = sum(step.writes for step in steps)
        conflicts = sum(step.conflicts for step in steps)
        high = writes >= _FEWEST_WRITES and self._is_high(steps)
        parts: dict[int, list[_Step]] = {}
        for step in steps:
            part = int(_PARTS * (now - step.began) / self._window)
            parts.setdefault(min(part, _PARTS - 1), []).append(step)
        lasts = now - self._busy_since >= self._window and all(map(self._is_high, parts.values()))
        told = f"{conflicts} of {writes} writes within {self._window:g} s met conflicts"
        if high and lasts:
            self._set("conflict_rate", True, f"{told}, which is more than {self._rate:.0%}")
        elif not high:
            self._set("conflict_rate", False, told)

    def _is_high(self, steps: Collection["_Step"]) -> bool:
        return sum(step.conflicts for step in steps) > self._rate * sum(step.writes for step in steps)

    def _count(self, *, conflict: bool) -> None:
        now = self._seconds()
        if not self._steps or now - self._steps[-1].began >= self._window / _STEPS:
            self._look_at_conflicts(now)
            if not self._steps:
                self._busy_since = now
            self._steps.append(_Step(now))
        step = self._steps[-1]
        step.writes += 1
        step.conflicts += conflict

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
    """The writes of a part of the window."""

    began: float
    writes: int = 0
    conflicts: int = 0


def _fields(
    action: str, key: str, writer: str, purpose: str, request_id: str | None, version: int | None
) -> dict[str, Any]:
    return {
        "operation": f"semantic_{action}",
        "directive": directive_of(writer),
        "writer": writer,
        "key": key,
        "semantics.purpose": purpose,
        "requestId": request_id,
        "version": version,
    }
