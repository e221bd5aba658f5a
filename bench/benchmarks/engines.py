"""Clusters that lose nodes, and what clusters cost: PostgreSQL with Patroni, and etcd: `scripts/bench engines`.

Each cluster has three nodes on this machine. Patroni runs with the file in deploy/patroni. With fewer cores than
servers, rates of several servers say little about several machines.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bench.arms import etcd as etcd_arms
from bench.arms.keyloft_file import NAME
from bench.arms.postgres.processes import readers
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Entrant, Task, arm
from bench.harness.figures import Reached, Row, of_rates
from bench.harness.race import Arm, Course
from bench.probes.outages import outage, outage_row
from tools import etcd, patroni
from tools.patroni import PatroniCluster, PatroniNode

_TTL_SECONDS = 20.0
"""Patroni's `ttl` in deploy/patroni/patroni.yml."""
_ONE, _TWO = "1 process", "2 processes"
_LEADER, _STANDBYS = "from the leader", "from two standbys"
_READERS = 4
_READS = Task("get", f"PostgreSQL: get, {IN_FLIGHT} concurrent in each of {_READERS} processes", "get", IN_FLIGHT)
_SET = Task("set", f"etcd: durable set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT)
_GET = Task("get", f"etcd: get, {IN_FLIGHT} concurrent", "get", IN_FLIGHT)
_WRITERS = Task("set", f"etcd: durable set, {IN_FLIGHT} concurrent in each process", "set", IN_FLIGHT)


class EngineScale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    seconds: float
    """Of each arm's round."""
    deaths: int


FULL = EngineScale(10_000, 9, 0.5, 3)
QUICK = EngineScale(1000, 1, 0.1, 1)


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    if reason := patroni.missing():
        raise SystemExit(reason)
    scale = QUICK if quick else FULL
    measure = _EngineRows(scale, folder, closing)
    rows: dict[str, Callable[[], Row]] = {
        "postgres-dies": measure.postgres_dies,
        "node-dies": measure.node_dies,
        "standby-reads": measure.standby_reads,
        "etcd-leader-dies": measure.etcd_leader_dies,
        "etcd-set": measure.etcd_set,
        "etcd-get": measure.etcd_get,
        "etcd-writers": measure.etcd_writers,
    }
    return Benchmark(
        rows=rows,
        notes=[
            f"three nodes of each cluster on one machine with {os.cpu_count()} cores; {scale.deaths} deaths per row",
            "PostgreSQL: quorum synchronous replication; ttl 20 s and loop_wait 2 s, as in deploy/patroni",
            f"etcd: {scale.stored:,} keys, {scale.rounds} interleaved rounds of {scale.seconds} s per arm",
        ],
    )


class _EngineRows:
    def __init__(self, scale: EngineScale, folder: Path, closing: ExitStack) -> None:
        self._scale, self._folder, self._closing = scale, folder, closing

    @cached_property
    def _cluster(self) -> PatroniCluster:
        return self._closing.enter_context(patroni.patroni_cluster())

    @cached_property
    def _etcd(self) -> list[etcd.Node]:
        return self._closing.enter_context(etcd.own_cluster(self._folder, 3))

    @cached_property
    def _course(self) -> Course:
        return self._closing.enter_context(Course(self._folder, self._scale.rounds))

    def postgres_dies(self) -> Row:
        def kill() -> None:
            self._cluster.leader().kill_postgres()

        found = []
        for _ in range(self._scale.deaths):
            self._cluster.wait_until_whole()
            found.append(asyncio.run(outage(self._cluster.url, kill, 10, reads="standby")))
        return outage_row("PostgreSQL: the leader's server is killed", found, writes=7, reads=2)

    def node_dies(self) -> Row:
        killed: list[PatroniNode] = []

        def kill() -> None:
            killed.append(self._cluster.leader())
            killed[-1].kill()

        found = []
        for _ in range(self._scale.deaths):
            self._cluster.wait_until_whole()
            found.append(asyncio.run(outage(self._cluster.url, kill, _TTL_SECONDS, reads="standby")))
            self._cluster.start(killed[-1])
        return outage_row(
            "PostgreSQL: the leader's server and its Patroni are killed", found, writes=_TTL_SECONDS + 5, reads=2
        )

    def standby_reads(self) -> Row:
        self._cluster.wait_until_whole()
        leader = self._cluster.url_of(self._cluster.leader())
        entrants = [
            readers(_LEADER, leader, _READERS, "writes"),
            readers(_STANDBYS, self._cluster.url, _READERS, "standby"),
        ]
        found = self._race(_READS, entrants)
        return Row(_READS.title, tuple(found.values()), _LEADER, verdicts=of_rates(found, _STANDBYS, {_LEADER: 1.6}))

    def etcd_leader_dies(self) -> Row:
        nodes, killed = self._etcd, list[etcd.Node]()

        def kill() -> None:
            killed.append(etcd.leader_of(nodes))
            killed[-1].kill()

        found = []
        for _ in range(self._scale.deaths):
            found.append(asyncio.run(outage(etcd.url_of(nodes, "outage"), kill, 4)))
            killed[-1].start(nodes)
            killed[-1].wait_until_ready()
        return outage_row("etcd: the leader is killed", found, writes=3, reads=3)

    def etcd_set(self) -> Row:
        # Of concurrent Puts, etcd writes many with one sync itself: the bar is for callers who wait for each one.
        return self._against_requests(_SET, etcd_arms.PUTS, etcd_arms.AWAITED_PUTS, {etcd_arms.AWAITED_PUTS: 10})

    def etcd_get(self) -> Row:
        return self._against_requests(_GET, etcd_arms.RANGES, etcd_arms.AWAITED_RANGES, {etcd_arms.RANGES: 5})

    def _against_requests(self, task: Task, concurrent: str, awaited: str, bars: dict[str, float]) -> Row:
        arms = [
            self._arm(etcd_arms.store(self._etcd), task),
            self._arm(etcd_arms.requests(self._etcd, concurrent), task),
            self._arm(etcd_arms.requests(self._etcd, awaited), replace(task, workers=1)),
        ]
        found = self._course.race(arms)
        return Row(task.title, tuple(found.values()), concurrent, verdicts=of_rates(found, NAME, bars))

    def etcd_writers(self) -> Row:
        entrants = [etcd_arms.processes(name, self._etcd, number) for name, number in ((_ONE, 1), (_TWO, 2))]
        found = self._race(_WRITERS, entrants)
        return Row(_WRITERS.title, tuple(found.values()), _ONE, verdicts=of_rates(found, _TWO, {_ONE: 0.8}))

    def _race(self, task: Task, entrants: list[Entrant]) -> dict[str, Reached]:
        return self._course.race([self._arm(entrant, task) for entrant in entrants])

    def _arm(self, entrant: Entrant, task: Task) -> Arm[Any, Any, Any]:
        return arm(entrant, task, self._scale.stored, self._scale.seconds)
