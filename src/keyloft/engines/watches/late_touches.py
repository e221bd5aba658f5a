"""Knows which touches may have been seen late: after the expiry that they put off, when reads found no entry.

The time of a commit is fixed before it syncs. If its process is slow or stopped in between, the entry expires for all
others, and is alive again once they see the touch. No read of expiries shows that afterwards.
"""

from keyloft.clock import Clock
from keyloft.core.records import DuePage, LoggedChange


class LateTouches:
    """Compares touches with the expiries that are known. While none of these is due, no touch is late."""

    def __init__(self, clock: Clock) -> None:
        self.newest_time = 0
        """The latest moment of any read, also if the clock was set back since."""
        self._clock = clock
        self._behind = 0
        """By how many milliseconds the clock is behind the engine's time."""
        self._earliest: int | None = None
        """The earliest known expiry that is not dispatched; None if there is none."""
        self._found_to = 0, 0
        """Version and moment of the last read of expiries when one was due."""

    def note_time(self, now: int) -> None:
        """Note the engine's time, as a read just now had it."""
        self.newest_time = max(self.newest_time, now)
        self._behind = max(0, now - self._clock.now())

    def expect(self, moment: int) -> None:
        """Note an expiry that is not dispatched."""
        self._earliest = moment if self._earliest is None else min(moment, self._earliest)

    def read(self, page: DuePage) -> None:
        """Note a read of expiries."""
        self.newest_time = max(self.newest_time, page.up_to)
        if self._earliest is not None and self._earliest <= page.up_to:
            self._found_to = page.version, page.up_to

    def dispatched(self, earliest: int | None) -> None:
        """Note that all expiries before this one were dispatched; None if no entry expires."""
        self._earliest = earliest

    def may_have(self, touch: LoggedChange) -> bool:
        """Whether a touch that is dispatched now may have been seen late."""
        version, moment = self._found_to
        if touch.version <= version and touch.at < moment:
            return True  # that read saw the touch, not the expiry
        now = self._clock.now() + self._behind
        return self._earliest is not None and self._earliest <= now and touch.at < now
