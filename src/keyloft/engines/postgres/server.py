"""Connects to PostgreSQL: hosts, session settings and poolers, and how long to wait."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import asyncpg  # type: ignore[import-untyped,unused-ignore]
from msgspec.structs import replace

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core import schema
from keyloft.core.urls import PostgresAddress
from keyloft.engines.postgres import errors, function, host_state
from keyloft.engines.postgres.errors import Failure
from keyloft.engines.postgres.host_state import Host, HostState, name_of
from keyloft.engines.postgres.hosts import HostChoice
from keyloft.errors import Busy, CannotOpen, DatabaseError, ReadOnly, Unreachable

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

_OF_SESSION: Final = "current_setting('server_encoding'), current_setting('synchronous_commit'), pg_backend_pid()"

# Types that statements bind and return. They have the same numbers on every server, but asyncpg would ask the catalogue
# about them on each new connection, which takes the server longer than everything else that a connection begins with.
_ARRAYS: Final = [
    {
        **dict.fromkeys(("basetype", "basetype_name", "range_subtype", "range_subtype_name", "attrtypoids")),
        "attrnames": None,
        "oid": number,
        "ns": "pg_catalog",
        "name": f"_{element}",
        "kind": b"b",
        "elemtype": number_of_element,
        "elemtype_name": element,
        "elemdelim": b",",
        "depth": 0,
    }
    for number, element, number_of_element in ((1001, "bytea", 17), (1016, "int8", 20))
]

# The function that commits must see what others have committed since its transaction began.
_READ_COMMITTED: Final = "SET SESSION default_transaction_isolation = 'read committed'"

# If the server ended an idle session while a commit was on its way, the outcome would be unknown. Servers before
# version 14 have no such setting.
_NO_IDLE_TIMEOUT: Final = (
    "SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('idle_session_timeout', true) IS NOT NULL"
)

# Arrays that are sent as text hold NULLs.
_ARRAY_NULLS: Final = "SELECT set_config('array_nulls', 'on', false) WHERE current_setting('array_nulls', true) = 'off'"


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
        """Prepare to connect; the first caller connects.

        Args:
            address: Where the database is.
            clock: Another clock than the server's, for tests.
            durability: "relaxed" lets the server answer before a commit is on disk.
            patience: How many seconds a call waits for a server that is away or silent.
        """
        self.address = address
        self.clock = clock
        self.name = address.name
        self.hosts = HostChoice(address.name, address.hosts, self._ask)
        """The hosts of the URL, and which of them is used."""
        self._has_timelines = True
        self._settings = {} if "application_name" in address.options else {"application_name": "keyloft"}
        chosen = address.options.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS")
        self._takes_any = chosen not in (None, "", "read-write", "primary")
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
        self.has_notifications = False
        """Whether the server has NOTIFY."""
        self.has_listeners = True
        """Whether a process listens for commits, as far as known (`listeners.py`)."""
        self.functions = function.functions_in()
        """The functions that commit, once the schema was checked."""
        self.has_function = False
        """Whether the server has the functions that commit."""
        self._last_failure: str | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def announcer(self) -> str | None:
        """The name with which a commit notifies other processes; None if it need not, or can't."""
        return self.process if self.has_notifications and self.has_listeners else None

    @property
    def timeline(self) -> str:
        """SQL for the timeline of the server; NULL where the server does not report it."""
        return schema.TIMELINE if self._has_timelines else "NULL::bigint"

    def of_standby(self, host: str, patience: float) -> "PostgresServer":
        """One of the hosts as a server of its own, with a patience of its own: others may answer sooner."""
        address = replace(self.address, hosts=(self.hosts.named(host),), name=f"PostgreSQL at {host}")
        server = PostgresServer(address, self.clock, patience=patience)
        server.hosts.store = self.hosts.store
        return server

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
            except (Unreachable, ReadOnly, Busy) as error:
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

    def unreachable(self, waited: float, failure: DatabaseError | None = None) -> DatabaseError:
        """The error for a caller that has waited long enough.

        Args:
            waited: For how many seconds.
            failure: What went wrong last, if it is more than that no connection could be made.
        """
        if failure is not None and type(failure) is not Unreachable:
            return failure
        reason = self._last_failure or failure or f"{self.name} has not answered"
        return Unreachable(
            f"{reason}; Keyloft waited for {round(waited, 1):g} s, and nothing was done: "
            "try again, or set patience higher"
        )

    @property
    def last_answers(self) -> str:
        """Why there is no connection, in brackets for messages; empty if there is one."""
        return f" ({self._last_failure})" if self._last_failure else ""

    async def connect_once(self) -> Connection:
        """Connect to the primary among the hosts, without a second attempt.

        Raises:
            DatabaseError: It can't be connected to.
        """
        chooses = self.hosts.several and not self._takes_any
        candidates = [await self.hosts.find()] if chooses else list(self.address.hosts)
        # Host by host, not all in one call of the driver: a silent host must not use up the time of all.
        error: DatabaseError | None = None
        for host in candidates:
            try:
                return await self._connect_to(host)
            except (Unreachable, ReadOnly) as reason:
                error = reason
        assert error is not None
        raise error

    async def _connect_to(self, host: Host) -> Connection:
        connection: Connection = None
        try:
            async with asyncio.timeout(self._connect_seconds):
                connection = await self._connect(host)
                state = await self._set_up(connection, host)
            self.hosts.accept(connection, state)
        except BaseException as error:
            self.hosts.failed()
            if connection is not None:
                connection.terminate()
            if isinstance(error, (*Failure, TimeoutError, ValueError)):
                raise errors.explain_connecting(error, self._address_of(host)) from error
            raise
        return connection

    async def _ask(self, host: Host, connection: Connection) -> tuple[Connection, HostState]:
        """The state of a host, read over this connection or over a new one."""
        try:
            async with asyncio.timeout(self._connect_seconds):
                if connection is None or connection.is_closed():
                    connection = await self._connect(host)
                _, state = await self._read_state(connection, host)
                return connection, state
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if isinstance(error, (*Failure, TimeoutError, ValueError)):
                raise errors.explain_connecting(error, self._address_of(host)) from error
            raise

    async def _connect(self, host: Host) -> Connection:
        connection = await asyncpg.connect(
            self.address.dsn,
            **host,
            target_session_attrs=None if self._takes_any else "any",
            server_settings=self._settings,
            statement_cache_size=0,
        )
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # another asyncpg then asks the server itself
            connection.get_settings().register_data_types(_ARRAYS)
        return connection

    @property
    def _connect_seconds(self) -> float:
        return min(limits.POSTGRES_CONNECT_SECONDS, self.patience / (len(self.address.hosts) + 1))

    def _address_of(self, host: Host) -> PostgresAddress:
        """The address of one of several hosts, for messages."""
        return replace(self.address, name=f"PostgreSQL at {name_of(host)}") if self.hosts.several else self.address

    async def _set_up(self, connection: Connection, host: Host) -> HostState:
        [encoding, commit, process], state = await self._read_state(connection, host)
        if encoding != "UTF8":
            raise CannotOpen(f"{self.name} is encoded as {encoding}: make a database with ENCODING 'UTF8'")
        if (commit == "off") != (self._durability == "relaxed"):
            self._commit_setting = "off" if self._durability == "relaxed" else "on"
        if process != connection.get_server_pid():
            self._note_pooler()
        if not self.is_pooled:
            settings = (*self._settings_of("SESSION"), _READ_COMMITTED, _NO_IDLE_TIMEOUT, _ARRAY_NULLS)
            await connection.execute("; ".join(settings))
        return state

    async def _read_state(self, connection: Connection, host: Host) -> tuple[list[Any], HostState]:
        """The settings that a session depends on, and the state of the host."""
        asked_at = asyncio.get_running_loop().time()
        try:
            row = await self._fetch_state(connection)
        except asyncpg.PostgresError as error:
            if not self._has_timelines or not errors.is_of_timelines(error):
                raise
            logger.info("%s does not report its timeline: %s", self.name, errors.message_of(error, self.address))
            self._has_timelines = False
            row = await self._fetch_state(connection)
        is_standby, is_read_only, timeline, cluster, synchronous, *replication, store, counter = row[3:]
        receives_as, streams, started = replication
        version, last_commit = counter or (None, 0)
        state = HostState(
            name=name_of(host) or self.name,
            is_standby=is_standby,
            is_writable=not is_standby and not is_read_only,
            timeline=timeline or 0,
            cluster=cluster,
            synchronous=synchronous,
            receives_as=receives_as,
            streams=tuple(streams or ()),
            started=started,
            last_commit=last_commit,
            store=store,
            version=version,
            asked_at=asked_at,
        )
        return list(row[:3]), state

    async def _fetch_state(self, connection: Connection) -> Any:
        state = host_state.STATE_WITHOUT_TIMELINE
        if self._has_timelines:
            state = host_state.STATE_OF_SEVERAL if self.hosts.several else host_state.STATE
        # In a transaction, because a pooler may give each statement outside of one another session.
        async with connection.transaction():
            of_store = "NULL, NULL" if await self._lacks_store(connection) else host_state.OF_STORE
            return await connection.fetchrow(f"SELECT {_OF_SESSION}, {state}, {of_store}")

    async def _lacks_store(self, connection: Connection) -> bool:
        """Whether the tables with the store's id and the version counter are yet to be made, migrated, or granted.

        For a single host, their contents are not needed before the store is known.
        """
        if self.hosts.store is not None:
            return False
        return not self.hosts.several or not await connection.fetchval(host_state.HAS_STORE)

    def _session_settings(self) -> dict[str, str]:
        """The settings of a session, or behind a pooler of a transaction."""
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
        """The same for a group of this many checks and mutations, which this process must decide meanwhile."""
        most = timeout(self.holding_seconds(operations))
        return f"{self.begin}; SET LOCAL idle_in_transaction_session_timeout = {most}"

    @staticmethod
    def holding_seconds(operations: int) -> float:
        """How long a group of this many checks and mutations may hold the version counter, while all others wait."""
        return limits.POSTGRES_TRANSACTION_SECONDS + operations * limits.POSTGRES_TRANSACTION_SECONDS_EACH

    def close_later(self, connection: Connection) -> None:
        """Close a connection in the background; `aclose` waits for it."""
        closing = asyncio.create_task(_close(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Wait until all connections are closed."""
        await self.hosts.aclose()
        if self._closing:
            await asyncio.wait(self._closing)

    def note_wrong_isolation(self) -> None:
        """Note that the function refuses to commit: behind a pooler, the database decides the isolation level."""
        if self.has_function:
            logger.warning(
                "%s: default_transaction_isolation is not 'read committed', so commits hold locks for longer", self.name
            )
            self.has_function = False

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
        return errors.explain(error, self.address)

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
