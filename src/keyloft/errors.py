"""Every error that Keyloft raises, each with a stable code.

    KeyloftError                         INTERNAL_ERROR     a defect of Keyloft
    ├── InvalidInput (ValueError)        VALIDATION_ERROR   refused before anything was written
    │   ├── InvalidArgument              VALIDATION_ERROR   an argument is out of range, or contradicts another
    │   │   ├── InvalidCursor            INVALID_CURSOR     a cursor of another list, or no cursor at all
    │   │   └── NotEmpty                 NOT_EMPTY          a restore would replace what is stored
    │   ├── InvalidJson                  INVALID_JSON       a request is not JSON
    │   ├── MissingField                 MISSING_FIELD      a request lacks a required field
    │   ├── InvalidPluginName            INVALID_PLUGIN_NAME
    │   ├── InvalidSubject               INVALID_SUBJECT    a request was sent to a subject without a meaning
    │   ├── InvalidKey                   INVALID_KEY
    │   │   ├── InvalidKeyType           INVALID_KEY        (also a TypeError)
    │   │   └── KeyTooLarge              KEY_TOO_LARGE
    │   ├── InvalidValue                 INVALID_VALUE      would not come back equal
    │   │   ├── InvalidValueType         INVALID_VALUE      (also a TypeError)
    │   │   └── ValueTooLarge            VALUE_TOO_LARGE
    │   └── NotForward                   NOT_FORWARD        a checkpoint only moves forward
    ├── NotACounter (TypeError)          NOT_A_COUNTER      sum, add, min or max met a value that it can't count with
    ├── CounterOutOfRange (ValueError)   COUNTER_OUT_OF_RANGE  a U64 would leave its range
    ├── QuotaExceeded                    QUOTA_EXCEEDED     a plugin would store more than it may
    ├── ReplyTooLarge                    REPLY_TOO_LARGE    a reply does not fit into one message with others
    ├── HistoryGone                      HISTORY_GONE       the change log no longer reaches back so far
    ├── WatchExpired                     WATCH_EXPIRED      a watch over NATS was not renewed in time
    ├── Undecodable                      UNDECODABLE        stored bytes are not a key or value of Keyloft
    ├── WrongType (TypeError)            WRONG_TYPE         a stored value does not fit the type it was read with
    ├── Closed                           CLOSED             used after aclose()
    ├── WrongLoop (RuntimeError)         WRONG_LOOP         used from another event loop or thread
    ├── ReentrantCall (RuntimeError)     REENTRANT_CALL     a signal's handler used a store that it has interrupted
    ├── AlreadyExists                    ALREADY_EXISTS     an import or copy met another entry at the same key
    ├── VersionConflict                  VERSION_CONFLICT   the stored version is not the expected one
    ├── StaleFence                       STALE_FENCE        the lock of this fencing token is no longer held
    ├── NothingToRestore (LookupError)   NOTHING_TO_RESTORE nothing was deleted here, or too long ago
    ├── LockHeld (TimeoutError)          LOCK_HELD          another holder kept the lock for the whole wait
    ├── LockLost                         LOCK_LOST          the lock was lost while its holder was working
    ├── Escalated                        ESCALATED          retries did not help; the intent is a dead letter
    ├── IncompatibleLibrary              INCOMPATIBLE_LIBRARY  an installed library lacks what Keyloft uses
    ├── TransferFailed                   TRANSFER_FAILED    an import or a copy is incomplete
    ├── NatsServerFailed                 NATS_SERVER_FAILED the nats-server that Keyloft starts does not run
    ├── AnotherStore                     ANOTHER_STORE      services of the queue group serve another database
    ├── Unanswered (ConnectionError)     UNANSWERED         a request over NATS got no reply
    │   ├── NoService                    NO_SERVICE         no service listens on this subject
    │   ├── NotPermitted                 NOT_PERMITTED      NATS, or a service over HTTP, refused the request
    │   └── TimedOut (TimeoutError)      TIMED_OUT          the request may have been carried out, or not
    └── DatabaseError                    DATABASE_ERROR     the database failed
        ├── CannotOpen                   CANNOT_OPEN        (also raised by migrations, as CannotMigrate)
        ├── NotADatabase                 NOT_A_DATABASE
        ├── SchemaTooNew                 SCHEMA_TOO_NEW
        ├── SchemaTooOld                 SCHEMA_TOO_OLD     run `keyloft migrate`
        ├── ReadOnly                     READ_ONLY
        ├── DiskFull                     DISK_FULL
        ├── Unreachable                  UNREACHABLE        its server does not answer; nothing was written, retry
        ├── CommitUnknown                COMMIT_UNKNOWN     the connection was lost during a commit
        ├── Stalled                      STALLED            the database did not answer in time
        ├── ClockSetBack                 CLOCK_SET_BACK     the last commit lies far in the future of this clock
        └── Busy                         BUSY               retry later

Messages name arguments, keys, sizes, files, limits and, to locate a problem inside a value, field names; never a value.
"""

import copyreg
from typing import Any, ClassVar, Final

# Written out, in a form that type checkers follow.
__all__ = ["InvalidArgument", "InvalidCursor", "InvalidInput", "InvalidJson", "InvalidKey", "KeyloftError"]
__all__ += ["Closed", "InvalidKeyType", "NotACounter", "Undecodable", "ValueTooLarge", "WrongLoop"]
__all__ += ["InvalidPluginName", "InvalidSubject", "InvalidValue", "InvalidValueType", "KeyTooLarge", "MissingField"]
__all__ += ["Escalated", "LockHeld", "LockLost", "NotForward", "NothingToRestore", "StaleFence", "VersionConflict"]
__all__ += ["IncompatibleLibrary", "NatsServerFailed", "NoService", "NotPermitted", "TimedOut", "Unanswered"]
__all__ += ["CannotOpen", "DatabaseError", "NotADatabase", "ReadOnly", "SchemaTooNew", "SchemaTooOld"]
__all__ += ["AlreadyExists", "AnotherStore", "Busy", "CommitUnknown", "DiskFull", "NotEmpty"]
__all__ += ["Stalled", "TransferFailed", "Unreachable"]
__all__ += ["ClockSetBack", "CounterOutOfRange", "HistoryGone", "QuotaExceeded", "ReplyTooLarge", "WatchExpired"]
__all__ += ["ReentrantCall", "WrongType"]

CLOSED: Final = "this store is closed: open it again"
AT_EXIT: Final = (
    "the interpreter is ending, and its other threads have stopped where they were; nothing was done: use and close "
    "stores before, by `with` or a function of `atexit`"
)


class KeyloftError(Exception):
    """The base of all errors of Keyloft."""

    code: ClassVar[str] = "INTERNAL_ERROR"

    failed_request: Any = None
    """The write request of the semantic store that failed, for the dead letter of a retry policy that gives up."""

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled between processes; many are not made from their message alone, so `__init__` is not called.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InvalidInput(KeyloftError, ValueError, code="VALIDATION_ERROR"):
    """An argument can't be used; nothing was written."""


class InvalidArgument(InvalidInput):
    """An argument is out of range, or contradicts another."""


class InvalidCursor(InvalidArgument, code="INVALID_CURSOR"):
    """The cursor belongs to a list with another prefix, start, end or direction, or is no cursor."""


class NotEmpty(InvalidArgument, code="NOT_EMPTY"):
    """A restore would replace what a database holds, and was not allowed to; nothing was changed."""

    def __init__(self, database: str, rows: int, backup_rows: int) -> None:
        super().__init__(
            f"{database} holds {rows:,} row{'' if rows == 1 else 's'}, which would be lost, and is left as it is: "
            "restore into another database, or pass replace=True"
        )
        self.database = database
        self.rows = rows
        self.backup_rows = backup_rows


class InvalidJson(InvalidInput, code="INVALID_JSON"):
    """A request is not JSON."""


class MissingField(InvalidInput, code="MISSING_FIELD"):
    """A request lacks a required field."""


class InvalidPluginName(InvalidInput, code="INVALID_PLUGIN_NAME"):
    """No plugin can have this name."""


class InvalidSubject(InvalidInput, code="INVALID_SUBJECT"):
    """A request was sent to a subject without a meaning."""


class InvalidKey(InvalidInput, code="INVALID_KEY"):
    """The key can't be stored."""


class InvalidKeyType(InvalidKey, TypeError):
    """The key, or one of its parts, has a type that keys can't have."""


class KeyTooLarge(InvalidKey, code="KEY_TOO_LARGE"):
    """The key's byte encoding is over the limit."""


class InvalidValue(InvalidInput, code="INVALID_VALUE"):
    """The value would not come back equal to what was passed in."""


class InvalidValueType(InvalidValue, TypeError):
    """The value holds an object of a type that can't be stored."""


class ValueTooLarge(InvalidValue, code="VALUE_TOO_LARGE"):
    """The stored form of the value is over the limit."""

    def __init__(self, size: int | None, limit: int | None, message: str | None = None) -> None:
        """`size` and `limit` are None where a service reported both in its message only."""
        if message is None and limit is not None:
            message = f"value size exceeds {_unit(limit)} limit: {size:,} bytes as stored, {limit:,} allowed"
        super().__init__(message)
        self.size = size
        self.limit = limit


def _unit(size: int) -> str:
    for unit, power in ((" MiB", 2**20), ("KB", 2**10)):  # the plugins' API spells 64 KiB «64KB»
        if size % power == 0:
            return f"{size // power}{unit}"
    return f"{size:,}-byte"


class NotACounter(KeyloftError, TypeError, code="NOT_A_COUNTER"):
    """A counter operation met a stored value that it can't count with; nothing of its batch was written."""

    def __init__(self, key: Any, *, takes_json: bool = False, message: str | None = None) -> None:
        """`key` is None where a service reported it in its message only."""
        cure = "create the counter with set(key, U64(…)), or by the first sum"
        rule = f"a U64 counter; nothing of this batch was written: {cure}"
        if takes_json:
            rule = "an integer, or is too long to add to; nothing was written: use another key"
        super().__init__(message or f"the value at {key!r} is not {rule}")
        self.key = key
        self._takes_json = takes_json

    def at(self, key: Any) -> "NotACounter":
        """The same error, with the key as its caller wrote it."""
        return NotACounter(key, takes_json=self._takes_json)


class CounterOutOfRange(KeyloftError, ValueError, code="COUNTER_OUT_OF_RANGE"):
    """An addition would take a U64 below 0 or above 2**64 - 1; nothing of its batch was written."""

    def __init__(self, key: Any) -> None:
        super().__init__(
            f"the U64 counter at {key!r} would leave the range 0 to 2**64 - 1; nothing of this batch was written"
        )
        self.key = key

    def at(self, key: Any) -> "CounterOutOfRange":
        """The same error, with the key as its caller wrote it."""
        return CounterOutOfRange(key)


class QuotaExceeded(KeyloftError, code="QUOTA_EXCEEDED"):
    """With this write, a plugin would store more than it may; nothing was written."""

    def __init__(self, message: str, actual: int | None = None, limit: int | None = None) -> None:
        """`actual` and `limit`, of keys or bytes, are None where a service reported both in its message only."""
        super().__init__(message)
        self.actual = actual
        self.limit = limit


class ReplyTooLarge(KeyloftError, code="REPLY_TOO_LARGE"):
    """The reply does not fit into one message, alone or with those to other requests; the message says what to do."""


class HistoryGone(KeyloftError, code="HISTORY_GONE"):
    """The change log no longer holds, or never held, what was asked for: list the entries, then watch again."""

    def __init__(self, version: int = 0, oldest: int = 0, latest: int = 0, message: str | None = None) -> None:
        """`message` alone for an error that another process has reported."""
        cure = "list the entries, then watch again from now"
        if message is None and version > latest:
            why = f"version {version} is above the last one, {latest}: it is of another database, or was never given"
            message = f"{why}; {cure}"
        elif message is None and version >= oldest:
            why = f"version {version} was given by another database, or by a primary that a failover has replaced"
            message = f"{why}; {cure}"
        elif message is None:
            why = (
                f"the change log begins with version {oldest}, what changed after version {version} is no longer known"
            )
            message = f"{why}; {cure}"
        super().__init__(message)
        self.version = version
        self.latest = latest


class WatchExpired(KeyloftError, code="WATCH_EXPIRED"):
    """A watch over NATS has ended, or its client has not renewed it in time."""


class Undecodable(KeyloftError, code="UNDECODABLE"):
    """Stored bytes are not a key or value that Keyloft wrote."""


class WrongType(KeyloftError, TypeError, code="WRONG_TYPE"):
    """A stored value does not fit the type that it was to be read with; without a type it can be read."""


class Closed(KeyloftError, code="CLOSED"):
    """The store was used after `aclose()`."""

    def __init__(self, message: str = CLOSED) -> None:
        super().__init__(message)


class WrongLoop(KeyloftError, RuntimeError, code="WRONG_LOOP"):
    """The store was used from another event loop, or another thread, than the one it was opened in."""

    def __init__(
        self,
        message: str = "this store was opened in another event loop: call asyncio.run once for the whole program, or "
        "open a store in this loop; threads use keyloft.open_sync(…), or hand the coroutine to the store's own loop "
        "with asyncio.run_coroutine_threadsafe(kv.get(…), loop)",
    ) -> None:
        super().__init__(message)


class ReentrantCall(KeyloftError, RuntimeError, code="REENTRANT_CALL"):
    """A signal's handler, a `__del__` or a callback used a store in the middle of another call of its thread."""

    def __init__(
        self,
        message: str = "this thread is in the middle of another call of this store, which a signal's handler or a "
        "__del__ has interrupted, so that the two would wait for each other; nothing was done: let the handler set a "
        "flag or raise, and use the store afterwards, or hand the call to another thread",
    ) -> None:
        super().__init__(message)


class AlreadyExists(KeyloftError, code="ALREADY_EXISTS"):
    """An import or a copy met another entry at the same key, and was not asked to keep or replace it."""

    def __init__(self, space: Any, key: Any) -> None:
        super().__init__("another entry is stored at that key")
        self.space = space
        self.key = key


class _RefusedWrite(Exception):
    """What a refused write carries."""

    def __init__(
        self, message: str, *, current: Any = None, conflicts: tuple[Any, ...] = (), correlation_id: str | None = None
    ) -> None:
        """A write of one key carries the entry stored now; a batch carries every key whose check failed.

        Args:
            message: What was expected, and what is stored.
            current: The `Envelope` that is stored now, or None. For a batch, that of the first failed key.
            conflicts: A `FailedWrite` for each failed key.
            correlation_id: The id of this conflict in the log and the audit trail.
        """
        super().__init__(message)
        self.current = current
        self.conflicts = conflicts
        self.correlation_id = correlation_id


class VersionConflict(_RefusedWrite, KeyloftError, code="VERSION_CONFLICT"):
    """The stored version is not the expected one; nothing was written. `current` is what is stored."""


class StaleFence(_RefusedWrite, KeyloftError, code="STALE_FENCE"):
    """The lock of this fencing token is no longer held by its holder; nothing was written."""


class NothingToRestore(KeyloftError, LookupError, code="NOTHING_TO_RESTORE"):
    """Nothing was deleted or has expired at this key, or too long ago."""


class NotForward(InvalidInput, code="NOT_FORWARD"):
    """A checkpoint only moves forward, and the given position is its current one or lies before it."""


class LockHeld(KeyloftError, TimeoutError, code="LOCK_HELD"):
    """Another holder kept the lock for the whole time that was waited."""


class LockLost(KeyloftError, code="LOCK_LOST"):
    """The lock expired or was released by an operator while its holder worked; writes with its fence are refused."""


class Escalated(KeyloftError, code="ESCALATED"):
    """A write failed at every attempt; `__cause__` is the last failure."""

    def __init__(self, message: str, dead_letter: str | None = None) -> None:
        """`dead_letter` is the id of the stored intent; None if there was none, or it could not be stored."""
        super().__init__(message)
        self.dead_letter = dead_letter


class IncompatibleLibrary(KeyloftError, code="INCOMPATIBLE_LIBRARY"):
    """An installed library lacks something that Keyloft uses; the message names it, and the versions that work."""


class TransferFailed(KeyloftError, code="TRANSFER_FAILED"):
    """An import or a copy ended early, or what arrived is not what was sent; `result` says what was stored."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NatsServerFailed(KeyloftError, code="NATS_SERVER_FAILED"):
    """The nats-server that Keyloft starts itself could not be started, or stopped."""


class AnotherStore(KeyloftError, code="ANOTHER_STORE"):
    """Services of the same queue group serve another database; this one does not join them."""


class Unanswered(KeyloftError, ConnectionError, code="UNANSWERED"):
    """A request over NATS got no reply."""


class NoService(Unanswered, code="NO_SERVICE"):
    """No service listens on the subject of the request."""


class NotPermitted(Unanswered, code="NOT_PERMITTED"):
    """NATS refused the request, or the delivery of its reply; or a service over HTTP refused the token."""

    is_out_of_scope: bool = False
    """Whether a service over HTTP knows the token, which may not do this one thing."""


class TimedOut(Unanswered, TimeoutError, code="TIMED_OUT"):
    """No reply arrived in time; the request may have been carried out, or not."""


class DatabaseError(KeyloftError, code="DATABASE_ERROR"):
    """The database failed; what was acknowledged before is safe."""

    is_for_callers: bool = False
    """Whether a service sends the message to its callers, too: it names neither hosts nor files."""


class CannotOpen(DatabaseError, code="CANNOT_OPEN"):
    """The database can't be opened: a wrong path or URL, or a missing permission."""


class NotADatabase(DatabaseError, code="NOT_A_DATABASE"):
    """The file is not an SQLite database, or the URL of a server names a place without a store."""


class SchemaTooNew(DatabaseError, code="SCHEMA_TOO_NEW"):
    """A later version of Keyloft wrote this database."""


class SchemaTooOld(DatabaseError, code="SCHEMA_TOO_OLD"):
    """An earlier version of Keyloft wrote this database: run `keyloft migrate`."""


class ReadOnly(DatabaseError, code="READ_ONLY"):
    """The database can't be written."""


class DiskFull(DatabaseError, code="DISK_FULL"):
    """No space is left; writes work again once there is some."""


class Unreachable(DatabaseError, code="UNREACHABLE"):
    """The database server can't be reached; nothing was written, and the call can be repeated."""


class CommitUnknown(DatabaseError, code="COMMIT_UNKNOWN"):
    """The connection was lost, or the disk failed, in a commit: it was made whole or not at all. Read to find out."""


class ClockSetBack(DatabaseError, code="CLOCK_SET_BACK"):
    """The last commit is more than five minutes ahead of the database's clock; nothing was written."""


class Stalled(DatabaseError, code="STALLED"):
    """The database did not answer in time; the message says whether the request may still be carried out."""

    is_for_callers = True


class Busy(DatabaseError, code="BUSY"):
    """Another writer held the database for too long; nothing was written, and the call can be repeated."""
