"""What can happen to a cluster: each fault is made by a call, which returns the call that ends it."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from tools import etcd
from tools.machines import Machine, MachineGroup, namespaces
from tools.patroni import PatroniCluster, PatroniNode, patroni_cluster

Ending: TypeAlias = Callable[[], None]


class Arena(Struct, frozen=True):
    """A cluster, and what can be done to it."""

    url: str
    faults: dict[str, Callable[[], Ending]]
    """By name: makes the fault, and returns what ends it."""
    wait_until_whole: Callable[[], None]
    client: Machine | None = None
    """Where the first client runs, if it can be cut off."""


@contextmanager
def postgres_arena(*, cuts: bool, electors: int = 1, within: Path | None = None) -> Iterator[Arena]:
    """Three PostgreSQL servers with Patroni; with cuts, each on a machine of its own with an etcd node."""
    with ExitStack() as stack:
        group = stack.enter_context(namespaces(3)) if cuts else None
        cluster = stack.enter_context(patroni_cluster(electors=electors, machines=group, within=within))
        faults = {**_patroni_faults(cluster), **_cuts_of(cluster), **_cuts_of_client(group)}
        yield Arena(cluster.url, faults, cluster.wait_until_whole, None if group is None else group.client)


def _patroni_faults(cluster: PatroniCluster) -> dict[str, Callable[[], Ending]]:
    def follower() -> PatroniNode:
        return random.choice(cluster.followers())

    def kill(node: PatroniNode) -> Ending:
        node.kill()
        return lambda: cluster.start(node)

    def kill_postgres(node: PatroniNode) -> Ending:
        node.kill_postgres()

        def wait_for_another() -> None:
            """Until Patroni has noticed, the cluster looks whole."""
            cluster.leader(other_than=node)

        return wait_for_another

    def hang(node: PatroniNode) -> Ending:
        node.hang_patroni()
        return node.go_on

    def hang_and_replace(node: PatroniNode) -> Ending:
        """Two servers can be written, until the old leader's Patroni goes on."""
        node.hang_patroni()
        try:
            cluster.end_leadership()
            cluster.leader(other_than=node)
        except BaseException:
            node.go_on()
            raise
        return node.go_on

    def freeze(node: PatroniNode) -> Ending:
        node.freeze()
        return node.go_on

    return {
        "the leader's PostgreSQL dies": lambda: kill_postgres(cluster.leader()),
        "the leader's machine dies": lambda: kill(cluster.leader()),
        "the leader's Patroni hangs": lambda: hang(cluster.leader()),
        "the leader's Patroni hangs, and another node leads": lambda: hang_and_replace(cluster.leader()),
        "the leader's machine freezes": lambda: freeze(cluster.leader()),
        "a standby's machine dies": lambda: kill(follower()),
        "a standby's machine freezes": lambda: freeze(follower()),
    }


def _cuts_of(cluster: PatroniCluster) -> dict[str, Callable[[], Ending]]:
    def cut(off: Callable[[PatroniNode], None], node: PatroniNode) -> Ending:
        off(node)
        return cluster.group.mend

    if not cluster.group.can_cut:
        return {}
    return {
        "the leader is cut off": lambda: cut(lambda node: cluster.group.cut_off(node.machine), cluster.leader()),
        "the leader is cut off from the others, not from clients": lambda: cut(
            lambda node: cluster.group.cut_from_others(node.machine), cluster.leader()
        ),
        "a standby is cut off": lambda: cut(
            lambda node: cluster.group.cut_off(node.machine), random.choice(cluster.followers())
        ),
    }


def _cuts_of_client(group: MachineGroup | None) -> dict[str, Callable[[], Ending]]:
    if group is None or (client := group.client) is None:
        return {}

    def cut() -> Ending:
        group.cut_off(client)
        return group.mend

    return {"a client is cut off": cut}


@contextmanager
def etcd_arena(folder: Path, *, cuts: bool) -> Iterator[Arena]:
    """Three etcd nodes; with cuts, each on a machine of its own."""
    with ExitStack() as stack:
        group = stack.enter_context(namespaces(3)) if cuts else None
        nodes = stack.enter_context(etcd.own_cluster(folder, 3, machines=group))

        def wait_until_whole() -> None:
            for node in nodes:
                try:
                    node.wait_until_ready()
                except RuntimeError:
                    # etcd 3.4.23, once: after it was frozen as the leader, it followed, and answered no reads.
                    node.kill()
                    node.start(nodes)
                    node.wait_until_ready()

        faults = {**_etcd_faults(nodes, group), **_cuts_of_client(group)}
        yield Arena(etcd.url_of(nodes, "torture"), faults, wait_until_whole, None if group is None else group.client)


def _etcd_faults(nodes: list[etcd.Node], group: MachineGroup | None) -> dict[str, Callable[[], Ending]]:
    def follower() -> etcd.Node:
        leader = etcd.leader_of(nodes)
        return random.choice([node for node in nodes if node is not leader])

    def kill(node: etcd.Node) -> Ending:
        node.kill()
        return lambda: node.start(nodes)

    def freeze(node: etcd.Node) -> Ending:
        node.send(signal.SIGSTOP)
        return lambda: node.send(signal.SIGCONT)

    def cut(off: Callable[[etcd.Node], None], node: etcd.Node) -> Ending:
        assert group is not None
        off(node)
        return group.mend

    faults: dict[str, Callable[[], Ending]] = {
        "the leader dies": lambda: kill(etcd.leader_of(nodes)),
        "the leader freezes": lambda: freeze(etcd.leader_of(nodes)),
        "a follower dies": lambda: kill(follower()),
        "a follower freezes": lambda: freeze(follower()),
    }
    if group is not None:
        faults |= {
            "the leader is cut off": lambda: cut(lambda node: group.cut_off(node.machine), etcd.leader_of(nodes)),
            "the leader is cut off from the others, not from clients": lambda: cut(
                lambda node: group.cut_from_others(node.machine), etcd.leader_of(nodes)
            ),
            "a follower is cut off": lambda: cut(lambda node: group.cut_off(node.machine), follower()),
        }
    return faults


def hold(seconds: float) -> None:
    """Let a fault last: nothing tells when it was long enough."""
    time.sleep(seconds)
