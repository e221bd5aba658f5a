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
    ├── NotACounter (TypeError)          NOT_A_COUNTER      sum, min or max met a value that is not a U64
    ├── Undecodable                      UNDECODABLE        stored bytes are not a key or value of Keyloft
    ├── Closed                           CLOSED             used after aclose()
    ├── WrongLoop (RuntimeError)         WRONG_LOOP         used from another event loop or thread
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
    ├── Unanswered (ConnectionError)     UNANSWERED         a request over NATS got no reply
    │   ├── NoService                    NO_SERVICE         no service listens on this subject
    │   ├── NotPermitted                 NOT_PERMITTED      NATS refused the request
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
        └── Busy                         BUSY               retry later

Messages name arguments, keys, sizes, files, limits and, to locate a problem inside a value, field names; never a value.
"""

from typing import Any, ClassVar, Final, Self

__all__ = [
    "AlreadyExists",
    "Busy",
    "CannotOpen",
    "Closed",
    "CommitUnknown",
    "DatabaseError",
    "DiskFull",
    "Escalated",
    "IncompatibleLibrary",
    "InvalidArgument",
    "InvalidCursor",
    "InvalidInput",
    "InvalidJson",
    "InvalidKey",
    "InvalidKeyType",
    "InvalidPluginName",
    "InvalidSubject",
    "InvalidValue",
    "InvalidValueType",
    "KeyTooLarge",
    "KeyloftError",
    "LockHeld",
    "LockLost",
    "MissingField",
    "NatsServerFailed",
    "NoService",
    "NotACounter",
    "NotADatabase",
    "NotEmpty",
    "NotForward",
    "NotPermitted",
    "NothingToRestore",
    "ReadOnly",
    "SchemaTooNew",
    "SchemaTooOld",
    "StaleFence",
    "Stalled",
    "TimedOut",
    "TransferFailed",
    "Unanswered",
    "Undecodable",
    "Unreachable",
    "ValueTooLarge",
    "VersionConflict",
    "WrongLoop",
]

CLOSED: Final = "this store is closed: open it again"


class KeyloftError(Exception):
    """The base of all errors of Keyloft."""

    code: ClassVar[str] = "INTERNAL_ERROR"

    failed_request: Any = None
    """The write request of the semantic store that failed, for the dead letter of a retry policy that gives up."""


class InvalidInput(KeyloftError, ValueError):
    """An argument can't be used; nothing was written."""

    code = "VALIDATION_ERROR"


class InvalidArgument(InvalidInput):
    """An argument is out of range, or contradicts another."""


class InvalidCursor(InvalidArgument):
    """The cursor belongs to a list with another prefix, start, end or direction, or is no cursor."""

    code = "INVALID_CURSOR"


class NotEmpty(InvalidArgument):
    """A restore would replace what a database holds, and was not allowed to; nothing was changed."""

    code = "NOT_EMPTY"

    def __init__(self, database: str, rows: int, backup_rows: int) -> None:
        super().__init__(
            f"{database} holds {rows:,} row{'' if rows == 1 else 's'}, which would be lost, and is left as it is: "
            "restore into another database, or pass replace=True (--replace)"
        )
        self.database = database
        self.rows = rows
        self.backup_rows = backup_rows

    def __reduce__(self) -> tuple[type[Self], tuple[str, int, int]]:
        return type(self), (self.database, self.rows, self.backup_rows)


class InvalidJson(InvalidInput):
    """A request is not JSON."""

    code = "INVALID_JSON"


class MissingField(InvalidInput):
    """A request lacks a required field."""

    code = "MISSING_FIELD"


class InvalidPluginName(InvalidInput):
    """No plugin can have this name."""

    code = "INVALID_PLUGIN_NAME"


class InvalidSubject(InvalidInput):
    """A request was sent to a subject without a meaning."""

    code = "INVALID_SUBJECT"


class InvalidKey(InvalidInput):
    """The key can't be stored."""

    code = "INVALID_KEY"


class InvalidKeyType(InvalidKey, TypeError):
    """The key, or one of its parts, has a type that keys can't have."""


class KeyTooLarge(InvalidKey):
    """The key's byte encoding is over the limit."""

    code = "KEY_TOO_LARGE"


class InvalidValue(InvalidInput):
    """The value would not come back equal to what was passed in."""

    code = "INVALID_VALUE"


class InvalidValueType(InvalidValue, TypeError):
    """The value holds an object of a type that can't be stored."""


class ValueTooLarge(InvalidValue):
    """The stored form of the value is over the limit."""

    code = "VALUE_TOO_LARGE"

    def __init__(self, size: int | None, limit: int | None, message: str | None = None) -> None:
        """`size` and `limit` are None where a service reported both in its message only."""
        if message is None and limit is not None:
            message = f"value size exceeds {_unit(limit)} limit: {size:,} bytes as stored, {limit:,} allowed"
        super().__init__(message)
        self.size = size
        self.limit = limit

    def __reduce__(self) -> tuple[type[Self], tuple[int | None, int | None, str]]:
        return type(self), (self.size, self.limit, str(self))


def _unit(size: int) -> str:
    for unit, power in ((" MiB", 2**20), ("KB", 2**10)):  # the plugins' API spells 64 KiB «64KB»
        if size % power == 0:
            return f"{size // power}{unit}"
    return f"{size:,}-byte"


class NotACounter(KeyloftError, TypeError):
    """`sum`, `min` or `max` met a stored value that is not a U64; nothing of its batch was written."""

    code = "NOT_A_COUNTER"

    def __init__(self, key: Any) -> None:
        super().__init__(
            f"the value at {key!r} is not a U64 counter; nothing of this batch was written: "
            "create the counter with set(key, U64(…)), or by the first sum"
        )
        self.key = key

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        return type(self), (self.key,)


class Undecodable(KeyloftError):
    """Stored bytes are not a key or value that Keyloft wrote."""

    code = "UNDECODABLE"


class Closed(KeyloftError):
    """The store was used after `aclose()`."""

    code = "CLOSED"

    def __init__(self, message: str = CLOSED) -> None:
        super().__init__(message)


class WrongLoop(KeyloftError, RuntimeError):
    """The store was used from another event loop, or another thread, than the one it was opened in."""

    code = "WRONG_LOOP"

    def __init__(
        self,
        message: str = "this store was opened in another event loop: open a store in this one, or hand the coroutine "
        "to the store's own loop with asyncio.run_coroutine_threadsafe(kv.get(…), loop)",
    ) -> None:
        super().__init__(message)


class AlreadyExists(KeyloftError):
    """An import or a copy met another entry at the same key, and was not asked to keep or replace it."""

    code = "ALREADY_EXISTS"

    def __init__(self, space: Any, key: Any) -> None:
        super().__init__("another entry is stored at that key")
        self.space = space
        self.key = key

    def __reduce__(self) -> tuple[type[Self], tuple[Any, Any]]:
        return type(self), (self.space, self.key)


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

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.current, self.conflicts, self.correlation_id)


class VersionConflict(_RefusedWrite, KeyloftError):
    """The stored version is not the expected one; nothing was written. `current` is what is stored."""

    code = "VERSION_CONFLICT"


class StaleFence(_RefusedWrite, KeyloftError):
    """The lock of this fencing token is no longer held by its holder; nothing was written."""

    code = "STALE_FENCE"


def _rebuild(kind: Any, message: str, current: Any, conflicts: tuple[Any, ...], correlation_id: str | None) -> Any:
    return kind(message, current=current, conflicts=conflicts, correlation_id=correlation_id)


class NothingToRestore(KeyloftError, LookupError):
    """Nothing was deleted or has expired at this key, or too long ago."""

    code = "NOTHING_TO_RESTORE"


class NotForward(InvalidInput):
    """A checkpoint only moves forward, and the given position is its current one or lies before it."""

    code = "NOT_FORWARD"


class LockHeld(KeyloftError, TimeoutError):
    """Another holder kept the lock for the whole time that was waited."""

    code = "LOCK_HELD"


class LockLost(KeyloftError):
    """The lock expired or was released by an operator while its holder worked; writes with its fence are refused."""

    code = "LOCK_LOST"


class Escalated(KeyloftError):
    """A write failed at every attempt; `__cause__` is the last failure."""

    code = "ESCALATED"

    def __init__(self, message: str, dead_letter: str | None = None) -> None:
        """`dead_letter` is the id of the stored intent; None if there was none, or it could not be stored."""
        super().__init__(message)
        self.dead_letter = dead_letter

    def __reduce__(self) -> tuple[type[Self], tuple[str, str | None]]:
        return type(self), (str(self), self.dead_letter)


class IncompatibleLibrary(KeyloftError):
    """An installed library lacks something that Keyloft uses; the message names it, and the versions that work."""

    code = "INCOMPATIBLE_LIBRARY"


class TransferFailed(KeyloftError):
    """An import or a copy ended early, or what arrived is not what was sent; `result` says what was stored."""

    code = "TRANSFER_FAILED"

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[type[Self], tuple[str, Any]]:
        return type(self), (str(self), self.result)


class NatsServerFailed(KeyloftError):
    """The nats-server that Keyloft starts itself could not be started, or stopped."""

    code = "NATS_SERVER_FAILED"


class Unanswered(KeyloftError, ConnectionError):
    """A request over NATS got no reply."""

    code = "UNANSWERED"


class NoService(Unanswered):
    """No service listens on the subject of the request."""

    code = "NO_SERVICE"


class NotPermitted(Unanswered):
    """NATS refused the request, or the delivery of its reply."""

    code = "NOT_PERMITTED"


class TimedOut(Unanswered, TimeoutError):
    """No reply arrived in time; the request may have been carried out, or not."""

    code = "TIMED_OUT"


class DatabaseError(KeyloftError):
    """The database failed; what was acknowledged before is safe."""

    code = "DATABASE_ERROR"


class CannotOpen(DatabaseError):
    """The database can't be opened: a wrong path or URL, or a missing permission."""

    code = "CANNOT_OPEN"


class NotADatabase(DatabaseError):
    """The file exists and is not an SQLite database."""

    code = "NOT_A_DATABASE"


class SchemaTooNew(DatabaseError):
    """A later version of Keyloft wrote this database."""

    code = "SCHEMA_TOO_NEW"


class SchemaTooOld(DatabaseError):
    """An earlier version of Keyloft wrote this database: run `keyloft migrate`."""

    code = "SCHEMA_TOO_OLD"


class ReadOnly(DatabaseError):
    """The database can't be written."""

    code = "READ_ONLY"


class DiskFull(DatabaseError):
    """No space is left; writes work again once there is some."""

    code = "DISK_FULL"


class Unreachable(DatabaseError):
    """The database server can't be reached; nothing was written, and the call can be repeated."""

    code = "UNREACHABLE"


class CommitUnknown(DatabaseError):
    """The connection was lost during a commit: all of the batch was written, or nothing. Read to find out."""

    code = "COMMIT_UNKNOWN"


class Stalled(DatabaseError):
    """The database did not answer in time; the message says whether the request may still be carried out."""

    code = "STALLED"


class Busy(DatabaseError):
    """Another writer held the database for too long; nothing was written, and the call can be repeated."""

    code = "BUSY"
