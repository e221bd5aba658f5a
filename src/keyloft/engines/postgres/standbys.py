"""Answers gets and lists from standbys that show what this client has seen, and from the primary otherwise.

Each answer comes with the version counter of its snapshot. An answer counts if it is not older than what this engine
has read, written, or reported to a watch before, from whichever host: so its callers read their own writes, and never
go back in time.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from keyloft import limits
from keyloft.core.records import Ask, Changes, Get, Latest, Scan, Usage
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.postgres.host_state import HostState
from keyloft.engines.postgres.reads import PostgresReads, SnapshotAnswers
from keyloft.engines.postgres.server import PostgresServer
from keyloft.errors import Busy, Closed, DatabaseError, Unreachable

_ANSWERED: Final = (Get, Scan)
"""The requests that standbys answer."""
_PASSING: Final = (Unreachable, Busy, TimeoutError)


class PrimaryReads:
    """Reads from the primary, and notes which version the answers show: no standby may show less afterwards."""

    def __init__(self, reads: PostgresReads, saw: Callable[[int], None]) -> None:
        self._reads = reads
        self._saw = saw

    async def read(self, *asks: Ask) -> list[Any]:
        answers = await self._reads.read(*asks)
        self._saw(_version_shown(asks, answers))
        return answers


def _version_shown(asks: Sequence[Ask], answers: list[Any]) -> int:
    """The version of the state that the answers show, as far as they tell."""
    if isinstance(answers, SnapshotAnswers):
        return answers.version
    versions = [0]
    for ask, answer in zip(asks, answers, strict=True):
        if isinstance(ask, Latest):
            versions.append(answer)
        elif isinstance(ask, Changes):
            versions.append(answer.end.version)
        elif isinstance(ask, Usage):
            versions.append(answer.version)
    return max(versions)


class StandbyReads:
    """Reads from several hosts."""

    def __init__(
        self, server: PostgresServer, primary: PostgresReads, max_lag: float, opened_on: HostState | None = None
    ) -> None:
        """If there was no primary at the beginning, `opened_on` is the standby that had the highest version then."""
        self._server = server
        self._primary = primary
        self.of_primary = PrimaryReads(primary, self.saw)
        """For watches, and for what standbys don't answer."""
        self._max_lag = max_lag
        self._standbys: dict[tuple[str, bool], tuple[PostgresServer, PostgresReads]] = {}
        """By their name, and whether they are patient."""
        self._failed: dict[str, HostState] = {}
        """Standbys that did not answer, with the state by which they were chosen; a newer state lets them be asked."""
        self.answered: Counter[str] = Counter()
        """How many reads each host has answered."""
        self._next = 0
        self._seen = 0 if opened_on is None else opened_on.version or 0
        self._has_met_primary = opened_on is None
        self._timeline = server.hosts.timeline
        self._iteration = LoopIteration(at_start=self._choose)
        self._chosen: HostState | None = None
        """The standby that gets of this iteration of the event loop ask: they share a statement."""
        self._closed = False

    def saw(self, version: int) -> None:
        """Note that a caller has seen this version, so that no later answer is older."""
        self._seen = max(self._seen, version)

    async def read(self, *asks: Ask) -> list[Any]:
        """The answers to all requests, from one snapshot of one host.

        Raises:
            DatabaseError: No host has answered in time.
        """
        asked: HostState | None = None
        if len(asks) == 1 and type(get := asks[0]) is Get and not get.include_expired:
            self._iteration.enter()
            asked = self._chosen
            if asked is not None and (found := await self._get(asked, get)) is not None:
                return found
        elif not all([type(ask) in _ANSWERED for ask in asks]):
            return await self.of_primary.read(*asks)
        return await self._first_of(lambda reads: reads.read(*asks), standbys_first=True, asked=asked)

    async def _get(self, host: HostState, get: Get) -> list[Any] | None:
        """The answer of a standby; None if it does not answer, or its answer does not count.

        It needs no timer: the reads of a standby give up by themselves after POSTGRES_STANDBY_SECONDS.
        """
        wanted = self._seen
        try:
            answers = await self._reads_of(host).points.read(get.space, (get,))
        except _PASSING:
            self._failed[host.name] = host
            return None
        if not isinstance(answers, SnapshotAnswers) or answers.version < wanted:
            return None
        self.saw(answers.version)
        self._count(host)
        return answers

    def _choose(self, now: float) -> None:
        self._forget_lost_history()
        self._chosen = next(iter(self._usable()), None)

    async def counter(self) -> tuple[int, int]:
        """The version counter and the time, of the primary if there is one."""
        version, now = await self._first_of(PostgresReads.counter_and_time, standbys_first=False)
        return version, now

    async def _first_of(
        self,
        read: Callable[[PostgresReads], Awaitable[list[Any]]],
        *,
        standbys_first: bool,
        asked: HostState | None = None,
    ) -> list[Any]:
        """The first answer that counts; `asked` has just been asked, and is asked again only after all others."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._server.patience
        failure: DatabaseError | None = None
        seconds = limits.POSTGRES_STANDBY_SECONDS
        was_late = False
        while True:
            self._forget_lost_history()
            wanted = self._seen
            others = [host for host in self._usable() if host is not asked]
            asked = None
            # Without a primary, no one else can answer a read that takes long. Standbys that were late, and have said
            # since which role they have, are alive: they share the time that is left.
            patient = was_late and self._server.hosts.primary is None
            if patient and others:
                seconds = max(seconds, (deadline - loop.time()) / len(others))
            for host in (*others, None) if standbys_first else (None, *others):
                if host is None and self._server.hosts.primary is None and self._server.hosts.standbys:
                    continue
                try:
                    async with asyncio.timeout(min(seconds, deadline - loop.time())):
                        answers = await read(self._primary if host is None else self._reads_of(host, patient=patient))
                except _PASSING as error:
                    failure = error if isinstance(error, DatabaseError) else failure
                    if host is not None:
                        self._failed[host.name] = host
                        was_late = True
                    elif isinstance(error, TimeoutError):
                        seconds *= 2  # a read that takes long is left to the primary, not begun again on each standby
                    continue
                version = answers.version if isinstance(answers, SnapshotAnswers) else 0
                if host is None or version >= wanted:
                    self.saw(version)
                    self._count(host)
                    return answers
            if loop.time() >= deadline:
                raise self._server.unreachable(self._server.patience, failure)
            await asyncio.sleep(limits.POSTGRES_CONNECT_PAUSES[0])

    def _count(self, host: HostState | None) -> None:
        host = host or self._server.hosts.current
        if host is not None:
            self.answered[host.name] += 1

    def _forget_lost_history(self) -> None:
        """Give up waiting for a version that was lost with the former primary: no host will ever reach it.

        A new primary whose version has not yet jumped shows where the history goes on.
        """
        primary = self._server.hosts.primary
        if primary is None or primary.timeline == self._timeline:
            return
        self._timeline, version = primary.timeline, primary.version or 0
        if version // limits.VERSION_JUMP == self._seen // limits.VERSION_JUMP:
            self._seen = min(self._seen, version)

    def _usable(self) -> list[HostState]:
        """The standbys that are not too far behind, another one first each time."""
        hosts = self._server.hosts
        self._has_met_primary = self._has_met_primary or hosts.primary is not None
        found = [
            state for state in hosts.standbys if self._is_near(state) and self._failed.get(state.name) is not state
        ]
        self._next += 1
        turn = self._next % len(found) if found else 0
        return found[turn:] + found[:turn]

    def _is_near(self, state: HostState) -> bool:
        """Whether a standby may be asked; before there was a primary, its lag is not known, and versions decide."""
        hosts = self._server.hosts
        if not self._has_met_primary:
            return not hosts.is_superseded(state)
        return hosts.lags.get(state.name, math.inf) <= self._max_lag

    def _reads_of(self, host: HostState, *, patient: bool = False) -> PostgresReads:
        """The reads of a standby, which give up soon by themselves unless they are to be patient."""
        if self._closed:
            raise Closed
        if (host.name, patient) not in self._standbys:
            patience = self._server.patience if patient else limits.POSTGRES_STANDBY_SECONDS
            server = self._server.of_standby(host.name, patience)
            self._standbys[host.name, patient] = server, PostgresReads(server, shows_version=True)
        return self._standbys[host.name, patient][1]

    async def aclose(self) -> None:
        self._closed = True
        for server, reads in self._standbys.values():
            await reads.aclose()
            await server.aclose()
