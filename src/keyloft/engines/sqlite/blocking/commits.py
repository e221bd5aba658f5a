"""Group commit among threads: one thread at a time leads, and commits for all that wait.

After a group, its threads are woken one after the other, and the last of them wakes the next leader. By then the others
have added their next batches. If all were woken at once, they would wait for Python's interpreter lock, and meanwhile
the leader would commit its own batches alone.

A signal's handler may raise anywhere in the main thread, as KeyboardInterrupt does. So locks are only taken by
`with lock`, each step leaves enough behind to find out what became of a group, and the next thread finishes what an
interrupted one has left.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from time import monotonic

from keyloft import limits
from keyloft.core.engine import Verdict
from keyloft.core.records import Batch
from keyloft.engines.commit.long_batches import is_long
from keyloft.engines.commit.outcomes import Outcome, failed
from keyloft.engines.sqlite.blocking.connections import SharedConnection
from keyloft.engines.sqlite.errors import OF_SQLITE
from keyloft.engines.sqlite.writes import SqliteWriter
from keyloft.errors import Closed, CommitUnknown, KeyloftError


def _is_of_a_handler(error: BaseException) -> bool:
    """Whether a signal's handler has raised an exception: then only the interrupted caller gets it.

    Handlers run in the main thread. The database raises errors of SQLite, and UnicodeDecodeError for damaged texts.
    """
    if not isinstance(error, Exception):
        return True
    is_of_the_database = isinstance(error, (*OF_SQLITE, KeyloftError, MemoryError))
    return not is_of_the_database and threading.current_thread() is threading.main_thread()


class WaitingBatch:
    """A batch whose caller waits for its verdict, or for its turn to lead."""

    __slots__ = ("_wake_up", "batch", "is_withdrawn", "next", "verdict")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.verdict: Verdict | None = None
        self.next: WaitingBatch | None = None
        """The batch of the same group whose thread this one's thread wakes."""
        self.is_withdrawn = False
        self._wake_up = threading.Lock()
        self._wake_up.acquire()

    def wait(self) -> bool:
        """Wait for `wake`, but not for long: the thread that should call it may have been interrupted."""
        return self._wake_up.acquire(timeout=limits.COMMIT_WAIT_SECONDS)

    def wake(self) -> None:
        with suppress(RuntimeError):  # the thread was woken already
            self._wake_up.release()


class CommitQueue:
    """Batches of all threads, and the group that is being committed."""

    def __init__(self, writer: SqliteWriter, shared: SharedConnection, committed: Callable[[Outcome], None]) -> None:
        """`committed` is called with the outcome of each group, by a thread that no longer has the connection."""
        self._writer = writer
        self._shared = shared
        self._lock = shared.lock
        self._committed = committed
        self.finished: Callable[[], None] = lambda: None
        """Called after each group, by the thread that still has the connection."""
        self.waiting: deque[WaitingBatch] = deque()
        """The batches of the next groups."""
        self.group: list[WaitingBatch] = []
        """Batches that a thread commits; if there are any while no thread has the lock, a thread was interrupted."""
        self._is_led = False
        """Whether a thread commits, or is about to: others wait until it wakes them. This is only a hint: if a signal
        interrupts the leader, the others wait until their timeout."""
        self._is_committing = False
        """Whether a group is being gathered and committed."""
        self._alone = 0
        """How many batches are still to be committed one by one, because one of them made a whole group fail."""
        self._is_closed = False

    def commit(self, batch: Batch) -> Verdict:
        """The verdict on a batch, committed by this thread or by another one.

        A caller that is interrupted while its batch waits withdraws it.

        Raises:
            Closed: The queue is closed.
            ReentrantCall: The caller has interrupted a thread that has the connection, and would wait for itself.
        """
        # While another thread leads, batches gather for the next group.
        if not (self._is_led or self.waiting or self._shared.is_in_use):
            self._is_led = True
            if (outcome := self._commit_alone(batch)) is not None:
                self._committed(outcome)
                [verdict] = outcome.verdicts
                assert verdict is not None, "it is alone"
                return verdict
        self._shared.refuse_reentry()
        mine = WaitingBatch(batch)
        try:
            self.waiting.append(mine)
            is_decided = False
            while not is_decided:
                outcome = None
                if self._is_led:
                    mine.wait()
                if mine.verdict is None:
                    self._is_led = True
                    with self._lock:
                        if mine.verdict is None:
                            if self._is_closed:
                                raise Closed
                            outcome = self._commit_next()
                # Read first: if the batch is decided after this line, the next thread is woken in the next round.
                is_decided = mine.verdict is not None
                self._wake(mine.next)
                if outcome is not None:
                    self._committed(outcome)
        except BaseException:
            mine.is_withdrawn = True
            self._wake(mine.next)
            self._wait_for_decision(mine)
            raise
        assert mine.verdict is not None, "it is decided"
        return mine.verdict

    def _wait_for_decision(self, withdrawn: WaitingBatch) -> None:
        """Wait while another thread commits a group that may have this batch: its caller may read next.

        The wait is bounded: the other thread may be waiting for another process.
        """
        deadline = monotonic() + limits.WITHDRAWAL_SECONDS
        while self._is_committing and withdrawn.verdict is None and monotonic() < deadline:
            if withdrawn not in self.group and withdrawn not in self.waiting.copy():
                return
            withdrawn.wait()

    def _commit_alone(self, batch: Batch) -> Outcome | None:
        """Commit a batch while no other waits, with less Python code than a group needs; None if others came."""
        shared, writer = self._shared, self._writer
        try:
            with self._lock:
                if self.waiting or self.group or self._is_closed:
                    return None
                if shared.is_in_use:
                    self.clean()
                shared.end_reading()
                shared.is_in_use = True
                outcome = None
                try:
                    outcome = writer.attempt_alone(batch)
                    self.finished()
                    shared.is_in_use = False
                except BaseException as error:
                    failure = writer.failure(error)[0] if outcome is None and not _is_of_a_handler(error) else None
                    writer.roll_back()
                    shared.is_in_use = False
                    if failure is None:
                        raise
                    outcome = failed([batch], failure, writer.last_version)
        finally:
            self._is_led = False
            if self.waiting:
                self._hand_on()
        return outcome

    def try_set(self, key: bytes, value: bytes, encoding: int) -> tuple[int, int] | None:
        """Commit a plain Set of the tuple store; returns its version and its time, or None if other batches wait.

        This is `_commit_alone`, without what a plain Set does not need.

        Raises:
            DatabaseError: It was not committed, or it is not known whether it was.
        """
        shared, writer = self._shared, self._writer
        if self._is_led or self.waiting or shared.is_in_use:
            return None
        self._is_led = True
        try:
            with self._lock:
                if self.waiting or self.group or self._is_closed or shared.is_in_use:
                    return None
                shared.end_reading()
                shared.is_in_use = True
                committed = None
                try:
                    committed = writer.set_alone(key, value, encoding)
                    self.finished()
                    shared.is_in_use = False
                except BaseException as error:
                    failure = writer.failure(error)[0] if committed is None and not _is_of_a_handler(error) else None
                    writer.roll_back()
                    shared.is_in_use = False
                    if failure is None:
                        raise
                    raise failure from failure.__cause__
        finally:
            self._is_led = False
            if self.waiting:
                self._hand_on()
        return committed

    def close(self) -> None:
        """Commit the batches that wait, and refuse later ones; the caller has the lock."""
        while self.waiting or self.group:
            self._commit_next()
        self._is_closed = True

    def clean(self) -> None:
        """Finish a read or a commit that an interrupted thread has left; the caller has the lock."""
        if self.group:
            self.recover()
        self._shared.clean()

    def recover(self) -> None:
        """Decide a group that an interrupted thread has left; if its outcome is not known, its batches wait again."""
        if (outcome := self._writer.outcome()) is not None:
            self._decide(outcome.verdicts)
            return
        self._writer.roll_back()
        for left in reversed(self.group):
            if left in self.waiting:
                self.waiting.remove(left)
            if left.verdict is None:
                self.waiting.appendleft(left)
        self.group.clear()

    def _wake(self, decided: WaitingBatch | None) -> None:
        """Wake the thread of a decided batch, which wakes the next one; after the last one, the next leader."""
        while decided is not None:
            decided.wake()
            if not decided.is_withdrawn:
                return
            decided = decided.next  # the thread of a withdrawn batch may be gone
        self._hand_on()

    def _hand_on(self) -> None:
        """Let the thread whose batch waits longest commit the next group."""
        # First of all: a thread that adds its batch from now on either leads by itself, or is found below.
        self._is_led = False
        for waiting in self.waiting.copy():
            self._is_led = True  # before the check: a thread whose batch is decided by then waits for no one
            if waiting.verdict is None and not waiting.is_withdrawn:
                waiting.wake()
                return
            self._is_led = False

    def _commit_next(self) -> Outcome | None:
        shared = self._shared
        if shared.is_in_use:
            self.clean()
        shared.end_reading()
        shared.is_in_use = self._is_committing = True
        try:
            self._gather()
            group = [waiting.batch for waiting in self.group]
            if not group:
                return None
            try:
                outcome = self._writer.attempt(group)
            except Exception as error:
                if _is_of_a_handler(error):
                    raise
                failure, fails_whole_group = self._writer.failure(error)
                if not fails_whole_group and len(group) > 1:
                    self._alone = len(group)
                    self.recover()
                    return None
                if fails_whole_group:  # others would fail, too, and as one group they wait for a lock together
                    self._alone = 0
                if not isinstance(failure, CommitUnknown):  # `recover` finds that one if a handler raises now
                    self._writer.roll_back()
                outcome = failed(group, failure, self._writer.last_version)
            self._decide(outcome.verdicts)
            self.finished()
            return outcome
        except BaseException:
            self.recover()
            raise
        finally:
            self._is_committing = False
            if not self.group:
                shared.is_in_use = False

    def _gather(self) -> None:
        """Move waiting batches into the group. At any time, each is in one of the two, or for a moment in both."""
        operations = size = 0
        waiting, group = self.waiting, self.group
        while waiting and operations < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            first = waiting[0]
            if first.verdict is None and not first.is_withdrawn:
                if group and (self._alone or is_long(first.batch) or is_long(group[0].batch)):
                    break
                group.append(first)
                batch = first.batch
                operations += len(batch.checks) + len(batch.mutations)
                if operations < limits.GROUP_OPERATIONS:
                    size += batch.size
            waiting.popleft()
            if first.is_withdrawn:
                first.wake()
        self._alone = max(0, self._alone - 1)

    def _decide(self, verdicts: Sequence[Verdict | None]) -> None:
        group = self.group
        for one, following in pairwise(group):
            one.next = following
        for decided, verdict in zip(group, verdicts, strict=True):
            decided.verdict = verdict
        self._wake(group[0])
        self._writer.roll_back()  # no transaction is open: this forgets the group
        group.clear()
