"""The operations audit, restore, locks and dead_letters over NATS, and the client's calls of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.msg import Msg

import keyloft
from keyloft import ManualClock
from keyloft.errors import NothingToRestore
from keyloft.semantic import (
    Escalated,
    Intent,
    LockLost,
    Retry,
    SemanticClient,
    Semantics,
    SemanticService,
    SemanticStore,
    StaleFence,
    VersionConflict,
    WriteRequest,
)
from tests.semantic.over_nats import served
from tests.support.nats import settled

PROJECT = "tenant/acme/project/web"
CURSOR = Semantics("cursor")
LOCK = Semantics("lock", ttl_seconds=30)


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[SemanticStore]:
    async with keyloft.open(clock=clock) as kv, SemanticStore(kv, sweep_every=None) as store:
        yield store


@pytest.fixture
async def client(nats_url: str, store: SemanticStore) -> AsyncIterator[SemanticClient]:
    async with served(nats_url, store) as client:
        yield client


async def put(client: SemanticClient, key: str, value: Any = 1, **options: Any) -> Any:
    about: dict[str, Any] = {"expected_version": "*", "writer": "w", "semantics": CURSOR}
    return await client.put(key, value, **about | options)


async def ask(client: SemanticClient, operation: str, **fields: Any) -> dict[str, Any]:
    """What a stock client of NATS gets."""
    subject = f"{client.prefix}.acme.web.{operation}"
    answer = await client.nats.request(subject, json.dumps(fields).encode(), timeout=20)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


class TestAudit:
    async def test_records_are_those_of_the_store_in_both_directions(
        self, client: SemanticClient, store: SemanticStore
    ) -> None:
        for value in range(3):
            await put(client, "a", value)
            await put(client, "b", value)
        with pytest.raises(VersionConflict):
            await put(client, "a", expected_version=0)
        await client.delete("a", expected_version="*", writer="w")
        for reverse in (False, True):
            assert await client.audit(reverse=reverse) == await store.audit(PROJECT, reverse=reverse)
            assert await client.audit("a", reverse=reverse) == await store.audit(f"{PROJECT}/a", reverse=reverse)
        [first, second, *rest] = await client.audit("a")
        assert await client.audit("a", limit=2) == [first, second]
        assert await client.audit("a", after=second.sequence) == rest
        assert await client.audit("a", after=second.sequence, reverse=True, limit=1) == rest[-1:]
        assert await client.audit("absent") == []

    async def test_a_commit_whose_records_fill_several_messages_is_shown_whole(
        self, client: SemanticClient, store: SemanticStore
    ) -> None:
        about: dict[str, Any] = {"expected_version": 0, "writer": "é" * 128, "semantics": CURSOR, "spec_ref": "é" * 256}
        await store.batch([Intent.put(f"{PROJECT}/many/{number:04}", 1, **about) for number in range(1000)])
        for reverse in (False, True):
            reply = await ask(client, "audit", limit=10_000, reverse=reverse)
            assert reply["truncated"]
            assert 100 < len(reply["records"]) < 1000
            assert await client.audit(reverse=reverse) == await store.audit(PROJECT, reverse=reverse)
        assert len(await client.audit("many/0007")) == 1


class TestRestoring:
    async def test_what_was_deleted_is_restored_once(self, client: SemanticClient) -> None:
        await put(client, "k", "value")
        await client.delete("k", expected_version="*", writer="w")
        entry = await client.restore("k", writer="operator:undo", request_id="r", spec_ref="adr-1")
        assert (entry.value, entry.last_writer, entry.spec_ref) == ("value", "operator:undo", "adr-1")
        assert await client.restore("k", writer="operator:undo", request_id="r", spec_ref="adr-1") == entry
        with pytest.raises(VersionConflict):
            await client.restore("k", writer="operator:undo")
        with pytest.raises(NothingToRestore, match="nothing to restore at"):
            await client.restore("absent", writer="operator:undo")


class TestLocks:
    async def test_held_locks_are_listed_in_the_order_of_their_tokens(
        self, client: SemanticClient, store: SemanticStore, clock: ManualClock
    ) -> None:
        await put(client, "entry")
        for number in (3, 1, 2):
            await put(client, f"locks/{number}", number, semantics=LOCK)
        await put(client, "locks/short", semantics=Semantics("lock", ttl_seconds=1))
        clock.advance(1)
        await client.delete("locks/1", expected_version="*", writer="w")
        held = await client.locks(values=True)
        assert held == await store.locks(PROJECT, values=True)
        assert [(lock.key.rpartition("/")[2], lock.value) for lock in held] == [("3", 3), ("2", 2)]
        assert [lock.value for lock in await client.locks()] == [None, None]
        assert await client.locks(limit=1) == (await client.locks())[:1]
        reply = await ask(client, "locks", limit=1)
        assert (len(reply["locks"]), reply["truncated"]) == (1, True)
        assert await store.locks(PROJECT, after=held[0].fence) == await store.locks(
            PROJECT, limit=2, after=held[0].fence
        )

    async def test_a_renewal_by_token_moves_the_expiry_and_nothing_else(
        self, client: SemanticClient, clock: ManualClock
    ) -> None:
        held = await put(client, "locks/a", semantics=LOCK)
        clock.advance(20)
        reply = await ask(client, "locks", action="renew", key="locks/a", fence=held.fence, ttlSeconds=30)
        renewed = await client.get("locks/a")
        assert renewed is not None
        assert reply == {"success": True, "expiresAt": msgspec.to_builtins(renewed.expires_at)}
        assert (renewed.version, renewed.fence) == (held.version, held.fence)
        assert renewed.expires_at > held.expires_at
        assert [record.action for record in await client.audit("locks/a")] == ["put"]
        again = await put(client, "locks/a", 2, semantics=LOCK, fence=held.fence)
        reply = await ask(client, "locks", action="renew", key="locks/a", fence=held.fence, ttlSeconds=60)
        entry = await client.get("locks/a")
        assert (reply["success"], entry and entry.version) == (True, again.version)

    @pytest.mark.parametrize("action", ["renew", "release"])
    async def test_a_token_is_good_for_its_own_lock_alone(self, client: SemanticClient, action: str) -> None:
        held = await put(client, "locks/a", semantics=LOCK)
        other = await put(client, "locks/b", semantics=LOCK)
        entry = await put(client, "entry")
        more: dict[str, Any] = {"ttlSeconds": 5} if action == "renew" else {"lastWriter": "w"}
        for key, fence in (
            ("locks/a", other.fence),
            ("locks/a", 0),
            ("locks/a", 2**63 - 1),
            ("entry", entry.version),
            ("entry", held.fence),
            ("absent", held.fence),
        ):
            reply = await ask(client, "locks", action=action, key=key, fence=fence, **more)
            assert (reply["success"], reply["error_code"]) == (False, "STALE_FENCE"), (key, fence)
        for stored in (held, other, entry):
            assert await client.get(stored.key.split("/", 4)[4]) == stored

    async def test_a_release_is_made_once_however_often_it_is_sent(self, client: SemanticClient) -> None:
        held = await put(client, "locks/a", semantics=LOCK)
        release = {"action": "release", "key": "locks/a", "fence": held.fence, "lastWriter": "w", "requestId": "r"}
        for _ in range(2):
            assert await ask(client, "locks", **release) == {"success": True}
        reply = await ask(client, "locks", **release | {"requestId": "r2"})
        assert reply["error_code"] == "STALE_FENCE"

    async def test_a_lost_race_is_answered_with_the_holder_and_leaves_no_record(self, client: SemanticClient) -> None:
        acquire = {"action": "acquire", "key": "locks/a", "lastWriter": "w", "semantics": {"purpose": "lock"}}
        acquire["semantics"] = {"purpose": "lock", "ttlSeconds": 30}
        first = await ask(client, "locks", **acquire, requestId="r")
        assert first["entry"]["fence"] == first["entry"]["version"]
        assert await ask(client, "locks", **acquire, requestId="r") == first
        second = await ask(client, "locks", **acquire, requestId="r2")
        assert (second["error_code"], second["current"]) == ("VERSION_CONFLICT", first["entry"])
        assert [record.action for record in await client.audit()] == ["put"]

    async def test_a_fence_of_an_expired_lock_is_refused_in_the_put_s_own_batch(
        self, client: SemanticClient, clock: ManualClock
    ) -> None:
        async with client.lock("locks/a", writer="w", ttl=30) as lock:
            await put(client, "k", fence=lock.fence)
            fence = lock.fence
        with pytest.raises(StaleFence):
            await put(client, "k", fence=fence)


class TestDeadLetters:
    async def give_up(self, client: SemanticClient, value: Any = "secret", **options: Any) -> str:
        with pytest.raises(Escalated) as caught:
            await client.retrying(conflict_pauses=[]).run(
                lambda: put(client, "k", value, expected_version=7, **options)
            )
        assert caught.value.dead_letter is not None
        return caught.value.dead_letter

    async def test_a_write_that_was_given_up_is_kept_by_the_service_and_retried(
        self, client: SemanticClient, store: SemanticStore
    ) -> None:
        first = await self.give_up(client, request_id="r", spec_ref="adr-1")
        second = await self.give_up(client, {"a": [1]})
        kept = await client.dead_letters.list()
        assert kept == await store.dead_letters.list(PROJECT)
        assert [(letter.id, letter.operations[0].value) for letter in kept] == [(first, "secret"), (second, {"a": [1]})]
        assert kept[0].request_id == "r"
        assert [letter.id for letter in await client.dead_letters.list(limit=1)] == [first]
        reply = await ask(client, "dead_letters")
        assert "secret" not in json.dumps(reply), "values are shown if asked for"
        with pytest.raises(VersionConflict):
            await client.dead_letters.retry(kept[0])
        [entry] = await client.dead_letters.retry(kept[0], expected_version="*")
        assert entry == await client.get("k")
        with pytest.raises(keyloft.InvalidArgument, match="gone"):
            await client.dead_letters.retry(kept[0])
        assert await client.dead_letters.drop(kept[1]) is True
        assert await client.dead_letters.drop(kept[1]) is False
        assert await client.dead_letters.list() == []

    async def test_batches_deletes_and_restores_are_kept_whole(
        self, client: SemanticClient, store: SemanticStore
    ) -> None:
        give_up = client.retrying(conflict_pauses=[], transient_attempts=1)
        batch = [
            Intent.put("a", "x" * 60_000, expected_version=3, writer="w", semantics=LOCK, spec_ref="s"),
            Intent.delete("b", expected_version="*", writer="w", fence=None),
        ]
        await put(client, "k")
        for write in (
            lambda: client.batch(batch, request_id="r"),
            lambda: client.delete("k", expected_version=99, writer="w"),
            lambda: client.restore("k", writer="w"),
        ):
            with pytest.raises(Escalated):
                await give_up.run(write)
        kept = await client.dead_letters.list()
        assert kept == await store.dead_letters.list(PROJECT)
        assert [(letter.is_batch, letter.operations[0].action) for letter in kept] == [
            (True, "put"),
            (False, "delete"),
            (False, "restore"),
        ]

    async def test_a_dead_letter_that_no_message_holds_is_listed_without_its_values(
        self, client: SemanticClient, store: SemanticStore
    ) -> None:
        large = [
            Intent.put(f"{PROJECT}/{number}", "x" * 60_000, expected_version=9, writer="w", semantics=CURSOR)
            for number in range(30)
        ]
        for _ in range(2):
            with pytest.raises(Escalated):
                await store.retrying(conflict_pauses=[]).run(lambda: store.batch(large))
        kept = await client.dead_letters.list()
        assert [[one.key for one in letter.operations] for letter in kept] == [[one.key for one in large]] * 2
        assert {one.value for letter in kept for one in letter.operations} == {None}
        made = await client.dead_letters.retry(kept[0], expected_version="*")
        assert len(made) == 30
        stored = await store.get(f"{PROJECT}/29")
        assert stored is not None
        assert len(stored.value) == 60_000

    async def test_what_is_kept_twice_under_one_id_is_one_dead_letter(self, client: SemanticClient) -> None:
        delete = {"operation": "delete", "key": "k", "expectedVersion": 7, "lastWriter": "w"}
        keep = {"action": "keep", "id": "0" * 24, "operations": [delete], "errorCode": "E", "error": "e", "attempts": 2}
        for _ in range(2):
            assert await ask(client, "dead_letters", **keep) == {"success": True, "id": "0" * 24}
        assert len(await client.dead_letters.list()) == 1

    async def test_a_purpose_that_is_not_registered_is_not_kept(self, client: SemanticClient) -> None:
        put = {"operation": "put", "key": "k", "value": 1, "expectedVersion": 0, "lastWriter": "w"}
        put["semantics"] = {"purpose": "unheard_of"}
        keep = {"action": "keep", "id": "0" * 24, "operations": [put], "errorCode": "E", "error": "e", "attempts": 2}
        reply = await ask(client, "dead_letters", **keep)
        assert (reply["success"], reply["error_code"]) == (False, "VALIDATION_ERROR")
        assert "purpose" in reply["message"]
        put_it = Intent.put("k", 1, expected_version=0, writer="w", semantics=Semantics("unheard_of"))
        assert await client.dead_letters.keep(WriteRequest(intents=(put_it,)), "BUSY", "busy", 5) is None
        assert client.dead_letters.unsaved == 0

    async def test_without_a_service_it_waits_until_the_client_is_closed(
        self, nats_url: str, store: SemanticStore
    ) -> None:
        connection = await nats.connect(nats_url)
        client = await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix="later.semantic")
        with pytest.raises(Escalated, match="once the store answers again"):
            await client.retrying(transient_attempts=1).run(lambda: put(client, "k"))
        assert client.dead_letters.unsaved == 1
        async with SemanticService(connection, store, prefix="later.semantic"):
            await client.aclose()
        await connection.close()
        [letter] = await store.dead_letters.list(PROJECT)
        assert letter.error_code == "NO_SERVICE"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("audit", {"keys": "a"}, "keys: there is no such field; did you mean key?"),
    ("audit", {"key": 5}, "key: expected a string"),
    ("audit", {"reverse": "yes"}, "reverse: expected true or false"),
    ("audit", {"limit": 0}, "limit: expected"),
    ("audit", {"after": "x"}, "after: expected the sequence"),
    ("audit", {"cursor": "zz"}, "cursor: expected"),
    ("audit", {"cursor": 5}, "cursor: expected"),
    ("restore", {"key": "a", "lastWriter": "w", "fence": 1}, "fence: there is no such field"),
    ("restore", {"key": "a"}, "Missing required field: lastWriter"),
    ("locks", {"action": "steal"}, "action: expected list, acquire, renew or release"),
    ("locks", {"action": ["list"]}, "action: expected"),
    ("locks", {"action": ""}, "action: expected list, acquire, renew or release"),
    ("locks", {"action": False}, "action: expected list, acquire, renew or release, got a boolean"),
    ("locks", {"action": "renew", "key": "a", "fence": 1, "ttl_seconds": 1}, "did you mean ttlSeconds?"),
    ("locks", {"action": "renew", "key": "a", "fence": None, "ttlSeconds": 1}, "fence: expected"),
    ("locks", {"action": "renew", "key": "a", "fence": 1, "ttlSeconds": 0}, "ttlSeconds: expected"),
    ("locks", {"action": "release", "key": "a", "fence": True, "lastWriter": "w"}, "fence: expected"),
    (
        "locks",
        {"action": "release", "key": "a", "fence": 1, "lastWriter": "w", "requestId": ""},
        "requestId: expected a non-empty string",
    ),
    (
        "locks",
        {"action": "acquire", "key": "a", "lastWriter": "w", "semantics": {"purpose": "cursor"}},
        "expected lock",
    ),
    ("locks", {"values": 1}, "values: expected true or false"),
    ("dead_letters", {"action": "retry", "id": "x"}, "id: expected the id of a dead letter"),
    ("dead_letters", {"action": "retry", "id": "0" * 24, "expectedVersion": -1}, "expectedVersion: expected"),
    ("dead_letters", {"action": "drop"}, "Missing required field: id"),
    ("dead_letters", {"action": ""}, "action: expected list, keep, retry or drop"),
    ("dead_letters", {"after": "../x"}, "after: expected the id of a dead letter"),
    ("dead_letters", {"ids": 1}, "ids: there is no such field"),
    (
        "dead_letters",
        {"action": "keep", "id": "0" * 24, "operations": [], "errorCode": "E", "error": "e", "attempts": 0},
        "attempts: expected",
    ),
    (
        "dead_letters",
        {"action": "keep", "id": "0" * 24, "operations": [], "errorCode": "E", "error": "e", "attempts": 1},
        "operations: expected 1 to",
    ),
    ("watch", {"prefix": 5}, "prefix: expected a string, the path within the project, got a number"),
    ("watch", {"prefix": False}, "prefix: expected a string, the path within the project, got a boolean"),
    ("watch", {"keys": ["a", None]}, "keys[1]: expected a string, the path within the project, got null"),
]


async def test_a_request_that_breaks_a_rule_is_refused_by_name(client: SemanticClient) -> None:
    for operation, fields, message in WRONG:
        reply = await ask(client, operation, **fields)
        assert reply["success"] is False, (operation, fields)
        assert reply["error_code"] in ("VALIDATION_ERROR", "MISSING_FIELD", "INVALID_KEY"), reply
        assert message in reply["message"], (operation, fields)


@pytest.mark.slow
async def test_an_update_whose_answer_got_lost_is_made_once(nats_url: str, store: SemanticStore) -> None:
    """The service carries puts out, and every second answer to one gets lost."""
    connection, other = await nats.connect(nats_url), await nats.connect(nats_url)
    lost = 0

    async def forgetful(message: Msg) -> None:
        nonlocal lost
        answer = await other.request(f"behind.{message.subject.partition('.')[2]}", message.data, timeout=20)
        if message.subject.endswith(".put"):
            lost += 1
            if lost % 2:
                return
        await message.respond(answer.data)

    async with SemanticService(connection, store, prefix="behind.updates"):
        await other.subscribe("front.updates.>", cb=forgetful)
        await settled(other)
        async with await SemanticClient.connect(
            nats_url, tenant="acme", project="web", prefix="front.updates", timeout=0.3
        ) as client:
            for _ in range(3):
                await client.update(
                    "n",
                    lambda value: (value or 0) + 1,
                    writer="w",
                    semantics=CURSOR,
                    retry=Retry(transient_pause=0.01),
                )
    entry = await store.get(f"{PROJECT}/n")
    assert entry is not None
    assert (entry.value, lost >= 6) == (3, True)
    await asyncio.gather(connection.close(), other.close())


@pytest.mark.slow
async def test_updates_of_clients_of_two_services_are_all_counted(nats_url: str, store: SemanticStore) -> None:
    async with keyloft.open() as kv, SemanticStore(kv) as first, SemanticStore(kv) as second:
        connections = [await nats.connect(nats_url) for _ in range(2)]
        async with (
            SemanticService(connections[0], first, prefix="both.semantic"),
            SemanticService(connections[1], second, prefix="both.semantic"),
        ):
            clients = [
                await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix="both.semantic")
                for _ in range(4)
            ]

            async def count(client: SemanticClient) -> None:
                retry = client.retrying(conflict_pauses=[0.001] * 1000)
                for _ in range(25):
                    await client.update("n", lambda n: (n or 0) + 1, writer="w", semantics=CURSOR, retry=retry)

            await asyncio.gather(*map(count, clients))
            entry = await clients[0].get("n")
            assert entry is not None
            assert entry.value == 100
            for client in clients:
                await client.aclose()
        for connection in connections:
            await connection.close()


@pytest.mark.slow
class TestInterruptions:
    async def test_a_lock_outlives_a_restart_of_the_service(self, nats_url: str, store: SemanticStore) -> None:
        connection = await nats.connect(nats_url)
        options: dict[str, Any] = {"tenant": "acme", "project": "web", "prefix": "again.semantic"}
        async with await SemanticClient.connect(nats_url, **options) as client:
            async with SemanticService(connection, store, prefix="again.semantic"):
                lock = client.lock("locks/a", writer="w", ttl=3)
                held = await lock.acquire()
            with pytest.raises(keyloft.NoService):
                await client.get("locks/a")
            assert lock.is_held
            async with SemanticService(connection, store, prefix="again.semantic") as service:
                async with asyncio.timeout(20):
                    while not service.meters.histogram("locks").count:  # until it is renewed
                        await asyncio.sleep(0.02)
                assert lock.is_held
                assert lock.fence == held.fence
                await lock.release()
                assert await client.get("locks/a") is None
        await connection.close()

    async def test_a_holder_without_a_service_loses_its_lock_in_time(self, nats_url: str, store: SemanticStore) -> None:
        connection = await nats.connect(nats_url)
        options: dict[str, Any] = {"tenant": "acme", "project": "web", "prefix": "gone.semantic"}
        async with await SemanticClient.connect(nats_url, **options) as client:
            service = SemanticService(connection, store, prefix="gone.semantic")
            await service.start()
            lock = client.lock("locks/a", writer="w", ttl=1)
            await lock.acquire()
            await service.stop()
            await asyncio.wait_for(lock.lost.wait(), 20)
            with pytest.raises(LockLost, match="could not be renewed in time"):
                await lock.release()
        await connection.close()

    async def test_closing_the_client_is_a_loss(self, nats_url: str, store: SemanticStore) -> None:
        async with served(nats_url, store) as client:
            lock = client.lock("locks/a", writer="w")
            await lock.acquire()
            await client.aclose()
            await asyncio.wait_for(lock.lost.wait(), 20)
