"""Every error that Keyloft raises, each with a stable code.

    KeyloftError
    ├── InvalidInput (ValueError)        refused before anything was written
    │   ├── InvalidArgument              VALIDATION_ERROR   an option is out of range, or two contradict each other
    │   │   └── InvalidCursor            INVALID_CURSOR     a cursor of another list, or no cursor at all
    │   ├── InvalidJson                  INVALID_JSON       a request is not JSON
    │   ├── MissingField                 MISSING_FIELD      a request lacks a field that it needs
    │   ├── InvalidPluginName            INVALID_PLUGIN_NAME
    │   ├── InvalidSubject               INVALID_SUBJECT    a request went to a subject that means nothing
    │   ├── InvalidKey                   INVALID_KEY
    │   │   ├── InvalidKeyType           INVALID_KEY        (also a TypeError)
    │   │   └── KeyTooLarge              KEY_TOO_LARGE
    │   └── InvalidValue                 INVALID_VALUE      would not come back equal
    │       ├── InvalidValueType         INVALID_VALUE      (also a TypeError)
    │       └── ValueTooLarge            VALUE_TOO_LARGE
    ├── NotACounter (TypeError)          NOT_A_COUNTER      sum, min or max met a value that is not a U64
    ├── Undecodable                      UNDECODABLE        what is stored is no key or value of ours
    ├── Closed                           CLOSED             used after aclose()
    ├── WrongLoop (RuntimeError)         WRONG_LOOP         used from another event loop or thread
    ├── VersionConflict                  VERSION_CONFLICT   what is stored is not what was expected; nothing was written
    ├── StaleFence                       STALE_FENCE        the lock of this fencing token is no longer held
    ├── NothingToRestore (LookupError)   NOTHING_TO_RESTORE nothing was deleted here, or too long ago
    ├── NotForward (ValueError)          NOT_FORWARD        a checkpoint was to be moved back
    ├── LockHeld (TimeoutError)          LOCK_HELD          somebody else held a lock for as long as was waited
    ├── LockLost                         LOCK_LOST          a lock was lost while its holder was at work
    ├── Escalated                        ESCALATED          trying again did not help; the intent is a dead letter
    ├── IncompatibleLibrary              INCOMPATIBLE_LIBRARY  a library has changed in a way that Keyloft can't use
    ├── TransferFailed                   TRANSFER_FAILED    an import or a copy ended before its end, or did not arrive
    ├── NatsServerFailed                 NATS_SERVER_FAILED our own nats-server does not run
    ├── Unanswered (ConnectionError)     UNANSWERED         a request over the bus got no answer
    │   ├── NoService                    NO_SERVICE         nobody serves this subject
    │   ├── NotPermitted                 NOT_PERMITTED      the bus refused the request
    │   └── TimedOut (TimeoutError)      TIMED_OUT          it may have been carried out, or not
    └── DatabaseError                    DATABASE_ERROR     the storage below failed
        ├── CannotOpen                   CANNOT_OPEN
        ├── NotADatabase                 NOT_A_DATABASE
        ├── SchemaTooNew                 SCHEMA_TOO_NEW
        ├── SchemaTooOld                 SCHEMA_TOO_OLD     to be migrated
        ├── ReadOnly                     READ_ONLY
        ├── DiskFull                     DISK_FULL
        ├── Unreachable                  UNREACHABLE        its server does not answer: nothing was written, retry
        ├── CommitUnknown                COMMIT_UNKNOWN     it was lost during a commit, which was made or not
        ├── Stalled                      STALLED            it has not answered in time
        └── Busy                         BUSY               retry later

Messages name keys, sizes, files, limits and, to say where in a value something is wrong, its dicts' field names; never
a value.
"""

from typing import Any, ClassVar, Final, Self

CLOSED: Final = "this store is closed: open it again to go on"


class KeyloftError(Exception):
    """The base of all errors of Keyloft."""

    code: ClassVar[str] = "INTERNAL_ERROR"


class InvalidInput(KeyloftError, ValueError):
    """Something that was passed in can't be used; nothing was written."""

    code = "VALIDATION_ERROR"


class InvalidArgument(InvalidInput):
    """An option is out of range, or contradicts another."""


class InvalidCursor(InvalidArgument):
    """The cursor belongs to a list with another prefix, start, end or direction, or is no cursor."""

    code = "INVALID_CURSOR"


class InvalidJson(InvalidInput):
    """A request is not JSON."""

    code = "INVALID_JSON"


class MissingField(InvalidInput):
    """A request lacks a field that it needs."""

    code = "MISSING_FIELD"


class InvalidPluginName(InvalidInput):
    """No plugin can have this name."""

    code = "INVALID_PLUGIN_NAME"


class InvalidSubject(InvalidInput):
    """A request went to a subject that means nothing."""

    code = "INVALID_SUBJECT"


class InvalidKey(InvalidInput):
    """The key can't be stored."""

    code = "INVALID_KEY"


class InvalidKeyType(InvalidKey, TypeError):
    """The key, or one of its parts, is of a type that keys don't have."""


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
        """A service tells of both numbers in its message only."""
        if message is None and limit is not None:
            message = f"the value's size ({size} bytes as stored) exceeds {_short(limit)} ({limit} bytes)"
        super().__init__(message)
        self.size = size
        self.limit = limit

    def __reduce__(self) -> tuple[type[Self], tuple[int | None, int | None, str]]:
        return type(self), (self.size, self.limit, str(self))


def _short(size: int) -> str:
    for unit, power in (("MB", 2**20), ("KB", 2**10)):
        if size % power == 0:
            return f"{size // power}{unit} limit"
    return "the limit"


class NotACounter(KeyloftError, TypeError):
    """`sum`, `min` or `max` met a stored value that is not a U64; nothing of its batch was written."""

    code = "NOT_A_COUNTER"

    def __init__(self, key: Any) -> None:
        super().__init__(
            f"the value at {key!r} is no counter, and nothing of this batch was written: "
            "a counter begins as a U64, by set(key, U64(…)) or by the first sum"
        )
        self.key = key

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        return type(self), (self.key,)


class Undecodable(KeyloftError):
    """Stored bytes are no key or value that Keyloft wrote."""

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
        self, message: str = "this store belongs to another event loop: open it in the one that uses it"
    ) -> None:
        super().__init__(message)


class _Refused(Exception):
    """What a refused write tells."""

    def __init__(
        self, message: str, *, current: Any = None, conflicts: tuple[Any, ...] = (), correlation_id: str | None = None
    ) -> None:
        """A write of one key tells what is stored there now; a batch tells of every key that was in its way.

        Args:
            message: What was expected, and what is there.
            current: The `Envelope` that is stored now, or None. Of a batch, the first one's.
            conflicts: A `FailedWrite` for each key.
            correlation_id: As the log and the audit trail name this conflict.
        """
        super().__init__(message)
        self.current = current
        self.conflicts = conflicts
        self.correlation_id = correlation_id

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), str(self), self.current, self.conflicts, self.correlation_id)


class VersionConflict(_Refused, KeyloftError):
    """What is stored is not what a write expected; nothing was written. `current` tells what is there instead."""

    code = "VERSION_CONFLICT"


class StaleFence(_Refused, KeyloftError):
    """The lock that gave out this fencing token is no longer held by whoever got it; nothing was written."""

    code = "STALE_FENCE"


def _again(kind: Any, message: str, current: Any, conflicts: tuple[Any, ...], correlation_id: str | None) -> Any:
    return kind(message, current=current, conflicts=conflicts, correlation_id=correlation_id)


class NothingToRestore(KeyloftError, LookupError):
    """Nothing was deleted at this key, nothing has expired there, or it is too long ago."""

    code = "NOTHING_TO_RESTORE"


class NotForward(InvalidInput):
    """A checkpoint only moves forward, and this is where it is, or behind it."""

    code = "NOT_FORWARD"


class LockHeld(KeyloftError, TimeoutError):
    """Somebody else held the lock for as long as was waited."""

    code = "LOCK_HELD"


class LockLost(KeyloftError):
    """The lock expired or was taken away while its holder was at work; the holder's later writes are refused."""

    code = "LOCK_LOST"


class Escalated(KeyloftError):
    """A write was tried as often as it makes sense; its cause says what stood in the way each time."""

    code = "ESCALATED"

    def __init__(self, message: str, dead_letter: str | None = None) -> None:
        """`dead_letter` is where the intent is kept; None where there was none to keep, or it could not be stored."""
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
    """The nats-server that Keyloft runs itself could not be started, or did not do what it was told."""

    code = "NATS_SERVER_FAILED"


class Unanswered(KeyloftError, ConnectionError):
    """A request over the bus got no answer."""

    code = "UNANSWERED"


class NoService(Unanswered):
    """Nobody serves the subject of the request."""

    code = "NO_SERVICE"


class NotPermitted(Unanswered):
    """The bus refused the request, or to deliver its answer."""

    code = "NOT_PERMITTED"


class TimedOut(Unanswered, TimeoutError):
    """No answer came in time; the request may have been carried out, or not."""

    code = "TIMED_OUT"


class DatabaseError(KeyloftError):
    """The database below failed; what was acknowledged before is safe."""

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
    """An earlier version of Keyloft wrote this database: it is to be migrated."""

    code = "SCHEMA_TOO_OLD"


class ReadOnly(DatabaseError):
    """The database can't be written."""

    code = "READ_ONLY"


class DiskFull(DatabaseError):
    """No space is left; writes work again once there is some."""

    code = "DISK_FULL"


class Unreachable(DatabaseError):
    """The database's server can't be reached; nothing was written, and what was asked can be asked again."""

    code = "UNREACHABLE"


class CommitUnknown(DatabaseError):
    """The database was lost while it committed: the whole batch was made, or nothing of it. Read to find out."""

    code = "COMMIT_UNKNOWN"


class Stalled(DatabaseError):
    """The database has not answered in time; the message says whether the request may still be carried out."""

    code = "STALLED"


class Busy(DatabaseError):
    """Somebody else held the database for too long; the write was not made and can be retried."""

    code = "BUSY"
