"""The client of the semantic store, on a real NATS and a real service."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

import keyloft
from keyloft import InvalidValue, limits
from keyloft.core import values
from keyloft.semantic import (
    Envelope,
    Intent,
    Retry,
    SemanticClient,
    Semantics,
    SemanticService,
    SemanticStore,
    StaleFence,
    VersionConflict,
)
from tests.support.nats import settled

CURSOR = Semantics("cursor", producer="harvester", consumer_hints=("search", "ui"))
SPOT = "tenant/acme/project/web"
SECONDS = 30


@pytest.fixture
async def store() -> AsyncIterator[SemanticStore]:
    async with keyloft.open() as kv, SemanticStore(kv, purposes=["workflow_state"]) as store:
        yield store


@pytest.fixture
async def service(nats_url: str, store: SemanticStore) -> AsyncIterator[SemanticService]:
    connection = await nats.connect(nats_url)
    service = SemanticService(connection, store, prefix="client.semantic")
    await service.start()
    yield service
    await service.stop()
    await connection.close()


@pytest.fixture
async def client(nats_url: str, service: SemanticService) -> AsyncIterator[SemanticClient]:
    async with await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix="client.semantic") as client:
        yield client


async def test_what_it_puts_is_what_the_store_holds(client: SemanticClient, store: SemanticStore) -> None:
    value = {"token": "é\u0000", "n": [10**40, 1.5, None]}
    entry = await client.put(
        "docs/delta",
        value,
        expected_version=0,
        writer="harvester:sync",
        semantics=CURSOR,
        request_id="r",
        spec_ref="specs/kv.md",
    )
    assert entry == await client.get("docs/delta") == await store.get(f"{SPOT}/docs/delta")
    assert entry.value == value
    again = await client.put(
        "docs/delta",
        value,
        expected_version=0,
        writer="harvester:sync",
        semantics=CURSOR,
        request_id="r",
        spec_ref="specs/kv.md",
    )
    assert again == entry
    assert await client.delete("docs/delta", expected_version=entry.version, writer="w") == entry
    assert await client.get("docs/delta") is None
    assert await client.delete("docs/delta", expected_version="*", writer="w") is None


async def test_a_value_of_900_levels_comes_back_on_every_way(client: SemanticClient, store: SemanticStore) -> None:
    data = b'{"a":[' * 450 + b"]}" * 450
    value = values.decode_json(data)

    def same(entry: Envelope | None) -> bool:
        return entry is not None and values.encode_json(entry.value, len(data), 900) == data

    about: dict[str, Any] = {"expected_version": 0, "writer": "w", "semantics": CURSOR}
    for _ in range(2):
        assert same(await client.put("deep", value, request_id="r", **about))
    with pytest.raises(VersionConflict) as conflict:
        await client.put("deep", 1, **about)
    assert same(conflict.value.current)
    [put] = await client.batch([Intent.put("batch", value, **about)])
    assert same(put)
    assert same(await client.get("batch"))
    assert same(await store.get(f"{SPOT}/deep"))
    assert all([same(entry) async for entry in client.list(values=True)])
    for deeper in ([value], {"a": value}):
        with pytest.raises(InvalidValue, match="nests more than 900"):
            await client.put("deeper", deeper, **about)
    assert same(await store.delete(f"{SPOT}/deep", expected_version="*", writer="w"))
    assert same(await store.restore(f"{SPOT}/deep", writer="w"))


async def test_a_conflict_carries_what_is_there(client: SemanticClient) -> None:
    entry = await client.put("k", 1, expected_version=0, writer="w", semantics=CURSOR)
    with pytest.raises(VersionConflict, match="expected no entry") as caught:
        await client.put("k", 2, expected_version=0, writer="w", semantics=CURSOR, request_id="r2")
    assert caught.value.current == entry
    assert caught.value.correlation_id == "r2"
    with pytest.raises(VersionConflict) as batched:
        await client.batch(
            [
                Intent.put("k", 2, expected_version=0, writer="w", semantics=CURSOR),
                Intent.put("new", 1, expected_version=0, writer="w", semantics=CURSOR),
                Intent.delete("gone", expected_version=7, writer="w"),
            ]
        )
    assert [(one.key, one.current) for one in batched.value.conflicts] == [(f"{SPOT}/k", entry), (f"{SPOT}/gone", None)]
    assert await client.get("new") is None


async def test_a_batch_is_one_commit(client: SemanticClient) -> None:
    made = await client.batch(
        [
            Intent.put("a", 1, expected_version=0, writer="w", semantics=CURSOR),
            Intent.put("b", 2, expected_version="*", writer="w", semantics=CURSOR),
            Intent.delete("c", expected_version="*", writer="w"),
        ]
    )
    assert [entry and entry.value for entry in made] == [1, 2, None]
    assert made[0] is not None
    assert made[1] is not None
    assert made[0].version == made[1].version


async def test_a_list_of_any_length_is_complete(client: SemanticClient, store: SemanticStore) -> None:
    for first in range(0, 2500, 500):
        await store.batch(
            [
                Intent.put(f"{SPOT}/many/{number:04}", number, expected_version=0, writer="w", semantics=CURSOR)
                for number in range(first, first + 500)
            ]
        )
    assert [entry.value async for entry in client.list("many/", values=True)] == list(range(2500))
    assert [entry.value for entry in await client.list("many/", limit=3)] == [None] * 3
    assert len(await client.list("many/", limit=1700)) == 1700
    assert await client.list("other/") == []


async def test_a_list_of_large_values_takes_several_messages(client: SemanticClient) -> None:
    for number in range(40):
        await client.put(f"large/{number:02}", "x" * 60_000, expected_version=0, writer="w", semantics=CURSOR)
    found = await client.list("large/", values=True)
    assert [len(entry.value) for entry in found] == [60_000] * 40


async def test_replies_that_fit_into_no_message_come_without_values(client: SemanticClient) -> None:
    for number in range(20):
        await client.put(f"large/{number:02}", "x" * 60_000, expected_version=0, writer="w", semantics=CURSOR)
    with pytest.raises(VersionConflict) as caught:
        await client.batch(
            [Intent.delete(f"large/{number:02}", expected_version=1, writer="w") for number in range(20)]
        )
    assert len(caught.value.conflicts) == 20
    assert all(failed.current is not None and failed.current.value is None for failed in caught.value.conflicts)
    removed = await client.batch(
        [Intent.delete(f"large/{number:02}", expected_version="*", writer="w") for number in range(20)]
    )
    assert [entry is not None and entry.value is None for entry in removed] == [True] * 20
    assert await client.list("large/") == []


async def test_a_batch_of_long_winded_entries_is_answered_too(client: SemanticClient) -> None:
    wordy = Semantics("cursor", consumer_hints=("h" * 128,) * 32)
    for first in range(0, 400, 100):
        await client.batch(
            [
                Intent.put(f"wordy/{number:03}", 1, expected_version=0, writer="w", semantics=wordy)
                for number in range(first, first + 100)
            ]
        )
    with pytest.raises(VersionConflict) as caught:
        await client.batch(
            [Intent.delete(f"wordy/{number:03}", expected_version=1, writer="w") for number in range(400)]
        )
    assert len(caught.value.conflicts) == 400
    removed = await client.batch(
        [Intent.delete(f"wordy/{number:03}", expected_version="*", writer="w") for number in range(400)],
        request_id="once",
    )
    assert [entry is not None and entry.semantics.purpose for entry in removed] == ["cursor"] * 400
    assert await client.list("wordy/") == []


async def test_a_lock_over_nats_is_a_put_that_is_renewed_by_its_token(client: SemanticClient) -> None:
    lock = Semantics("lock", ttl_seconds=30)
    held = await client.put("lock", None, expected_version=0, writer="w", semantics=lock)
    renewed = await client.put(
        "lock", None, expected_version=held.version, writer="w", semantics=lock, fence=held.fence
    )
    assert renewed.fence == held.fence == held.version < renewed.version
    await client.put("k", 1, expected_version=0, writer="w", semantics=CURSOR, fence=held.fence)
    await client.delete("lock", expected_version="*", writer="operator")
    with pytest.raises(StaleFence):
        await client.put("k", 2, expected_version="*", writer="w", semantics=CURSOR, fence=held.fence)


async def test_a_registered_purpose_is_taken_and_another_is_not(client: SemanticClient) -> None:
    await client.put("k", 1, expected_version=0, writer="w", semantics=Semantics("workflow_state"))
    with pytest.raises(keyloft.InvalidArgument, match="purpose"):
        await client.put("k", 1, expected_version="*", writer="w", semantics=Semantics("other"))


@pytest.mark.parametrize("path", ["", "A", "a//b", "a b", "/a", "x" * 120, f"{SPOT}/k", 5])
async def test_a_path_that_breaks_a_rule_is_not_sent(client: SemanticClient, path: str) -> None:
    with pytest.raises(keyloft.InvalidKey):
        await client.get(path)


async def test_a_batch_that_breaks_a_rule_is_not_sent(client: SemanticClient) -> None:
    delete = Intent.delete("k", expected_version="*", writer="w")
    await client.nats.close()
    with pytest.raises(keyloft.InvalidArgument, match="operations: expected 1 to"):
        await client.batch([])
    with pytest.raises(keyloft.InvalidKey, match=r"operations\[1\]: key"):
        await client.batch([delete, Intent.delete("A", expected_version="*", writer="w")])
    with pytest.raises(keyloft.InvalidArgument, match="operations: expected each key once, got k twice"):
        await client.batch([delete, delete])


async def test_what_is_no_value_is_not_sent(client: SemanticClient) -> None:
    with pytest.raises(keyloft.InvalidValue):
        await client.put("k", float("nan"), expected_version=0, writer="w", semantics=CURSOR)
    with pytest.raises(keyloft.ValueTooLarge):
        await client.put("k", "x" * 70_000, expected_version=0, writer="w", semantics=CURSOR)
    with pytest.raises(keyloft.InvalidArgument):
        client.list(limit=0)
    with pytest.raises(TypeError, match="has not been read yet"):
        bool(client.list())


async def test_a_missing_service_is_reported_at_once(nats_url: str) -> None:
    async with await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix="no.service") as client:
        began = time.monotonic()
        with pytest.raises(keyloft.NoService, match="keyloft serve"):
            await client.get("k")
        assert time.monotonic() - began < limits.PATIENCE_SECONDS / 2


async def test_an_answer_that_got_lost_is_asked_for_again(nats_url: str, store: SemanticStore) -> None:
    """The service carries a put out, and its first answer gets lost."""
    connection, other = await nats.connect(nats_url), await nats.connect(nats_url)
    service = SemanticService(connection, store, prefix="behind.semantic")
    await service.start()
    lost: list[bytes] = []

    async def forgetful(message: Msg) -> None:
        answer = await other.request(f"behind.{message.subject.partition('.')[2]}", message.data, timeout=20)
        if lost:
            await message.respond(answer.data)
        lost.append(answer.data)

    await other.subscribe("front.semantic.>", cb=forgetful)
    await settled(other)
    async with await SemanticClient.connect(
        nats_url, tenant="acme", project="web", prefix="front.semantic", timeout=0.5
    ) as client:

        async def put() -> keyloft.semantic.Envelope:
            return await client.put("k", 1, expected_version=0, writer="w", semantics=CURSOR, request_id="once")

        entry = await Retry(transient_pause=0.01).run(put)
    assert entry == await store.get(f"{SPOT}/k")
    assert [json.loads(data)["entry"]["version"] for data in lost] == [entry.version] * 2
    assert [record.action async for record in store.audit(f"{SPOT}/k")] == ["put"]
    await service.stop()
    await asyncio.gather(connection.close(), other.close())


@pytest.mark.parametrize("kind", ["watch", "changes"])
async def test_a_watch_of_entries_goes_on_after_a_restart_of_the_service(
    kind: str, client: SemanticClient, service: SemanticService
) -> None:
    about: dict[str, Any] = {"writer": "harvester:sync", "semantics": CURSOR}
    watch: Any = client.watch("docs/delta") if kind == "watch" else client.changes("docs/")
    async with watch, asyncio.timeout(SECONDS):
        if kind == "watch":
            assert await anext(watch) is None
        await client.put("docs/delta", "abc", expected_version=0, **about)
        while "docs/delta" not in [event.key for event in watch.events.unread]:
            await asyncio.sleep(0.001)
        await service.stop()
        following = asyncio.ensure_future(anext(watch))
        await asyncio.wait([following], timeout=0.3)  # it meets the outage
        await service.start()
        found = await following
    entry = found if kind == "watch" else found[f"{SPOT}/docs/delta"]
    assert entry.value == "abc"


async def test_a_watch_of_entries_ends_with_its_connection(nats_url: str, service: SemanticService) -> None:
    connection = await nats.connect(nats_url)
    client = SemanticClient(connection, "acme", "web", prefix="client.semantic")
    async with client.watch("docs/delta") as watch, asyncio.timeout(SECONDS):
        assert await anext(watch) is None
        await client.put("docs/delta", "abc", expected_version=0, writer="harvester:sync", semantics=CURSOR)
        while "docs/delta" not in [event.key for event in watch.events.unread]:
            await asyncio.sleep(0.001)
        await connection.close()
        with pytest.raises(keyloft.Unanswered):
            await anext(watch)


async def test_a_watch_of_an_entry_that_missed_events_reads_it_again_also_after_an_outage(
    client: SemanticClient, service: SemanticService, store: SemanticStore
) -> None:
    async with client.watch("docs/delta") as watch, asyncio.timeout(SECONDS):
        assert await anext(watch) is None
        await service.stop()
        watch.events.fail(keyloft.HistoryGone())
        with pytest.raises(keyloft.Unanswered):
            await anext(watch)
        await store.put(f"{SPOT}/docs/delta", "abc", expected_version=0, writer="harvester:sync", semantics=CURSOR)
        await service.start()
        entry = await anext(watch)
        assert entry is not None
        assert entry.value == "abc"


async def test_a_watch_of_an_entry_that_is_closed_when_it_has_missed_events_does_not_begin_again(
    client: SemanticClient,
) -> None:
    watch = client.watch("docs/delta")
    async with asyncio.timeout(SECONDS):
        assert await anext(watch) is None
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        watch.events.fail(keyloft.HistoryGone())
        await asyncio.sleep(0)  # it ends the events now
        assert watch.events.is_closed
        await watch.aclose()
        await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), StopAsyncIteration)
    assert not client.watches
