"""Plugins and tenants that try to reach each other on a real nats-server with our configuration, and its refusals."""

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

import keyloft
from keyloft import limits
from keyloft.errors import InvalidArgument, InvalidPluginName
from keyloft.nats.connection import connect
from keyloft.semantic import (
    Intent,
    Login,
    SemanticClient,
    Semantics,
    SemanticService,
    SemanticStore,
    StaleFence,
    WriteRequest,
)
from keyloft.server.isolation import ADMIN, SERVICE, Isolation, NatsUser, isolate
from keyloft.server.nats_process import NatsServer
from tests.support.nats import private_server, settled

OPERATIONS = ["set", "get", "delete", "list", "incr", "get_many", "set_many", "delete_many", "count", "touch", "usage"]
OPERATIONS += ["many", "watch"]
PREFIXES = ["db.kv", "rosey.db.kv"]
# Names that begin alike, and those that could be taken for the service or the operator.
PLUGINS = ["a", "a-b", "a_b", "service", "admin", "trivia", "_", "123"]
SEMANTIC_OPERATIONS = ["put", "get", "delete", "list", "batch", "watch"]
# Ids that begin alike, and some that plugins have as names.
TENANTS = ["acme", "acme-2", "a", "a-b", "service"]
_LONGEST_SECONDS = 30.0


@dataclass
class Connected:
    """A client, and what the server refused it."""

    nats: Client
    refusals: list[str] = field(default_factory=list)

    async def ask(self, subject: str, payload: bytes = b"{}") -> str:
        return (await self.nats.request(subject, payload, timeout=_LONGEST_SECONDS)).data.decode()

    async def is_refused_to_publish(self, subject: str, reply: str = "") -> bool:
        return await self._refused(self.nats.publish(subject, b"{}", reply=reply), f'publish to "{subject}"')

    async def is_refused_to_subscribe(self, subject: str, queue: str = "") -> bool:
        return await self._refused(self.nats.subscribe(subject, queue=queue), f'subscription to "{subject}"')

    async def _refused(self, attempt: Awaitable[object], what: str) -> bool:
        before = len(self.refusals)
        await attempt
        await settled(self.nats)
        news = self.refusals[before:]
        assert all([what.lower() in refusal.lower() for refusal in news]), news
        return bool(news)


@asynccontextmanager
async def connected(server: NatsServer, user: NatsUser | None) -> AsyncIterator[Connected]:
    refusals: list[str] = []

    async def refused(error: Exception) -> None:
        refusals.append(str(error))

    client = Client()
    await client.connect(
        server.url,
        error_cb=refused,
        allow_reconnect=False,
        skip_subject_validation=True,
        **(user or NatsUser("", "", "_INBOX")).options(),
    )
    try:
        yield Connected(client, refusals)
    finally:
        await client.close()


@dataclass
class WorstService(Connected):
    """Stands in for a plugin service that checks nothing: it answers every request, to whatever reply subject.

    What still can't be done with it, the server alone prevents.
    """

    heard: list[str] = field(default_factory=list)

    async def serve(self) -> None:
        for prefix in (*PREFIXES, "db.semantic"):
            await self.nats.subscribe(f"{prefix}.>", queue="any", cb=self._answer)
        for verb in ("PING", "INFO", "STATS"):
            await self.nats.subscribe(f"$SRV.{verb}", cb=self._answer)
            await self.nats.subscribe(f"$SRV.{verb}.>", cb=self._answer)
        await settled(self.nats)

    async def _answer(self, message: Msg) -> None:
        self.heard.append(message.subject)
        if message.reply:
            await self.nats.publish(message.reply, message.subject.encode())


@dataclass
class World:
    server: NatsServer
    isolation: Isolation
    service: WorstService

    def plugin(self, name: str) -> AbstractAsyncContextManager[Connected]:
        return connected(self.server, self.isolation.plugins[name])

    def tenant(self, tenant: str) -> AbstractAsyncContextManager[Connected]:
        return connected(self.server, self.isolation.tenants[tenant])

    def admin(self) -> AbstractAsyncContextManager[Connected]:
        return connected(self.server, self.isolation.admin)

    async def heard(self) -> list[str]:
        """All that reached the service until now."""
        async with self.admin() as admin:
            await admin.ask("$SRV.PING")
        await settled(self.service.nats)
        heard = [subject for subject in self.service.heard if subject != "$SRV.PING"]
        self.service.heard.clear()
        return heard


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A server with our configuration, and the worst possible service on it."""
    isolation = isolate(PLUGINS, TENANTS)
    isolation.write(tmp_path / "nats.conf")
    async with private_server(tmp_path / "nats.conf") as server, connected(server, isolation.service) as client:
        service = WorstService(client.nats, client.refusals)
        await service.serve()
        assert not service.refusals
        yield World(server, isolation, service)


# What a plugin may do


@pytest.mark.parametrize("name", PLUGINS)
async def test_a_plugin_gets_answers_to_its_own_requests(world: World, name: str) -> None:
    async with world.plugin(name) as plugin:
        for prefix in PREFIXES:
            for operation in OPERATIONS:
                assert await plugin.ask(f"{prefix}.{name}.{operation}") == f"{prefix}.{name}.{operation}"
        await plugin.nats.publish(f"db.kv.{name}.set", b"{}")
        await settled(plugin.nats)
        assert plugin.refusals == []
    assert len(await world.heard()) == len(PREFIXES) * len(OPERATIONS) + 1


async def test_a_plugin_learns_that_no_service_runs(tmp_path: Path) -> None:
    isolation = isolate(["trivia"])
    isolation.write(tmp_path / "nats.conf")
    async with (
        private_server(tmp_path / "nats.conf") as server,
        connected(server, isolation.plugins["trivia"]) as plugin,
    ):
        with pytest.raises(NoRespondersError):
            await plugin.ask("db.kv.trivia.get")


async def test_the_operator_reaches_all_plugins_and_the_state_of_the_service(world: World) -> None:
    async with world.admin() as admin:
        for subject in (
            "db.kv.trivia.get",
            "rosey.db.kv.a-b.set",
            "db.semantic.acme.web.get",
            "$SRV.PING",
            "$SRV.INFO.keyloft",
            "$SRV.STATS",
        ):
            assert await admin.ask(subject) == subject
        assert not await admin.is_refused_to_subscribe("db.kv.>")


# What it may not


@pytest.mark.parametrize(("rogue", "other"), [("a", "a-b"), ("a-b", "a"), ("a", "a_b"), ("service", "a"), ("_", "123")])
async def test_a_plugin_can_neither_read_nor_write_nor_delete_nor_list_what_is_anothers(
    world: World, rogue: str, other: str
) -> None:
    async with world.plugin(rogue) as plugin:
        for prefix in PREFIXES:
            for operation in OPERATIONS:
                assert await plugin.is_refused_to_publish(f"{prefix}.{other}.{operation}")
                inbox = plugin.nats.new_inbox()
                assert await plugin.is_refused_to_publish(f"{prefix}.{other}.{operation}", reply=inbox)
    assert await world.heard() == []


@pytest.mark.parametrize(
    "subject",
    [
        "db.kv.a.events.x",
        "db.kv.a.events",
        "db.kv.trivia.events.x",
        "db.semantic.a.web.events.x",
        "db.kv.a",
        "db.kv.a.set.b",
        "db.kv.set",
        "db.kv",
        "db.other.a.set",
        "rosey.db.kv.b.set",
        "db.semantic.a.web.get",
        "_INBOX_trivia.x",
        "_INBOX_a.x",
        "_INBOX_SERVICE.x",
        "_INBOX.x",
        "$SRV.PING",
        "$SRV.STATS.keyloft",
        "$SYS.REQ.SERVER.PING",
        "$JS.API.INFO",
        "anything",
    ],
)
async def test_a_plugin_publishes_nothing_but_its_requests(world: World, subject: str) -> None:
    async with world.plugin("a") as plugin:
        assert await plugin.is_refused_to_publish(subject)
    assert await world.heard() == []


@pytest.mark.parametrize(
    "subject",
    [
        ">",
        "*",
        "*.>",
        "*.x",
        "*.*.*",
        "_INBOX.>",
        "_INBOX.*",
        "_INBOX_*.>",
        "_INBOX_>",
        "_INBOX_trivia.>",
        "_INBOX_trivia.*.*",
        "_INBOX_a-b.>",
        "_INBOX_a_b.>",
        "_INBOX_SERVICE.>",
        "_INBOX_a",
        "db.kv.>",
        "db.kv.*.*",
        "db.kv.*.set",
        "db.kv.a.set",
        "db.kv.trivia.get",
        "db.kv.trivia.events.x",
        "db.kv.trivia.events.*",
        "db.kv.*.events.*",
        "db.semantic.a.*.events.*",
        "rosey.db.kv.>",
        "$SRV.>",
        "$SRV.PING",
        "$SYS.>",
    ],
)
async def test_a_plugin_listens_to_nothing_but_its_own_answers(world: World, subject: str) -> None:
    async with world.plugin("a") as plugin:
        assert await plugin.is_refused_to_subscribe(subject)
        assert await plugin.is_refused_to_subscribe(subject, queue="any")
        for own in ("_INBOX_a.>", "db.kv.a.events.*", "rosey.db.kv.a.events.x"):
            assert not await plugin.is_refused_to_subscribe(own)


async def test_a_client_without_its_inbox_prefix_hears_no_answers(world: World) -> None:
    trivia = world.isolation.plugins["trivia"]
    async with connected(world.server, NatsUser(trivia.name, trivia.password, "_INBOX")) as plugin:
        assert await plugin.is_refused_to_subscribe(plugin.nats.new_inbox())


@pytest.mark.parametrize(
    "reply",
    ["db.kv.trivia.set", "rosey.db.kv.trivia.delete", "db.kv.a.set", "db.semantic.a.web.put", "$SRV.PING", "other"],
)
async def test_the_service_sends_no_reply_to_plugins_subjects(world: World, reply: str) -> None:
    async with world.plugin("a") as plugin:
        assert not await plugin.is_refused_to_publish("db.kv.a.get", reply=reply)
    assert await world.heard() == ["db.kv.a.get"]
    assert len(world.service.refusals) == 1
    assert f'publish to "{reply}"'.lower() in world.service.refusals[0].lower()


async def test_without_this_configuration_it_would_send_them() -> None:
    """Shows that the test above can fail."""
    async with private_server() as server, connected(server, None) as client, connected(server, None) as plugin:
        service = WorstService(client.nats, client.refusals)
        await service.serve()
        await plugin.nats.publish("db.kv.a.get", b"{}", reply="db.kv.trivia.set")
        await settled(plugin.nats)
        await plugin.ask("db.kv.a.get")
        # The service hears its own answer behind the request that it stood in for.
        await plugin.ask("db.kv.a.get")
        assert "db.kv.trivia.set" in service.heard


async def test_an_answer_reaches_only_the_plugin_that_asked(world: World) -> None:
    async with world.plugin("a") as one, world.plugin("a-b") as other:
        eavesdropper = await one.nats.subscribe("_INBOX_a.>")
        assert await other.ask("db.kv.a-b.get") == "db.kv.a-b.get"
        await settled(one.nats)
        assert eavesdropper.pending_msgs == 0


@pytest.mark.parametrize(
    "subject", [">", "_INBOX.>", "_INBOX_a.>", "db.>", "db.kv.>", "rosey.db.kv.a.get", "$SYS.>", "anything"]
)
async def test_the_service_listens_to_requests_in_a_queue_group_and_to_nothing_else(world: World, subject: str) -> None:
    assert await world.service.is_refused_to_subscribe(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "db.kv.a.set",
        "rosey.db.kv.a.get",
        "db.kv.a.events",
        "db.kv.a.events.x.y",
        "db.semantic.a.events.x",
        "$SRV.PING",
        "_INBOX_nowhere.x",
        "$SRV.INFO.x",
        "anything",
    ],
)
async def test_the_service_speaks_to_inboxes_and_watchers_and_to_nothing_else(world: World, subject: str) -> None:
    assert await world.service.is_refused_to_publish(subject)
    for events in ("db.kv.a.events.x", "db.semantic.acme.web.events.x"):
        assert not await world.service.is_refused_to_publish(events)


# Tenants of the semantic store


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_tenant_gets_answers_about_all_its_projects(world: World, tenant: str) -> None:
    async with world.tenant(tenant) as workflow:
        for project in ("web", tenant, "_"):
            for operation in SEMANTIC_OPERATIONS:
                subject = f"db.semantic.{tenant}.{project}.{operation}"
                assert await workflow.ask(subject) == subject
        assert workflow.refusals == []


@pytest.mark.parametrize(("rogue", "other"), [("acme", "acme-2"), ("acme-2", "acme"), ("a", "a-b"), ("service", "a")])
async def test_a_tenant_reaches_neither_another_tenant_nor_a_plugin(world: World, rogue: str, other: str) -> None:
    async with world.tenant(rogue) as workflow:
        for operation in SEMANTIC_OPERATIONS:
            assert await workflow.is_refused_to_publish(f"db.semantic.{other}.web.{operation}")
            assert await workflow.is_refused_to_publish(
                f"db.semantic.{other}.web.{operation}", reply=workflow.nats.new_inbox()
            )
        for subject in (
            f"db.kv.{rogue}.get",
            f"db.semantic.{rogue}.web.other",
            f"db.semantic.{rogue}.put",
            f"db.semantic.{rogue}.web.x.put",
            "$SRV.PING",
            f"_INBOX_TENANT-{other}.x",
            f"db.semantic.{rogue}.web.events.x",
            f"db.semantic.{other}.web.events.x",
        ):
            assert await workflow.is_refused_to_publish(subject)
        for subject in (
            ">",
            "db.semantic.>",
            f"_INBOX_TENANT-{other}.>",
            f"_INBOX_{rogue}.>",
            "_INBOX_*.>",
            "_INBOX.>",
            f"db.semantic.{other}.web.events.*",
            "db.semantic.*.web.events.*",
        ):
            assert await workflow.is_refused_to_subscribe(subject)
        for own in (f"_INBOX_TENANT-{rogue}.>", f"db.semantic.{rogue}.web.events.x"):
            assert not await workflow.is_refused_to_subscribe(own)
    assert await world.heard() == []


async def test_the_service_sends_no_reply_to_tenants_subjects(world: World) -> None:
    async with world.tenant("acme") as workflow:
        for reply in ("db.semantic.acme-2.web.put", "db.semantic.acme.web.put", "db.kv.trivia.set"):
            assert not await workflow.is_refused_to_publish("db.semantic.acme.web.get", reply=reply)
            assert await world.heard() == ["db.semantic.acme.web.get"]
            assert f'publish to "{reply}"'.lower() in world.service.refusals[-1].lower()


async def test_a_rogue_tenant_gets_nothing_from_the_real_service(tmp_path: Path) -> None:
    isolation = isolate((), ["acme", "rogue"])
    isolation.write(tmp_path / "nats.conf")
    config = Semantics("config")
    async with (
        private_server(tmp_path / "nats.conf") as server,
        connected(server, isolation.service) as behind,
        keyloft.open() as kv,
        SemanticStore(kv) as store,
    ):
        service = SemanticService(behind.nats, store)
        await service.start()

        async def client(user: NatsUser, tenant: str) -> SemanticClient:
            login = Login(user=user.name, password=user.password)
            return await SemanticClient.connect(server.url, tenant=tenant, project="web", login=login)

        async with await client(isolation.tenants["acme"], "acme") as acme:
            secret = await acme.put("secret", "gold", expected_version=0, writer="w", semantics=config)
            held = await acme.lock("locks/a", writer="w").acquire()
            assert held.fence is not None
            await acme.dead_letters.keep(_removal(), "BUSY", "busy", 5)
            [letter] = await acme.dead_letters.list()
            async with await client(isolation.tenants["rogue"], "acme") as rogue:
                for refused in (
                    rogue.get("secret"),
                    rogue.restore("secret", writer="w"),
                    rogue.audit(),
                    rogue.locks(),
                    rogue.lock("locks/a", writer="w").acquire(),
                    rogue.dead_letters.list(),
                    rogue.dead_letters.retry(letter, expected_version="*"),
                    rogue.dead_letters.drop(letter),
                    anext(rogue.watch("secret")),
                ):
                    with pytest.raises(keyloft.NotPermitted, match="Log in as the tenant acme"):
                        await refused
            async with await client(isolation.tenants["rogue"], "rogue") as rogue:
                assert await rogue.get("secret") is None
                assert await rogue.list() == []
                assert await rogue.get("../../acme/project/web/secret") is None
                assert (await rogue.audit(), await rogue.locks(), await rogue.dead_letters.list()) == ([], [], [])
                with pytest.raises(keyloft.InvalidArgument, match="gone"):
                    await rogue.dead_letters.retry(letter, expected_version="*")
                assert await rogue.dead_letters.drop(letter) is False
                with pytest.raises(StaleFence):
                    await rogue.put("k", 1, expected_version="*", writer="w", semantics=config, fence=held.fence)
                # A get whose answer would be another tenant's put.
                await rogue.nats.publish(
                    "db.semantic.rogue.web.get", b'{"key": "secret"}', reply="db.semantic.acme.web.put"
                )
                assert await rogue.list() == []
            assert await acme.get("secret") == secret
            assert [lock.fence for lock in await acme.locks()] == [held.fence]
            assert await acme.dead_letters.list() == [letter]
        await service.stop()


def _removal() -> WriteRequest:
    return WriteRequest(intents=(Intent.delete("secret", expected_version="*", writer="w"),))


async def test_the_operator_can_pose_neither_as_the_service_nor_as_the_system(world: World) -> None:
    async with world.admin() as admin:
        for subject in ("_INBOX_a.x", "_INBOX.x", "$SYS.REQ.SERVER.PING", "anything"):
            assert await admin.is_refused_to_publish(subject)
        assert await admin.is_refused_to_subscribe("_INBOX_a.>")


async def test_no_client_logs_in_without_the_right_password(world: World) -> None:
    a, other = world.isolation.plugins["a"], world.isolation.plugins["a-b"]
    refused_users = [
        None,
        NatsUser("a", "wrong", a.inbox_prefix),
        NatsUser("a", "", a.inbox_prefix),
        NatsUser("a", other.password, a.inbox_prefix),
        NatsUser("A", a.password, a.inbox_prefix),
        NatsUser("", "", "_INBOX"),
        NatsUser("unknown", a.password, "_INBOX"),
        NatsUser(SERVICE, a.password, "_INBOX"),
        NatsUser(ADMIN, a.password, "_INBOX"),
    ]
    for user in refused_users:
        assert "Authorization Violation" in await greeting(world.server, user)
    assert await greeting(world.server, a) == "PONG\r\n"


async def greeting(server: NatsServer, user: NatsUser | None) -> str:
    """The server's first answer to a login, over a bare socket: nats-py leaves sockets open when it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(_LONGEST_SECONDS):
            await reader.readline()
            login = {"verbose": False} | ({"user": user.name, "pass": user.password} if user else {})
            writer.write(f"CONNECT {json.dumps(login)}\r\nPING\r\n".encode())
            return (await reader.readline()).decode()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_other_prefixes_are_kept_apart_as_well(tmp_path: Path) -> None:
    isolation = isolate(["a", "b"], prefixes=["bot.store", "x"])
    isolation.write(tmp_path / "nats.conf")
    async with private_server(tmp_path / "nats.conf") as server, connected(server, isolation.plugins["a"]) as plugin:
        for subject in ("bot.store.a.get", "x.a.list"):
            assert not await plugin.is_refused_to_publish(subject)
        for subject in ("bot.store.b.get", "x.b.list", "db.kv.a.get"):
            assert await plugin.is_refused_to_publish(subject)


async def test_a_plugin_is_added_while_the_others_stay_connected(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    before = isolate(["a"])
    before.write(config)
    async with private_server(config) as server, connected(server, before.plugins["a"]) as old:
        users = [before.service, before.admin, before.plugins["a"]]
        after = isolate(["a", "b"], passwords={user.name: user.password for user in users})
        after.write(config, replace=True)
        await server.reload()
        assert not await old.is_refused_to_publish("db.kv.a.set")
        async with connected(server, after.plugins["b"]) as new:
            assert not await new.is_refused_to_publish("db.kv.b.set")
            assert await new.is_refused_to_publish("db.kv.a.set")


# What is made of what was passed in


@pytest.mark.parametrize(
    "name",
    [
        "*",
        ">",
        "a.b",
        "A",
        "",
        "x" * 101,
        'x" } users',
        "x\n",
        "a b",
        "a\x00",
        "$SYS",
        "ä",
        "SERVICE",
        "ADMIN",
        "a*",
        "#",
    ],
)
def test_a_name_that_no_plugin_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidPluginName):
        isolate(["trivia", name])


def test_a_plugin_named_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="plugin named twice: b"):
        isolate(["a", "b", "c", "b"])


def test_one_string_is_not_taken_for_many_plugins() -> None:
    with pytest.raises(InvalidArgument, match="expected a sequence of names"):
        isolate("trivia")


@pytest.mark.parametrize(
    "prefixes",
    [
        [],
        "db.kv",
        [""],
        ["db.*"],
        ["db.>"],
        [">"],
        ["db..kv"],
        ["db.kv."],
        [".db"],
        ["_INBOX_trivia"],
        ["$SRV"],
        ['db" ]'],
        ["db kv"],
        ["db.kv\n"],
        ["db.kv", "db.kv"],
        ["db", "db.kv"],
        ["db.kv", "db"],
    ],
)
def test_prefixes_that_could_reach_elsewhere_are_refused(prefixes: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="prefix"):
        isolate(["trivia"], prefixes=prefixes)


@pytest.mark.parametrize("password", ["", 'x" } users', "it's", "back\\slash", "two words", "line\n", "ä", "\x00"])
def test_a_password_that_the_configuration_cannot_hold_is_refused_and_not_shown(password: str) -> None:
    with pytest.raises(InvalidArgument, match=r"passwords: expected printable ASCII.*for trivia") as caught:
        isolate(["trivia"], passwords={"trivia": password})
    assert not password or password not in str(caught.value)


def test_a_password_for_an_unknown_user_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'quote'"):
        isolate(["trivia"], passwords={"quote": "secret"})


@pytest.mark.parametrize(
    "listen", ["", "4222", "127.0.0.1", '127.0.0.1:4222"', "127.0.0.1:4222\n", ":4222", "a b:1", "a:65536"]
)
def test_an_address_that_cannot_be_is_refused(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="listen: expected HOST:PORT"):
        isolate(["trivia"], listen=listen)


async def test_every_password_that_is_accepted_logs_in(tmp_path: Path) -> None:
    every = "".join([chr(code) for code in range(33, 127) if chr(code) not in "\"'\\"])
    passwords = {"one": every, "two": "$HOME", "three": "123", "four": "true", "five": "#//{}[];,:=", "six": "%(x)s"}
    isolation = isolate(passwords, passwords=passwords)
    isolation.write(tmp_path / "nats.conf")
    async with private_server(tmp_path / "nats.conf") as server:
        for user in isolation.plugins.values():
            assert user.password == passwords[user.name]
            async with connected(server, user) as plugin:
                assert not await plugin.is_refused_to_publish(f"db.kv.{user.name}.get")


def test_passwords_are_random_and_not_shown() -> None:
    one, two = isolate(["a", "b"]), isolate(["a", "b"])
    users = [user for each in (one, two) for user in (*each.plugins.values(), each.service, each.admin)]
    assert len({user.password for user in users}) == 8
    assert all([len(user.password) >= 32 for user in users])
    assert not any([user.password in repr(one) + repr(two) for user in users])


def test_the_address_is_in_the_text() -> None:
    assert 'listen: "127.0.0.1:4222"' in isolate([]).text
    assert 'listen: "[::1]:4333"' in isolate([], listen="[::1]:4333").text


def test_the_file_is_its_owners_alone_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "nats.conf"
    first, second = isolate(["a"]), isolate(["a"])
    first.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvalidArgument, match="exists already"):
        second.write(path)
    assert path.read_text() == first.text

    path.chmod(0o644)
    second.write(path, replace=True)
    assert path.read_text() == second.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    for replace in (False, True):
        with pytest.raises(InvalidArgument, match="can't be written"):
            isolate([]).write(tmp_path / "nowhere" / "nats.conf", replace=replace)


def _send_and_wait(port: int, user: NatsUser, message: bytes, times: int) -> None:
    """Send a message again and again over a raw socket; returns once the server has taken all of them."""
    options = {"verbose": False, "pedantic": False, "user": user.name, "pass": user.password}
    with socket.create_connection(("127.0.0.1", port), timeout=_LONGEST_SECONDS) as sender:
        sender.sendall(b"CONNECT %b\r\n" % json.dumps(options).encode())
        for _ in range(times):
            sender.sendall(message)
        sender.sendall(b"PING\r\n")
        received = b""
        while b"PONG\r\n" not in received:
            received += sender.recv(65_536)


@pytest.mark.slow
async def test_no_plugin_gets_a_service_cut_off_that_can_not_read_for_a_while(tmp_path: Path) -> None:
    isolation = isolate(["trivia", "quotes"])
    isolation.write(tmp_path / "nats.conf")
    payload = bytes(1_000_000)
    message = b"PUB db.kv.trivia.set %d\r\n%b\r\n" % (len(payload), payload)
    async with private_server(tmp_path / "nats.conf") as server:
        service = await connect(server.url, name="service", **isolation.service.options())
        released, sizes = asyncio.Event(), []

        async def wait() -> None:
            await released.wait()

        def handle(subject: bytes, reply: bytes, data: bytes) -> Coroutine[Any, Any, None] | None:
            sizes.append(len(data))
            return None if released.is_set() else wait()

        service.handle(await service.subscribe("db.kv.>", queue="service"), handle)
        await settled(service)
        # Half of what nats-server keeps for one connection by this configuration, and twice what it keeps by default.
        times = limits.NATS_PENDING_BYTES // 2 // len(payload)
        await asyncio.to_thread(_send_and_wait, server.port, isolation.plugins["trivia"], message, times)
        released.set()
        async with asyncio.timeout(_LONGEST_SECONDS):
            while len(sizes) < times:
                await asyncio.sleep(0.01)
        await settled(service)
        assert service.stats["reconnects"] == 0
        assert sizes == [len(payload)] * times
        await service.close()
