"""Connects to PostgreSQL: hosts, session settings and poolers, how long to wait, and the schema that it must have."""

import asyncio
import logging
import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import asyncpg  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core import schema
from keyloft.core.adoption import CHAPTER
from keyloft.core.records import Space
from keyloft.core.urls import PostgresAddress
from keyloft.engines.postgres import errors, function, log, tables
from keyloft.engines.postgres.adoption import find_adoption
from keyloft.engines.postgres.errors import Failure
from keyloft.engines.tables import create_beside
from keyloft.errors import CannotOpen, DatabaseError, NotADatabase, ReadOnly, Unreachable

logger = logging.getLogger(__name__)

Connection: TypeAlias = Any
"""asyncpg's, which has no types."""

# Every statement has its index. Without these settings, a plan made while a table was small would still scan and sort
# the whole table long after it has grown. So no plan depends on the bindings, either: for few keys PostgreSQL would
# plan each statement again, which takes longer than to carry it out.
_PLANNER_SETTINGS: Final = {
    **dict.fromkeys(
        ("enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin"), "off"
    ),
    "plan_cache_mode": "force_generic_plan",
}

# The function that commits must see what others have committed since its transaction began.
_READ_COMMITTED: Final = "SET SESSION default_transaction_isolation = 'read committed'"

# If the server ended an idle session while a commit was on its way, the outcome would be unknown. Servers before
# version 14 have no such setting.
_NO_IDLE_TIMEOUT: Final = (
    "SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('idle_session_timeout', true) IS NOT NULL"
)


class ServerClock(SystemClock):
    """This machine's estimate of the server's time, for timers only: the server decides what has expired."""

    __slots__ = ("_began",)

    def __init__(self, now: int) -> None:
        self.set(now)

    def now(self) -> int:
        return self._began + time.monotonic_ns() // 1_000_000

    def set(self, now: int) -> None:
        """Set it to the time that the server has just reported; so it is never ahead of the server."""
        # Counted from there by the monotonic clock: this machine's wall clock may be wrong, and may be set.
        self._began = now - time.monotonic_ns() // 1_000_000


class PostgresServer:
    """Where the database is, and how connections to it are made."""

    def __init__(
        self,
        address: PostgresAddress,
        clock: Clock | None = None,
        *,
        durability: str = "full",
        patience: float = limits.SERVER_SECONDS,
    ) -> None:
        """Connects later.

        Args:
            address: Where the database is.
            clock: Another clock than the server's, for tests.
            durability: "relaxed" lets the server answer before a commit is on disk.
            patience: How many seconds a call waits for a server that is away or silent.
        """
        self._address = address
        self.clock = clock
        self.name = address.name
        self._hosts = list(address.hosts)
        self._settings = {} if "application_name" in address.options else {"application_name": "keyloft"}
        chosen = address.options.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS")
        # Of several hosts, the one that can be written; a single one that is read-only can at least be read.
        self._session_attributes = "read-write" if len(self._hosts) > 1 and not chosen else None
        self._durability = durability
        self.patience = patience
        self.lock_seconds = min(patience / 8, limits.POSTGRES_LOCK_SECONDS)
        """How long a commit waits for the version counter, and a read for a table, before the server cancels it."""
        self.table_seconds = min(self.lock_seconds, limits.POSTGRES_TABLE_SECONDS)
        """How long a commit waits for a locked table."""
        self._commit_setting: str | None = None
        self.is_pooled = False
        """Whether each transaction may get another session, so that no setting or statement outlives one."""
        self.token = f"keyloft_{secrets.token_hex(8)}"
        """A name that no other process uses."""
        self.process = self.token
        """Names the commits of this process in notifications, once the schema was checked."""
        self.announcer: str | None = None
        """The same, or None where the server has no notifications."""
        self.functions = function.functions_in()
        """The functions that commit, once the schema was checked."""
        self.has_function = False
        """Whether the server has the functions that commit."""
        self._last_failure: str | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def now(self) -> int | None:
        """The time of an injected clock; None for the server's."""
        return None if self.clock is None else self.clock.now()

    # Connecting

    async def connect(self) -> Connection:
        """Connect, as soon as a host accepts.

        Raises:
            DatabaseError: It can't be connected to, for a reason that waiting does not cure.
        """
        pause, longest = limits.POSTGRES_CONNECT_PAUSES
        while True:
            try:
                connection = await self.connect_once()
            except (Unreachable, ReadOnly) as error:
                if self._last_failure is None:
                    logger.warning("%s; waiting for it", error)
                self._last_failure = str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
            else:
                if self._last_failure is not None:
                    logger.info("connected to %s", self.name)
                self._last_failure = None
                return connection

    def unreachable(self) -> Unreachable:
        """The error for a caller that has waited long enough."""
        failure = self._last_failure or f"{self.name} has not answered"
        return Unreachable(f"{failure}; Keyloft waited up to {self.patience:g} s, and nothing was done: try again")

    async def connect_once(self) -> Connection:
        """Connect to the first host that answers, without a second attempt.

        Raises:
            DatabaseError: It can't be connected to.
        """
        # Host by host, not all in one call of the driver: a silent host must not use up the time of all.
        error: DatabaseError | None = None
        for host in list(self._hosts):
            try:
                connection = await self._connect_to(host)
                # The next connection begins with this host.
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
            seconds = min(limits.POSTGRES_CONNECT_SECONDS, self.patience / (len(self._hosts) + 1))
            async with asyncio.timeout(seconds):
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
                raise errors.explain_connecting(error, self._address) from error
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
            settings = (*self._settings_of("SESSION"), _READ_COMMITTED, _NO_IDLE_TIMEOUT)
            await connection.execute("; ".join(settings))

    def _session_settings(self) -> dict[str, str]:
        """What a session is to have, or a transaction behind a pooler."""
        settings = {
            "lock_timeout": timeout(self.lock_seconds),
            # A machine that is lost within a transaction would keep its locks until TCP notices.
            "idle_in_transaction_session_timeout": timeout(self.patience),
        }
        settings |= _PLANNER_SETTINGS
        if self._commit_setting is not None:
            settings["synchronous_commit"] = self._commit_setting
        return settings

    def _settings_of(self, scope: str) -> list[str]:
        """The statements that set up a session, or a transaction."""
        return [f"SET {scope} {name} = {value}" for name, value in self._session_settings().items()]

    def transaction_settings(self) -> tuple[list[str] | None, list[str] | None]:
        """Names and values of what a transaction must set itself, because its session may be another's; or Nones."""
        if not self.is_pooled:
            return None, None
        settings = self._session_settings() | {"lock_timeout": timeout(self.table_seconds)}
        return list(settings), list(settings.values())

    def _note_pooler(self) -> None:
        if not self.is_pooled:
            logger.info("%s is behind a pooler: nothing is kept in a session between two transactions", self.name)
            self.is_pooled = True

    @property
    def begin(self) -> str:
        """Begins a transaction that writes."""
        settings = self._settings_of("LOCAL") if self.is_pooled else ()
        return "; ".join(("BEGIN ISOLATION LEVEL READ COMMITTED", *settings))

    @property
    def begin_commit(self) -> str:
        """Begins a transaction that locks the version counter: others wait no longer for a client that is stopped."""
        return self.begin_commit_of(0)

    def begin_commit_of(self, operations: int) -> str:
        """The same for a group of so many checks and mutations, which this process must decide meanwhile."""
        most = timeout(self.holding_seconds(operations))
        return f"{self.begin}; SET LOCAL idle_in_transaction_session_timeout = {most}"

    @staticmethod
    def holding_seconds(operations: int) -> float:
        """How long a group of so many checks and mutations may hold the version counter, while all others wait."""
        return limits.POSTGRES_TRANSACTION_SECONDS + operations * limits.POSTGRES_TRANSACTION_SECONDS_EACH

    def close_later(self, connection: Connection) -> None:
        """Close a connection in the background; `aclose` waits for it."""
        closing = asyncio.create_task(_close(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Wait until all connections are closed."""
        if self._closing:
            await asyncio.wait(self._closing)

    # The schema

    async def set_up_schema(self, connection: Connection) -> None:
        """Make Keyloft's tables in a database without them; two processes may do so at once.

        Raises:
            SchemaTooOld: It is to be migrated.
            SchemaTooNew: A later version of Keyloft wrote it.
            DatabaseError: It can't be read, or tables can't be made.
        """
        attempts = 0
        while (revision := await self.revision(connection)) is None:
            attempts += 1
            adoption = await find_adoption(connection)
            if adoption is not None:
                adoption.check(self.name)
                logger.info("%s: adopting its table %s", self.name, schema.PLUGIN_TABLE)
            create = create_beside(tables.CREATE, tables.LAYOUTS[Space.PLUGINS].create, adoption)
            try:
                await connection.execute("; ".join(("BEGIN", *create, "COMMIT")))
            except asyncpg.PostgresError as error:
                await connection.execute("ROLLBACK")
                if error.sqlstate not in errors.CREATED_BY_ANOTHER:
                    if adoption is not None and not errors.may_pass(error):
                        raise CannotOpen(
                            f"{self.name} has a table {schema.PLUGIN_TABLE} that this user can't adopt: "
                            f"{errors.message_of(error, self._address)}; nothing was changed. Let its owner run "
                            f"`keyloft migrate`, or see {CHAPTER}"
                        ) from error
                    raise
                if attempts == limits.POSTGRES_SETUP_ATTEMPTS:
                    raise CannotOpen(
                        f"{self.name}: {errors.message_of(error, self._address)}, but {schema.REVISION_TABLE} names no "
                        "revision of Keyloft: rename that table, or give Keyloft a database or a schema of its own"
                    ) from error
                await asyncio.sleep(limits.POSTGRES_CONNECT_PAUSES[0])
        await self._check_revision(connection, revision)

    async def check_schema(self, connection: Connection) -> None:
        """Check that the database has Keyloft's tables, without writing anything.

        Raises:
            DatabaseError: It has none, or those of another version.
        """
        revision = await self.revision(connection)
        if revision is None:
            raise NotADatabase(f"{self.name} has no tables of Keyloft; it was left as it is")
        await self._check_revision(connection, revision)

    async def _check_revision(self, connection: Connection, revision: str) -> None:
        remark = " (with the password, which is left out here)" if self._address.secrets else ""
        schema.check_revision(revision, self.name, shlex.quote(self._address.shown), remark)
        async with connection.transaction():
            found = {name: (home, number) for name, home, number in await connection.fetch(function.FIND_TABLES)}
        self.functions = function.functions_in(*[(name, home) for name, (home, _) in sorted(found.items())])
        # Stores in several schemas of one database share the channel of notifications: this number tells them apart.
        _, store = found.get(schema.VERSION_COUNTER_TABLE, ("", 0))
        self.process = f"{store}.{self.token}"

    async def set_up_commits(self, connection: Connection) -> None:
        """Find out what the server has: notifications, and functions; make those that commit."""
        self.announcer = self.process
        try:
            async with connection.transaction():
                await connection.execute(log.NOTIFY.format(name=self.process, version=0))
        except asyncpg.PostgresError as error:
            if errors.is_lost(error):
                raise
            self.announcer = None
            logger.info("%s sends no notifications: %s", self.name, errors.message_of(error, self._address))
        await self.make_functions(connection)

    async def make_functions(self, connection: Connection) -> None:
        """Make the functions that commit, unless they are there; without them, commits take their locks first."""
        self.has_function = await self._has_function(connection)
        if not self.has_function:
            try:
                async with connection.transaction():
                    await connection.execute(self.functions.create)
                self.has_function = True
            except asyncpg.PostgresError as error:
                if errors.is_lost(error):
                    raise
                self.has_function = await self._has_function(connection)  # another process may have made them
                if not self.has_function:
                    message = errors.message_of(error, self._address)
                    logger.info("%s: functions can't be made, so commits hold locks for longer: %s", self.name, message)
            else:
                await self._drop_other_functions(connection)

    async def _drop_other_functions(self, connection: Connection) -> None:
        """Drop the functions of earlier revisions of the schema. Those of this one may be in use, by other versions."""
        try:
            async with connection.transaction():
                for [other] in await connection.fetch(self.functions.find_others):
                    await connection.execute(f"DROP FUNCTION IF EXISTS {other}")
        except asyncpg.PostgresError as error:
            if errors.is_lost(error):
                raise
            logger.info("%s: %s", self.name, errors.message_of(error, self._address))

    def note_wrong_isolation(self) -> None:
        """The function refuses to commit: behind a pooler, transactions have the isolation that the database sets."""
        if self.has_function:
            logger.warning(
                "%s: default_transaction_isolation is not 'read committed', so commits hold locks for longer", self.name
            )
            self.has_function = False

    async def _has_function(self, connection: Connection) -> bool:
        async with connection.transaction():
            return bool(await connection.fetchval(self.functions.may_call))

    async def revision(self, connection: Connection) -> str | None:
        """The revision of the schema; None in a database without Keyloft's tables."""
        async with connection.transaction():
            if await connection.fetchval(f"SELECT to_regclass('{schema.REVISION_TABLE}')") is None:
                return None
            revision: str | None = await connection.fetchval(f"SELECT version_num FROM {schema.REVISION_TABLE}")
            return revision

    def counter_row(self, rows: Sequence[Any]) -> Any:
        """The first row that a statement on the version counter selects.

        Raises:
            DatabaseError: There is no counter.
        """
        if not rows:
            raise schema.lost_counter(self.name, schema.VERSION_COUNTER_TABLE)
        return rows[0]

    # Errors

    def explain(self, error: BaseException) -> DatabaseError:
        return errors.explain(error, self._address)

    def may_succeed_after(self, error: Exception) -> bool:
        """Whether a statement that failed may succeed later; takes note of a pooler that the error reveals."""
        if errors.is_of_pooler(error):
            self._note_pooler()
        return errors.may_pass(error)


def timeout(seconds: float) -> str:
    """The value of a setting of PostgreSQL that is a time limit; 0 would mean none."""
    return str(max(1, round(1000 * seconds)))


async def _close(connection: Connection) -> None:
    try:
        await connection.close(timeout=limits.POSTGRES_CLOSE_SECONDS)
    except (*Failure, TimeoutError):
        connection.terminate()
