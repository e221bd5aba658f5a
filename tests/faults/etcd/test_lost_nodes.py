"""A cluster of three nodes that loses one: nothing that was acknowledged is lost, and nothing is written twice."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keyloft import Unreachable, admin, limits
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Change, Committed, Get, Scan, Set, Space, Sum
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import Encoding, unpack_counter
from keyloft.engines import inspect_database, open_engine
from keyloft.engines.etcd.cluster import EtcdCluster
from tools.etcd import NOT_INSTALLED, Node, is_installed, own_cluster, url_of

A = Space.TUPLES
_WRITERS = 8
_LONGEST_SECONDS = 60


@pytest.fixture
def nodes(server_folder: Path) -> Iterator[list[Node]]:
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    # Else etcd lets a member join only if the others have been connected for five seconds.
    with own_cluster(server_folder, 3, "--strict-reconfig-check=false") as nodes:
        yield nodes
        for node in nodes:
            node.stop()


def size_of(node: Node) -> int:
    """How many bytes the file of a member has."""
    return int(json.loads(node.request("/v3/maintenance/status", {}))["dbSize"])


async def leader_of(nodes: list[Node]) -> Node:
    address = DatabaseUrl.parse(url_of(nodes, "any")).etcd
    assert address is not None
    cluster = EtcdCluster(address)
    statuses = await cluster.statuses()
    await cluster.aclose()
    return next(node for node in nodes if node.client in statuses and _leads(statuses[node.client]))


def _leads(status: object) -> bool:
    return bool(status.leader == status.header.member_id)  # type: ignore[attr-defined]


class WriteLoad:
    """Writers that set a key of their own and add to one counter, again and again."""

    def __init__(self) -> None:
        self.acknowledged: set[bytes] = set()
        self.must_end = False

    async def write(self, engine: Engine, name: bytes) -> None:
        number = 0
        while not self.must_end:
            key = b"%s-%06d" % (name, number)
            done = await engine.commit(Batch((Set(A, key, b"1", Encoding.JSON), Sum(A, b"total", 1))))
            assert isinstance(done, Committed)
            self.acknowledged.add(key)
            number += 1

    async def wait_for(self, more: int) -> None:
        wanted = len(self.acknowledged) + more
        async with asyncio.timeout(_LONGEST_SECONDS):
            while len(self.acknowledged) < wanted:
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def on(self, *engines: Engine) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as writers:
            for number in range(_WRITERS):
                writers.create_task(self.write(engines[number % len(engines)], b"w%d" % number))
            yield
            self.must_end = True


def endpoints_known_to(engine: Engine) -> list[str]:
    cluster: EtcdCluster = engine.cluster  # type: ignore[attr-defined]
    return [member.endpoint for member in cluster.members]


def replace(lost: Node, nodes: list[Node], folder: Path) -> None:
    """Remove a member that is lost from its cluster, and start another one in its place, as the documents say."""
    nodes.remove(lost)
    asked = nodes[0]
    members = json.loads(asked.request("/v3/cluster/member/list", {}))["members"]
    [number] = [member["ID"] for member in members if member["name"] == lost.name]
    new = Node("n4", folder)
    asked.request("/v3/cluster/member/remove", {"ID": number})
    asked.request("/v3/cluster/member/add", {"peerURLs": [f"http://{new.peer}"]})
    nodes.append(new)
    new.start(nodes, joins=True)
    new.wait_until_ready()


async def test_a_leader_that_is_killed_and_replaced_costs_nothing_that_was_acknowledged(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kill -9 and one SIGSTOP, under the load of two engines that write the same counter."""
    monkeypatch.setattr(limits, "ETCD_MEMBERS_SECONDS", 0.05)
    first, second = [
        await open_engine(url_of(nodes[at:] + nodes[:at], "app"), patience=_LONGEST_SECONDS) for at in (0, 1)
    ]
    watch = second.watch(Scan(A, b"w", b"x", 1))
    await second.read(Get(A, b"total"))  # then the watch has started: it reports all that the other engine writes
    seen: set[bytes] = set()

    async def follow() -> None:
        async for changes in watch:
            seen.update(change.key for change in changes if isinstance(change, Change))

    following = asyncio.create_task(follow())
    load = WriteLoad()
    async with load.on(first, second):
        await load.wait_for(100)
        killed = await leader_of(nodes)
        killed.kill()
        await load.wait_for(100)
        await asyncio.to_thread(replace, killed, nodes, tmp_path)
        leader = await leader_of(nodes)
        # One of the two that the engines know: they go on with the other one, which needs the new one's vote.
        stopped = leader if leader in nodes[:2] else nodes[0]
        stopped.send(signal.SIGSTOP)
        await load.wait_for(100)
        stopped.send(signal.SIGCONT)
        await load.wait_for(50)
    for engine in (first, second):
        [total] = await engine.read(Get(A, b"total"))
        assert total is not None
        assert unpack_counter(total.value) == len(load.acknowledged)
        [page] = await engine.read(Scan(A, b"w", b"x", 1_000_000))
        assert set(page.keys) == load.acknowledged
    async with asyncio.timeout(_LONGEST_SECONDS):
        while seen != load.acknowledged:  # the watch has missed nothing
            assert not following.done(), following.exception()
            await asyncio.sleep(0.01)
    following.cancel()
    async with asyncio.timeout(_LONGEST_SECONDS):
        for engine in (first, second):
            while nodes[2].client not in endpoints_known_to(engine):  # it has joined while they ran
                await asyncio.sleep(0.01)
            await engine.aclose()


async def test_a_commit_that_was_never_sent_is_known_not_to_be_made(nodes: list[Node]) -> None:
    engine = await open_engine(url_of(nodes, "app"), patience=1)
    await engine.commit(Batch((Set(A, b"k", b"1", Encoding.JSON),)))
    for node in nodes:
        node.kill()
    with pytest.raises(Unreachable):
        await engine.read(Get(A, b"k"))
    with pytest.raises(Unreachable):
        await engine.commit(Batch((Set(A, b"k", b"2", Encoding.JSON),)))
    await engine.aclose()


async def test_a_compaction_passes_over_a_member_that_is_away_and_names_it(nodes: list[Node]) -> None:
    url = url_of(nodes, "app")
    engine = await open_engine(url)
    for number in range(20):
        await engine.commit(Batch((Set(A, b"k", b"%d" % number * 100_000, Encoding.BYTES),)))
    await engine.aclose()
    while (before := size_of(nodes[2])) < 2_000_000:  # its file grows a moment later
        await asyncio.sleep(0.01)
    nodes[0].kill()  # the first one of the URL
    names_it = f"has been compacted, but these members did not answer.*{nodes[0].client}"
    with pytest.raises(Unreachable, match=names_it):
        await admin.compact(url)
    async with asyncio.timeout(_LONGEST_SECONDS):
        while size_of(nodes[2]) > before / 2:  # a member forgets old revisions a moment after the one that was asked
            with pytest.raises(Unreachable, match=names_it):
                await admin.compact(url)


async def test_a_cluster_that_is_away_is_named_and_served_again(nodes: list[Node]) -> None:
    engine = await open_engine(url_of(nodes, "app"), patience=1)
    of_one_name = await open_engine(url_of(nodes[2:], "app"), patience=_LONGEST_SECONDS)
    await engine.commit(Batch((Set(A, b"k", b"1", Encoding.JSON),)))
    for node in nodes[1:]:
        node.kill()
    with pytest.raises(Unreachable, match="more than half of its members"):
        await engine.read(Get(A, b"k"))
    with pytest.raises(
        Unreachable, match=f"answer by themselves: {nodes[0].client}, and these don't: {nodes[1].client}"
    ):
        await inspect_database(url_of(nodes, "app"), patience=1)
    nodes[1].start(nodes)
    await asyncio.to_thread(nodes[1].wait_until_ready)
    inspection = await inspect_database(url_of(nodes, "app"))
    assert inspection is not None
    assert [what for what, _ in inspection.doubts] == [f"these members of etcd don't answer: {nodes[2].client}"]
    inspection = await inspect_database(url_of(nodes[:2], "app"))
    assert inspection is not None
    assert ["the URL names 2 of etcd's 3 members" in what for what, _ in inspection.doubts] == [True]
    async with asyncio.timeout(_LONGEST_SECONDS):
        while True:
            try:
                [record] = await engine.read(Get(A, b"k"))
                break
            except Unreachable:
                continue
    assert record is not None
    # The only member that the URL names is away; the engine has learned of the others.
    assert await of_one_name.read(Get(A, b"k")) == [record]
    await engine.aclose()
    await of_one_name.aclose()
