"""Connects to PostgreSQL: where it is, how long to wait for it, and what its errors mean to a user."""

import asyncio
import logging
import os
import secrets
import shlex
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from keyloft.core import schema
from keyloft.core.urls import PostgresAddress
from keyloft.engines.postgres import tables
from keyloft.errors import (
    Busy,
    CannotOpen,
    DatabaseError,
    DiskFull,
    NotADatabase,
    ReadOnly,
    SchemaTooNew,
    SchemaTooOld,
    Unreachable,
)

try:
    import asyncpg  # type: ignore[import-untyped,unused-ignore]
except ImportError as error:
    raise CannotOpen('PostgreSQL needs its driver: pip install "keyloft[postgres]"') from error

logger = logging.getLogger(__name__)

Connection: TypeAlias = Any
"""asyncpg's, which has no types."""

Failure: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What can go wrong with a connection: the server said no, or is gone."""

_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5
_ATTEMPT_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 1.0
_LONGEST_LOCK_SECONDS: Final = 0.5
_TRIES: Final = 5

# Every statement has its index. A plan that was made while a table was small would otherwise walk all of it, and sort
# it, long after it has grown.
_DETOURS: Final = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin")

# A session that the server ends while a commit is on its way to it would be a commit of unknown fate. Servers before
# version 14 have no such setting.
_NEVER_IDLE_FOR_TOO_LONG: Final = (
    "SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('idle_session_timeout', true) IS NOT NULL"
)

# SQLSTATEs. The session is gone: ended by an administrator or a crash, or the connection broke.
_GONE: Final = ("57P", "08", "25P03")
# What waiting cures: that, a server that has too many connections, and one that has yet to become the primary.
_NOT_NOW: Final = (*_GONE, "53300", "25006")
# The server undid the transaction, and the next try may succeed: serialization, deadlock, lock and statement time-outs.
_LOCKED: Final = "55P03"
_AGAIN: Final = ("40001", "40P01", _LOCKED, "57014")
_SOMEBODY_WAS_FASTER: Final = ("23505", "42P07", "42710", *_AGAIN)
# A prepared statement that is not there, or there already: somebody between us gives each transaction another session.
_POOLED: Final = ("26000", "42P05")
# A table has changed under a prepared statement.
_CHANGED: Final = ("0A000",)


class PostgresServer:
    """Where the database is, and how connections to it are made."""

    def __init__(self, address: PostgresAddress, *, durability: str, patience: float) -> None:
        self._address = address
        self.name = address.name
        self._hosts = list(address.hosts)
        self._settings = {} if "application_name" in address.options else {"application_name": "keyloft"}
        chosen = address.options.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS")
        # Of several hosts, the one that can be written; a single one that is read-only can at least be read.
        self._session_attributes = "read-write" if len(self._hosts) > 1 and not chosen else None
        self._durability = durability
        self.patience = patience
        self.lock_seconds = min(patience / 4, _LONGEST_LOCK_SECONDS)
        """How long a commit waits for somebody else's locks before the server itself gives it up, and tells so."""
        self._commit_setting: str | None = None
        self.is_pooled = False
        """Whether each transaction may meet another session, so that nothing outlives one."""
        self.token = f"keyloft_{secrets.token_hex(8)}"
        """What is named here is named like nothing else."""
        self._trouble: str | None = None
        self._closing: set[asyncio.Task[None]] = set()

    # Connecting

    async def connect(self) -> Connection:
        """Connect, as soon as there is somebody to connect to.

        Raises:
            DatabaseError: It can't be connected to, for a reason that waiting does not cure.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                connection = await self.connect_once()
            except (Unreachable, ReadOnly) as error:
                if self._trouble is None:
                    logger.warning("%s; waiting for it", error)
                self._trouble = str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                if self._trouble is not None:
                    logger.info("connected to %s", self.name)
                self._trouble = None
                return connection

    def unreachable(self) -> Unreachable:
        """The error of whoever has waited long enough."""
        trouble = self._trouble or f"{self.name} has not answered"
        return Unreachable(f"{trouble}; it was waited for up to {self.patience:g} s, and nothing was done: try again")

    async def connect_once(self) -> Connection:
        """Connect to the first host that answers, now or not at all.

        Raises:
            DatabaseError: It can't be connected to.
        """
        # Host by host, not all in one call of the driver: one that is silent must not use up the time of all.
        error: DatabaseError | None = None
        for host in list(self._hosts):
            try:
                connection = await self._connect_to(host)
                # The next connection begins with it.
                self._hosts.remove(host)
                self._hosts.insert(0, host)
                return connection
            except (Unreachable, ReadOnly) as reason:
                error = reason
        assert error is not None
        raise error

    async def _connect_to(self, host: Mapping[str, Any]) -> Connection:
        connection: Connection = None
        try:
            async with asyncio.timeout(min(_ATTEMPT_SECONDS, self.patience / (len(self._hosts) + 1))):
                connection = await asyncpg.connect(
                    self._address.dsn,
                    **host,
                    target_session_attrs=self._session_attributes,
                    server_settings=self._settings,
                    statement_cache_size=0,
                )
                await self._set_up(connection)
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if isinstance(error, (*Failure, TimeoutError, ValueError)):
                raise self._why_not(error) from error
            raise
        return connection

    async def _set_up(self, connection: Connection) -> None:
        # In a transaction, because a pooler may give each statement outside of one another session.
        async with connection.transaction():
            encoding, commit, process = await connection.fetchrow(
                "SELECT current_setting('server_encoding'), current_setting('synchronous_commit'), pg_backend_pid()"
            )
        if encoding != "UTF8":
            raise CannotOpen(f"{self.name} is encoded as {encoding}: make a database with ENCODING 'UTF8'")
        if (commit == "off") != (self._durability == "relaxed"):
            self._commit_setting = "off" if self._durability == "relaxed" else "on"
        if process != connection.get_server_pid():
            self._note_pooler()
        if not self.is_pooled:
            await connection.execute("; ".join((*self._settings_of("SESSION"), _NEVER_IDLE_FOR_TOO_LONG)))

    def _settings_of(self, scope: str) -> list[str]:
        """What a session, or a transaction, is to be set to."""
        settings = [
            f"SET {scope} lock_timeout = {max(1, round(1000 * self.lock_seconds))}",
            # A machine that is lost in the middle of a transaction would keep the clock until TCP notices.
            f"SET {scope} idle_in_transaction_session_timeout = {max(1, round(1000 * self.patience))}",
        ]
        settings += [f"SET {scope} {detour} = off" for detour in _DETOURS]
        if self._commit_setting is not None:
            settings.append(f"SET {scope} synchronous_commit = {self._commit_setting}")
        return settings

    def _note_pooler(self) -> None:
        if not self.is_pooled:
            logger.info("%s is behind a pooler: nothing is kept in a session between two transactions", self.name)
            self.is_pooled = True

    @property
    def begin(self) -> str:
        """Begins a transaction that writes."""
        settings = self._settings_of("LOCAL") if self.is_pooled else ()
        return "; ".join(("BEGIN ISOLATION LEVEL READ COMMITTED", *settings))

    def close_aside(self, connection: Connection) -> None:
        """Close a connection that nobody waits for."""
        closing = asyncio.create_task(_closed(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Wait until all connections that were left are closed."""
        if self._closing:
            await asyncio.wait(self._closing)

    # The schema

    async def set_up_schema(self, connection: Connection) -> int:
        """Make the tables in a database that is not ours yet; two processes may do so at once.

        Returns:
            What tells this store from another one in another schema of the database.

        Raises:
            SchemaTooOld: It is to be migrated.
            SchemaTooNew: A later version of Keyloft wrote it.
            DatabaseError: It can't be read, or tables can't be made.
        """
        tries = 0
        while (stamp := await self.stamp(connection)) is None:
            tries += 1
            try:
                await connection.execute("; ".join(("BEGIN", *tables.CREATE, "COMMIT")))
            except asyncpg.PostgresError as error:
                await connection.execute("ROLLBACK")
                if error.sqlstate not in _SOMEBODY_WAS_FASTER:
                    raise
                if tries == _TRIES:
                    raise CannotOpen(
                        f"{self.name}: {self._told(error)}, "
                        f"but {schema.REVISION_TABLE} does not say that it is ours: "
                        "rename what is in the way, or give Keyloft a database or a schema of its own"
                    ) from error
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
        self._check_stamp(stamp)
        async with connection.transaction():
            return int(await connection.fetchval("SELECT coalesce(to_regclass('keyloft_version_counter')::oid, 0)"))

    async def check_schema(self, connection: Connection) -> None:
        """See whether the database is ours, without writing anything.

        Raises:
            DatabaseError: It is not, or of another version.
        """
        stamp = await self.stamp(connection)
        if stamp is None:
            raise NotADatabase(f"{self.name} has no tables of Keyloft; it was left as it is")
        self._check_stamp(stamp)

    def _check_stamp(self, stamp: str) -> None:
        if stamp < schema.REVISION:
            raise SchemaTooOld(
                f"{self.name} has schema {stamp}, this version of Keyloft has {schema.REVISION}: run "
                f"`keyloft migrate --database {shlex.quote(self._address.shown)}`{self._left_out()}; the database was "
                "left as it is"
            )
        if stamp > schema.REVISION:
            raise SchemaTooNew(
                f"{self.name} has schema {stamp}, which this version of Keyloft does not know (it has "
                f"{schema.REVISION}): upgrade keyloft; the database was left as it is"
            )

    async def stamp(self, connection: Connection) -> str | None:
        """The revision of the schema; None in a database that is not ours yet."""
        async with connection.transaction():
            if await connection.fetchval(f"SELECT to_regclass('{schema.REVISION_TABLE}')") is None:
                return None
            stamp: str | None = await connection.fetchval(f"SELECT version_num FROM {schema.REVISION_TABLE}")
            return stamp

    def clock_of(self, rows: Sequence[Any]) -> Any:
        """The row that a statement on the clock selects.

        Raises:
            DatabaseError: There is no clock.
        """
        if not rows:
            raise DatabaseError(
                f"{self.name}: the row of keyloft_version_counter is gone; restore it: its version is at least the "
                "largest one in Keyloft's tables"
            )
        return rows[0]

    # What errors mean

    def is_locked(self, error: DatabaseError) -> bool:
        """Whether somebody else held a lock for too long."""
        return getattr(error.__cause__, "sqlstate", None) == _LOCKED

    def is_lost(self, error: Exception) -> bool:
        """Whether there is nobody at the other end any more: what was under way there was done, or not."""
        if isinstance(error, asyncpg.PostgresError):
            return (error.sqlstate or "").startswith(_GONE)
        return not isinstance(error, asyncpg.DataError)

    def learn_from(self, error: Exception) -> bool:
        """Take note of what an error tells of the server; returns whether what failed may succeed the next time."""
        if self.is_lost(error):
            return True
        state = getattr(error, "sqlstate", None) or ""
        if state in _POOLED:
            self._note_pooler()
        return state.startswith((*_AGAIN, *_NOT_NOW, *_POOLED, *_CHANGED))

    def explain(self, error: BaseException) -> DatabaseError:
        """The error that tells a user what is wrong with which database."""
        if isinstance(error, DatabaseError):
            return error
        state = getattr(error, "sqlstate", None) or ""
        told = self._told(error)
        match state:
            case "53100":
                return DiskFull(f"{self.name}: its disk is full; nothing of this was written")
            case "25006":
                return ReadOnly(f"{self.name} can't be written: it is a standby, or set to read-only")
            case "42501":
                return CannotOpen(f"{self.name}: {told}: {_right_for(told)}")
            case "42P01" | "3F000":
                return DatabaseError(
                    f"{self.name}: {told}: run `keyloft migrate --database {shlex.quote(self._address.shown)}`; "
                    "if it is in another schema, set search_path"
                )
        if state in _AGAIN:
            return Busy(f"{self.name}: {told}; nothing was written: try again")
        if state.startswith(_NOT_NOW) or (isinstance(error, Failure) and self.is_lost(error)):
            return Unreachable(f"{self.name} can't be reached: {told}")
        return DatabaseError(f"{self.name}: {told} ({state or type(error).__name__})")

    def _why_not(self, error: BaseException) -> DatabaseError:
        """Why nobody could connect."""
        state = getattr(error, "sqlstate", None) or ""
        told = self._told(error)
        if state.startswith("28"):
            return CannotOpen(
                f"{self.name} refuses this user: {told}: check the name, and the password in the URL, in PGPASSWORD or "
                "in the password file"
            )
        if state == "3D000":
            return CannotOpen(f"{self.name}: {told}: make it with CREATE DATABASE, or correct its name in the URL")
        if state == "55000":
            return CannotOpen(f"{self.name} lets nobody in: {told}: ALTER DATABASE … ALLOW_CONNECTIONS true")
        if state.startswith(("42704", "22023")):
            return CannotOpen(f"{self.name}: {told}: an option after ? in the URL is wrong")
        if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
            return ReadOnly(f"{self.name} can't be written: it is a standby, or set to read-only")
        if isinstance(error, (asyncpg.ClientConfigurationError, ssl.SSLCertVerificationError, ValueError)):
            return CannotOpen(f"{self.name} can't be connected to: {told}")
        if isinstance(error, TimeoutError):
            return Unreachable(f"{self.name} does not answer")
        if isinstance(error, ConnectionError) and "rejected SSL" in told:
            return CannotOpen(f"{self.name} has no TLS: set it up there, or leave sslmode out")
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            return Unreachable(f"{self.name} can't be reached: {told}: does it run, and are host and port right?")
        return self.explain(error)

    def _left_out(self) -> str:
        return " (with the password, which is left out here)" if self._address.secrets else ""

    def _told(self, error: BaseException) -> str:
        """What an error says, without what nobody else should read: it may quote the URL."""
        # Not str(error): PostgreSQL's details quote keys and values.
        told = str(error.args[0] if isinstance(error, asyncpg.PostgresError) and error.args else error)
        if isinstance(error, ValueError):
            for secret in self._address.secrets:
                told = told.replace(secret, "…").replace(urllib.parse.unquote(secret), "…")
        return told or type(error).__name__


def _right_for(told: str) -> str:
    """What to grant, by what PostgreSQL says is denied."""
    if "for schema" in told:
        return "GRANT USAGE, CREATE ON its schema TO this user, or let its owner run `keyloft migrate` and grant USAGE"
    if "for database" in told:
        return "GRANT CONNECT ON it TO this user"
    return "GRANT SELECT, INSERT, UPDATE, DELETE ON Keyloft's tables TO this user"


async def _closed(connection: Connection) -> None:
    try:
        await connection.close(timeout=_CLOSE_SECONDS)
    except (*Failure, TimeoutError):
        connection.terminate()
