"""The intake of a service: what a stuck write holds up, what is given up in time, and what is forgotten."""

import asyncio
import gc
import json
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest
from nats.aio.client import Client as Nats

import keyloft
from keyloft import InvalidArgument, KeyloftError, limits
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.requests import NO_OPERATION, Operation
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.plugins.operations import operations
from keyloft.plugins.quota_writes import under_quotas
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic import SemanticService, SemanticStore
from keyloft.semantic.keys import Project
from keyloft.semantic.operations import operations as semantic_operations
from tests.support.plugin_files import locked
from tests.support.postgres import database_url
from tools.postgres import TIMEOUT_SECONDS

PREFIX = "intake.kv"


async def ask(client: Nats, subject: str, **fields: Any) -> Any:
    reply = await client.request(f"{PREFIX}.{subject}", json.dumps(fields).encode(), timeout=TIMEOUT_SECONDS)
    return json.loads(reply.data)


async def publish(client: Nats, subject: str, **fields: Any) -> None:
    await client.publish(f"{PREFIX}.{subject}", json.dumps(fields).encode())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not is_so():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(client: Nats, db: BotDatabase, **options: Any) -> AsyncIterator[DatabaseService]:
    async with DatabaseService(client, db, prefixes=[PREFIX], **options) as service:
        yield service


class TestAStuckWrite:
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
        # Not within the event loop: the first one starts a server.
        return database_url("postgresql", request, tmp_path)

    async def test_uses_up_no_room_for_the_replies_of_others(self, url: str, client: Nats) -> None:
        async with BotDatabase(url) as db, serving(client, db) as service:
            for number in range(5):
                await db.kv_set(f"t{number}", "k", 0)
            other = await asyncpg.connect(url)
            async with other.transaction():
                await other.fetch("SELECT 1 FROM plugin_kv_storage WHERE plugin_name <> 't4' FOR UPDATE")
                for number in range(4):
                    await publish(client, f"t{number}.set", key="k", value=1)
                    for _ in range(4):
                        await publish(client, f"t{number}.list")
                await until(lambda: service.unanswered == 20)
                assert await ask(client, "t4.list") == {"success": True, "keys": ["k"], "count": 1, "truncated": False}
                assert await ask(client, "t4.set", key="k", value=2) == {"success": True}
            await other.close()
            await until(lambda: not service.unanswered)

    async def test_keeps_no_value_of_later_writes_that_are_done(self, url: str, client: Nats) -> None:
        async with BotDatabase(url) as db, serving(client, db) as service:
            await db.kv_set("trivia", "k", 0)
            other = await asyncpg.connect(url)
            async with other.transaction():
                await other.fetch("SELECT 1 FROM plugin_kv_storage FOR UPDATE")
                await publish(client, "trivia.set", key="k", value=1)
                await until(lambda: service.unanswered == 1)
                with grows_by_no_more_than(2_000_000):
                    for _ in range(100):
                        assert (await ask(client, "trivia.set", key="other", value="x" * 60_000))["success"]
            await other.close()
            await until(lambda: not service.unanswered)


async def test_a_get_waits_for_the_write_before_one_that_was_withdrawn(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, deadline=0.4) as service:
        await db.kv_set("trivia", "k", 0)
        async with locked(db):
            await publish(client, "trivia.set", key="k", value=1)
            await until(lambda: service.unanswered == 1)
            withdrawn = await ask(client, "trivia.set", key="k", value=2)
            assert "was not carried out" in withdrawn["message"]
            late = await ask(client, "trivia.get", key="k")
            assert late.get("error_code") == "DATABASE_ERROR", "it does not show the value before the published one"
        assert (await ask(client, "trivia.get", key="k"))["value"] == 1


async def test_late_requests_among_many_published_ones_are_answered_in_time(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, deadline=0.5) as service:
        async with locked(db):
            for number in range(3000):
                await publish(client, "trivia.set", key=f"{number}", value=1)
            replies = await asyncio.gather(*[ask(client, "trivia.get", key="k") for _ in range(500)])
            assert {reply["error_code"] for reply in replies} == {"DATABASE_ERROR"}
            assert service.unanswered == 3000, "what was published has no deadline"
        await until(lambda: not service.unanswered)
        assert (await ask(client, "trivia.list", limit=10_000))["count"] == 3000


async def test_a_late_request_is_not_answered_at_another_owners_subject(client: Nats, db: BotDatabase) -> None:
    heard = await client.subscribe(f"{PREFIX}.victim.set")
    async with serving(client, db, deadline=0.3) as service:
        async with locked(db):
            for number in range(300):
                await publish(client, "rogue.set", key=f"{number}", value=1)
            await client.publish(f"{PREFIX}.rogue.get", b'{"key":"k"}', reply=f"{PREFIX}.victim.set")
            assert (await ask(client, "rogue.get", key="k"))["error_code"] == "DATABASE_ERROR"
        await until(lambda: not service.unanswered)
    assert heard.pending_msgs == 0


async def test_a_refused_subject_keeps_none_of_its_messages(client: Nats) -> None:
    async with (
        keyloft.open() as kv,
        SemanticStore(kv, sweep_every=None) as store,
        SemanticService(client, store, prefix="intake.semantic"),
    ):
        with grows_by_no_more_than(2_000_000):
            for _ in range(100):
                reply = await client.request("intake.semantic.acme.X.put", b"x" * 60_000, timeout=TIMEOUT_SECONDS)
                assert json.loads(reply.data)["success"] is False


@contextmanager
def grows_by_no_more_than(size: int) -> Iterator[None]:
    """Python's objects take no more than so many bytes afterwards."""
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        yield
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert after - before <= size
    finally:
        tracemalloc.stop()


async def test_owners_with_much_unanswered_do_not_shut_out_those_with_little(client: Nats, db: BotDatabase) -> None:
    bounds = IntakeBounds(all_bytes=1_600_000, owner_bytes=400_000)
    async with serving(client, db, bounds=bounds) as service:
        async with locked(db):
            for number in range(600):
                await publish(client, f"large{number % 3}.set", key=f"{number}", value="x" * 2000)
            await until(lambda: sum(meter.dropped for meter in service.meters.owners.values()) > 0)
            assert (await ask(client, "small.get", key="k")) == {"success": True, "exists": False}
        await until(lambda: not service.unanswered)


async def test_large_requests_beyond_the_bound_of_an_owner_are_busy_and_all_others_are_answered(
    client: Nats, db: BotDatabase
) -> None:
    async with serving(client, db, bounds=IntakeBounds(owner_bytes=400_000)) as service:
        async with locked(db):
            await publish(client, "large.set", key="first", value="x" * 60_000)
            await until(lambda: service.unanswered == 1)
            large = [ask(client, "large.set_many", entries={"k": "x" * 900_000}) for _ in range(8)]
            small = [ask(client, f"{name}.get", key="k") for name in ("large", "small") for _ in range(20)]
            replies = await asyncio.gather(*large, *small)
        assert {reply["error_code"] for reply in replies[:8]} == {"BUSY"}
        assert replies[8:] == [{"success": True, "exists": False}] * 40
        assert service.meters.owners["large"].errors["BUSY"] == 8


async def test_a_message_larger_than_its_operation_takes_is_refused_by_its_size_however_much_waits(
    client: Nats, db: BotDatabase
) -> None:
    """BUSY would ask its sender to try again, for ever."""
    too_large = {
        "set": ("VALUE_TOO_LARGE", "bytes as sent, 65,536 allowed"),
        "get": ("VALIDATION_ERROR", "at most 16384"),
        "delete_many": ("VALIDATION_ERROR", "at most 524288"),
        "watch": ("VALIDATION_ERROR", "at most 65536"),
    }
    quotas = Quotas(named={"bounded": Quota(keys=10)})
    async with PluginUsage(db, quotas) as usage:
        async with serving(client, db, bounds=IntakeBounds(owner_bytes=400_000), usage=usage) as service:
            async with locked(db):
                for owner in ("large", "bounded"):
                    await publish(client, f"{owner}.set", key="first", value="x" * 60_000)
                    for operation, (code, rule) in too_large.items():
                        reply = await ask(client, f"{owner}.{operation}", key="k", value="x" * 900_000)
                        assert reply["error_code"] == code
                        assert rule in reply["message"]
                    assert service.meters.owners[owner].errors == {"VALUE_TOO_LARGE": 1, "VALIDATION_ERROR": 3}
                await publish(client, "large.set", key="k", value="x" * 900_000)  # without a reply subject
                await until(lambda: service.meters.owners["large"].errors["VALUE_TOO_LARGE"] == 2)
            await until(lambda: not service.unanswered)
        assert {one.name: one.num_errors for one in service.counted() if one.num_errors} == {
            "set": 3,
            "get": 2,
            "delete_many": 2,
            "watch": 2,
        }


async def test_the_reader_of_an_operation_takes_as_many_bytes_as_the_operation_says(
    client: Nats, db: BotDatabase
) -> None:
    async with PluginUsage(db) as usage:
        known = [*operations(client, db, usage, lambda *_: NO_OPERATION), *under_quotas(db, usage).values()]
    bounded = [operation for operation in known if operation.most_bytes < sys.maxsize]
    assert len(bounded) == 14, "all but set_many and many; four of them also under quotas"
    for operation in bounded:
        check_bound(operation, "trivia")


async def test_the_reader_of_a_semantic_operation_takes_as_many_bytes_as_the_operation_says(client: Nats) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        known = semantic_operations(client, store)
    bounded = [operation for operation in known if operation.most_bytes < sys.maxsize]
    assert {one.name for one in known} - {one.name for one in bounded} == {"batch", "dead_letters"}
    for operation in bounded:
        check_bound(operation, Project("acme", "web"))


def check_bound(operation: Operation, about: object) -> None:
    for size, is_too_large in ((operation.most_bytes, False), (operation.most_bytes + 1, True)):
        with pytest.raises(KeyloftError) as raised:
            operation.read(about, b"x" * size)
        assert (str(raised.value) == str(operation.too_large(size))) is is_too_large


async def test_headers_do_not_count_towards_the_size_that_an_operation_takes(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db):
        assert (await ask(client, "trivia.set", key="k", value=1))["success"]
        headers = {"Trace": "x" * 100_000}
        for operation, fields in (("get", {"key": "k"}), ("watch", {"keys": ["k"]})):
            data, subject = json.dumps(fields).encode(), f"{PREFIX}.trivia.{operation}"
            reply = await client.request(subject, data, timeout=TIMEOUT_SECONDS, headers=headers)
            assert json.loads(reply.data)["success"]


async def test_a_semantic_request_larger_than_its_operation_takes_is_refused_by_its_size_however_much_waits(
    client: Nats,
) -> None:
    async with (
        keyloft.open() as kv,
        SemanticStore(kv, sweep_every=None) as store,
        SemanticService(client, store, prefix="intake.semantic", bounds=IntakeBounds(owner_bytes=400_000)) as service,
    ):
        for operation in ("put", "get", "locks"):
            subject = f"intake.semantic.acme.web.{operation}"
            reply = json.loads((await client.request(subject, b"x" * 900_000, timeout=TIMEOUT_SECONDS)).data)
            assert (reply["error_code"], "got 900,000 bytes" in reply["message"]) == ("VALUE_TOO_LARGE", True)
        assert service.meters.owners["acme"].errors == {"VALUE_TOO_LARGE": 3}


async def test_gets_of_many_plugins_that_arrive_together_have_each_its_own_value(client: Nats, db: BotDatabase) -> None:
    plugins = [f"p{number}" for number in range(30)]
    for number, plugin in enumerate(plugins):
        await db.kv_set(plugin, "k", number)
    async with serving(client, db) as service:
        asked = [ask(client, f"{plugin}.get", key=key) for key in ("k", "absent", "k") for plugin in plugins]
        replies = await asyncio.gather(*asked)
        values = [reply.get("value") for reply in replies]
        assert values == [*range(30), *[None] * 30, *range(30)]
        assert not service.unanswered


class TestMoreNamesThanQueues:
    """While another program locks the file, each name has an unfinished write, and keeps its queue."""

    async def flood(self, client: Nats, service: DatabaseService) -> None:
        for number in range(limits.OWNERS + 100):
            await publish(client, f"p{number}.set", key="k", value=number)
        await until(lambda: service.unanswered == limits.OWNERS + 100)

    async def test_a_plugin_that_comes_back_is_served_while_new_names_are_refused(
        self, client: Nats, db: BotDatabase
    ) -> None:
        async with serving(client, db, bounds=IntakeBounds(owner_bytes=40_000)) as service:
            async with locked(db):
                await self.flood(client, service)
            await until(lambda: not service.unanswered)
            for _ in range(64):  # it takes the queue of a name that did not come back
                await ask(client, "good.get", key="k")
            async with locked(db):
                await self.flood(client, service)
                for number in range(1000):
                    await publish(client, f"new{number}.set", key="k", value=number)
                assert (await ask(client, "new.get", key="k"))["error_code"] == "BUSY"
                assert await ask(client, "good.get", key="k") == {"success": True, "exists": False}
                assert await ask(client, "good.list") == {"success": True, "keys": [], "count": 0, "truncated": False}
            await until(lambda: not service.unanswered)
            assert await ask(client, "new.get", key="k") == {"success": True, "exists": False}
            assert service.meters.owners["other"].dropped > 0

    async def test_names_that_share_a_queue_read_what_they_published(self, client: Nats, db: BotDatabase) -> None:
        async with serving(client, db) as service:
            async with locked(db):
                await self.flood(client, service)
                await publish(client, "late.set", key="k", value=1)
                asking = asyncio.create_task(ask(client, "late.get", key="k"))
                wrong = asyncio.create_task(ask(client, "late.upsert", key="k"))
                many = asyncio.create_task(ask(client, "late.many", requests=[{"op": "get", "key": "k"}]))
                await until(lambda: service.unanswered == limits.OWNERS + 104)
            assert (await asking)["value"] == 1
            assert (await wrong)["error_code"] == "INVALID_SUBJECT"
            assert [reply["value"] for reply in (await many)["replies"]] == [1]
            stored = [await db.kv_get(f"p{number}", "k") for number in range(limits.OWNERS + 100)]
            assert [found["value"] for found in stored] == list(range(limits.OWNERS + 100))


@pytest.mark.parametrize(("rate", "carried_out"), [(0.5, 1), (5.0, 5)])
async def test_a_limit_of_the_rate_allows_so_many_at_once(
    rate: float, carried_out: int, client: Nats, db: BotDatabase
) -> None:
    async with serving(client, db, bounds=IntakeBounds(requests_per_second=rate)):
        replies = await asyncio.gather(*[ask(client, "trivia.get", key="k") for _ in range(50)])
    codes = [reply.get("error_code", "ok") for reply in replies]
    assert carried_out <= codes.count("ok") < 50
    assert set(codes) == {"ok", "BUSY"}


async def test_a_service_starts_once_and_on_a_connected_client(client: Nats, db: BotDatabase) -> None:
    with pytest.raises(InvalidArgument, match="connected client"):
        await DatabaseService(Nats(), db).start()
    async with serving(client, db) as service:
        with pytest.raises(InvalidArgument, match="started already"):
            await service.start()


async def test_a_cancelled_closing_can_be_repeated(client: Nats, db: BotDatabase) -> None:
    service = DatabaseService(client, db, prefixes=[PREFIX])
    await service.start()
    async with locked(db):
        await publish(client, "trivia.set", key="k", value=1)
        await until(lambda: service.unanswered == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await service.aclose()
        assert service.unanswered == 1
    await service.aclose()
    assert await db.kv_get("trivia", "k") == {"exists": True, "value": 1}


async def test_a_stop_beside_a_locked_file_is_bounded_and_says_what_it_waits_for(
    client: Nats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "CLOSING_REMARK_SECONDS", 0.05)
    monkeypatch.setattr(limits, "CLOSING_SECONDS", 0.2)
    monkeypatch.setattr(limits, "CLOSING_LOCK_SECONDS", 0.1)
    db = BotDatabase(tmp_path / "locked.db")
    service = DatabaseService(client, db, prefixes=[PREFIX])
    await service.start()
    async with locked(db):
        for number in range(2):  # the second is in a group of its own
            await publish(client, "trivia.set", key=f"{number}", value=1)
            await until(lambda count=number + 1: service.unanswered == count)  # type: ignore[misc]
        await service.aclose()
        await db.aclose()
    lines = [line for line in caplog.messages if line.startswith("[KV] stop")]
    assert lines == [
        "[KV] stopping: the database has not carried out 2 requests yet; waiting up to 0.2 s for it",
        "[KV] stopped; the database does not answer, 2 requests are left behind",
    ]
    assert len([line for line in caplog.messages if "error=BUSY" in line]) == 2
