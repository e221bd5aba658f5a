"""Commits groups one after the other: on the event loop if no other task has to wait, else on the thread (ADR 6)."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from time import monotonic

from keyloft import limits
from keyloft.core.records import Batch
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.sqlite.connection import WritingConnection
from keyloft.engines.sqlite.errors import OF_SQLITE
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.lone_callers import LoneCallers
from keyloft.engines.sqlite.plain_sets import is_plain
from keyloft.engines.sqlite.wal import WriteAheadLog, restarts_log
from keyloft.engines.sqlite.writes import SqliteWriter
from keyloft.errors import CommitUnknown, DatabaseError


class CommitStep(StrEnum):
    """The steps of a group that run on the event loop, where a signal's handler may raise."""

    TO_THREAD = "to thread"
    INLINE = "inline"
    FINISHED = "finished"


class SqliteCommits:
    """Decides where a group is written, and where it is committed."""

    def __init__(
        self,
        file: SqliteFile,
        writing: WritingConnection,
        writer: SqliteWriter,
        wal: WriteAheadLog,
        finished: Callable[[Outcome], None],
    ) -> None:
        """`finished` is called with the outcome of each group."""
        self._in_memory = file.in_memory
        self._is_durable = file.durability == "full"
        self._writing = writing
        self._writer = writer
        self._wal = wal
        self._finished = finished
        self.callers: LoneCallers | None = None
        """Which tasks call the engine; None if that makes no difference."""
        if file.sync == "auto" and self._is_durable and not self._in_memory:
            self.callers = LoneCallers()
        self.before_step: Callable[[CommitStep], None] = lambda step: None
        """For tests: called before each step of a group; it may raise, as a signal's handler would."""

    def start(self, group: list[Batch], operations: int, size: int) -> None:
        """Commit a group of this many operations, whose values have this many bytes."""
        if self._in_memory:
            with self._writing.lock:
                committed = self._writer.commit(group)
            self.finish(committed)
            return
        is_small = operations <= limits.INLINE_OPERATIONS and size <= limits.INLINE_BYTES
        try:
            if is_small and not self._writing.is_lent:
                self._writing.view.end()
                may_commit = self._may_commit_here()
                self.before_step(CommitStep.INLINE)
                with self._writing.lock:
                    if self._writer.try_begin(group) and may_commit:
                        self._writer.try_end()
        finally:
            # Also if a signal's handler raised: the callers of this group wait for its outcome.
            outcome = self._writer.take_outcome()
            if outcome is None:
                self.before_step(CommitStep.TO_THREAD)
                self._writing.lend(partial(self._writer.commit, group), self.finish)
            else:
                self.finish(outcome)

    def try_alone(self, batch: Batch, callers: LoneCallers) -> Outcome | None:
        """Commit a plain Set of a lone caller at once; None, and nothing is written, if a group is to commit it.

        If a signal's handler raises, only the caller of this batch gets the exception, and does not learn whether the
        batch was committed.

        Raises:
            CommitUnknown: The disk failed to sync it.
        """
        mutations, writer = batch.mutations, self._writer
        if self._writing.is_lent or len(mutations) != 1 or len(batch.checks) > 1 or not is_plain(only := mutations[0]):
            return None
        began = monotonic()
        if not callers.is_lone(began) or not writer.sync_times.expect_fast(began):
            return None
        self._writing.view.end()
        outcome = None
        try:
            with self._writing.lock:
                if not restarts_log(writer.connection):
                    outcome = writer.attempt_alone(batch) if batch.checks else writer.attempt_set(only)
        except CommitUnknown:
            raise
        except (*OF_SQLITE, DatabaseError):
            return None  # the group waits for the lock, or finds the error
        finally:
            if outcome is None:
                writer.roll_back()
        if outcome is not None:
            now = monotonic()
            if outcome.version_after != outcome.version_before:  # after a conflict, nothing was synced
                writer.sync_times.add(now - began, now)
            self._wal.committed()
        return outcome

    def finish(self, outcome: Outcome) -> None:
        self.before_step(CommitStep.FINISHED)
        self._finished(outcome)
        self._wal.committed()

    def _may_commit_here(self) -> bool:
        """Whether COMMIT takes microseconds, or delays no other task while it syncs."""
        if not self._is_durable:
            return True
        if self.callers is None:
            return False
        now = monotonic()
        return self.callers.is_lone(now) and self._writer.sync_times.expect_fast(now)
