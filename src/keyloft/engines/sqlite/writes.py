"""Commits groups of batches to an SQLite file, each group in one transaction."""

import contextlib
import logging
import math
from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Final

import apsw
from msgspec import Struct

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.records import Batch, LoggedChange, Set, Space
from keyloft.core.schema import Row
from keyloft.core.slices import give_way
from keyloft.engines import change_log
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.long_batches import GatheredVerdict, divided, is_long
from keyloft.engines.commit.outcomes import Outcome, committed, failed, joined
from keyloft.engines.sqlite.errors import FAILS_WHOLE_GROUP, OF_SQLITE, is_unknown_commit, unknown_commit
from keyloft.engines.sqlite.expected import NotAsExpected, replaced_version
from keyloft.engines.sqlite.file import SqliteFile, busy_handler
from keyloft.engines.sqlite.group_rows import TakesTooLong, check_time, settle_and_write
from keyloft.engines.sqlite.inherited import lock_of
from keyloft.engines.sqlite.log import last_logged, last_to_follow
from keyloft.engines.sqlite.lone_callers import sync_times
from keyloft.engines.sqlite.plain_sets import PUT, is_plain, outcome_of_set, plain_sets, write_sets
from keyloft.engines.sqlite.rows import put_rows
from keyloft.engines.sqlite.tables import LAYOUTS, LOG, SECOND_LOGGED, TRIM_LOG, bind_set
from keyloft.engines.sqlite.uncommitted import UncommittedGroup
from keyloft.engines.sqlite.wal import restarts_log
from keyloft.errors import CommitUnknown, DatabaseError

logger = logging.getLogger(__name__)
_TUPLES: Final = Space.TUPLES  # a shorter way: on Python 3.11, looking up a member of an enum is slow
_PUT_TUPLE: Final = LAYOUTS[_TUPLES].put


class _Failure(Struct, frozen=True):
    """Why a group was not committed."""

    error: DatabaseError
    fails_whole_group: bool
    """Whether each of its batches would fail in the same way alone."""


class SqliteWriter:
    """Commits groups on the writing connection, which its owner lends to one thread at a time."""

    def __init__(self, file: SqliteFile, clock: Clock, connection: apsw.Connection, history: KeptHistory) -> None:
        self._file = file
        self._history = history
        self._clock = clock
        self.connection = connection
        self._cursor = connection.cursor()
        self._check_place = file.place_check(connection)
        self.last_version = self.last_commit_at = 0
        """The version and the time of the last commit, by any process, that is known here; 0 if none is known."""
        with contextlib.suppress(*OF_SQLITE, DatabaseError):  # the first read or write reports what is wrong
            self.last_version, self.last_commit_at, _ = last_logged(self._cursor)
        self._newest_logged = (-1, 0, 0, 0)
        """SQLite's data version after the last commit of this connection, and what `last_logged` would return then. The
        data version changes with commits of this connection, too, so after an interrupted commit the log is read."""
        self._begun: UncommittedGroup | None = None
        """The group that `try_begin` or `attempt` has written."""
        self._failed: tuple[UncommittedGroup, apsw.Error] | None = None
        """Such a group whose COMMIT failed, and the error."""
        self.sync_times = sync_times(None if file.in_memory else file.path)
        self._gives_up_at = math.inf
        """Until when to wait for other processes' locks, by the monotonic clock."""
        self.wait_for_lock = busy_handler(lambda: monotonic() > self._gives_up_at)
        self.allow_spill(False)

    def give_up_soon(self) -> None:
        """From now on, wait for other processes' locks only a little longer in all, because the engine closes."""
        self._gives_up_at = monotonic() + limits.CLOSING_LOCK_SECONDS

    def try_begin(self, group: list[Batch]) -> bool:
        """Write a group up to COMMIT, on the event loop: without waiting for a lock, in a millisecond at most.

        Returns whether that worked. Otherwise nothing is left behind: `commit` waits, or finds the error.
        """
        try:
            restarts = restarts_log(self.connection)
            self._begun = self._begin(group, perf_counter() + limits.INLINE_SECONDS, restarts)
        except (*OF_SQLITE, DatabaseError, TakesTooLong):
            self.roll_back()
            return False
        return True

    def try_end(self) -> None:
        """Commit the group that `try_begin` has written, on the event loop.

        If that fails, nothing is left behind, and `commit` tries it again. Only if the commit may be found after a
        crash, it is not tried again: a second error would say that nothing was written. So that is its outcome.

        A group whose commit restarts the write-ahead log is not committed here, because that takes longer.
        """
        assert self._begun is not None
        if self._begun.restarts_log:
            return
        try:
            self._end(self._begun)
        except CommitUnknown:
            pass  # `take_outcome` returns it
        except apsw.Error:
            self.roll_back()

    def take_outcome(self) -> Outcome | None:
        """The outcome of a group that was decided on the event loop, or None if none was.

        If a signal's handler raised there, SQLite has committed, COMMIT has failed, or the transaction is still open.
        """
        outcome = self.outcome()
        if self._failed is not None:
            self.roll_back()
        elif outcome is not None:
            self._begun = None
        return outcome

    def outcome(self) -> Outcome | None:
        """The outcome that `take_outcome` would return, without forgetting the group."""
        if self._failed is not None:
            group, error = self._failed
            if not is_unknown_commit(error):
                return None
            return failed(group.outcome.verdicts, self._unknown(error), self.last_version)
        if self._begun is None or self.connection.in_transaction:
            return None
        return self._note(self._begun)

    def commit(self, group: list[Batch]) -> Outcome:
        """Commit a group on the thread, perhaps one that `try_begin` has written; wait for other processes' locks.

        This never raises: an error is part of the outcome.
        """
        begun = self._begun if self.connection.in_transaction else None
        if begun is not None:
            self._begun = None
            decided = self._try(group, begun)
        else:
            decided = self._wait_and_try(group)
        if isinstance(decided, Outcome):
            return decided
        if decided.fails_whole_group or len(group) == 1:
            return failed(group, decided.error, self.last_version)
        return self._commit_one_by_one(group)

    def _commit_one_by_one(self, group: list[Batch]) -> Outcome:
        """Commit batches of which one may have made the group fail.

        After a failure that each of the others would meet, too, they get it without being tried: to wait for another
        process's lock takes long.
        """
        outcomes: list[Outcome] = []
        for position, batch in enumerate(group):
            decided = self._wait_and_try([batch])
            if isinstance(decided, Outcome):
                outcomes.append(decided)
            elif decided.fails_whole_group:
                outcomes.append(failed(group[position:], decided.error, self.last_version))
                break
            else:
                outcomes.append(failed([batch], decided.error, self.last_version))
        return joined(outcomes)

    def _wait_and_try(self, group: list[Batch]) -> Outcome | _Failure:
        """Try to commit a group, and wait for other processes' locks."""
        self.roll_back()  # a signal's handler that raised may have left a transaction open
        # Adding up the sizes of a long batch takes milliseconds, and the event loop may have to wait for this thread.
        is_large = is_long(group[0]) or sum([batch.size for batch in group]) > limits.INLINE_BYTES
        self.connection.set_busy_handler(self.wait_for_lock)
        if is_large:
            self.allow_spill(True)
        try:
            return self._try(group)
        finally:
            self.connection.set_busy_handler(None)
            if is_large:
                self.allow_spill(False)

    def _try(self, group: list[Batch], begun: UncommittedGroup | None = None) -> Outcome | _Failure:
        try:
            begun = begun or self._begin(group, restarts=restarts_log(self.connection))
            self._end(begun)
            return self._note(begun)
        except BaseException as error:  # nothing else on this thread would catch it, and all callers would wait
            failure = _Failure(*self.failure(error))
        self.roll_back()
        return failure

    def attempt(self, group: list[Batch]) -> Outcome:
        """Commit a group, and raise what goes wrong, for a caller on its own thread.

        After an exception, which may be a signal handler's, `outcome` says whether the group was committed. In any
        case, the caller then calls `roll_back`, which forgets the group.
        """
        self._begun = self._begin(group)
        self._commit(self._begun)
        return self._note(self._begun)

    def attempt_alone(self, batch: Batch) -> Outcome:
        """Commit one batch whose caller is on this thread; after an exception, the caller only has to call `roll_back`.

        Whether the batch was committed need not be known then, because its own caller gets the exception.
        """
        begun = self._begin([batch])
        self._commit(begun)
        return self._note(begun)

    def attempt_set(self, only: Set) -> Outcome:
        """What `attempt_alone` does, for a batch of only a plain Set."""
        if only.space is not _TUPLES:
            return self.attempt_alone(Batch((only,)))
        return outcome_of_set(_TUPLES, only.key, *self.set_alone(only.key, only.value, only.encoding))

    def set_alone(self, key: bytes, value: bytes, encoding: int) -> tuple[int, int]:
        """Commit a plain Set of the tuple store, as `attempt_alone` would; returns its version and its time.

        All steps are in this function, and it makes none of the objects of a batch and a group: after a sync, the
        processor's caches are cold, and each function and each object takes up to a microsecond (ADR 18).
        """
        connection, cursor = self.connection, self._cursor
        # As in `_begin_transaction`.
        cursor.execute("BEGIN IMMEDIATE")
        self._check_place()
        data_version, before, last_commit, log_size = self._newest_logged
        if connection.data_version() != data_version:
            before, last_commit, log_size = last_to_follow(cursor)
        now = self._clock.now()
        if now < last_commit:
            now = change_log.commit_time(now, last_commit, self._file.path)
        # As in `_begin_set`.
        version = before + 1
        bindings = bind_set(key, value, encoding, version, now)
        cursor.execute(_PUT_TUPLE, bindings)
        if not connection.changes():  # a large value is stored there
            put_rows(cursor, LAYOUTS[_TUPLES], [bindings])
        packed = change_log.pack_one(_TUPLES, PUT, key)
        log_size += len(packed)
        cursor.execute(LOG, (version, 0, before, now, log_size, packed))
        if version % limits.TRIM_EVERY == 0:
            self._trim_log(now, log_size)
        try:
            cursor.execute("COMMIT")
        except apsw.Error as error:
            if is_unknown_commit(error):
                raise self._unknown(error) from error
            raise
        self._newest_logged = connection.data_version(), version, now, log_size
        self.last_version, self.last_commit_at = version, now
        return version, now

    def _begin_set(self, wanted: Set, replaced: int | None, deadline: float, restarts: bool) -> UncommittedGroup:
        """What `_begin_group` does with a plain Set, without steps that a plain Set does not need.

        It takes three quarters of the time (`scripts/bench peers`, rows «sync-set» and «sync-check-and-set»). Given a
        version to replace, it raises NotAsExpected if another one is stored, or a large value.
        """
        before, now, log_size = self._begin_transaction()
        version, cursor = before + 1, self._cursor
        space, key = wanted.space, wanted.key
        layout = LAYOUTS[space]
        bindings = bind_set(key, wanted.value, wanted.encoding, version, now)
        if perf_counter() > deadline:
            raise TakesTooLong
        if replaced is not None:
            cursor.execute(layout.replace_expected, (*bindings, replaced))
            if not self.connection.changes():
                raise NotAsExpected
        else:
            cursor.execute(layout.put, bindings)
            if not self.connection.changes():  # a large value is stored there
                put_rows(cursor, layout, [bindings])
        packed = change_log.pack_one(space, PUT, key)
        log_size += len(packed)
        cursor.execute(LOG, (version, 0, before, now, log_size, packed))
        if version % limits.TRIM_EVERY == 0:
            self._trim_log(now, log_size)
        return UncommittedGroup(outcome_of_set(space, key, version, now), now, True, True, log_size, restarts)

    def failure(self, error: BaseException) -> tuple[DatabaseError, bool]:
        """The error for the callers of a group, and whether each of its batches would fail in the same way alone."""
        if isinstance(error, DatabaseError):
            return error, True
        if isinstance(error, OF_SQLITE):
            failure = self._file.explain(error, self.connection)
        else:
            failure = DatabaseError(f"{self._file.path}: a write failed unexpectedly: {type(error).__name__}")
        failure.__cause__ = error
        return failure, isinstance(error, FAILS_WHOLE_GROUP)

    def _begin(self, group: list[Batch], deadline: float = math.inf, restarts: bool = False) -> UncommittedGroup:
        first = group[0]
        try:
            if len(group) == len(first.mutations) == 1 and is_plain(only := first.mutations[0]):
                replaced = replaced_version(first.checks, only) if first.checks else None
                if replaced is not None or not first.checks:
                    return self._begin_set(only, replaced, deadline, restarts)
            return self._begin_group(group, deadline, restarts, expects_rows=True)
        except NotAsExpected:
            self._cursor.execute("ROLLBACK")
        return self._begin_group(group, deadline, restarts, expects_rows=False)

    def _begin_group(
        self, group: list[Batch], deadline: float, restarts: bool, *, expects_rows: bool
    ) -> UncommittedGroup:
        version, now, log_size = self._begin_transaction()
        if is_long(group[0]):
            return self._begin_long(group[0], version, now, log_size, expects_rows=expects_rows)
        sets = plain_sets(group) if len(group) > 1 else None
        if sets is not None:
            settled = write_sets(self._cursor, sets, version, now, lambda: check_time(deadline))
        else:
            settled = settle_and_write(self._cursor, group, version, now, deadline, expects_rows=expects_rows)
        has_version = settled.version != version
        if has_version:
            log_size, part = self._log(settled.changes, settled.version, version, now, log_size)
            # Also after several parts, so that the log never grows by more rows than are removed.
            if part > 1 or version // limits.TRIM_EVERY != settled.version // limits.TRIM_EVERY:
                self._trim_log(now, log_size)
        is_small = len(sets or settled.writes) <= limits.INLINE_OPERATIONS
        return UncommittedGroup(committed(settled, version), now, has_version, is_small, log_size, restarts)

    def _begin_transaction(self) -> tuple[int, int, int]:
        """The version before the transaction, its time, and the size of the change log."""
        self._cursor.execute("BEGIN IMMEDIATE")
        self._check_place()
        # Within a transaction, SQLite has noticed the commits of all other connections. If there was none since this
        # connection's last commit, the log need not be read (ADR 6).
        data_version, version, last_commit, log_size = self._newest_logged
        if self.connection.data_version() != data_version:
            version, last_commit, log_size = last_to_follow(self._cursor)
        now = self._clock.now()
        if now < last_commit:
            now = change_log.commit_time(now, last_commit, self._file.path)
        return version, now, log_size

    def _begin_long(
        self, batch: Batch, version: int, now: int, log_size: int, *, expects_rows: bool
    ) -> UncommittedGroup:
        gathered, parts = GatheredVerdict(version, now), 0
        for part in divided(batch):
            if gathered.refuses(part):
                break
            settled = settle_and_write(self._cursor, [part], version, now, math.inf, expects_rows=expects_rows)
            gathered.add(settled)
            if settled.changes:
                log_size, parts = self._log(settled.changes, version + 1, version, now, log_size, parts)
            give_way()
        outcome = gathered.outcome()
        has_version = outcome.version_after != version
        if has_version:
            if not parts:
                log_size, _ = self._log((), version + 1, version, now, log_size)
            self._trim_log(now, log_size)
        return UncommittedGroup(outcome, now, has_version, is_small=False, log_size=log_size)

    def _log(
        self, changes: Sequence[LoggedChange], version: int, before: int, now: int, size: int, part: int = 0
    ) -> tuple[int, int]:
        """Log changes from this part on; returns the size of the log, and the number of the next part."""
        for packed in change_log.pack(changes, before):
            size += len(packed)
            self._cursor.execute(LOG, (version, part, before, now, size, packed))
            part += 1
        return size, part

    def _trim_log(self, now: int, size: int) -> None:
        rows: list[Row] = self._cursor.execute(SECOND_LOGGED).fetchall()
        oldest = self._history.oldest_time(now), self._history.oldest_size(size)
        if rows and (rows[0][0] < oldest[0] or rows[0][1] <= oldest[1]):
            self._cursor.execute(TRIM_LOG, (*oldest, limits.TRIM_ROWS))

    def _end(self, begun: UncommittedGroup) -> None:
        began = monotonic()
        self._commit(begun)
        now = monotonic()
        if begun.has_version and begun.is_small:  # a large commit writes for longer than it syncs
            self.sync_times.add(now - began, now, restarted_log=begun.restarts_log)

    def _commit(self, begun: UncommittedGroup) -> None:
        try:
            self._cursor.execute("COMMIT" if begun.has_version else "ROLLBACK")
        except apsw.Error as error:
            # SQLite may have rolled back, which `outcome` must not take for a commit. This comes before any call, in
            # which a signal's handler might raise.
            if self._begun is not None:
                self._failed, self._begun = (self._begun, error), None
            if is_unknown_commit(error):
                raise self._unknown(error) from error
            raise
        if begun.has_version:
            # Now, not later: in the next transaction, even of a read, SQLite may notice another commit.
            newest = begun.outcome.version_after, begun.at, begun.log_size
            self._newest_logged = (self.connection.data_version(), *newest)

    def _unknown(self, error: apsw.Error) -> CommitUnknown:
        unknown = unknown_commit(error, self._file.path)
        unknown.__cause__ = error
        return unknown

    def _note(self, begun: UncommittedGroup) -> Outcome:
        self.last_version = begun.outcome.version_after
        self.last_commit_at = begun.at
        return begun.outcome

    def allow_spill(self, allowed: bool) -> None:
        """Set whether SQLite may write pages to the WAL before COMMIT: only in a large transaction, on the thread."""
        with contextlib.suppress(apsw.Error):  # then the next statement fails, too, and reports it
            self._cursor.execute(f"PRAGMA cache_spill = {int(allowed)}").fetchall()

    def roll_back(self) -> None:
        """End the open transaction, if there is one, and forget its group."""
        self._begun = self._failed = None
        try:
            if self.connection.in_transaction:
                # On the event loop, a commit that failed or was interrupted has released it already.
                with lock_of(self.connection):
                    self._cursor.execute("ROLLBACK")
        except apsw.Error as error:
            logger.error("rolling back failed: %s", self._file.explain(error, self.connection))
