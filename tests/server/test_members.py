"""The id of a store: where it is shown, and that services of one queue group never serve two stores."""

import asyncio
import json
import re
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from keyloft import AnotherStore, admin, limits
from keyloft.cli.doctor import database as doctor
from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.server.config import Config
from keyloft.server.isolation import isolate
from keyloft.server.members import QueueGroup, find_services, store_of
from tests.cli.commands import SURROUNDINGS, run_command
from tests.server.test_serve import Serving, refused, serving
from tests.support.nats import private_server
from tests.support.postgres_proxy import listening, proxy

MINE = "a" * 32
OTHER = "b" * 32


def config(**settings: Any) -> Config:
    return Config(database=":memory:", **settings)


async def served_by(
    stack: AsyncExitStack, url: str, *, store: str | None, prefix: str = "db.kv", queue: str | None = None
) -> None:
    """A service as another process would run it."""
    client = await nats.connect(url)
    stack.push_async_callback(client.close)
    db = BotDatabase()
    stack.push_async_callback(db.aclose)
    metadata = {"host": "elsewhere", "pid": "77", "database": "other.db", "prefixes": prefix}
    options: dict[str, Any] = {} if queue is None else {"queue": queue}
    service = DatabaseService(
        client, db, prefixes=[prefix], metadata=metadata | ({"store": store} if store else {}), **options
    )
    await stack.enter_async_context(service)


async def mine() -> str:
    return MINE


async def check(url: str, **settings: Any) -> None:
    client = await connect(url, name="test")
    try:
        await QueueGroup(config(**settings), mine).check(client, None)
    finally:
        await client.close()


async def test_the_answers_of_all_members_count() -> None:
    async with private_server() as server, AsyncExitStack() as stack:
        for store in [MINE] * 5:
            await served_by(stack, server.url, store=store)
        await check(server.url)
        client = await connect(server.url, name="test")
        stack.push_async_callback(client.close)
        found = await find_services(client, None)
        assert [member.store for member in found or ()] == [MINE] * 5
        await served_by(stack, server.url, store=OTHER)
        with pytest.raises(AnotherStore) as caught:
            await check(server.url)
        assert caught.value.code == "ANOTHER_STORE"
        for part in (MINE, OTHER, "elsewhere", "process 77", "other.db", "--database", "--prefixes"):
            assert part in str(caught.value)


@pytest.mark.parametrize("prefix", ["db.kv", "db", "db.kv.more"])
async def test_prefixes_that_overlap_are_shared(prefix: str) -> None:
    async with private_server() as server, AsyncExitStack() as stack:
        await served_by(stack, server.url, store=OTHER, prefix=prefix)
        with pytest.raises(AnotherStore):
            await check(server.url)


async def test_other_prefixes_and_queue_groups_are_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    async with private_server() as server, AsyncExitStack() as stack:
        await served_by(stack, server.url, store=OTHER, prefix="shop.kv")
        await served_by(stack, server.url, store=OTHER, queue="another")
        await check(server.url)


async def test_a_member_that_tells_no_store_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with private_server() as server, AsyncExitStack() as stack:
        await served_by(stack, server.url, store=None)
        await check(server.url)
    assert "does not say which store it serves" in caplog.text


async def test_while_the_database_does_not_answer_the_last_known_id_counts() -> None:
    async with BotDatabase() as db:
        store = store_of(await db.engine(), MINE)
        known = await store()
        assert known != MINE
    assert await store() == known


async def test_only_the_first_answer_waits_while_the_database_stalls(emptied_postgres_url: str) -> None:
    async with proxy(emptied_postgres_url) as (between, url), BotDatabase(url) as db:
        store = store_of(await db.engine(), MINE)
        known = await store()
        between.pause()
        try:
            async with asyncio.timeout(4 * limits.STORE_ID_SECONDS):
                answers = [await store() for _ in range(20)]
        finally:
            between.go_on()
        assert answers == 20 * [known]


# As processes


async def information(client: Client, name: str) -> dict[str, Any]:
    answer = await client.request(f"$SRV.INFO.{name}", b"", timeout=10)
    found: dict[str, Any] = json.loads(answer.data)
    return found


@pytest.mark.slow
async def test_the_id_is_shown_wherever_an_operator_looks(tmp_path: Path) -> None:
    async with private_server() as server, serving(tmp_path, "--nats", server.url) as served:
        [file] = tmp_path.glob("*.db")
        store = (await admin.stats(file)).store
        assert len(bytes.fromhex(store)) == 16
        assert await served.page("/healthz") == (200, f"ok\nstore {store}\n")
        client = await nats.connect(server.url)
        for name, prefixes in (("keyloft-plugins", "db.kv rosey.db.kv"), ("keyloft-semantic", "db.semantic")):
            about = (await information(client, name))["metadata"]
            assert (about["store"], about["prefixes"], about["pid"]) == (store, prefixes, str(served.process.pid))
        await client.close()
        assert [one.what for one in await doctor.examine(str(file)) if one.code == "store"] == [f"its id is {store}"]


@pytest.mark.slow
async def test_after_a_restore_the_health_page_shows_the_new_id_and_doctor_compares_it(tmp_path: Path) -> None:
    async with private_server() as server, serving(tmp_path, "--nats", server.url) as served:
        [file] = tmp_path.glob("*.db")
        before = (await admin.stats(file)).store
        backup = tmp_path / "backup.sqlite"
        await admin.backup(file, backup)
        await admin.restore(backup, file, replace=True)
        store = (await admin.stats(file)).store
        assert store != before
        assert await served.page("/healthz") == (200, f"ok\nstore {store}\n")
        [port] = set(re.findall(r"http://127\.0\.0\.1:(\d+)", served.log))

        async def severity(database: Path) -> str:
            arguments = ("--nats", server.url, "--http", f"127.0.0.1:{port}", "--database", str(database))
            command = ("doctor", "--json", *arguments)
            _, found, _ = await asyncio.to_thread(run_command, SURROUNDINGS, *command, folder=tmp_path)
            [finding] = [one for one in json.loads(found) if one["code"] == f"port {port}"]
            return str(finding["severity"])

        assert [await severity(file), await severity(backup)] == ["ok", "warning"]


@pytest.mark.slow
async def test_after_a_restore_instances_are_restarted_one_by_one(tmp_path: Path) -> None:
    async with private_server() as server, serving(tmp_path, "--nats", server.url) as first:
        [file] = tmp_path.glob("*.db")
        before = (await admin.stats(file)).store
        await admin.backup(file, tmp_path / "backup.sqlite")
        await admin.restore(tmp_path / "backup.sqlite", file, replace=True)
        store = (await admin.stats(file)).store
        async with serving(tmp_path, "--nats", server.url) as second:
            await second.logs("sharing the requests with another instance")
            assert before not in second.log
            client = await nats.connect(server.url)
            for verb in ("PING", "INFO", "STATS"):
                for name in ("keyloft-plugins", "keyloft-semantic"):
                    answer = await client.request(f"$SRV.{verb}.{name}", b"", timeout=10)
                    assert json.loads(answer.data)["metadata"]["store"] == store
            await client.close()
            first.process.terminate()
            await first.ends()
            async with serving(tmp_path, "--nats", server.url) as third:
                await third.logs("sharing the requests with another instance")


async def test_a_restore_while_members_are_asked_is_no_other_store() -> None:
    async with private_server() as server, AsyncExitStack() as stack:
        await served_by(stack, server.url, store=OTHER)
        client = await connect(server.url, name="test")
        stack.push_async_callback(client.close)
        ids = iter([MINE, OTHER, OTHER])

        async def store() -> str:
            return next(ids)

        await QueueGroup(config(), store).check(client, None)
        assert next(ids, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_isolated", [False, True], ids=["open", "isolated"])
async def test_a_service_of_another_store_does_not_join(tmp_path: Path, is_isolated: bool) -> None:
    (tmp_path / "other").mkdir()
    isolation = isolate(["trivia"])
    isolation.write(tmp_path / "nats.conf")
    async with private_server(tmp_path / "nats.conf" if is_isolated else None) as server:
        url = server.url
        if is_isolated:
            url = url.replace("nats://", f"nats://SERVICE:{isolation.service.password}@")
        async with serving(tmp_path, "--nats", url) as first:
            code, error = await refused(tmp_path / "other", "--nats", url)
            assert code == 1
            assert "ANOTHER_STORE" in error
            assert list((tmp_path / "other").glob("*.db*")) == [], "no new file is left behind"
            assert f"process {first.process.pid}" in error
            store = (await first.page("/healthz"))[1].split()[-1]
            assert f"store {store}" in error
            async with serving(tmp_path, "--nats", url) as second:
                await second.logs("sharing the requests with another instance")
                assert await second.is_healthy()
            code, error = await refused(tmp_path / "other", "--nats", url, "--prefixes", "shop.kv")
            assert "db.semantic: served here already" in error
            assert await first.is_healthy()
            assert first.process.poll() is None


@pytest.mark.slow
async def test_a_service_leaves_if_another_store_was_joined_while_its_connection_was_lost(tmp_path: Path) -> None:
    is_cut, connections = False, list[asyncio.StreamWriter]()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_cut:
            return
        from_nats, to_nats = await asyncio.open_connection("127.0.0.1", server.port)
        connections.extend((writer, to_nats))
        ways = [pass_on(from_nats, writer), pass_on(reader, to_nats)]
        await asyncio.wait(map(asyncio.ensure_future, ways), return_when=asyncio.FIRST_COMPLETED)
        to_nats.transport.abort()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with (
        private_server() as server,
        listening(between) as port,
        serving(tmp_path / "first", "--nats", f"nats://127.0.0.1:{port}") as first,
    ):
        is_cut = True
        for writer in connections:
            writer.transport.abort()
        await first.logs("the connection is lost")
        async with serving(tmp_path / "second", "--nats", server.url) as second:
            is_cut = False
            await first.logs("ANOTHER_STORE")
            await first.shows("/readyz", 503)
            client = await nats.connect(server.url)
            for _ in range(20):
                about = (await information(client, "keyloft-plugins"))["metadata"]
                assert about["pid"] == str(second.process.pid)
            second.process.terminate()
            await second.ends()
            await first.shows("/readyz", 200)
            assert (await information(client, "keyloft-plugins"))["metadata"]["pid"] == str(first.process.pid)
            await client.close()


@pytest.mark.slow
async def test_under_an_older_configuration_the_check_is_left_out_with_a_warning(tmp_path: Path) -> None:
    isolation = isolate(["trivia"])
    older = isolation.text.replace('            "$SRV.INFO"\n', "", 1)
    assert older != isolation.text
    (tmp_path / "nats.conf").write_text(older)
    async with private_server(tmp_path / "nats.conf") as server:
        url = server.url.replace("nats://", f"nats://SERVICE:{isolation.service.password}@")
        async with serving(tmp_path, "--nats", url) as first:
            assert first.log.count("whether other services here serve the same store is not known") == 1
            assert "nats-config --replace" in first.log
            assert await first.is_healthy()


@pytest.mark.slow
async def test_of_two_that_start_at_the_same_moment_not_both_serve(tmp_path: Path) -> None:
    async with private_server() as server:
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        both = [Serving(folder, "--nats", server.url) for folder in folders]
        try:
            ended = [asyncio.create_task(one.ends()) for one in both]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result() for task in ended if task.done()} == {1}
            assert any("ANOTHER_STORE" in one.log for one in both)
        finally:
            for task in ended:
                task.cancel()
            for one in both:
                one.end()
