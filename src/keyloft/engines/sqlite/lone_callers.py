"""Decides whether the event loop may wait for the disk: only if no other task waits, and not for long (ADR 6)."""

import asyncio
from pathlib import Path

from keyloft import limits


class LoneCallers:
    """Which task calls an engine, and when another task last did."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._caller: int | None = None
        self.are_several = False
        """Whether several tasks have called since `is_lone` was last called."""
        self._last_call = -limits.LONE_CALLER_SECONDS
        self._last_other = -limits.LONE_CALLER_SECONDS

    def note(self, now: float) -> bool:
        """Note that the current task calls; returns whether the call before came from it, too.

        A caller that is not a task counts as a different one each time.
        """
        task = asyncio.current_task()
        caller = id(task)  # no reference: the task may end
        is_known = caller == self._caller and task is not None and task.get_loop() is self._loop
        if not is_known:
            self._caller, self._last_other = caller, self._last_call
        self._last_call = now
        return is_known

    def is_lone(self, now: float) -> bool:
        """Whether all recent calls came from one task."""
        if self.are_several:
            self.are_several = False
            self._caller, self._last_other = None, now
        return now - self._last_other > limits.LONE_CALLER_SECONDS


class SyncTimes:
    """How long the last syncs of a device took; shared by all engines of the process on that device."""

    def __init__(self) -> None:
        self._fast_at = float("-inf")
        self._slow_at = float("-inf")

    def add(self, seconds: float, now: float, *, restarted_log: bool = False) -> None:
        """Note how long a commit took; it waited for the disk most of that time.

        Args:
            seconds: How long the commit took.
            now: When it ended, by the monotonic clock.
            restarted_log: Whether the commit restarted the write-ahead log: then it synced twice, and may have
                truncated the file, which can take longer than a sync. The next commit will show how long a sync takes.
        """
        self._fast_at = now if seconds < limits.FAST_SYNC_SECONDS else float("-inf")
        if seconds > limits.SLOW_SYNC_SECONDS and not restarted_log:
            self._slow_at = now

    def expect_fast(self, now: float) -> bool:
        """Whether the next sync will probably be short."""
        return now - self._fast_at < limits.RECENT_SYNC_SECONDS and now - self._slow_at > limits.AFTER_SLOW_SYNC_SECONDS


devices: dict[int, SyncTimes] = {}
"""By the number of a device, how long its syncs take."""


def sync_times(path: str | None) -> SyncTimes:
    """The times of the device that holds a file; None stands for a database in memory."""
    if path is None:
        return SyncTimes()
    try:
        device = Path(path).stat().st_dev
    except OSError:  # a VFS of its own may keep the file elsewhere
        return SyncTimes()
    return devices.setdefault(device, SyncTimes())
