"""Knows the hosts of a database: their answers, and which is the primary, the host with the highest timeline.

A standby that is promoted begins a new timeline. The former primary may still run, and accept writes that no one else
will ever see. So the order in the URL does not decide, and a host is refused while another host, a standby
included, has a higher timeline, or had one before.

A client relies on the hosts' answers for POSTGRES_LEASE_SECONDS, then it asks again before it reads. The first commit
on a new timeline waits for that time, unless no former primary can be running. So once that commit is acknowledged, no
client reads from the former primary any more.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from keyloft import limits
from keyloft.core.health import HostHealth, ServerHealth
from keyloft.engines.postgres.host_state import Host, HostState, name_of
from keyloft.engines.postgres.lag import LagMeter
from keyloft.errors import CannotOpen, DatabaseError, ReadOnly, Unreachable

logger = logging.getLogger(__name__)


class HostChoice:
    """Chooses among the hosts of a URL, and remembers the highest timeline that was seen."""

    def __init__(self, name: str, hosts: Sequence[Host], ask: Callable[[Host, Any], Awaitable[tuple[Any, HostState]]]):
        """`ask` takes a host and a connection to it, or None; it returns a connection and the host's state."""
        self._name = name
        self._hosts = {name_of(host): host for host in hosts}
        self._ask = ask
        self.states: tuple[HostState, ...] = ()
        """What the hosts have answered last, in the order of the URL."""
        self.primary: HostState | None = None
        """The primary, as of the last time that the hosts were asked; None if there was none."""
        self.standbys: list[HostState] = []
        """The standbys that have answered."""
        self.lags: dict[str, float] = {}
        """For each standby that answers, how many seconds it is behind the primary, at most."""
        self._lag_meter = LagMeter()
        self.current: HostState | None = None
        """The host that was connected to last."""
        self.failovers = 0
        """How often a new timeline was met."""
        self.timeline = 0
        """The highest timeline that was seen."""
        self._cluster: int | None = None
        self.store: str | None = None
        """The id of the store, once it is known; a host with another one is refused."""
        self._probes: dict[str, Any] = {}
        self._connections: dict[Any, HostState] = {}
        self._surveying = asyncio.Lock()
        self._surveyed_at = 0.0
        self._asked_at = -math.inf
        """When the hosts were last asked and all had answered, or had had the time to."""
        self.renew_at = -math.inf if self.several else math.inf
        """From when on connections call `renew` before they are used, by the event loop's time."""
        self._renewing: asyncio.Task[None] | None = None
        self._held: tuple[int, float] = (0, -math.inf)
        """A timeline without commits, and from when on this process may commit on it."""
        self._has_failed = True
        self._warned_of: tuple[str, ...] = ()
        self._watching: asyncio.Task[None] | None = None

    @property
    def several(self) -> bool:
        return len(self._hosts) > 1

    def named(self, name: str) -> Host:
        return self._hosts[name]

    async def ask_all(self) -> None:
        """Ask all hosts for their state."""
        async with self._surveying:
            await self._survey()

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
        """Note that a connection to a host could not be made."""
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
            if self._is_known_cluster(state) and state.timeline < self.timeline:
                raise Unreachable(
                    f"{state.described}, but timeline {self.timeline} was seen: a former primary is not used"
                )
            self._note_timeline(state)
            self.timeline, self._cluster = state.timeline, state.cluster
            self._hold_commits(state)
        self.current = state
        self._connections[connection] = state

    def _note_timeline(self, state: HostState) -> None:
        """Note the timeline of a primary that has answered; a higher one means a failover."""
        if self.timeline and self._is_known_cluster(state) and state.timeline > self.timeline:
            self.failovers += 1
            logger.warning("%s: a new primary, on timeline %s after %s", state.name, state.timeline, self.timeline)
            self.timeline = state.timeline

    def _check_store(self, state: HostState) -> None:
        if self._has_other_store(state):
            raise CannotOpen(
                f"{state.name} holds the store {state.store}, and the one that was opened is {self.store}: if it was "
                "restored or replaced, start this process again, or close the store and open it again; otherwise "
                "correct the hosts in the URL"
            )

    def _has_other_store(self, state: HostState) -> bool:
        return self.store is not None and state.store is not None and state.store != self.store

    def _is_known_cluster(self, state: HostState) -> bool:
        return self._cluster == state.cluster

    def _belongs(self, state: HostState) -> bool:
        """Whether a host may have this store's data. An unknown host, such as a silent one, counts."""
        is_known = self._cluster is None or state.error is not None or self._is_known_cluster(state)
        return is_known and not self._has_other_store(state)

    def standby_without_primary(self) -> HostState | None:
        """The standby with the highest version, while no primary answers; None unless it surely holds this store."""
        answered = [state for state in self.states if state.error is None]
        if self.primary is not None or len({(state.cluster, state.store) for state in answered}) != 1:
            return None
        found = [
            (state.version, at)
            for at, state in enumerate(self.standbys)
            if state.store is not None and state.version is not None and not self.is_superseded(state)
        ]
        return self.standbys[max(found)[1]] if found else None

    def begin_with(self, standby: HostState) -> None:
        """Open the store on this standby, and refuse from now on a primary of an earlier timeline or another store."""
        self.store, self._cluster = standby.store, standby.cluster
        self.timeline = max(self.timeline, standby.timeline)

    def is_superseded(self, state: HostState) -> bool:
        """Whether another host that answers follows a later timeline."""
        return any([other.supersedes(state) for other in self.states])

    # Former primaries

    async def renew(self) -> None:
        """Ask all hosts again; wait for their answers only if the last ones are too old to rely on.

        When it returns, the connections to former primaries are closed: another host has a higher timeline.
        """
        time = asyncio.get_running_loop().time
        while True:
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._ask_again(), name="keyloft hosts")
            if time() < self._asked_at + limits.POSTGRES_LEASE_SECONDS:
                return
            await asyncio.shield(self._renewing)

    def _hold_commits(self, primary: HostState) -> None:
        """Note from when on this process may commit, if this timeline has no commits yet."""
        others = [state for state in self.states if self._belongs(state) and not state.is_same_server(primary)]
        others = [state for state in others if state.name != primary.name]
        if primary.is_unused and self._held[0] != primary.timeline and any([state.may_serve for state in others]):
            self._held = primary.timeline, asyncio.get_running_loop().time() + limits.POSTGRES_LEASE_SECONDS

    async def wait_for_readers(self) -> None:
        """Wait until no client reads from a former primary any more."""
        timeline, until = self._held
        if timeline == self.timeline:
            await asyncio.sleep(until - asyncio.get_running_loop().time())

    def health(self, answered: Mapping[str, int], unknown: int) -> ServerHealth:
        """What is known of the hosts: `answered` are the reads by host, `unknown` the commits of unknown outcome."""
        states = self.states or (() if self.current is None else (self.current,))
        lags = {name: lag for name, lag in self.lags.items() if lag < math.inf}
        primary = self.primary if self.states else self.current
        return ServerHealth(
            host=None if primary is None else primary.name,
            timeline=self.timeline or None,
            synchronous=None if primary is None else primary.synchronous,
            hosts=tuple(
                [
                    HostHealth(
                        name=state.name,
                        role=self._role_of(state),
                        timeline=self._shown_timeline(state) or None,
                        sync_state=None if primary is None else primary.sync_state_of(state),
                        lag=lags.get(state.name),
                        reads=answered.get(state.name, 0),
                    )
                    for state in states
                ]
            ),
            failovers=self.failovers,
            unknown_commits=unknown,
        )

    def _role_of(self, state: HostState) -> str:
        if self._belongs(state):
            primary = self.primary
            is_alias = primary is not None and primary.name != state.name and primary.is_same_server(state)
            return "alias" if is_alias else state.role
        return "other store" if self._is_known_cluster(state) else "other cluster"

    def _shown_timeline(self, state: HostState) -> int:
        """The timeline of a host; for a standby that reports it late, the timeline of the last commit that it shows."""
        return max(state.timeline, state.last_commit if state.last_commit <= self.timeline else 0)

    # Asking

    def watch(self) -> None:
        """Ask all hosts every few seconds from now on, where there are several."""
        if self.several and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(), name="keyloft hosts")

    async def aclose(self) -> None:
        for task in (self._watching, self._renewing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for connection in self._probes.values():
            connection.terminate()
        self._probes = {}

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(limits.POSTGRES_HOSTS_SECONDS)
            await self._ask_again()

    async def _ask_again(self) -> None:
        try:
            await self.ask_all()
        except Exception:  # without this task, hosts would never be asked again
            logger.exception("%s: asking the hosts failed, trying again", self._name)
            await asyncio.sleep(limits.POSTGRES_CONNECT_PAUSES[0])

    async def _survey(self) -> None:
        """Ask all hosts at once. Once a writable host has answered, the others have a moment left."""
        loop = asyncio.get_running_loop()
        began = loop.time()
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
        self.standbys = [state for state in self.states if state.is_standby and self._belongs(state)]
        try:
            self.primary = self._choose()
            self._note_timeline(self.primary)
        except DatabaseError:
            self.primary = None
        self.lags = self._lag_meter.measure(self.primary, self.standbys)
        for state in self.standbys:
            if self.primary is not None and self._shown_timeline(state) < self.primary.timeline:
                self.lags[state.name] = math.inf  # it follows a former primary, as far as is known
        self._warn()
        self._drop_superseded()
        self._asked_at = began
        if self.several:
            self.renew_at = began + limits.POSTGRES_RENEW_SECONDS

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
        current = [state for state in answered if state.is_writable and state.timeline >= self.timeline]
        best = [state for state in current if not any([other.supersedes(state) for other in answered])]
        if not best:
            raise self._no_primary()
        chosen = next((state for state in best if self.current and state.name == self.current.name), best[0])
        # Of the chosen host alone: a standby that is behind a restore still shows the id from before it.
        self._check_store(chosen)
        return chosen

    def _no_primary(self) -> DatabaseError:
        errors = [state.error for state in self.states if state.error is not None]
        if len(errors) == len(self.states) and not any(isinstance(error, (Unreachable, ReadOnly)) for error in errors):
            return errors[0]
        former = ", and timeline {} was seen" if self.timeline else ""
        answers = "; ".join([state.described for state in self.states])
        return Unreachable(f"no host of {self._name} is its primary{former.format(self.timeline)}: {answers}")

    def _warn(self) -> None:
        """Log a warning if two hosts can be written: what one of them acknowledges may be lost."""
        known = [state for state in self.states if self._cluster in (None, state.cluster)]
        writable: list[HostState] = []
        for state in known:
            if state.is_writable and not any([state.is_same_server(other) for other in writable]):
                writable.append(state)
        names = tuple([state.described for state in writable]) if len(writable) > 1 else ()
        if names and names != self._warned_of:
            logger.warning(
                "%s: two hosts can be written (%s); Keyloft uses %s: stop the other, which may still acknowledge "
                "writes of others that will be lost",
                self._name,
                "; ".join(names),
                "neither" if self.primary is None else self.primary.name,
            )
        self._warned_of = names

    def _drop_superseded(self) -> None:
        """Close the connections to hosts whose timeline is lower than that of a host that answers."""
        answered = [state for state in self.states if self._is_known_cluster(state)]
        self._connections = {each: state for each, state in self._connections.items() if not each.is_closed()}
        superseded = {
            each: state
            for each, state in self._connections.items()
            if any([other.supersedes(state) for other in answered])
        }
        for connection in superseded:
            connection.terminate()
        for described in {state.described for state in superseded.values()}:
            logger.warning("%s, and a later timeline was begun: its connections are dropped", described)


def _silent(name: str) -> HostState:
    return HostState(name=name, error=Unreachable(f"{name} does not answer"))
