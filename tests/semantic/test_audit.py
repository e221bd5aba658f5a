"""The audit trail: complete, in order, by key and by project, and silent about values."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import keyloft
from keyloft import Busy, InvalidArgument, ManualClock, Store
from keyloft.core.engine import Engine
from keyloft.core.records import NO_LIMIT, Get, Scan, Space
from keyloft.semantic import AuditRecord, NothingToRestore, Semantics, SemanticStore, StaleFence, VersionConflict
from tests.support.examples import examples
from tests.support.postgres import IN_MEMORY

from .entries import (
    CURSOR,
    KEY,
    LOCK,
    OTHER,
    PROJECT,
    WRITER,
    actions,
    agreeing_trail,
    delete,
    deleting,
    living,
    locked,
    put,
    putting,
    restore,
    trail,
)

CANARY = "canary-7f3a"


async def refused(write: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises((VersionConflict, StaleFence)):
        await write


async def log_rows(engine: Engine) -> list[bytes]:
    [rows] = await engine.read(Scan(Space.SEMANTIC, b"a/", b"a0", NO_LIMIT))
    return [row.key + row.value for row in rows]


class TestRecords:
    async def test_a_put_says_who_did_what_when_and_why(self, store: SemanticStore, clock: ManualClock) -> None:
        first = await put(store, value="a", request_id="r-1", spec_ref="adr/7")
        clock.advance(7)
        second = await put(store, value="b", expected=first.version, writer="service")
        [one, two] = await trail(store)
        assert one == AuditRecord(
            action="put",
            key=KEY,
            writer=WRITER,
            directive="sync",
            purpose="cursor",
            request_id="r-1",
            spec_ref="adr/7",
            version_before=None,
            version_after=first.version,
            before_hash=None,
            after_hash=one.after_hash,
            at=first.updated_at,
            sequence=first.version,
        )
        assert (two.writer, two.directive) == ("service", "service")
        assert (two.version_before, two.version_after) == (first.version, second.version)
        assert (two.before_hash, two.at) == (one.after_hash, second.updated_at)

    async def test_a_conflict_says_what_was_expected_and_what_was_there(self, store: SemanticStore) -> None:
        there = await put(store)
        with pytest.raises(VersionConflict) as raised:
            await put(store, value=2, expected=0, request_id="r-2", writer="late:comer", spec_ref="adr/9")
        [first, conflict] = await trail(store)
        assert (conflict.action, conflict.reason, conflict.expected_version) == ("conflict", "version", 0)
        assert (conflict.version_before, conflict.version_after) == (there.version, None)
        assert (conflict.before_hash, conflict.after_hash) == (first.after_hash, None)
        assert (conflict.writer, conflict.request_id, conflict.spec_ref) == ("late:comer", "r-2", "adr/9")
        assert conflict.correlation_id == raised.value.correlation_id == "r-2"
        assert conflict.sequence > there.version

    async def test_a_conflict_without_a_request_id_has_a_correlation_id_all_the_same(
        self, store: SemanticStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(VersionConflict) as raised:
            await put(store, expected=9)
        [conflict] = await trail(store)
        assert conflict.correlation_id is not None
        assert conflict.correlation_id == raised.value.correlation_id
        [line] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert line.__dict__["correlationId"] == conflict.correlation_id
        assert conflict.correlation_id in line.message

    async def test_a_delete_and_a_restore_lead_back_to_the_same_value(self, store: SemanticStore) -> None:
        first = await put(store)
        await delete(store, spec_ref="adr/1")
        back = await restore(store, request_id="r")
        [one, gone, again] = await trail(store)
        assert (gone.action, gone.version_before, gone.version_after) == ("delete", first.version, None)
        assert (gone.purpose, gone.spec_ref) == ("cursor", "adr/1")
        assert (again.action, again.version_after, again.request_id) == ("restore", back.version, "r")
        assert one.after_hash == gone.before_hash == again.after_hash

    async def test_what_is_refused_for_its_form_leaves_no_record(self, store: SemanticStore) -> None:
        with pytest.raises(InvalidArgument):
            await put(store, writer="")
        with pytest.raises(NothingToRestore):
            await restore(store)
        assert await trail(store, PROJECT) == []


class TestReadingTheTrail:
    async def test_a_hundred_puts_in_a_row_are_all_there(self, kv: Store, store: SemanticStore) -> None:
        await put(store, OTHER)
        for number in range(100):
            await put(store, value=number)
        records = await trail(store)
        assert len(records) == 100
        assert [record.version_before for record in records[1:]] == [record.version_after for record in records[:-1]]
        assert await trail(store, reverse=True) == records[::-1]
        assert await trail(store, PROJECT) == [*await trail(store, OTHER), *records]
        async with SemanticStore(kv, sweep_every=None) as fresh:
            assert await trail(fresh) == records

    async def test_after_limit_and_reverse_choose_alike_for_a_key_and_a_project(self, store: SemanticStore) -> None:
        for number in range(4):
            await put(store, value=number)
            await refused(put(store, expected=0))
        await delete(store)
        await put(store)
        everything = await trail(store, PROJECT)
        for about in (KEY, PROJECT):
            assert await trail(store, about) == everything
            for count in (1, 3, 10, 11):
                assert await trail(store, about, limit=count) == everything[:count]
                assert await trail(store, about, limit=count, reverse=True) == everything[::-1][:count]
            for index, record in enumerate(everything):
                assert await trail(store, about, after=record.sequence) == everything[index + 1 :]
                assert await trail(store, about, after=record.sequence, limit=2) == everything[index + 1 : index + 3]
                later = await trail(store, about, after=record.sequence, reverse=True)
                assert later == everything[:index:-1]

    @pytest.mark.parametrize(
        "options", [{"limit": 0}, {"limit": True}, {"after": -1}, {"after": "1"}, {"after": 2**63}]
    )
    @IN_MEMORY
    async def test_options_that_make_no_sense_are_refused(self, store: SemanticStore, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match=f"^{next(iter(options))}: "):
            store.audit(KEY, **options)

    async def test_a_project_shows_nothing_of_its_neighbours(self, store: SemanticStore) -> None:
        neighbours = [
            "acme/project/web2",
            "acme/project/we",
            "acme/project/web-",
            "acm/project/web",
            "acme2/project/web",
        ]
        for neighbour in neighbours:
            await put(store, f"tenant/{neighbour}/docs/onedrive/delta")
        await put(store, f"{KEY}/below")
        await put(store, f"{KEY}2")
        assert await trail(store) == []
        assert [record.key for record in await trail(store, PROJECT)] == [f"{KEY}/below", f"{KEY}2"]

    async def test_records_are_kept_for_the_retention(self, kv: Store, clock: ManualClock) -> None:
        async with SemanticStore(kv, sweep_every=None, audit_retention=100) as store:
            await put(store)
            await delete(store)
            clock.advance(50)
            await put(store, value=2)
            await put(store, value=3)
            clock.advance(49.999)
            assert await actions(store) == ["put", "delete", "put", "put"]
            clock.advance(0.001)
            assert await actions(store) == await actions(store, PROJECT) == ["put", "put"]
            await store.sweep()
            assert len(await log_rows(kv.engine)) == 2
            clock.advance(50)
            assert await actions(store) == []
            await put(store, value=4)
            assert await actions(store) == await actions(store, PROJECT) == ["put"]

    async def test_a_reader_that_continues_while_others_write_misses_nothing(self, store: SemanticStore) -> None:
        """A reader that goes on after the last record it saw ends up with what the project's trail shows."""
        writing = asyncio.gather(*[_busy_life(store) for _ in range(4)])

        async def read_on() -> list[AuditRecord]:
            seen: list[AuditRecord] = []
            is_last = False
            while not is_last:
                is_last = writing.done()
                seen += await trail(store, after=seen[-1].sequence if seen else None)
                await asyncio.sleep(0)
            return seen

        readers = await asyncio.gather(*[read_on() for _ in range(4)])
        await writing
        everything = await trail(store, PROJECT)
        assert all(seen == everything for seen in readers)


class Counting:
    """Leads to an engine, and counts its reads and the audit records that were asked for one by one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reads = 0
        self.records = 0

    async def read(self, *asks: Any) -> list[Any]:
        self.reads += 1
        self.records += len([ask for ask in asks if isinstance(ask, Get) and ask.key.startswith(b"a/")])
        answers: list[Any] = await self._engine.read(*asks)
        return answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.slow
async def test_a_page_of_the_trail_takes_two_reads_in_either_direction(
    kv: Store, store: SemanticStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "keyloft.semantic")  # to capture thousands of lines takes most of the time
    for number in range(25):
        for step in range(3):
            await put(store, value=step)
        if number % 10 == 0:
            await delete(store)
        await asyncio.gather(*[refused(put(store, expected=2**62)) for _ in range(96 + (number % 10 > 0))])
    everything = await trail(store, PROJECT)
    assert len(everything) == 2500
    counting = Counting(kv.engine)
    async with SemanticStore(Store(cast("Engine", counting)), sweep_every=None) as counted:
        for about, reverse, limit in itertools.product((KEY, PROJECT), (False, True), (1, 1000)):
            for after in (None, everything[1250].sequence):
                expected = everything if after is None else everything[1251:]
                expected = expected[::-1][:limit] if reverse else expected[:limit]
                counting.reads = counting.records = 0
                assert await counted.audit(about, after=after, limit=limit, reverse=reverse) == expected
                assert counting.reads <= 2
                assert counting.records == (limit if about == KEY else 0)
        for about in (KEY, PROJECT):
            counting.reads = 0
            assert await counted.audit(about) == everything
            assert counting.reads <= 8


async def _busy_life(store: SemanticStore) -> None:
    for number in range(30):
        await put(store, value=number)
        await refused(put(store, expected=1))


moves = st.one_of(
    st.tuples(st.sampled_from(["put", "delete", "conflict", "restore", "lock", "stale", "brief"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["pass", "sweep", "other"]), st.just(0)),
    st.tuples(st.just("batch"), st.integers(1, 2**6 - 1)),
)


class History:
    """Makes moves in a project of its own."""

    def __init__(self, store: SemanticStore, other: SemanticStore, clock: ManualClock, project: str) -> None:
        self.stores = [store, other]
        self.clock = clock
        self.keys = [f"{project}/{name}" for name in ("a", "a/b", "a.b")]

    async def make(self, kind: str, number: int) -> None:
        store, key = self.stores[0], self.keys[number % 3]
        match kind:
            case "put":
                await put(store, key, number)
            case "brief":
                await put(store, key, number, semantics=living(1))
            case "lock":
                await put(store, key, number, semantics=locked(2))
            case "delete":
                await delete(store, key)
            case "conflict":
                await refused(put(store, key, expected=2**62))
            case "stale":
                await refused(delete(store, key, fence=2**62))
            case "restore":
                with suppress(VersionConflict, NothingToRestore):
                    await restore(store, key)
            case "pass":
                self.clock.advance(1)
            case "sweep":
                await store.sweep()
            case "other":
                self.stores.reverse()
            case "batch":
                await self._batch(store, number)

    async def _batch(self, store: SemanticStore, number: int) -> None:
        """What becomes of each key is chosen by two bits: nothing, a put, a brief one, or a delete."""
        asked = [(key, number >> 2 * index & 3) for index, key in enumerate(self.keys)]
        await store.batch(
            [
                deleting(key) if what == 3 else putting(key, number, semantics=living(1) if what == 2 else CURSOR)
                for key, what in asked
                if what
            ]
        )


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(moves, min_size=1, max_size=25))
async def test_what_happened_to_a_key_is_what_happened_to_it_in_its_project(
    kv: Store, store: SemanticStore, clock: ManualClock, history: list[tuple[str, int]]
) -> None:
    global _projects
    _projects += 1
    project = f"tenant/acme/project/p{_projects}"
    async with SemanticStore(kv, sweep_every=None) as other:
        past = History(store, other, clock, project)
        for move in history:
            await past.make(*move)
    everything = await trail(store, project)
    assert [record.sequence for record in everything] == sorted(record.sequence for record in everything)
    for key in past.keys:
        own = await agreeing_trail(kv, store, key)
        assert own == [record for record in everything if record.key == key]
        assert await trail(store, key, reverse=True) == own[::-1]


_projects = 0


async def test_trails_agree_when_many_write_through_two_stores_at_once(
    kv: Store, store: SemanticStore, clock: ManualClock
) -> None:
    project = "tenant/acme/project/crowd"
    async with SemanticStore(kv, sweep_every=None) as other:
        histories = [History(store, other, clock, project), History(other, store, clock, project)] * 4

        async def live(history: History, seed: int) -> None:
            kinds = ["put", "brief", "conflict", "batch", "delete", "restore", "pass", "lock", "sweep", "stale"]
            for step in range(15):
                await history.make(kinds[(7 * step + 3 * seed) % 10], 1 + (step + seed) % 63)

        await asyncio.gather(*[live(history, seed) for seed, history in enumerate(histories)])
    everything = await trail(store, project)
    for key in histories[0].keys:
        assert await agreeing_trail(kv, store, key) == [record for record in everything if record.key == key]
    assert {record.action for record in everything} >= {"put", "delete", "conflict"}


class TestSecrecy:
    async def test_nothing_of_a_value_is_in_any_record_or_log_line(
        self, kv: Store, store: SemanticStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        value = {CANARY: [CANARY, {"deep": f"{CANARY}!"}]}
        first = await put(store, value=value, expected=0, request_id="r")
        await put(store, value=value, expected=0, request_id="r")
        errors = []
        for write in (
            put(store, value=value, expected=0),
            put(store, value=[value], expected=0, request_id="r"),
            put(store, value=value, fence=1),
            delete(store, expected=first.version + 1),
            restore(store),
            store.batch([putting(KEY, value, 0), putting(OTHER, value, 7)]),
        ):
            with pytest.raises((VersionConflict, StaleFence)) as raised:
                await write
            errors.append(f"{raised.value} {raised.value!r}")
        await put(store, value=value, semantics=living(1))
        clock.advance(1)
        await put(store, value=value, semantics=living(1))
        clock.advance(1)
        await store.sweep()
        await restore(store)
        await delete(store)
        await store.batch([putting(KEY, value), putting(OTHER, value)])
        rows = await log_rows(kv.engine)
        assert len(rows) == 16
        assert CANARY.encode() not in b"\n".join(rows)
        assert CANARY not in "\n".join(f"{record.message} {vars(record)!r}" for record in caplog.records)
        assert CANARY not in "\n".join(errors)
        assert len([record for record in caplog.records if record.name == "keyloft.semantic"]) >= 14

    async def test_equal_values_of_two_keys_have_different_hashes_and_of_one_key_the_same(
        self, store: SemanticStore
    ) -> None:
        await store.batch([putting(KEY, True), putting(OTHER, True)])
        await put(store, value=True)
        await put(store, value=False)
        [one, two, three] = [record.after_hash for record in await trail(store)]
        [other] = [record.after_hash for record in await trail(store, OTHER)]
        assert one == two
        assert len({one, three, other}) == 3

    @pytest.fixture(autouse=True)
    def _no_key_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KEYLOFT_AUDIT_KEY", raising=False)

    async def test_another_audit_key_makes_other_hashes(self, kv: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        hashes = []
        for audit_key in ("one", b"one", "two", None):
            async with SemanticStore(kv, sweep_every=None, audit_key=audit_key) as store:
                await put(store, value=True)
                hashes.append((await trail(store))[-1].after_hash)
        monkeypatch.setenv("KEYLOFT_AUDIT_KEY", "two")
        async with SemanticStore(kv, sweep_every=None) as store:
            await put(store, value=True)
            hashes.append((await trail(store))[-1].after_hash)
        assert hashes[0] == hashes[1]
        assert hashes[2] == hashes[4]
        assert len(set(hashes)) == 3

    async def test_stores_without_a_key_share_one_even_if_all_begin_at_once(self, kv: Store) -> None:
        stores = [SemanticStore(kv, sweep_every=None) for _ in range(5)]
        await asyncio.gather(*[put(each, value=True) for each in stores])
        assert len({record.after_hash for record in await trail(stores[0])}) == 1
        async with keyloft.open() as elsewhere, SemanticStore(elsewhere, sweep_every=None) as store:
            await put(store, value=True)
            assert (await trail(store))[0].after_hash != (await trail(stores[0]))[0].after_hash


async def test_an_entry_is_not_taken_for_damaged_because_the_database_is_busy(
    kv: Store, store: SemanticStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, semantics=living(1))
    clock.advance(1)
    read = kv.engine.read

    async def busy_with_the_audit_key(*asks: Any) -> Any:
        if asks == (Get(Space.SEMANTIC, b"h/audit"),):
            raise Busy("another process writes")
        return await read(*asks)

    async with SemanticStore(kv, sweep_every=None) as fresh:
        with monkeypatch.context() as patched:
            patched.setattr(kv.engine, "read", busy_with_the_audit_key)
            with pytest.raises(Busy):
                await fresh.sweep()
        assert await fresh.sweep() == 1
        assert await actions(fresh) == ["put", "expire"]
        assert (await restore(fresh)).value == 1


async def test_purposes_are_recorded_of_what_was_there(store: SemanticStore) -> None:
    await put(store, LOCK, semantics=locked())
    await refused(delete(store, LOCK, expected=1))
    await put(store, LOCK, semantics=Semantics("config"))
    await delete(store, LOCK)
    assert [record.purpose for record in await trail(store, LOCK)] == ["lock", "lock", "config", "config"]
