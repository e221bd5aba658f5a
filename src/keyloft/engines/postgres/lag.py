"""Measures how far standbys are behind: by when the primary showed the version that a standby shows now."""

import math
from collections import deque
from collections.abc import Iterable

from keyloft import limits
from keyloft.engines.postgres.host_state import HostState


class LagMeter:
    """Compares what primary and standbys answer, each time that all are asked.

    A standby has all that was committed before the primary was asked for the version that the standby shows. The lag is
    therefore never more than measured, give or take the time between two questions. While there is no primary, nothing
    is committed, and the lag stays as it is.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=limits.POSTGRES_LAG_MARKS)
        """When the primary was asked, and its version then."""
        self._shown: dict[str, int] = {}
        """The version of each standby when it was last asked."""

    def measure(self, primary: HostState | None, states: Iterable[HostState]) -> dict[str, float]:
        """For each standby that answers, how many seconds it is behind."""
        if primary is not None:
            if primary.version is None:
                return {}
            if self._marks and primary.version < self._marks[-1][1]:
                self._marks.clear()  # after a failover that has lost commits
            self._marks.append((primary.asked_at, primary.version))
        lags: dict[str, float] = {}
        shown: dict[str, int] = {}
        for state in states:
            if state.is_standby and state.version is not None and state.error is None:
                shown[state.name] = state.version
                if primary is not None and self._shown.get(state.name, 0) > self._marks[-1][1]:
                    # The standby has commits that the primary lacks: it followed a former primary.
                    lags[state.name] = math.inf
                else:
                    lags[state.name] = self._lag(state.version)
        self._shown = shown
        return lags

    def _lag(self, version: int) -> float:
        reached = next((at for at, marked in reversed(self._marks) if marked <= version), None)
        return math.inf if reached is None else self._marks[-1][0] - reached
