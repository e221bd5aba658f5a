"""Follows the change log for all watches of an engine, and wakes those that a change or an expiry concerns.

Commits of this process are dispatched as they finish. Those of other processes are read from the log as soon as the
engine has noticed that the version counter moved. An expiry has no row in the log until it is swept, so expiries are
read from the index of expiries when the first of them is due.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from msgspec import Struct

from keyloft import limits
from keyloft.clock import Clock, Timer
from keyloft.core.engine import Reader
from keyloft.core.forks import ProcessBound
from keyloft.core.records import (
    Change,
    ChangeKind,
    Changes,
    Committed,
    Due,
    Get,
    Latest,
    LogPosition,
    LogSlice,
    Scan,
    Space,
)
from keyloft.core.waiting import Job, LoopWaiting, Waiting
from keyloft.engines.commit.outcomes import Outcome, copy
from keyloft.engines.watches.backlog import LATE
from keyloft.engines.watches.followed import FollowedLog
from keyloft.engines.watches.interest import Interest, Registration
from keyloft.engines.watches.key_watch import KeyWatch
from keyloft.engines.watches.late_touches import LateTouches
from keyloft.engines.watches.range_watch import RangeWatch
from keyloft.engines.watches.slices import SharedSlices
from keyloft.engines.watches.watch import EngineWatch, WakeCall
from keyloft.errors import Closed, DatabaseError, HistoryGone, KeyloftError, Undecodable

logger = logging.getLogger(__name__)

_MOVES_EXPIRY: Final = (ChangeKind.PUT, ChangeKind.TOUCH)


class Start(Struct, frozen=True):
    """Where a watch begins: it reports later versions, and later expiries."""

    version: int
    at: int
    """The engine's time, in milliseconds."""


class ChangeFeed(ProcessBound):
    """The one reader of the change log in an engine; it follows the log while there are watches."""

    def __init__(self, reader: Reader, clock: Clock, waiting: Waiting | None = None) -> None:
        """`reader` never waits for a watch to start; `clock` is for timers only."""
        super().__init__()
        self.reader = reader
        self.waiting = waiting or LoopWaiting()
        self.lock = self.waiting.lock
        self._clock = clock
        self._interest: Interest[EngineWatch[Any]] = Interest()
        self.slices = SharedSlices(reader)
        self.position: LogPosition | None = None
        """The position in the log up to which it was dispatched; None until the first watch has started."""
        self.dispatched_to = -1
        """The last version of which all changes were dispatched; the version of `position` may have further parts."""
        self.expired_to: dict[Space, int] = {}
        """For each watched space, up to which moment expiries were dispatched."""
        self.latest_time = 0
        """The latest moment up to which expiries were read. An earlier time shows that the clock was set back."""
        self.late_touches = LateTouches(clock)
        # Strong references, while a task waits in a watch: nothing else may refer to it, and it must not be collected.
        self.awaited: set[object] = set()
        self._task: Job | None = None
        self._woken = self.waiting.event()
        self._is_closed = False
        self._must_read = False
        self._check_expiries = False
        self._timer: Timer | None = None
        self._next_expiry: int | None = None
        """From which moment on there may be expiries that are not dispatched; None if no entry expires."""
        self._timer_number = 0
        """The number of the timer that was set last."""
        self._expected_meanwhile: int | None = None
        self._is_reading = False

    # Watches

    @property
    def has_watches(self) -> bool:
        return bool(self._interest)

    @property
    def last_version(self) -> int:
        """The last version of which changes were dispatched, perhaps not yet all of them."""
        return -1 if self.position is None else self.position.version

    def watch(self, asks: tuple[Get | Scan, ...], since: int | None, start: Start | None) -> EngineWatch[Change]:
        """Make a watch.

        Args:
            asks: Gets, or one Scan.
            since: A version after which to report changes, instead of from now on.
            start: Where the watch begins; None if the engine has yet to find out, and then calls `started`.
        """
        scans = [ask for ask in asks if isinstance(ask, Scan)]
        gets = [ask for ask in asks if isinstance(ask, Get)]
        watch: EngineWatch[Change]
        if len(scans) == 1 and not gets:
            watch = RangeWatch(self, scans[0].space, since)
        elif gets and not scans:
            watch = KeyWatch(self, gets, since)
        else:
            raise ValueError("watch takes Gets, or one Scan")
        self._register(watch, asks, start)
        return watch

    def follow(
        self, asks: tuple[Get | Scan, ...], since: int | None, woken: Callable[[], None], start: Start | None
    ) -> FollowedLog:
        """Make a watch that reports changes of one space as the log has them; `woken` is called when there are some."""
        watch = FollowedLog(self, asks[0].space, since, WakeCall(woken))
        self._register(watch, asks, start)
        return watch

    def _register(self, watch: EngineWatch[Any], asks: tuple[Get | Scan, ...], start: Start | None) -> None:
        with self.lock:
            if not self._interest:
                self.position, self.dispatched_to, self.expired_to, self.latest_time = None, -1, {}, 0
            watch.registration = self._interest.add(watch, asks)
            if start is not None:
                self.started(watch, start)

    def started(self, watch: EngineWatch[Any], start: Start) -> None:
        """Start a watch: the engine knows now where it begins."""
        if self.position is None:
            self._stand_at(start.version)
        if start.at < self.latest_time - round(1000 * limits.LATE_START_SECONDS):
            self._clock_was_set_back(start.at)
        for space in watch.registration.spaces:
            if space not in self.expired_to:
                self.expired_to[space] = start.at
                self.latest_time = max(self.latest_time, start.at)
                self._must_check_expiries_after(start.at)
                self._expect(start.at)
        self.late_touches.note_time(start.at)
        watch.start(start.version, start.at)
        if self._task is None or self._task.done():
            self.waiting.start(self._follow(), "keyloft watches", self._keep_task)
        self._woken.set()

    def _keep_task(self, task: Job) -> None:
        self._task = task

    def forget(self, registration: Registration[EngineWatch[Any]]) -> None:
        """Remove a watch that has ended."""
        with self.lock:
            self._interest.remove(registration)
            if not self._interest:
                self._set_timer(None)
                self._woken.set()

    async def wait_until_reported(self, seconds: float) -> None:
        """Wait until the watches have reported what they were woken for, but no longer than this."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while any([watch.is_busy for watch in self._interest.watches()]) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(limits.WATCH_DRAIN_POLL_SECONDS)

    def close(self) -> None:
        """End all watches."""
        with self.lock:
            for watch in self._interest.watches():
                watch.end()
            self._set_timer(None)
        self._is_closed = True
        if (task := self._task) is not None:
            task.cancel()
        self._woken.set()  # a thread can't be cancelled

    def _stand_at(self, version: int) -> None:
        """Note that all changes up to this version were dispatched."""
        self.position, self.dispatched_to = LogPosition(version), version

    def _stand_after(self, piece: LogSlice) -> None:
        """Note that this slice of the log was dispatched. The rest of its last version may be in the next slice."""
        self.position = piece.end
        if piece.is_last:
            self.dispatched_to = piece.end.version
        elif piece.changes:
            self.dispatched_to = max(self.dispatched_to, piece.changes[-1].version - 1)

    # What happened

    def note_time(self, now: int) -> None:
        """Note the time of the engine's reads, where it may not be later than that of the reads before."""
        if now < self.latest_time:
            self._clock_was_set_back(now)

    def _clock_was_set_back(self, now: int) -> None:
        """Dispatch expiries a second time: reads show these entries again, until they expire again."""
        self.latest_time = now
        for watch in self._interest.watches():
            watch.clock_was_set_back()
        self.dispatch_expiries_after(now - round(1000 * limits.CLOCK_AHEAD_SECONDS))

    def dispatch_expiries_after(self, moment: int) -> None:
        """Dispatch all expiries after this moment, also if that was done before."""
        for space, dispatched in self.expired_to.items():
            if moment < dispatched:
                self.expired_to[space] = moment
                self._must_check_expiries_after(moment)
                self._woken.set()

    def committed(self, outcome: Outcome) -> None:
        """Dispatch the changes of a group that this process committed."""
        if self.position is None or outcome.version_after == outcome.version_before:
            return
        with self.lock:
            self._dispatch(outcome)

    def _dispatch(self, outcome: Outcome) -> None:
        if self.position is None:
            return
        is_next = outcome.version_before == self.position.version and not self._is_reading and not self._must_read
        is_short = len(outcome.changes) <= limits.WATCH_INLINE_CHANGES
        if is_next and is_short and not self._must_read_expiries_before(_time_of(outcome)):
            of, calls = self._interest.of, 0
            for change in outcome.changes:
                if calls > limits.WATCH_INLINE_CALLS:
                    # The rest is read from the log, in slices, this version's first changes included.
                    self._stand_at(change.version - 1)
                    self.observe(outcome.version_after)
                    break
                watches = of(change.space, change.key)
                calls += len(watches)
                for watch in watches:
                    watch.changed(change)
            else:
                self._stand_at(outcome.version_after)
            if (moment := outcome.next_expiry) is not None:
                if moment <= self.latest_time:
                    # The clock was set back, or COMMIT has taken longer than the entry lives.
                    self.dispatch_expiries_after(max(moment - 1, outcome.changes[0].at))
                self._expect(moment)
        else:
            self.observe(outcome.version_after)

    def observe(self, version: int) -> None:
        """Note the version counter, and read the log if the counter has moved."""
        with self.lock:
            if self.position is not None and version > self.position.version:
                self._must_read = True
                self._woken.set()

    def read_again(self) -> None:
        """Read the log, because the version counter is below what was dispatched: the log shows why."""
        self._must_read = True
        self._woken.set()

    # Following

    def _goes_on(self) -> bool:
        """Whether there are watches to follow the log for; if not, the next watch starts another task."""
        with self.lock:
            if self._interest and not self._is_closed:
                return True
            self._task = None
            return False

    async def _follow(self) -> None:
        while self._goes_on():
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._read_what_is_new()
            except Closed:
                return
            except DatabaseError as error:
                logger.warning("reading the change log for watches failed, retrying: %s", error)
                await self._try_again_after(limits.WATCH_POLL_SECONDS)
            except Exception:  # if this task ended, all watches would wait for ever
                logger.exception("reading the change log for watches failed unexpectedly, retrying")
                await self._try_again_after(limits.WATCH_CHECK_SECONDS)

    async def _try_again_after(self, seconds: float) -> None:
        self._must_read = self._check_expiries = True
        self._woken.set()
        await self.waiting.sleep(seconds)

    async def _read_what_is_new(self) -> None:
        try:
            if self._must_read:
                self._must_read = False
                await self._read_log()
            if self._check_expiries:
                self._check_expiries = False
                with self.lock:
                    await self._read_expiries()
        except HistoryGone as gone:
            self._start_again(gone)
        except Undecodable as error:
            await self._fail_all(error)

    def _must_read_expiries_before(self, moment: int) -> bool:
        """Whether who continues from a commit of this moment would miss an expiry that is not dispatched."""
        return self._next_expiry is not None and moment > self._next_expiry + LATE

    async def _read_log(self) -> None:
        self._is_reading = True
        try:
            while self.position is not None:
                with self.lock:
                    [piece] = await self.reader.read(Changes(self.position))
                    if any([change.kind in _MOVES_EXPIRY for change in piece.changes]):
                        self._must_check_expiries_after(piece.changes[0].at)
                    if self._must_read_expiries_before(piece.ended):
                        self._check_expiries = False  # before the read: during it, a watch may ask for another one
                        await self._read_expiries()
                    woken = calls = 0
                    for change in piece.changes:
                        watches = self._interest.of(change.space, change.key)
                        woken += sum([not watch.is_woken for watch in watches])
                        calls += len(watches)
                        for watch in watches:
                            watch.changed(change)
                        if woken >= limits.WATCHES_WOKEN_AT_ONCE or calls >= limits.WATCH_INLINE_CALLS:
                            woken = calls = 0
                            await asyncio.sleep(0)
                    self._stand_after(piece)
                    if piece.is_last:
                        return
                await asyncio.sleep(0)
        finally:
            self._is_reading = False

    def _must_check_expiries_after(self, moment: int) -> None:
        self._check_expiries = True
        if self._next_expiry is None or moment < self._next_expiry:
            self._next_expiry = moment

    async def _read_expiries(self) -> None:
        upcoming: list[int] = []
        self._expected_meanwhile = None
        for space in self._interest.spaces():
            # If there is no moment, no watch of the space has started yet; the first one to start triggers this read.
            while (after := self.expired_to.get(space)) is not None:
                latest_time = self.latest_time  # a watch that starts during the read may move it
                [page] = await self.reader.read(Due(space, after, limits.WATCH_DUE_KEYS))
                if page.is_last and page.up_to < latest_time:
                    self.note_time(page.up_to)
                    continue
                for key, moment in zip(page.keys, page.expired_at, strict=True):
                    for watch in self._interest.of(space, key):
                        watch.expired(key, moment)
                self.latest_time = max(self.latest_time, page.up_to)
                self.late_touches.read(page)
                if self.expired_to.get(space) == after:  # else these expiries are to be dispatched again
                    self.expired_to[space] = page.up_to
                if page.is_last:
                    self.late_touches.note_time(page.up_to)
                    upcoming += [] if page.next_expiry is None else [page.next_expiry]
                    break
                await asyncio.sleep(0)
        if self._expected_meanwhile is not None:
            upcoming.append(self._expected_meanwhile)
        earliest = min(upcoming, default=None)
        self.late_touches.dispatched(earliest)
        self._set_timer(earliest)

    def fail(self, error: KeyloftError) -> None:
        """Let every watch end with an error, unless it is about to end with an earlier one."""
        with self.lock:
            if watches := [watch for watch in self._interest.watches() if not watch.has_failed]:
                logger.error("watches end: %s", error)
            for watch in watches:
                watch.fail(copy(error))

    async def _fail_all(self, error: Undecodable) -> None:
        """End every watch with an error, because the log is damaged, and what it held is not known."""
        self.fail(error)
        with self.lock:
            [latest] = await self.reader.read(Latest())
            self._stand_at(latest)

    def _start_again(self, gone: HistoryGone) -> None:
        """Continue after the log was trimmed before it was read: watches of ranges fail, watches of keys read again."""
        with self.lock:
            for watch in self._interest.watches():
                watch.lost(gone)
            self._stand_at(gone.latest)
            self._must_read = self._check_expiries = True
            self._woken.set()

    # The timer of expiries

    def _expect(self, moment: int) -> None:
        """Set the timer for an entry that expires at this moment; a read of expiries under way may not show it."""
        if self._expected_meanwhile is None or moment < self._expected_meanwhile:
            self._expected_meanwhile = moment
        self.late_touches.expect(moment)
        if self._next_expiry is None or moment < self._next_expiry:
            self._set_timer(moment)

    def _set_timer(self, moment: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._next_expiry = moment
        self._timer_number += 1
        if moment is not None:
            self._timer = self.waiting.call_at(self._clock, moment, partial(self._on_timer, self._timer_number))

    def _on_timer(self, number: int) -> None:
        with self.lock:
            if number == self._timer_number:  # with threads, another timer may have replaced it meanwhile
                self._timer = None
            self._check_expiries = True
            self._woken.set()


def _time_of(outcome: Outcome) -> int:
    if outcome.changes:
        return outcome.changes[-1].at
    return max([verdict.at for verdict in outcome.verdicts if type(verdict) is Committed], default=0)
