"""What PostgreSQL's errors mean to a user, a full disk and a lost connection among them, and which of them pass."""

import shlex
import ssl
import urllib.parse
from typing import Final

import asyncpg  # type: ignore[import-untyped,unused-ignore]

from keyloft.core.urls import PostgresAddress
from keyloft.errors import Busy, CannotOpen, DatabaseError, DiskFull, ReadOnly, Unreachable

Failure: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What a statement raises if the server refuses it or the connection is lost."""

# SQLSTATEs. The session has ended: by an administrator, by a crash, or because the connection broke.
_LOST: Final = ("57P", "08", "25P03")
# Waiting cures these: a lost session, too many connections, and a standby that is about to become the primary.
_TEMPORARY: Final = (*_LOST, "53300", "25006")
# The server rolled back, and the next attempt may succeed: serialization, deadlock, lock and statement timeouts.
_LOCKED: Final = "55P03"
_RETRYABLE: Final = ("40001", "40P01", _LOCKED, "57014")
_NO_FUNCTION: Final = "42883"
_DENIED: Final = "42501"
_NOT_NOW: Final = "57P03"
_LIMIT_EXCEEDED: Final = "54000"
_NOTIFYING: Final = "async.c"
"""The file of PostgreSQL's source that reports errors of NOTIFY; messages are translated, this is not."""
TOO_SLOW: Final = "KL002"
"""The SQLSTATE by which the committing function says that it held the version counter for too long."""
# A table has changed under a prepared statement; or the server lacks something.
_CHANGED: Final = "0A000"
# A prepared statement is missing, or exists already: a pooler gives each transaction another session.
_POOLED: Final = ("26000", "42P05")
# PgBouncer's message where each statement gets another session; its SQLSTATE says only that the connection has ended.
_OF_STATEMENT_MODE: Final = "statement pooling mode"
CREATED_BY_ANOTHER: Final = ("23505", "42P07", "42710", *_RETRYABLE)
"""The errors that the slower of two processes gets when both create the same tables."""


def is_locked(error: Exception) -> bool:
    """Whether another client held a lock for too long."""
    return _LOCKED in (_state(error), _state(error.__cause__))


def is_too_slow(error: Exception) -> bool:
    """Whether a commit was given up because others have waited for it for too long."""
    return TOO_SLOW in (_state(error), _state(error.__cause__))


def is_missing_function(error: Exception) -> bool:
    return _state(error) == _NO_FUNCTION


def is_denied(error: Exception) -> bool:
    """Whether this user lacks a right."""
    return _state(error) == _DENIED


def may_be_full_queue(error: Exception) -> bool:
    """Whether the server's queue of notifications may be full: a commit that notifies fails then."""
    # Other limits have the same SQLSTATE, such as that of an index row. A server need not name the file.
    return _state(error) == _LIMIT_EXCEEDED and _source_file(error) in (None, _NOTIFYING)


def is_of_timelines(error: Exception) -> bool:
    """Whether a server lacks the functions that return timelines, or does not let this user call them."""
    return _state(error) in (_NO_FUNCTION, _DENIED, _CHANGED)


def is_lost(error: Exception) -> bool:
    """Whether the connection is lost, so that it is unknown what became of the statement."""
    if isinstance(error, asyncpg.PostgresError):
        return _state(error).startswith(_LOST)
    return not isinstance(error, asyncpg.DataError)


def is_down(error: DatabaseError) -> bool:
    """Whether a host serves no clients: no server runs there, or it is starting or ending."""
    cause = error.__cause__
    return isinstance(cause, (ConnectionRefusedError, FileNotFoundError)) or _state(cause) == _NOT_NOW


def is_of_pooler(error: Exception) -> bool:
    return _state(error) in _POOLED


def may_pass(error: Exception) -> bool:
    """Whether the same statement may succeed later."""
    return is_lost(error) or _state(error).startswith((*_RETRYABLE, *_TEMPORARY, *_POOLED))


def is_stale(error: Exception) -> bool:
    """Whether a prepared statement may be older than a change of its table; prepared again, it may succeed."""
    return _state(error) == _CHANGED


def _state(error: BaseException | None) -> str:
    """The SQLSTATE of an error, if it has one."""
    return getattr(error, "sqlstate", None) or ""


def _source_file(error: BaseException) -> str | None:
    """The file of the server's source that has reported an error, if the server names it."""
    return getattr(error, "server_source_filename", None)


def explain(error: BaseException, address: PostgresAddress) -> DatabaseError:
    """The error for the user, with the name of the database and the cause."""
    if isinstance(error, DatabaseError):
        return error
    name, state, message = address.name, _state(error), message_of(error, address)
    match state:
        case "53100":
            return DiskFull(f"{name}: its disk is full; nothing was written")
        case "25006":
            return _read_only(name)
        case _ if state == _DENIED:
            return CannotOpen(f"{name}: {message}: {_grant_for(message)}")
        case "42P01" | "3F000":
            migrate = f"run `keyloft migrate --database {shlex.quote(address.shown)}`"
            return DatabaseError(f"{name}: {message}: {migrate}; if the tables are in another schema, set search_path")
    if state == TOO_SLOW:
        return Busy(f"{name}: a commit took so long that others waited for it; nothing was written: write less at once")
    if state in _RETRYABLE:
        return Busy(f"{name}: {message}; nothing was written: try again")
    if state.startswith(_TEMPORARY) or (isinstance(error, Failure) and is_lost(error)):
        return Unreachable(f"{name} can't be reached: {message}")
    return DatabaseError(f"{name}: {message} ({state or type(error).__name__})")


def explain_connecting(error: BaseException, address: PostgresAddress) -> DatabaseError:
    """The error for the user if no connection could be made."""
    name, state, message = address.name, _state(error), message_of(error, address)
    if state.startswith("28"):
        cure = "check the name, and the password in the URL, in PGPASSWORD or in the password file"
        return CannotOpen(f"{name} refuses this user: {message}: {cure}")
    if state == "3D000":
        return CannotOpen(f"{name}: {message}: make it with CREATE DATABASE, or correct its name in the URL")
    if state == "55000":
        return CannotOpen(f"{name} accepts no connections: {message}: ALTER DATABASE … ALLOW_CONNECTIONS true")
    if state.startswith(("42704", "22023")):
        return CannotOpen(f"{name}: {message}: an option after ? in the URL is wrong")
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return _read_only(name)
    if isinstance(error, (asyncpg.ClientConfigurationError, ssl.SSLCertVerificationError, ValueError)):
        return CannotOpen(f"{name} can't be connected to: {message}")
    if _OF_STATEMENT_MODE in message:
        return CannotOpen(f"{name}: {message}: set pool_mode = transaction, or session, in PgBouncer")
    if isinstance(error, TimeoutError):
        return Unreachable(f"{name} does not answer")
    if isinstance(error, ConnectionError) and "rejected SSL" in message:
        return CannotOpen(f"{name} has no TLS: set it up there, or leave sslmode out")
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return Unreachable(f"{name} can't be reached: {message}: check that it runs, and the host and port")
    return explain(error, address)


def message_of(error: BaseException, address: PostgresAddress) -> str:
    """The message of an error, without passwords: the driver's may quote the URL."""
    # Not str(error): PostgreSQL's details quote keys and values.
    message = str(error.args[0] if isinstance(error, asyncpg.PostgresError) and error.args else error)
    if isinstance(error, ValueError):
        for secret in address.secrets:
            message = message.replace(secret, "…").replace(urllib.parse.unquote(secret), "…")
    return message or type(error).__name__


def _read_only(name: str) -> ReadOnly:
    return ReadOnly(f"{name} can't be written: it is a standby, or set to read-only")


def _grant_for(message: str) -> str:
    """What to grant, by what PostgreSQL denies."""
    if "for schema" in message:
        return "GRANT USAGE, CREATE ON its schema TO this user, or let its owner run `keyloft migrate` and grant USAGE"
    if "for database" in message:
        return "GRANT CONNECT ON it TO this user"
    return "GRANT SELECT, INSERT, UPDATE, DELETE ON Keyloft's tables TO this user"
