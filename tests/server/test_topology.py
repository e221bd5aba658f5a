"""A cluster of three nodes with a leaf node, as `nats-config` writes them: all plugins are served, and kept apart."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from keyloft.cli.doctor.nats import examine
from keyloft.errors import InvalidArgument
from keyloft.nats.connection import Login
from keyloft.plugins import DatabaseClient
from keyloft.server.config import Config
from keyloft.server.isolation import Isolation, NatsUser, isolate, logins_in
from keyloft.server.nats_process import NatsServer
from keyloft.server.topology import Topology
from tests.cli.commands import run_command
from tests.server.test_isolation import PREFIXES, Connected, WorstService, connected
from tests.server.test_serve import refused, serving
from tests.support.nats import settled
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

PLUGINS = ["a", "a-b", "trivia", "quotes"]
TENANTS = ["acme", "acme-2"]
AT_THE_LEAF = ["trivia", "a", "TENANT-acme"]
_LONGEST_SECONDS = 30.0


@dataclass
class Servers:
    """Servers by name: n1, n2 and n3 are a cluster, edge is a leaf node of n1 and n2."""

    servers: Mapping[str, NatsServer]
    isolation: Isolation
    hubs: list[str]
    services: list[WorstService] = field(default_factory=list)

    def user(self, name: str) -> NatsUser:
        users = {**self.isolation.plugins, **self.isolation.others, "ADMIN": self.isolation.admin}
        users |= {user.name: user for user in self.isolation.tenants.values()}
        return users[name]

    @asynccontextmanager
    async def client(self, server: str, user: str) -> AsyncIterator[Connected]:
        async with connected(self.servers[server], self.user(user)) as client:
            yield client

    @property
    def places(self) -> list[tuple[str, str]]:
        """Every user with every server that it can log in to."""
        everyone = [*PLUGINS, *[user.name for user in self.isolation.tenants.values()]]
        return [(node, name) for node in ("n1", "n2", "n3") for name in everyone] + [
            ("edge", name) for name in AT_THE_LEAF
        ]

    def heard(self) -> list[str]:
        found = [subject for service in self.services for subject in service.heard]
        for service in self.services:
            service.heard.clear()
        return found


def topologies(ports: Mapping[str, int], leaf_ports: Mapping[str, int]) -> dict[str, Topology]:
    routes = [f"127.0.0.1:{port}" for port in ports.values()]
    return {
        name: Topology(
            server_name=name,
            cluster="keyloft",
            cluster_listen=f"127.0.0.1:{port}",
            routes=routes,
            leaf_listen=f"127.0.0.1:{leaf_ports[name]}",
            leaves={"edge": AT_THE_LEAF},
            system=True,
        )
        for name, port in ports.items()
    }


@asynccontextmanager
async def built(folder: Path) -> AsyncIterator[Servers]:
    """The servers, connected to each other."""
    names = ["n1", "n2", "n3"]
    leaf_ports = {name: free_port() for name in names}
    nodes = topologies({name: free_port() for name in names}, leaf_ports)
    passwords: dict[str, str] = {}
    made: Isolation | None = None
    for name, topology in nodes.items():
        made = isolate(PLUGINS, TENANTS, passwords=passwords, topology=topology)
        passwords = logins_in(made.text)
        made.write(folder / f"{name}.conf")
    assert made is not None
    hubs = [f"127.0.0.1:{leaf_ports[name]}" for name in ("n1", "n2")]
    edge = Topology(server_name="edge", leaf_of=hubs, leaf_name="edge")
    there = {name: password for name, password in passwords.items() if name in (*AT_THE_LEAF, "LEAF-edge")}
    isolate(["trivia", "a"], ["acme"], passwords=there, topology=edge).write(folder / "edge.conf")
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(NatsServer(config=folder / f"{name}.conf"))
            for name in (*names, "edge")
        }
        network = Servers(servers, made, hubs)
        await until_connected(network)
        yield network


async def until_connected(network: Servers) -> None:
    """Wait until each node has its routes, and the leaf node its hub, as the system account tells."""
    async with asyncio.timeout(_LONGEST_SECONDS), network.client("n1", "SYSTEM") as system:
        while True:
            found = await pinged(system.nats)
            routes = [len({route["name"] for route in one["statsz"].get("routes", [])}) for one in found]
            if routes == [2, 2, 2] and await leaf_count(system.nats) == 1:
                return
            await asyncio.sleep(0.05)


async def pinged(client: Client) -> list[dict[str, Any]]:
    return await gathered(client, "$SYS.REQ.SERVER.PING", 3)


async def leaf_count(client: Client) -> int:
    return sum([one["data"]["leafnodes"] for one in await gathered(client, "$SYS.REQ.SERVER.PING.LEAFZ", 3)])


async def gathered(client: Client, subject: str, number: int) -> list[dict[str, Any]]:
    """Up to so many answers; fewer if servers are not connected yet."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subject, b"", reply=inbox)
    found = []
    with suppress(TimeoutError, NatsError):
        for _ in range(number):
            found.append(json.loads((await subscription.next_msg(timeout=2)).data))
    await subscription.unsubscribe()
    return found


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Servers]:
    """The servers, and the worst possible service on two nodes of the cluster."""
    async with built(tmp_path) as network, AsyncExitStack() as stack:
        for name in ("n1", "n2"):
            client = await stack.enter_async_context(connected(network.servers[name], network.isolation.service))
            service = WorstService(client.nats, client.refusals)
            await service.serve()
            assert not service.refusals
            network.services.append(service)
        # The other nodes learn of subscriptions a moment later, in their order; these are the last ones for requests.
        for server in ("n3", "edge"):
            async with network.client(server, "TENANT-acme") as client, asyncio.timeout(_LONGEST_SECONDS):
                for service in network.services:
                    while not service.heard:
                        with suppress(NoRespondersError):
                            await client.ask("db.semantic.acme.web.put")
            network.heard()
        yield network


def own(user: str) -> list[str]:
    """The subjects of a user's own requests."""
    if user.startswith("TENANT-"):
        return [f"db.semantic.{user.removeprefix('TENANT-')}.web.put"]
    return [f"{prefix}.{user}.set" for prefix in PREFIXES]


async def test_every_user_is_served_on_every_node_and_on_the_leaf(network: Servers) -> None:
    for server, user in network.places:
        async with network.client(server, user) as client:
            for subject in own(user):
                assert await client.ask(subject) == subject
            assert not client.refusals


async def test_the_queue_group_spreads_and_each_request_is_carried_out_once(network: Servers) -> None:
    for server in ("n3", "edge"):
        async with network.client(server, "trivia") as client:
            await asyncio.gather(*[client.ask("db.kv.trivia.get") for _ in range(300)])
        counts = [len(service.heard) for service in network.services]
        assert sum(counts) == 300
        assert min(counts) > 0, f"at {server}"
        network.heard()


async def test_users_are_kept_apart_on_every_node_and_on_the_leaf(network: Servers) -> None:
    everyone = [*PLUGINS, *[user.name for user in network.isolation.tenants.values()]]
    for server, user in network.places:
        async with network.client(server, user) as client:
            for other in everyone:
                if other == user:
                    continue
                for subject in (*own(other), f"_INBOX_{other}.x"):
                    assert await client.is_refused_to_publish(subject), (server, user, subject)
                for subject in (*own(other), f"_INBOX_{other}.>"):
                    assert await client.is_refused_to_subscribe(subject), (server, user, subject)
            for subject in (">", "*.>", "db.>", "_INBOX.>", "_INBOX_SERVICE.>", "$SYS.>", "$SRV.>"):
                assert await client.is_refused_to_subscribe(subject), (server, user, subject)
            for subject in ("$SYS.REQ.SERVER.PING", "$SRV.INFO"):
                assert await client.is_refused_to_publish(subject), (server, user, subject)
    assert network.heard() == []


@pytest.mark.parametrize("user", ["LEAF-edge", "trivia"])
async def test_a_rogue_leaf_node_gets_no_more_than_its_user(network: Servers, tmp_path: Path, user: str) -> None:
    """A server that an attacker runs with a stolen password, and no permissions of its own."""
    password = network.user(user).password
    rogue = tmp_path / "rogue.conf"
    rogue.write_text(f'leafnodes {{ remotes: [ {{ url: "nats-leaf://{user}:{password}@{network.hubs[0]}" }} ] }}')
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    async with NatsServer(config=rogue) as server, connected(server, None) as client:
        await client.nats.subscribe(">", cb=hear)
        async with asyncio.timeout(_LONGEST_SECONDS):
            while not network.heard():  # it is connected, and may do what its user may
                await client.nats.publish("db.kv.trivia.get", b"{}", reply="_INBOX_trivia.x")
                await asyncio.sleep(0.05)
        heard.clear()
        for subject in (
            "db.kv.quotes.set",
            "db.kv.a-b.set",
            "db.semantic.acme-2.web.put",
            "_INBOX_quotes.x",
            "$SRV.INFO",
        ):
            await client.nats.publish(subject, b"{}", reply="_INBOX_trivia.x")
        async with network.client("n2", "quotes") as victim:
            for _ in range(20):
                assert await victim.ask("db.kv.quotes.get") == "db.kv.quotes.get"
        await client.nats.publish("db.kv.trivia.set", b"{}")  # behind all others, on the same way
        async with asyncio.timeout(_LONGEST_SECONDS):
            reached: list[str] = []
            while "db.kv.trivia.set" not in reached:
                await asyncio.sleep(0.02)
                reached += network.heard()
        assert set(reached) - {"db.kv.trivia.get"} == {"db.kv.quotes.get", "db.kv.trivia.set"}
        assert reached.count("db.kv.quotes.get") == 20
        await settled(client.nats)
        # Its own messages come back to it, and nothing of the other plugin's.
        assert not [one for one in heard if one.startswith("_INBOX_quotes.") and one != "_INBOX_quotes.x"]
        assert "db.kv.quotes.get" not in heard


async def test_a_server_without_the_password_does_not_join_the_cluster(network: Servers, tmp_path: Path) -> None:
    routes = [line for line in network.isolation.text.splitlines() if "nats://ROUTE" in line]
    route = routes[0].split("@")[1].strip('"')
    rogue = tmp_path / "rogue.conf"
    rogue.write_text(f'cluster {{ name: "keyloft", listen: "127.0.0.1:-1", routes: ["nats://ROUTE:guess@{route}"] }}\n')
    async with NatsServer(config=rogue) as server, connected(server, None) as client:
        with pytest.raises(NoRespondersError):
            await client.ask("db.kv.trivia.get")
        async with network.client("n1", "SYSTEM") as system:
            assert len(await pinged(system.nats)) == 3
            assert len(await gathered(system.nats, "$SYS.REQ.SERVER.PING", 4)) == 3


async def test_the_system_account_sees_servers_and_no_data(network: Servers) -> None:
    async with network.client("n2", "SYSTEM") as system:
        assert sorted([one["server"]["name"] for one in await pinged(system.nats)]) == ["n1", "n2", "n3"]
        with pytest.raises(NoRespondersError):
            await system.ask("db.kv.trivia.get")
    assert network.heard() == []


async def test_real_services_share_a_store_across_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with built(tmp_path) as network:
        isolation = network.isolation
        login = f"nats://SERVICE:{isolation.service.password}@"
        urls = {name: server.url.replace("nats://", login) for name, server in network.servers.items()}
        async with (
            serving(tmp_path, "--nats", urls["n1"]) as first,
            serving(tmp_path, "--nats", urls["n2"]) as second,
        ):
            await second.logs("sharing the requests with another instance")
            for place, value in (("n3", 1), ("edge", 2), ("n1", 3)):
                user = isolation.plugins["trivia"]
                async with await DatabaseClient.connect(
                    network.servers[place].url,
                    plugin_name="trivia",
                    login=Login(user=user.name, password=user.password),
                    inbox_prefix=user.inbox_prefix,
                ) as client:
                    async with asyncio.timeout(_LONGEST_SECONDS):
                        while True:
                            with suppress(Exception):
                                await client.kv.set("score", value)
                                break
                    assert await client.kv.get("score") == value
            # The leaf's file has no ADMIN: a plugin asks.
            logins = logins_in((tmp_path / "edge.conf").read_text())
            at_the_leaf = Config(database=":memory:", nats=(network.servers["edge"].url,))
            found = {one.code: one.severity for one in await examine(at_the_leaf, None, logins)}
            assert found == {"nats": "ok", "service": "ok", "isolation": "ok"}
            code, error = await refused(tmp_path / "other", "--nats", urls["n3"])
            assert code == 1
            assert "ANOTHER_STORE" in error
            assert str(first.process.pid) in error or str(second.process.pid) in error


# What it writes


def test_the_command_writes_a_file_for_each_node(tmp_path: Path) -> None:
    def write(name: str, *flags: str) -> tuple[int, str]:
        code, _, shown = run_command(
            {"PATH": os.defpath}, "nats-config", "--plugin", "trivia", "--output", str(tmp_path / name), *flags
        )
        return code, shown

    def node(number: int) -> list[str]:
        routes = [flag for other in (1, 2, 3) for flag in ("--route", f"10.0.0.{other}:6222")]
        return ["--server-name", f"n{number}", "--cluster", "bot", "--cluster-listen", "0.0.0.0:6222", *routes]

    leaf = ["--leaf-listen", "0.0.0.0:7422", "--leaf", "edge=trivia"]
    assert write("n1.conf", *node(1), *leaf, "--system")[0] == 0
    assert write("n2.conf", *node(2), *leaf, "--system", "--users-of", str(tmp_path / "n1.conf"))[0] == 0
    first, second = [logins_in((tmp_path / name).read_text()) for name in ("n1.conf", "n2.conf")]
    assert first == second
    assert set(first) == {"SERVICE", "ADMIN", "trivia", "ROUTE", "SYSTEM", "LEAF-edge"}
    code, shown = write(
        "edge.conf", "--leaf-of", "10.0.0.1:7422", "--leaf-name", "edge", "--users-of", str(tmp_path / "n1.conf")
    )
    assert code == 0
    assert "keyloft serve" not in shown
    edge = (tmp_path / "edge.conf").read_text()
    assert logins_in(edge) == {name: first[name] for name in ("trivia", "LEAF-edge")}
    assert "SERVICE" not in edge
    code, shown = write(
        "far.conf", "--leaf-of", "10.0.0.1:7422", "--leaf-name", "far", "--users-of", str(tmp_path / "n1.conf")
    )
    assert code == 2
    assert "n1.conf, which has no user LEAF-far: name the --leaf there" in shown
    assert write("n1.conf", *node(1), *leaf, "--system", "--replace")[0] == 0
    assert logins_in((tmp_path / "n1.conf").read_text()) == first
    assert write("bad.conf", "--leaf", "edge")[0] == 2


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        ({"cluster": "a b", "cluster_listen": "127.0.0.1:1"}, "cluster: expected A-Z"),
        ({"cluster": "a"}, "cluster_listen: expected where this node listens"),
        ({"routes": ["127.0.0.1:1"]}, "cluster: expected"),
        ({"cluster": "a", "cluster_listen": "nowhere"}, "cluster_listen: expected HOST:PORT"),
        ({"cluster": "a", "cluster_listen": "127.0.0.1:1", "routes": ["x"]}, "routes: expected HOST:PORT"),
        ({"leaves": {"edge": []}}, "leaf_listen: expected"),
        ({"leaf_listen": "127.0.0.1:1", "leaves": {"edge": []}}, "leaves: expected the plugins or tenants of edge"),
        (
            {"leaf_listen": "127.0.0.1:1", "leaves": {"edge": ["quotes"]}},
            "leaves: edge=quotes: there is no plugin or tenant quotes; a tenant is written TENANT-name",
        ),
        ({"leaf_listen": "127.0.0.1:1", "leaves": {'e"': []}}, "leaves: expected A-Z"),
        ({"leaf_of": ["127.0.0.1:1"]}, "leaf_name: expected"),
        ({"leaf_name": "edge"}, "leaf_of: expected"),
        ({"server_name": 'n"'}, "server_name: expected A-Z"),
    ],
)
def test_what_does_not_fit_together_is_refused(topology: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        isolate(["trivia"], topology=Topology(**topology))


def test_a_password_that_is_sent_is_no_hash_and_is_quoted() -> None:
    hub = Topology(leaf_of=["127.0.0.1:7422"], leaf_name="edge")
    with pytest.raises(InvalidArgument, match="passwords: expected a plain password for LEAF-edge"):
        isolate(["trivia"], topology=hub, passwords={"LEAF-edge": "$2a$11$xyz"})
    made = isolate(["trivia"], topology=hub, passwords={"LEAF-edge": "a@b/c:d#e"})
    assert "nats-leaf://LEAF-edge:a%40b%2Fc%3Ad%23e@127.0.0.1:7422" in made.text
    assert logins_in(made.text)["LEAF-edge"] == "a@b/c:d#e"
