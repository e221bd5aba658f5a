"""`keyloft serve` on PostgreSQL, as a process: with a server that starts late or dies, and with a second service."""

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client as Nats

from keyloft.plugins import DatabaseClient
from keyloft.semantic import SemanticClient, Semantics, VersionConflict
from tests.cli.commands import SURROUNDINGS, run_command
from tests.server.test_serve import LONGEST_SECONDS, answers, refused, serving
from tests.support.nats import private_server
from tests.support.postgres import PASSWORD, MortalServer
from tests.support.postgres_cluster import cluster
from tools.postgres import fresh_database, query


@pytest.fixture
def url(mortal_postgres: MortalServer) -> Iterator[str]:
    """A database whose URL holds a password, on a server that may be killed."""
    with fresh_database(mortal_postgres.url) as url:
        assert PASSWORD in url
        yield url


async def ask(client: Nats, operation: str, **fields: object) -> dict[str, object]:
    data = json.dumps(fields).encode()
    answer = await client.request(f"db.kv.trivia.{operation}", data, timeout=LONGEST_SECONDS)
    reply: dict[str, object] = json.loads(answer.data)
    return reply


async def test_it_serves_without_showing_the_password(url: str, tmp_path: Path) -> None:
    elsewhere = url.replace(f":{PASSWORD}@", "@") + f"&password={PASSWORD}"
    for database in (url.replace("postgresql://", "postgresql+asyncpg://"), elsewhere):
        flags = ["--nats-port", "0", "--database", database, "--log-level", "debug", "--log-format", "json"]
        async with serving(tmp_path, *flags) as served:
            async with await DatabaseClient.connect(served.nats, plugin_name="trivia") as client:
                await client.kv.set("score", "confidential")
                assert await client.kv.get("score") == "confidential"
                info = await client.nats.request("$SRV.INFO.keyloft-plugins", b"")
            assert await served.is_healthy()
            _, health = await served.page("/healthz")
            assert re.search(
                r"^primary .*, timeline 1\nsynchronous standbys none\nfailovers 0\nunknown commits 0\n", health, re.M
            )
            metrics = await served.metrics()
            assert "rosey_database_timeline 1\n" in metrics
            assert 'rosey_kv_set_total{plugin="trivia"} 1\n' in metrics
            assert 'rosey_kv_keys_total{plugin="trivia"} 1\n' in metrics
            served.process.send_signal(signal.SIGTERM)
            assert await served.ends() == 0
            error = served.printed + served.log + metrics + info.data.decode()
            for secret in (PASSWORD, "confidential", "Traceback"):
                assert secret not in error
            assert "postgresql" in served.log


async def test_the_state_of_workflows_is_served_and_logged_without_its_values(url: str, tmp_path: Path) -> None:
    cursor = Semantics("cursor", ttl_seconds=1)
    flags = ["--nats-port", "0", "--log-format", "json", "--cleanup-every", "0.1", "--purposes", "workflow_state"]
    for database in (url, f"sqlite:///{tmp_path / 'state.db'}"):
        async with serving(tmp_path, *flags, "--database", database) as served:
            async with await SemanticClient.connect(served.nats, tenant="acme", project="web") as client:
                kept = await client.put(
                    "kept", "confidential", expected_version=0, writer="w:d", semantics=Semantics("workflow_state")
                )
                await client.put("gone", "confidential", expected_version=0, writer="w:d", semantics=cursor)
                with pytest.raises(VersionConflict):
                    await client.put("kept", "confidential", expected_version=0, writer="w:d", semantics=cursor)
            await served.logs('"operation":"semantic_expire"')
            _, metrics = await served.page("/metrics")
            for outcome, purpose in (("success", "workflow_state"), ("conflict", "cursor"), ("expiry", "cursor")):
                assert f'rosey_semantic_operations_total{{outcome="{outcome}",purpose="{purpose}"}} 1\n' in metrics
            assert 'rosey_semantic_alert{alert="storage_outage"} 0.0' in metrics
            served.process.send_signal(signal.SIGTERM)
            assert await served.ends() == 0
            assert "confidential" not in served.printed + served.log + metrics
            lines = [json.loads(line) for line in served.log.splitlines()]
            put, conflict = [line for line in lines if line.get("key") == kept.key]
            assert (put["level"], conflict["level"]) == ("INFO", "WARNING")
            assert (put["directive"], put["semantics.purpose"], put["version"]) == ("d", "workflow_state", kept.version)
            assert conflict["correlationId"]
        async with (
            serving(tmp_path, *flags, "--database", database) as served,
            await SemanticClient.connect(served.nats, tenant="acme", project="web") as client,
        ):
            assert await client.get("kept") == kept


async def test_a_database_that_is_not_up_yet_is_waited_for(
    url: str, mortal_postgres: MortalServer, tmp_path: Path
) -> None:
    flags = ["--nats-port", "0", "--database", url]
    async with AsyncExitStack() as stack:
        mortal_postgres.kill()
        try:
            async with serving(tmp_path, *flags, ready=False) as given_up:
                await given_up.logs("waiting for it")
                given_up.process.terminate()
                assert await given_up.ends() == 0
                assert "is running" not in given_up.log
            served = await stack.enter_async_context(serving(tmp_path, *flags, ready=False))
            await served.logs("waiting for it")
        finally:
            mortal_postgres.start()
        await served.ready()
        assert await answers(served.nats) == "nothing"
        assert await served.is_healthy()
        for log in (given_up.log, served.log):
            assert PASSWORD not in log
            assert "Traceback" not in log


async def test_a_database_that_dies_is_reported_and_used_again_when_it_is_back(
    url: str, mortal_postgres: MortalServer, tmp_path: Path
) -> None:
    flags = ["--nats-port", "0", "--database", url, "--deadline", "0.5"]
    async with serving(tmp_path, *flags) as served:
        client = await nats.connect(served.nats)
        assert await ask(client, "set", key="kept", value=1) == {"success": True}
        mortal_postgres.kill()
        try:
            replies = await asyncio.gather(
                ask(client, "set", key="k", value=1),
                ask(client, "get", key="kept"),
                ask(client, "delete", key="kept"),
                ask(client, "list"),
            )
            assert [reply.get("error_code") for reply in replies] == ["DATABASE_ERROR"] * 4
            assert str(tmp_path) not in str(replies)
            assert "host" not in str(replies)
            assert len((await served.shows("/healthz", 503)).splitlines()) == 1
            assert (await served.page("/metrics"))[0] == 200, "what is wrong with a database is when they are wanted"
        finally:
            mortal_postgres.start()
        await served.shows("/healthz", 200)
        assert await ask(client, "get", key="kept") == {"success": True, "exists": True, "value": 1}
        assert await ask(client, "set", key="again", value=1) == {"success": True}
        assert await ask(client, "get", key="k") == {"success": True, "exists": False}
        await client.close()
        served.process.terminate()
        assert await served.ends() == 0
        assert PASSWORD not in served.log


async def test_two_services_share_the_requests_and_lose_nothing(postgres_url: str, tmp_path: Path) -> None:
    async with private_server() as server:
        flags = ["--nats", server.url, "--database", postgres_url, "--log-level", "debug", "--log-format", "json"]
        async with serving(tmp_path, *flags) as one, serving(tmp_path, *flags) as other:
            await other.logs("sharing the requests with another instance")
            clients = [await nats.connect(server.url) for _ in range(4)]

            async def play(number: int, client: Nats) -> int:
                """What was acknowledged is read, by whichever of the two answers."""
                stale = 0
                for value in range(60):
                    assert await ask(client, "set", key=f"own{number}", value=value) == {"success": True}
                    stale += (await ask(client, "get", key=f"own{number}")).get("value") != value
                    assert await ask(client, "set", key=f"k{number}.{value}", value=value) == {"success": True}
                return stale

            assert await asyncio.gather(*[play(number, client) for number, client in enumerate(clients)]) == [0] * 4
            listed = await ask(clients[0], "list")
            assert (listed["count"], listed["truncated"]) == (4 * 60 + 4, False)

            # Of all clients that delete an entry, one gets the answer that it existed.
            deleted = await asyncio.gather(
                *[ask(client, "delete", key=f"k0.{number}") for client in clients for number in range(60)]
            )
            assert Counter(reply["deleted"] for reply in deleted) == {True: 60, False: 180}
            assert (await ask(clients[0], "list"))["count"] == 3 * 60 + 4
            for served in (one, other):
                operations = Counter(json.loads(line).get("operation") for line in served.log.splitlines())
                assert operations["kv_set"] > 50
                assert operations["kv_get"] > 25
            for client in clients:
                await client.close()
    assert query(postgres_url, "SELECT count(*) FROM plugin_kv_storage") == [(3 * 60 + 4,)]


async def test_migrations_by_the_command_line(url: str, tmp_path: Path) -> None:
    ended = []
    for steps in ([], ["--to", "-1"], ["--to", "-1", "--yes"]):
        code, output, error = await asyncio.to_thread(run_command, SURROUNDINGS, "migrate", "--database", url, *steps)
        assert output == ""
        assert PASSWORD not in error
        assert "Traceback" not in error
        ended.append((code, error))
    assert [code for code, _ in ended] == [0, 2, 0]
    assert "--yes" in ended[1][1]

    code, error = await refused(tmp_path, "--nats-port", "0", "--database", url)
    assert code == 1
    assert "SCHEMA_TOO_OLD" in error
    assert "keyloft migrate --database 'postgresql://" in error
    assert PASSWORD not in error

    environment = {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": url}
    assert (await asyncio.to_thread(run_command, environment, "migrate"))[0] == 0
    async with serving(tmp_path, "--nats-port", "0", "--database", url) as served:
        assert await answers(served.nats) == "nothing"


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        (PASSWORD, "not-the-one", "CANNOT_OPEN: .*check the name, and the password"),
        ("/keyloft_", "/no_such_", "CANNOT_OPEN: .*CREATE DATABASE"),
    ],
)
async def test_a_database_that_will_never_open_ends_it(
    url: str, tmp_path: Path, right: str, wrong: str, error: str
) -> None:
    code, line = await refused(tmp_path, "--nats-port", "0", "--database", url.replace(right, wrong))
    assert code == 1
    assert re.search(error, line)
    assert PASSWORD not in line
    assert "not-the-one" not in line


async def test_health_and_doctor_name_the_hosts_while_there_is_no_primary(tmp_path: Path) -> None:
    with cluster() as servers:
        primary, standby = servers.nodes
        async with serving(tmp_path, "--nats-port", "0", "--database", servers.url()) as served:
            [port] = set(re.findall(r"http://127\.0\.0\.1:(\d+)", served.log))

            async def examined() -> str:
                arguments = ("doctor", "--json", "--nats", served.nats, "--http", f"127.0.0.1:{port}")
                _, found, _ = await asyncio.to_thread(run_command, SURROUNDINGS, *arguments, folder=tmp_path)
                [finding] = [one for one in json.loads(found) if one["code"] == f"port {port}"]
                return str(finding["what"])

            said = await examined()
            assert re.fullmatch(r"taken by a service of Keyloft, which is healthy \(store [0-9a-f]+\)", said)
            primary.kill()
            async with asyncio.timeout(LONGEST_SECONDS):
                while f"\nunreachable {primary.host}\n" not in (health := await served.shows("/healthz", 503)):
                    pass
            assert health.startswith("the database ")
            assert "\nprimary none, timeline 1\n" in health
            assert f"\nstandby {standby.host}, timeline 1" in health
            said = await examined()
            assert said.startswith("the service there is not healthy: the database ")
            assert f"; unreachable {primary.host};" in said


async def test_gets_and_lists_go_on_from_standbys_while_there_is_no_primary(tmp_path: Path) -> None:
    with cluster() as servers:
        primary, standby = servers.nodes
        database = servers.url(options="&reads=standby")
        async with serving(tmp_path, "--nats-port", "0", "--database", database, "--deadline", "2") as served:
            client = await nats.connect(served.nats)
            for number in range(20):
                assert await ask(client, "set", key="k", value=number) == {"success": True}
                assert await ask(client, "get", key="k") == {"success": True, "exists": True, "value": number}
            async with asyncio.timeout(LONGEST_SECONDS):
                while not await asyncio.to_thread(standby.caught_up_with, primary):
                    pass
            primary.kill()
            assert await ask(client, "get", key="k") == {"success": True, "exists": True, "value": 19}
            assert (await ask(client, "list"))["keys"] == ["k"]
            assert (await ask(client, "set", key="k", value=20))["error_code"] == "DATABASE_ERROR"
            assert await ask(client, "get", key="k") == {"success": True, "exists": True, "value": 19}
            await client.close()
            assert "Traceback" not in served.log
