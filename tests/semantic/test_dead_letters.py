"""Dead letters: what was given up is kept until a person retries or drops it."""

import asyncio
import logging

import pytest

from keyloft import InvalidArgument, Store, Unreachable
from keyloft.semantic import (
    DeadLetter,
    Envelope,
    Escalated,
    Intent,
    Semantics,
    SemanticStore,
    StaleFence,
    VersionConflict,
)
from tests.semantic.unreliable_network import PROJECT, behind_network

KEY = f"{PROJECT}/docs/cursor"
OTHER = f"{PROJECT}/docs/other"
CURSOR = Semantics("cursor", "harvester")
SECRET = "a-secret-value"


async def at_once(seconds: float) -> None:
    """Does not wait."""


async def put(store: SemanticStore, value: object, expected: int | str = "*", key: str = KEY) -> Envelope:
    return await store.put(key, value, expected_version=expected, writer="rival", semantics=CURSOR)


async def dead_letters(store: SemanticStore, project: str = PROJECT) -> list[DeadLetter]:
    return [letter async for letter in store.dead_letters.list(project)]


async def given_up(store: SemanticStore) -> DeadLetter:
    """A put that met conflicts until it was given up."""
    await put(store, "rival's")

    async def insist() -> None:
        await store.put(
            KEY, SECRET, expected_version=0, writer="w:insist", semantics=CURSOR, request_id="run-7", spec_ref="adr-3"
        )

    with pytest.raises(Escalated) as caught:
        await store.retrying(sleep=at_once).run(insist)
    [letter] = await dead_letters(store)
    assert caught.value.dead_letter == letter.id
    return letter


async def test_a_request_that_was_given_up_is_kept_whole(
    store: SemanticStore, caplog: pytest.LogCaptureFixture
) -> None:
    letter = await given_up(store)
    [operation] = letter.operations
    assert (operation.action, operation.key, operation.value) == ("put", KEY, SECRET)
    assert (operation.expected_version, operation.writer, operation.semantics) == (0, "w:insist", CURSOR)
    assert (operation.spec_ref, operation.fence) == ("adr-3", None)
    assert (letter.request_id, letter.error_code, letter.attempts) == ("run-7", "VERSION_CONFLICT", 7)
    assert (letter.tenant, letter.project) == ("acme", "web")
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "escalated after 7 attempts" in line.getMessage()
    assert SECRET not in caplog.text + repr(letter) + letter.error


async def test_dead_letters_are_listed_by_project_the_oldest_first(store: SemanticStore) -> None:
    first = await given_up(store)
    with pytest.raises(Escalated):
        await store.retrying(sleep=at_once)(store.delete)(KEY, expected_version=1, writer="w")
    assert [letter.operations[0].action for letter in await dead_letters(store)] == ["put", "delete"]
    assert (await dead_letters(store))[0] == first
    for project in ("tenant/acme/project/we", "tenant/acme/project/web2", "tenant/other/project/web"):
        assert await dead_letters(store, project) == []


async def test_a_retry_that_succeeds_removes_its_dead_letter(store: SemanticStore) -> None:
    letter = await given_up(store)
    await store.delete(KEY, expected_version="*", writer="operator")
    [entry] = await store.dead_letters.retry(letter)
    assert entry is not None
    assert (entry.value, entry.last_writer, entry.request_id, entry.spec_ref) == (SECRET, "w:insist", "run-7", "adr-3")
    assert entry == await store.get(KEY)
    assert await dead_letters(store) == []
    with pytest.raises(InvalidArgument, match="gone"):
        await store.dead_letters.retry(letter)
    assert entry == await store.get(KEY)


async def test_a_retry_that_meets_a_conflict_keeps_its_dead_letter(store: SemanticStore) -> None:
    letter = await given_up(store)
    with pytest.raises(VersionConflict):
        await store.dead_letters.retry(letter)
    assert await dead_letters(store) == [letter]
    [entry] = await store.dead_letters.retry(letter, expected_version="*")
    assert entry is not None
    assert entry.value == SECRET
    assert await dead_letters(store) == []


async def test_a_retry_under_a_stale_fence_keeps_its_dead_letter(store: SemanticStore) -> None:
    await put(store, 1)
    async with store.lock(f"{PROJECT}/locks/a", writer="w") as lock:
        fenced = Intent.put(KEY, 2, expected_version=1, writer="w", semantics=CURSOR, fence=lock.fence)
        with pytest.raises(Escalated):
            await store.retrying(sleep=at_once).run(lambda: store.batch([fenced]))
    [letter] = await dead_letters(store)
    with pytest.raises(StaleFence):
        await store.dead_letters.retry(letter, expected_version="*")
    assert await dead_letters(store) == [letter]


async def test_a_dropped_dead_letter_is_gone(store: SemanticStore) -> None:
    letter = await given_up(store)
    assert await store.dead_letters.drop(letter) is True
    assert await store.dead_letters.drop(letter) is False
    assert await dead_letters(store) == []
    with pytest.raises(InvalidArgument, match="gone"):
        await store.dead_letters.retry(letter, expected_version="*")


async def test_two_operators_who_retry_at_once_write_once(store: SemanticStore) -> None:
    async def insist() -> None:
        await store.put(KEY, SECRET, expected_version=1, writer="w", semantics=CURSOR)

    await put(store, 1)
    with pytest.raises(Escalated):
        await store.retrying(sleep=at_once).run(insist)
    [letter] = await dead_letters(store)
    retries = [store.dead_letters.retry(letter, expected_version="*") for _ in range(5)]
    outcomes = await asyncio.gather(*retries, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(error) for error in refused] == [InvalidArgument] * 4
    puts = [record async for record in store.audit(KEY) if record.action == "put"]
    assert len(puts) == 2


async def test_a_batch_is_kept_and_retried_as_one(store: SemanticStore) -> None:
    there = await put(store, 1)
    operations: list[Intent] = [
        Intent.put(OTHER, 2, expected_version=0, writer="w", semantics=CURSOR),
        Intent.delete(KEY, expected_version=there.version + 1000, writer="w"),
    ]
    with pytest.raises(Escalated):
        await store.retrying(sleep=at_once).run(lambda: store.batch(operations, request_id="batch-1"))
    [letter] = await dead_letters(store)
    assert [operation.action for operation in letter.operations] == ["put", "delete"]
    await store.dead_letters.retry(letter, expected_version="*")
    assert await store.get(KEY) is None
    assert await store.get(OTHER) is not None
    assert await dead_letters(store) == []


@pytest.mark.parametrize("how", ["put", "batch"])
async def test_a_dead_letter_whose_write_was_made_after_all_is_gone_once_retried(kv: Store, how: str) -> None:
    network, through = behind_network(kv)
    network.breaks_after_loss = True
    async with SemanticStore(through, audit_key="k", sweep_every=None) as store:

        async def insist() -> None:
            if how == "batch":
                await store.batch(
                    [Intent.put(KEY, SECRET, expected_version="*", writer="w", semantics=CURSOR)], request_id="run-1"
                )
            else:
                await store.put(KEY, SECRET, expected_version="*", writer="w", semantics=CURSOR, request_id="run-1")

        network.loses_answers = 1
        with pytest.raises(Escalated):
            await store.retrying(sleep=at_once).run(insist)
        network.is_down = False
        await store.dead_letters.save()
        made = await store.get(KEY)
        assert made is not None
        [letter] = await dead_letters(store)
        await put(store, "a newer value")
        assert await store.dead_letters.retry(letter) == [made]
        assert await dead_letters(store) == []
        entry = await store.get(KEY)
        assert entry is not None
        assert entry.value == "a newer value"


async def test_a_dead_letter_waits_for_a_database_that_is_away(kv: Store, caplog: pytest.LogCaptureFixture) -> None:
    network, through = behind_network(kv)
    async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
        network.is_down = True
        with pytest.raises(Escalated, match="once the store answers again") as caught:
            await store.retrying(sleep=at_once).run(lambda: put(store, SECRET))
        assert caught.value.dead_letter is None
        assert isinstance(caught.value.__cause__, Unreachable)
        with pytest.raises(Unreachable):
            await store.dead_letters.save()
        network.is_down = False
        assert await dead_letters(store) == []
        await store.dead_letters.save()
        await store.dead_letters.save()
        [letter] = await dead_letters(store)
        assert letter.operations[0].value == SECRET
        assert (letter.error_code, letter.attempts) == ("UNREACHABLE", 5)
        assert SECRET not in caplog.text


@pytest.mark.parametrize("by", ["a sweep", "closing"])
async def test_a_dead_letter_that_waits_is_kept_at_the_next_occasion(kv: Store, by: str) -> None:
    network, through = behind_network(kv)
    async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
        network.is_down = True
        with pytest.raises(Escalated):
            await store.retrying(sleep=at_once).run(lambda: put(store, 1))
        network.is_down = False
        if by == "a sweep":
            await store.sweep()
    async with SemanticStore(kv, sweep_every=None) as store:
        assert len(await dead_letters(store)) == 1


async def test_a_dead_letter_whose_answer_got_lost_is_kept_once(kv: Store) -> None:
    network, through = behind_network(kv)
    async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
        await put(store, 1)

        async def conflict() -> None:
            try:
                await store.put(KEY, 2, expected_version=0, writer="w", semantics=CURSOR)
            finally:
                network.loses_answers = 1

        with pytest.raises(Escalated):
            await store.retrying(conflict_pauses=[]).run(conflict)
        await store.sweep()
        assert len(await dead_letters(store)) == 1


async def test_the_write_that_failed_is_kept_although_another_succeeded_beside_it(store: SemanticStore) -> None:
    async def both() -> None:
        await asyncio.gather(
            store.put(KEY, "failed", expected_version=7, writer="w", semantics=CURSOR),
            store.put(OTHER, "made", expected_version="*", writer="w", semantics=CURSOR),
        )

    with pytest.raises(Escalated):
        await store.retrying(conflict_pauses=[]).run(both)
    [letter] = await dead_letters(store)
    assert [operation.value for operation in letter.operations] == ["failed"]


async def test_what_was_written_is_not_kept_for_what_failed_after_it(kv: Store) -> None:
    network, through = behind_network(kv)
    async with SemanticStore(through, audit_key="k", sweep_every=None) as store:

        async def write_then_read() -> None:
            network.is_down = False
            await put(store, 1)
            network.is_down = True
            await store.get(OTHER)

        with pytest.raises(Escalated, match="nothing is kept"):
            await store.retrying(sleep=at_once).run(write_then_read)
        network.is_down = False
        await store.dead_letters.save()
        assert await dead_letters(store) == []


async def test_a_lock_that_was_not_acquired_leaves_no_dead_letter(kv: Store) -> None:
    network, through = behind_network(kv)
    async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
        network.is_down = True
        with pytest.raises(Escalated, match="nothing is kept"):
            await store.retrying(sleep=at_once).run(store.lock(f"{PROJECT}/locks/a", writer="w").acquire)
