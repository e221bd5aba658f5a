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
    is committed, and the lag stays as it is. A standby that has what the primary lacks followed a former one.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=limits.POSTGRES_LAG_MARKS)
        """When the primary was asked, and its version then."""
        self._shown: dict[str, int] = {}
        """By standby, its version when it was last asked."""

    def measure(self, primary: HostState | None, states: Iterable[HostState]) -> dict[str, float]:
        """By standby that answers, how many seconds it is behind."""
        if primary is not None and primary.version is not None:
            if self._marks and primary.version < self._marks[-1][1]:
                self._marks.clear()  # after a failover that has lost commits
            self._marks.append((primary.asked_at, primary.version))
        # While there is no primary, standbys may well have more than it showed when it was last asked.
        newest = math.inf if primary is None or primary.version is None else primary.version
        lags: dict[str, float] = {}
        shown: dict[str, int] = {}
        for state in states:
            if state.is_standby and state.version is not None and state.error is None:
                shown[state.name] = state.version
                is_ahead = self._shown.get(state.name, 0) > newest
                lags[state.name] = math.inf if is_ahead else self._lag(state.version)
        self._shown = shown
        return lags

    def _lag(self, version: int) -> float:
        reached = next((at for at, marked in reversed(self._marks) if marked <= version), None)
        return math.inf if reached is None else self._marks[-1][0] - reached
