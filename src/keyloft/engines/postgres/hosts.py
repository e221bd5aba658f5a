"""Knows the hosts of a database: what each of them answers, and which one is written to: that of the highest timeline.

A standby that is promoted begins a new timeline. The former primary may still run, and accept writes that no one else
will ever see. So the place in the URL does not decide, and a host is refused while another one, a standby included,
has a higher timeline, or had one before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.core import schema
from keyloft.errors import CannotOpen, DatabaseError, ReadOnly, Unreachable

logger = logging.getLogger(__name__)

Host: TypeAlias = Mapping[str, Any]
"""Host and port, as asyncpg takes them; empty where the DSN has them."""

# The control file of a standby lags by minutes. Only members of pg_read_all_stats see what its walreceiver receives.
_STANDBY_TIMELINE: Final = (
    "greatest((SELECT timeline_id FROM pg_control_checkpoint()), "
    "(SELECT min_recovery_end_timeline FROM pg_control_recovery()), "
    "(SELECT max(received_tli) FROM pg_stat_wal_receiver))::bigint"
)
_ROLE: Final = "pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool"
STATE: Final = (
    f"{_ROLE}, CASE WHEN pg_is_in_recovery() THEN {_STANDBY_TIMELINE} ELSE {schema.TIMELINE} END, "
    "(SELECT system_identifier FROM pg_control_system())"
)
"""SQL: whether the server is a standby, whether it is set to read-only, its timeline, and the id of its cluster."""
STATE_WITHOUT_TIMELINE: Final = f"{_ROLE}, NULL::bigint, NULL::bigint"
"""The same for a server that does not tell, such as some hosted ones."""
OF_STORE: Final = (
    f"(SELECT store_id FROM {schema.STORE_TABLE}), "
    f"(SELECT ARRAY[version, timeline] FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1)"
)
"""SQL: the id of the store, the version counter, and the timeline of the last commit."""
HAS_STORE: Final = (
    "SELECT count(*) = 2 FROM pg_attribute WHERE attrelid IN "
    f"(to_regclass('{schema.STORE_TABLE}'), to_regclass('{schema.VERSION_COUNTER_TABLE}')) "
    "AND attname IN ('store_id', 'timeline') AND has_table_privilege(attrelid, 'SELECT')"
)
"""Selects whether these can be read: the tables may be yet to be made, migrated or granted."""


class HostState(Struct, frozen=True, kw_only=True):
    """What a host has answered."""

    name: str
    error: DatabaseError | None = None
    """Why it could not be asked; then nothing else is known of it."""
    is_standby: bool = False
    is_writable: bool = False
    timeline: int = 0
    """0 if it is not known."""
    cluster: int | None = None
    """The same for a primary and its standbys, and for no other server."""
    store: str | None = None
    """The id of the store that it holds; None as long as that is not known."""
    version: int | None = None
    """What its version counter showed."""
    asked_at: float = 0.0
    """When it was asked, by the event loop's time."""

    @property
    def described(self) -> str:
        """For messages."""
        if self.error is not None:
            return str(self.error)
        role = "a standby" if self.is_standby else "a primary" if self.is_writable else "set to read-only"
        return f"{self.name} is {role}{f' on timeline {self.timeline}' if self.timeline else ''}"


def name_of(host: Host) -> str:
    """A host for messages."""
    return f"{host['host']}:{host['port']}" if "port" in host else str(host.get("host", ""))


class HostChoice:
    """Chooses among the hosts of a URL, and remembers the highest timeline that was seen."""

    def __init__(self, name: str, hosts: Sequence[Host], ask: Callable[[Host, Any], Awaitable[tuple[Any, HostState]]]):
        """`ask` takes a host and a connection to it, or None; it returns a connection and the host's state."""
        self._name = name
        self._hosts = {name_of(host): host for host in hosts}
        self._ask = ask
        self.states: tuple[HostState, ...] = ()
        """What the hosts have answered last, in the order of the URL."""
        self.current: HostState | None = None
        """The host that was connected to last."""
        self.failovers = 0
        """How often a new timeline was met."""
        self._timeline = 0
        self._cluster: int | None = None
        self.store: str | None = None
        """The id of the store, once it is known; a host with another one is refused."""
        self._probes: dict[str, Any] = {}
        self._connections: dict[Any, HostState] = {}
        self._surveying = asyncio.Lock()
        self._surveyed_at = 0.0
        self._has_failed = True
        self._warned_of: tuple[str, ...] = ()
        self._watching: asyncio.Task[None] | None = None

    @property
    def several(self) -> bool:
        return len(self._hosts) > 1

    async def find(self) -> Host:
        """The host to connect to.

        Raises:
            Unreachable: None of them can be written, or one that can't has a higher timeline.
            DatabaseError: All refuse, for reasons that waiting does not cure.
        """
        now = asyncio.get_running_loop().time()
        async with self._surveying:
            if self._surveyed_at < (now if self._has_lost else now - limits.POSTGRES_HOSTS_SECONDS):
                await self._survey()
        return self._hosts[self._choose().name]

    @property
    def _has_lost(self) -> bool:
        """Whether a connection was closed since all hosts were asked, or could not be made."""
        return self._has_failed or any(connection.is_closed() for connection in self._connections)

    def failed(self) -> None:
        """A host could not be connected to."""
        self._has_failed = True

    def accept(self, connection: Any, state: HostState) -> None:
        """Take note of a new connection.

        Raises:
            Unreachable: The host is a former primary, or can't be written while others could.
            CannotOpen: It holds another store.
        """
        self._check_store(state)
        if self.several and not state.is_writable:
            raise Unreachable(f"no host of {self._name} can be written: {state.described}")
        if not state.is_standby:
            if self._is_known_cluster(state) and state.timeline < self._timeline:
                raise Unreachable(
                    f"{state.described}, but timeline {self._timeline} was seen: a former primary is not used"
                )
            if self._timeline and self._is_known_cluster(state) and state.timeline > self._timeline:
                self.failovers += 1
                logger.warning("%s: a new primary, on timeline %s after %s", state.name, state.timeline, self._timeline)
            self._timeline, self._cluster = state.timeline, state.cluster
        self.current = state
        self._connections[connection] = state

    def _check_store(self, state: HostState) -> None:
        if self.store is not None and state.store is not None and state.store != self.store:
            raise CannotOpen(
                f"{state.name} holds the store {state.store}, and the one that was opened is {self.store}: if it was "
                "restored or replaced, open it again; otherwise correct the hosts in the URL"
            )

    def _is_known_cluster(self, state: HostState) -> bool:
        return self._cluster == state.cluster

    # Asking

    def watch(self) -> None:
        """Ask all hosts every few seconds from now on, where there are several."""
        if self.several and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(), name="keyloft hosts")

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for connection in self._probes.values():
            connection.terminate()
        self._probes = {}

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(limits.POSTGRES_HOSTS_SECONDS)
            async with self._surveying:
                await self._survey()

    async def _survey(self) -> None:
        """Ask all hosts at once. Once one has answered that can be written, the others have a moment left."""
        loop = asyncio.get_running_loop()
        asking = {name: asyncio.create_task(self._probe(name)) for name in self._hosts}
        pending = set(asking.values())
        seconds: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if any(task.result().is_writable for task in done):
                    seconds = limits.POSTGRES_SURVEY_SECONDS
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        self._surveyed_at, self._has_failed = loop.time(), False
        self.states = tuple([_silent(name) if task.cancelled() else task.result() for name, task in asking.items()])
        self._warn()
        self._drop_superseded()

    async def _probe(self, name: str) -> HostState:
        """Ask a host, on a connection that is kept for the next time."""
        probe = self._probes.pop(name, None)
        try:
            self._probes[name], state = await self._ask(self._hosts[name], probe)
        except DatabaseError as error:
            return HostState(name=name, error=error)
        return state

    # Choosing

    def _choose(self) -> HostState:
        answered = [state for state in self.states if state.error is None]
        if self._cluster is None and len({state.cluster for state in answered}) > 1:
            raise CannotOpen(
                f"the hosts of {self._name} belong to different clusters, which don't replicate each other: name hosts "
                "of one cluster in the URL"
            )
        if self._cluster is not None:
            answered = [state for state in answered if self._is_known_cluster(state)]
        for state in answered:
            self._check_store(state)
        highest = max([self._timeline, *[state.timeline for state in answered]])
        best = [state for state in answered if state.is_writable and state.timeline >= highest]
        if not best:
            raise self._no_primary()
        return next((state for state in best if self.current and state.name == self.current.name), best[0])

    def _no_primary(self) -> DatabaseError:
        errors = [state.error for state in self.states if state.error is not None]
        if len(errors) == len(self.states) and not any(isinstance(error, (Unreachable, ReadOnly)) for error in errors):
            return errors[0]
        former = ", and timeline {} was seen" if self._timeline else ""
        answers = "; ".join([state.described for state in self.states])
        return Unreachable(f"no host of {self._name} is its primary{former.format(self._timeline)}: {answers}")

    def _warn(self) -> None:
        """Say so if two hosts can be written: what one of them acknowledges may be lost."""
        writable = [state for state in self.states if state.is_writable]
        names = tuple([state.described for state in writable]) if len(writable) > 1 else ()
        if names and names != self._warned_of:
            logger.warning(
                "%s: two hosts can be written (%s); Keyloft uses the one with the highest timeline: stop the other, "
                "which may still acknowledge writes of others that will be lost",
                self._name,
                "; ".join(names),
            )
        self._warned_of = names

    def _drop_superseded(self) -> None:
        """Cut the connections to hosts of a lower timeline than one that answers."""
        highest = max([state.timeline for state in self.states if self._is_known_cluster(state)], default=0)
        self._connections = {each: state for each, state in self._connections.items() if not each.is_closed()}
        superseded = {each: state for each, state in self._connections.items() if state.timeline < highest}
        for connection in superseded:
            connection.terminate()
        for described in {state.described for state in superseded.values()}:
            logger.warning("%s, and timeline %s was begun: its connections are dropped", described, highest)


def _silent(name: str) -> HostState:
    return HostState(name=name, error=Unreachable(f"{name} does not answer"))
