"""Entries: put, get, delete, list, batch, restore, watch, and what becomes of them with time, on every engine."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyloft import Closed, InvalidArgument, ManualClock, Store, Undecodable
from keyloft.core.records import Batch, Get, Set, Space
from keyloft.core.values import Encoding
from keyloft.semantic import Envelope, FailedWrite, Intent, NothingToRestore, SemanticStore, VersionConflict
from tests.support.postgres import IN_MEMORY

from .entries import (
    CURSOR,
    KEY,
    ON_EVERY_ENGINE,
    OTHER,
    PROJECT,
    WRITER,
    actions,
    delete,
    deleting,
    living,
    locked,
    put,
    putting,
    restore,
    trail,
)

ROW = b"e/acme/web/docs/onedrive/delta"


def at(clock: ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.now() / 1000, UTC)


async def keys_below(store: SemanticStore, prefix: str, **options: Any) -> list[str]:
    return [entry.key async for entry in store.list(prefix, **options)]


@ON_EVERY_ENGINE
class TestPutAndGet:
    async def test_an_envelope_comes_back_as_it_was_put(self, store: SemanticStore, clock: ManualClock) -> None:
        clock.advance(5)
        written = await put(store, value={"token": "a"}, semantics=living(60), request_id="r-1", spec_ref="adr/7")
        assert written == Envelope(
            KEY,
            {"token": "a"},
            written.version,
            WRITER,
            living(60),
            "r-1",
            "adr/7",
            at(clock),
            at(clock) + timedelta(seconds=60),
        )
        assert await store.get(KEY) == written
        assert await store.list(PROJECT, values=True) == [written]

    async def test_an_absent_key_is_none(self, store: SemanticStore) -> None:
        assert await store.get(KEY) is None

    async def test_a_stored_null_is_an_entry(self, store: SemanticStore) -> None:
        assert await store.get(KEY) != await put(store, value=None)
        assert await store.get(KEY) is not None

    async def test_keys_of_the_tuple_store_and_of_this_one_never_meet(self, kv: Store, store: SemanticStore) -> None:
        await put(store)
        assert [entry async for entry in kv.list()] == []
        await kv.delete_range(prefix=())
        assert await store.get(KEY) is not None

    async def test_a_damaged_row_is_named_and_harms_no_other(self, kv: Store, store: SemanticStore) -> None:
        await put(store, OTHER)
        for damage in (b"{}", b"[", b'{"w":"w","s":{"purpose":7},"v":1,"h":""}'):
            await kv.engine.commit(Batch((Set(Space.SEMANTIC, ROW, damage, Encoding.JSON),)))
            with pytest.raises(Undecodable, match="delta"):
                await store.get(KEY)
        assert await store.get(OTHER) is not None


@ON_EVERY_ENGINE
class TestExpectedVersion:
    async def test_0_means_that_nothing_may_be_there(self, store: SemanticStore) -> None:
        first = await put(store, expected=0)
        with pytest.raises(VersionConflict) as refused:
            await put(store, value=2, expected=0)
        assert refused.value.current == first == await store.get(KEY)

    async def test_a_number_must_be_the_version(self, store: SemanticStore) -> None:
        first = await put(store, expected=0)
        second = await put(store, value=2, expected=first.version)
        assert second.version > first.version
        for stale in (first.version, second.version + 1):
            with pytest.raises(VersionConflict) as refused:
                await put(store, value=3, expected=stale)
            assert refused.value.current == second
            with pytest.raises(VersionConflict):
                await delete(store, expected=stale)
        assert await store.get(KEY) == second

    async def test_a_number_needs_an_entry(self, store: SemanticStore) -> None:
        for asked in (put(store, expected=1), delete(store, expected=1)):
            with pytest.raises(VersionConflict, match="expected version 1, found no entry") as refused:
                await asked
            assert refused.value.current is None

    async def test_a_star_takes_whatever_is_there(self, store: SemanticStore) -> None:
        versions = [(await put(store, value=n)).version for n in range(3)]
        assert versions == sorted(set(versions))
        assert (await delete(store)) is not None
        assert (await delete(store)) is None

    async def test_a_conflict_is_about_what_is_there_now_even_if_another_store_wrote_it(
        self, kv: Store, store: SemanticStore
    ) -> None:
        first = await put(store, expected=0)
        async with SemanticStore(kv, sweep_every=None) as other:
            second = await put(other, value="another", expected=first.version)
            with pytest.raises(VersionConflict) as refused:
                await put(store, value="mine", expected=first.version)
            assert refused.value.current == second
            assert [failed.reason for failed in refused.value.conflicts] == ["version"]
            await delete(other)
        assert (await put(store, value="mine")).version > second.version

    async def test_of_many_at_once_one_wins(self, store: SemanticStore) -> None:
        async def race(number: int) -> int | None:
            try:
                return (await put(store, value=number, expected=0)).version
            except VersionConflict:
                return None

        won = [version for version in await asyncio.gather(*map(race, range(20))) if version is not None]
        entry = await store.get(KEY)
        assert entry is not None
        assert won == [entry.version]
        assert sorted(await actions(store)) == ["conflict"] * 19 + ["put"]


@ON_EVERY_ENGINE
class TestVersions:
    async def test_they_grow_through_delete_expiry_and_restore(self, store: SemanticStore, clock: ManualClock) -> None:
        versions = [(await put(store)).version]
        await delete(store)
        versions.append((await put(store, expected=0, semantics=living(1))).version)
        clock.advance(1)
        versions.append((await put(store, expected=0, semantics=living(1))).version)
        clock.advance(1)
        await store.sweep()
        versions.append((await restore(store)).version)
        await delete(store)
        versions.append((await restore(store)).version)
        assert versions == sorted(set(versions))

    async def test_a_version_of_before_a_delete_is_never_good_again(self, store: SemanticStore) -> None:
        first = await put(store)
        await delete(store)
        again = await put(store)
        assert again.version > first.version
        with pytest.raises(VersionConflict):
            await put(store, expected=first.version)


@ON_EVERY_ENGINE
class TestDelete:
    async def test_it_returns_what_was_there_and_it_is_gone(self, store: SemanticStore) -> None:
        written = await put(store, semantics=living(9))
        assert await delete(store, expected=written.version) == written
        assert await store.get(KEY) is None
        assert await store.list(PROJECT) == []

    async def test_with_0_it_makes_sure_that_nothing_is_there(self, store: SemanticStore) -> None:
        assert await delete(store, expected=0) is None
        await put(store)
        with pytest.raises(VersionConflict):
            await delete(store, expected=0)


class TestSemanticList:
    @pytest.fixture(autouse=True)
    async def _filled(self, store: SemanticStore) -> None:
        paths = ["a", "a-b", "a.b", "a/b", "a/b/c", "a/c", "ab", "b"]
        await store.batch([putting(f"{PROJECT}/{path}", path) for path in paths])
        for elsewhere in ("tenant/acme/project/web-2/a", "tenant/acme/project/web2/a", "tenant/acm/project/e/web/a"):
            await put(store, elsewhere)

    @pytest.mark.parametrize(
        ("path", "found"),
        [
            ("", ["a", "a-b", "a.b", "a/b", "a/b/c", "a/c", "ab", "b"]),
            ("/", ["a", "a-b", "a.b", "a/b", "a/b/c", "a/c", "ab", "b"]),
            ("/a", ["a", "a-b", "a.b", "a/b", "a/b/c", "a/c", "ab"]),
            ("/a/", ["a/b", "a/b/c", "a/c"]),
            ("/a/b", ["a/b", "a/b/c"]),
            ("/z", []),
        ],
    )
    async def test_it_shows_the_keys_below_a_prefix_in_order(
        self, store: SemanticStore, path: str, found: list[str]
    ) -> None:
        entries = await store.list(PROJECT + path, values=True)
        assert [entry.value for entry in entries] == found
        assert [entry.key for entry in entries] == [f"{PROJECT}/{each}" for each in found]

    async def test_values_are_shown_only_if_asked_for(self, store: SemanticStore) -> None:
        [entry] = await store.list(f"{PROJECT}/ab")
        assert entry.value is None
        assert (entry.last_writer, entry.semantics) == (WRITER, CURSOR)

    async def test_it_goes_on_after_the_last_one(self, store: SemanticStore) -> None:
        everything = await keys_below(store, PROJECT)
        found: list[str] = []
        while page := await keys_below(store, PROJECT, limit=3, after=found[-1] if found else None):
            assert len(page) <= 3
            found += page
        assert found == everything

    async def test_after_counts_wherever_it_lies(self, store: SemanticStore) -> None:
        assert len(await keys_below(store, f"{PROJECT}/a/", after=f"{PROJECT}/a")) == 3
        assert await keys_below(store, f"{PROJECT}/a/", after=f"{PROJECT}/b") == []
        assert await keys_below(store, f"{PROJECT}/a/", after=f"{PROJECT}/a/b/x") == [f"{PROJECT}/a/c"]
        assert await keys_below(store, PROJECT, after="tenant/acme/project/web2/a") == []

    @pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3"])
    @IN_MEMORY
    async def test_a_limit_that_makes_no_sense_is_refused(self, store: SemanticStore, limit: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"^limit: "):
            store.list(PROJECT, limit=limit)

    async def test_a_list_that_was_not_awaited_has_no_truth_value(self, store: SemanticStore) -> None:
        with pytest.raises(TypeError, match="has not been read yet"):
            assert store.list(PROJECT)


@ON_EVERY_ENGINE
class TestBatch:
    async def test_puts_and_deletes_are_made_together(self, store: SemanticStore) -> None:
        first = await put(store)
        outcomes = await store.batch([deleting(KEY, first.version), putting(OTHER, 2, 0), deleting(f"{PROJECT}/none")])
        assert outcomes == [first, await store.get(OTHER), None]
        assert await store.get(KEY) is None

    async def test_one_conflict_stops_all_and_every_failed_one_is_named(self, store: SemanticStore) -> None:
        first, second = await put(store), await put(store, OTHER)
        third = f"{PROJECT}/third"
        operations: list[Intent] = [
            putting(KEY, "x", first.version),
            putting(OTHER, "x", 0),
            deleting(third, 7),
            putting(f"{PROJECT}/fourth", "x"),
            *[putting(f"{PROJECT}/more/{number}", "x", 99) for number in range(5)],
        ]
        with pytest.raises(VersionConflict, match=r"… 7 in all; nothing was written") as refused:
            await store.batch(operations)
        assert refused.value.conflicts == (
            FailedWrite(OTHER, 0, second, "version"),
            FailedWrite(third, 7, None, "version"),
            *[FailedWrite(f"{PROJECT}/more/{number}", 99, None, "version") for number in range(5)],
        )
        assert await store.list(PROJECT, values=True) == [first, second]
        conflicts = [record.key for record in await trail(store, PROJECT) if record.action == "conflict"]
        assert conflicts == [failed.key for failed in refused.value.conflicts]

    async def test_all_of_it_has_one_version(self, store: SemanticStore) -> None:
        outcomes = await store.batch([putting(f"{PROJECT}/{number}") for number in range(1000)])
        assert len({entry.version for entry in outcomes if entry}) == 1
        assert len(await trail(store, PROJECT)) == 1000

    async def test_it_may_span_projects_and_each_keeps_its_own_trail(self, store: SemanticStore) -> None:
        elsewhere = "tenant/other/project/shop/x"
        await store.batch([putting(KEY), putting(elsewhere)])
        assert [record.key for record in await trail(store, PROJECT)] == [KEY]
        assert [record.key for record in await trail(store, "tenant/other/project/shop")] == [elsewhere]

    async def test_over_expired_entries_it_records_each_expiry(self, store: SemanticStore, clock: ManualClock) -> None:
        await store.batch([putting(KEY, semantics=living(1)), putting(OTHER, semantics=living(1))])
        clock.advance(1)
        await store.batch([putting(KEY, 2, 0), deleting(OTHER)])
        assert await actions(store, KEY) == ["put", "expire", "put"]
        assert await actions(store, OTHER) == ["put", "expire", "delete"]


@ON_EVERY_ENGINE
class TestSemanticExpiry:
    async def test_an_entry_is_gone_at_the_due_moment(self, store: SemanticStore, clock: ManualClock) -> None:
        await put(store, semantics=living(60))
        clock.advance(59.999)
        assert await store.get(KEY) is not None
        clock.advance(0.001)
        assert await store.get(KEY) is None
        assert await store.list(PROJECT) == []

    async def test_a_put_over_an_expired_entry_records_the_expiry_in_its_own_commit(
        self, store: SemanticStore, clock: ManualClock
    ) -> None:
        old = await put(store, semantics=living(60), request_id="r")
        clock.advance(60)
        new = await put(store, value=2, expected=0)
        [_, expiry, second] = await trail(store)
        assert (expiry.action, expiry.version_before, expiry.version_after) == ("expire", old.version, None)
        assert expiry.sequence == second.sequence == new.version
        assert (second.action, second.version_before, second.before_hash) == ("put", None, None)
        assert await store.sweep() == 0

    async def test_an_expired_entry_has_no_version_to_expect(self, store: SemanticStore, clock: ManualClock) -> None:
        old = await put(store, semantics=living(60))
        clock.advance(60)
        for asked in (put(store, expected=old.version), delete(store, expected=old.version)):
            with pytest.raises(VersionConflict) as refused:
                await asked
            assert refused.value.current is None

    async def test_a_put_gives_the_entry_another_life(self, store: SemanticStore, clock: ManualClock) -> None:
        await put(store, semantics=living(60))
        clock.advance(59)
        await put(store, semantics=living(60))
        clock.advance(59)
        assert await store.get(KEY) is not None
        await put(store)
        clock.advance(10**6)
        assert await store.get(KEY) is not None

    async def test_a_sweep_moves_it_where_restore_finds_it_with_its_context(
        self, store: SemanticStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        old = await put(store, semantics=living(60), request_id="r-9", spec_ref="adr/7")
        clock.advance(61)
        with caplog.at_level("INFO"):
            assert await store.sweep() == 1
        assert await store.sweep() == 0
        [line] = [record for record in caplog.records if record.message.startswith("[KV] expired")]
        assert line.message == (
            f"[KV] expired: key={KEY} directive=sync purpose=cursor producer=harvester "
            f"consumerHints=indexer,search ttlSeconds=60 version={old.version}"
        )
        assert line.__dict__["requestId"] == "r-9"
        [first, expiry] = await trail(store)
        assert (expiry.action, expiry.purpose, expiry.request_id, expiry.spec_ref) == (
            "expire",
            "cursor",
            "r-9",
            "adr/7",
        )
        assert (expiry.before_hash, expiry.after_hash) == (first.after_hash, None)
        assert expiry.reason == f"written by {WRITER}"
        assert expiry.at == at(clock)
        assert store.signals.counts["expiry", "cursor"] == 1

    async def test_many_are_swept_in_one_go_and_the_living_stay(self, store: SemanticStore, clock: ManualClock) -> None:
        await store.batch([putting(f"{PROJECT}/{number}", semantics=living(60)) for number in range(150)])
        await put(store, semantics=living(61))
        clock.advance(60)
        assert await store.sweep() == 150
        assert await keys_below(store, PROJECT) == [KEY]
        assert len(await trail(store, PROJECT)) == 301

    async def test_the_sweep_of_the_tuple_store_leaves_it_to_the_semantic_store(
        self, kv: Store, store: SemanticStore, clock: ManualClock
    ) -> None:
        await put(store, semantics=living(1))
        clock.advance(1)
        assert await kv.sweep() == 0
        assert await store.sweep() == 1

    async def test_two_sweepers_and_a_writer_record_an_expiry_once(
        self, kv: Store, store: SemanticStore, clock: ManualClock
    ) -> None:
        async with SemanticStore(kv, sweep_every=None) as other:
            keys = [f"{PROJECT}/{number}" for number in range(20)]
            await store.batch([putting(key, semantics=living(1)) for key in keys])
            clock.advance(1)
            await asyncio.gather(store.sweep(), other.sweep(), *[put(other, key, 2, 0) for key in keys[:10]])
            for key in keys[:10]:
                assert await actions(store, key) == ["put", "expire", "put"]
            for key in keys[10:]:
                assert await actions(store, key) == ["put", "expire"]

    async def test_a_clock_that_is_set_back_revives_what_is_not_swept_and_breaks_nothing(
        self, store: SemanticStore, clock: ManualClock
    ) -> None:
        old = await put(store, semantics=living(60))
        clock.advance(60)
        assert await store.get(KEY) is None
        clock.advance(-30)
        assert await store.get(KEY) == old
        assert await store.sweep() == 0
        new = await put(store, expected=old.version, semantics=living(60))
        clock.advance(-10)
        assert (await put(store, expected=new.version)).version > new.version
        assert await actions(store) == ["put", "put", "put"]

    async def test_nothing_is_put_over_what_a_clock_that_is_set_back_has_revived(
        self, store: SemanticStore, clock: ManualClock
    ) -> None:
        for turns in [*range(10), *range(10, 100, 3)]:
            old = await put(store, semantics=living(60))
            clock.advance(60)
            writing = asyncio.ensure_future(put(store, value="new", expected=0))
            for _ in range(turns):
                await asyncio.sleep(0)
            clock.advance(-30)
            await asyncio.wait([writing])
            if writing.exception() is None:
                assert old.expires_at is not None
                assert writing.result().updated_at >= old.expires_at
            else:
                assert isinstance(writing.exception(), VersionConflict)

    async def test_a_damaged_entry_that_has_expired_is_swept_and_holds_up_no_other(
        self, kv: Store, store: SemanticStore, clock: ManualClock
    ) -> None:
        await put(store, OTHER, semantics=living(1))
        await kv.engine.commit(Batch((Set(Space.SEMANTIC, ROW, b"{}", Encoding.JSON, 1),)))
        clock.advance(1)
        await store.sweep()
        assert await kv.engine.read(Get(Space.SEMANTIC, ROW, include_expired=True)) == [None]
        assert await actions(store, OTHER) == ["put", "expire"]


@ON_EVERY_ENGINE
class TestSemanticRestore:
    async def test_a_deleted_entry_comes_back_as_a_new_version(self, store: SemanticStore, clock: ManualClock) -> None:
        old = await put(store, value={"token": "a"}, semantics=living(60), spec_ref="adr/7")
        await delete(store)
        clock.advance(1000)
        back = await store.restore(KEY, writer="operator:undo")
        assert (back.value, back.semantics, back.spec_ref) == (old.value, old.semantics, old.spec_ref)
        assert back.version > old.version
        assert back.last_writer == "operator:undo"
        assert back.expires_at == at(clock) + timedelta(seconds=60), "its TTL starts again"
        assert await store.get(KEY) == back

    @pytest.mark.parametrize("swept_after", [1, 9, None])
    async def test_an_expired_entry_comes_back_within_the_retention_of_its_expiry_whenever_it_was_swept(
        self, kv: Store, clock: ManualClock, swept_after: float | None
    ) -> None:
        async with SemanticStore(kv, restore_within=10, sweep_every=None) as store:
            for key in (KEY, OTHER):
                await put(store, key, semantics=living(60))
            clock.advance(60 + (swept_after or 0))
            if swept_after is not None:
                await store.sweep()
            clock.advance(9.9 - (swept_after or 0))
            await restore(store, KEY)
            clock.advance(0.1)
            with pytest.raises(NothingToRestore):
                await restore(store, OTHER)

    @pytest.mark.parametrize("swept", [True, False])
    async def test_an_expired_entry_comes_back_swept_or_not(
        self, store: SemanticStore, clock: ManualClock, swept: bool
    ) -> None:
        await put(store, value="kept", semantics=living(60))
        clock.advance(60)
        if swept:
            await store.sweep()
        assert (await restore(store)).value == "kept"
        assert await actions(store) == ["put", "expire", "restore"]
        [first, expiry, back] = await trail(store)
        assert first.after_hash == expiry.before_hash == back.after_hash
        assert await store.sweep() == 0

    async def test_what_was_there_last_comes_back_and_only_once(self, store: SemanticStore, clock: ManualClock) -> None:
        await put(store, value="first")
        await delete(store)
        await put(store, value="second", semantics=living(1))
        clock.advance(1)
        assert (await restore(store)).value == "second"
        await put(store, value="third")
        await delete(store)
        assert (await restore(store)).value == "third"
        clock.advance(10**5)
        with pytest.raises(VersionConflict) as refused:
            await restore(store)
        assert refused.value.current == await store.get(KEY)
        await store.batch([deleting(KEY)])
        await restore(store)
        await delete(store, expected="*")
        assert await delete(store, expected="*") is None, "a delete of nothing"
        assert (await restore(store)).value == "third"

    async def test_it_works_within_the_retention_only(self, kv: Store, clock: ManualClock) -> None:
        async with SemanticStore(kv, sweep_every=None, restore_within=100) as store:
            await put(store)
            await delete(store)
            clock.advance(99.999)
            await restore(store)
            await delete(store)
            clock.advance(100)
            with pytest.raises(NothingToRestore, match=r"within the last 100 s"):
                await restore(store)
            await put(store, semantics=living(1))
            clock.advance(1)
            await store.sweep()
            clock.advance(100)
            with pytest.raises(NothingToRestore):
                await restore(store)

    async def test_where_nothing_was_there_is_nothing_to_restore(self, store: SemanticStore) -> None:
        with pytest.raises(NothingToRestore, match=KEY):
            await restore(store)
        await put(store, OTHER)
        with pytest.raises(VersionConflict):
            await restore(store, OTHER)

    async def test_of_two_at_once_one_restores(self, store: SemanticStore) -> None:
        await put(store)
        await delete(store)
        done = await asyncio.gather(restore(store), restore(store), return_exceptions=True)
        assert [type(one) for one in done].count(Envelope) == 1
        assert [type(one) for one in done].count(VersionConflict) == 1

    async def test_a_lock_comes_back_with_a_new_fence(self, store: SemanticStore) -> None:
        old = await put(store, semantics=locked())
        await delete(store)
        back = await restore(store)
        assert back.fence == back.version
        assert old.fence is not None
        assert back.version > old.fence


@ON_EVERY_ENGINE
class TestWatching:
    async def test_a_watch_tells_of_puts_deletes_and_expiries(self, store: SemanticStore, clock: ManualClock) -> None:
        async with asyncio.timeout(60), store.watch(KEY) as watching:
            assert await anext(watching) is None
            first = await put(store)
            assert await anext(watching) == first
            await delete(store)
            assert await anext(watching) is None
            back = await restore(store)
            assert await anext(watching) == back
            short = await put(store, semantics=living(60))
            assert await anext(watching) == short
            clock.advance(60)
            assert await anext(watching) is None

    async def test_changes_tell_of_all_keys_below(self, store: SemanticStore) -> None:
        await put(store, OTHER)
        seen: dict[str, Envelope | None] = {}
        async with asyncio.timeout(60), store.changes(f"{PROJECT}/docs/") as changing:
            await asyncio.sleep(0)
            first = await put(store)
            await put(store, f"{PROJECT}/elsewhere")
            await delete(store, OTHER)
            while len(seen) < 2:
                seen |= await anext(changing)
        assert seen == {KEY: first, OTHER: None}

    async def test_once_the_store_below_is_closed_nothing_is_read_or_written(
        self, kv: Store, store: SemanticStore
    ) -> None:
        await kv.aclose()
        for asked in (store.get(KEY), put(store), delete(store), restore(store), store.sweep()):
            with pytest.raises(Closed):
                await asked

    async def test_closing_the_store_below_ends_it(self, kv: Store, store: SemanticStore) -> None:
        watching = store.watch(KEY)
        async with asyncio.timeout(60):
            assert await anext(watching) is None
            await kv.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(watching)


async def test_a_closed_store_says_so_and_leaves_what_is_below_it_open(kv: Store) -> None:
    store = SemanticStore(kv)
    await put(store)
    await store.aclose()
    await store.aclose()
    calls: list[Callable[[], Awaitable[object]]] = [lambda: store.get(KEY), lambda: put(store), lambda: delete(store)]
    for call in calls:
        with pytest.raises(Closed, match="semantic store"):
            await call()
    begins: list[Callable[[], object]] = [
        lambda: store.list(PROJECT),
        lambda: store.watch(KEY),
        lambda: store.changes(PROJECT),
        lambda: store.audit(KEY),
    ]
    for begin in begins:
        with pytest.raises(Closed):
            begin()
    await kv.set(("k",), 1)


@pytest.mark.parametrize("kv", ["app.db", None])
async def test_a_store_stands_on_an_open_store(kv: Any) -> None:
    with pytest.raises(InvalidArgument, match="an open store"):
        SemanticStore(kv)
