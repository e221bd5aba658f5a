"""Reads the changes of a watch from the change log, a few at a time, for the events that report them to clients."""

from keyloft import limits
from keyloft.core.engine import LogWatch
from keyloft.core.records import LoggedChange


class ChangeReader:
    """The changes of one watch, in the order of their versions."""

    __slots__ = ("_left", "_since", "watch")

    def __init__(self, watch: LogWatch, since: int) -> None:
        """`since` is the version from which the watch reports."""
        self.watch = watch
        self._since = since
        self._left: list[LoggedChange] = []
        """Changes that were read from the log and are not yet returned, the last one first."""

    @property
    def reached(self) -> int:
        """The version up to which everything was returned."""
        if self._left:
            return self._left[-1].version - 1
        reached = self.watch.reached
        return self._since if reached is None else reached

    @property
    def has_more(self) -> bool:
        """Whether the log may have more changes."""
        return bool(self._left) or self.watch.is_woken

    async def next_changes(self) -> list[tuple[LoggedChange, bool]]:
        """The next changes, perhaps none; with each, whether another change of the same version may follow.

        Raises:
            HistoryGone: The change log no longer has them.
        """
        if not self._left:
            self._left = (await self.watch.take())[::-1]
        taken: list[tuple[LoggedChange, bool]] = []
        while self._left and len(taken) < limits.EVENTS_PER_TURN:
            change = self._left.pop()
            taken.append((change, self._may_continue(change.version)))
        return taken

    def _may_continue(self, version: int) -> bool:
        if self._left:
            return self._left[-1].version == version
        return version > self.reached
