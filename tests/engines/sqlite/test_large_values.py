"""Large values are stored in a table of their own, and no caller sees a difference."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyloft
from keyloft import U64, ManualClock, Undecodable, limits
from keyloft.core.engine import Engine
from keyloft.core.keys import Part
from keyloft.core.maintenance import Existing
from keyloft.core.records import Batch, Check, Committed, Delete, Get, Mutation, Record, Scan, Set, Space, Touch
from keyloft.core.sweeper import sweep
from keyloft.core.values import Encoding
from keyloft.engines import open_maintenance
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.semantic import Semantics, SemanticStore
from tests.engines.contract.calls import get, put, write

FITS = limits.ROW_BYTES - 1
"""The largest value that is stored with a key of one byte."""
SIZES = (1, FITS, FITS + 1, 5000, 70_000)


def value(size: int) -> bytes:
    return b"1" * size


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(apsw.Connection(str(path))) as connection:
        return list(connection.execute(sql).fetchall())


def large_values(path: Path) -> list[int]:
    """The lengths of the values in the large value table."""
    return [length for (length,) in rows(path, "SELECT length(value) FROM keyloft_tuples_large ORDER BY 1")]


async def damage(path: Path) -> list[str]:
    maintenance = await open_maintenance(path)
    try:
        return await maintenance.damage()
    finally:
        await maintenance.aclose()


@asynccontextmanager
async def opened(path: Path, clock: ManualClock) -> AsyncIterator[Engine]:
    engine = await SqliteEngine.open(SqliteFile(str(path)), clock)
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
async def test_a_value_can_replace_one_of_any_size(before: int, after: int, clock: ManualClock, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with opened(path, clock) as engine:
        await write(engine, put(b"k", value(before)))
        clock.advance(1)
        await write(engine, put(b"k", value(after)))
        record = await get(engine, b"k")
        assert record is not None
        assert (record.value, record.updated_at - record.created_at) == (value(after), 1000)
    assert large_values(path) == [after] * (after > FITS)
    assert await damage(path) == []


@pytest.mark.parametrize("size", SIZES)
async def test_a_value_goes_with_its_entry(size: int, clock: ManualClock, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with opened(path, clock) as engine:
        await write(engine, put(b"a", value(size)), put(b"b", value(size)), put(b"c", value(size), expire_in=5))
        await write(engine, Delete(Space.TUPLES, b"a"))
        assert await get(engine, b"a") is None
        clock.advance(1)
        assert await get(engine, b"c") is None
        await write(engine, put(b"c", value(1)))
    assert large_values(path) == [size] * (size > FITS)


async def test_a_long_key_counts(clock: ManualClock, tmp_path: Path) -> None:
    """What does not fit on a page with its key would be read in full for each comparison with that key."""
    path = tmp_path / "app.db"
    async with opened(path, clock) as engine:
        await write(engine, put(b"k" * 400, value(112)), put(b"l" * 400, value(113)))
    assert large_values(path) == [113]


_KEYS = st.sampled_from([b"a", b"b", b"c"])
_MUTATIONS = st.one_of(
    st.builds(
        lambda key, size, due: Set(Space.TUPLES, key, value(size), Encoding.JSON, due),
        _KEYS,
        st.sampled_from(SIZES[:4]),
        st.none() | st.integers(1, 3),
    ),
    st.builds(lambda key: Delete(Space.TUPLES, key), _KEYS),
    st.builds(lambda key, due: Touch(Space.TUPLES, key, due), _KEYS, st.none() | st.integers(1, 3)),
)


@given(st.lists(st.lists(_MUTATIONS, min_size=1, max_size=4), max_size=12))
@pytest.mark.slow
def test_the_results_are_those_of_the_memory_engine(batches: list[list[Mutation]]) -> None:
    async def live() -> None:
        clock = ManualClock()
        engine, model = await SqliteEngine.open(SqliteFile(":memory:"), clock), MemoryEngine(clock)
        asks = [Get(Space.TUPLES, key) for key in (b"a", b"b", b"c")]
        for mutations in batches:
            batch = Batch(tuple(mutations))
            assert await engine.commit(batch) == await model.commit(batch)
            clock.advance(0.001)
            assert await engine.read(*asks) == await model.read(*asks)
        every = Scan(Space.TUPLES, b"\x00", b"\xff", 10)
        [found], [expected] = await engine.read(every), await model.read(every)
        assert [(one.key, one.value) for one in found] == [(one.key, one.value) for one in expected]
        large: list[tuple[Any, ...]] = engine.connection.execute(
            "SELECT length(value), (SELECT count(*) FROM keyloft_tuples WHERE large = id) FROM keyloft_tuples_large"
        ).fetchall()
        assert all(length > FITS and owners == 1 for length, owners in large)
        await engine.aclose()
        await model.aclose()

    asyncio.run(live())


async def test_lists_and_many_gets_show_large_among_small(tmp_path: Path) -> None:
    pairs = [((f"k{number:02}",), "x" * (number % 3 * 700)) for number in range(30)]
    async with keyloft.open(tmp_path / "app.db") as kv:
        await kv.set_many(pairs)
        assert [(entry.key, entry.value) for entry in await kv.get_many([key for key, _ in pairs])] == pairs
        assert [(entry.key, entry.value) async for entry in kv.list()] == pairs
        assert [(entry.key, entry.value) async for entry in kv.list(reverse=True)] == pairs[::-1]
        assert [key async for key in kv.keys()] == [key for key, _ in pairs]


def _record(size: int, version: int) -> tuple[Space, Record]:
    return Space.TUPLES, Record(b"\x02k\x00", value(size), Encoding.JSON, version, None, 5, 6)


@pytest.mark.parametrize("before", [1, 5000])
@pytest.mark.parametrize("after", [2, 7000])
async def test_an_import_stores_values_in_the_right_table(before: int, after: int, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 0)
    maintenance = await open_maintenance(path)
    for at, size in enumerate([before, after], start=7):
        await maintenance.load([_record(size, at)], at, Existing.REPLACE)
    assert await maintenance.damage() == []
    async with maintenance.snapshot() as snapshot:
        parts = keyloft.core.maintenance.Range(Space.TUPLES)
        [[record]] = [found async for found in snapshot.rows(parts)]
        [[sized]] = [found async for found in snapshot.sizes(parts)]
    assert (record.value, record.created_at, record.updated_at, sized.value_bytes) == (value(after), 5, 6, after)
    await maintenance.aclose()
    assert large_values(path) == [after] * (after > FITS)


@pytest.fixture
async def robbed(tmp_path: Path) -> Path:
    """A file whose large values were removed by hand."""
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set_many([(("a",), 1), (("b",), b"x" * 1000), (("c",), "x" * 1000), (("d",), 4)])
        await kv.set(("n" * 600,), U64(7))
    rows(path, "DELETE FROM keyloft_tuples_large")
    return path


async def test_a_lost_value_is_reported_for_its_entry_alone(robbed: Path) -> None:
    assert await damage(robbed) == ["3 rows of keyloft_tuples have lost their value"]
    async with keyloft.open(robbed) as kv:
        for key in ("b", "c", "n" * 600):
            with pytest.raises(Undecodable, match=rf"\('{key}',\) is damaged: the stored value is lost"):
                await kv.get((key,))
            with pytest.raises(Undecodable, match="the stored value is lost"):
                await kv.get_many([(key,)] * 6)
        found: list[Part] = []
        listing = kv.list(limit=4)
        while len(found) < 4:
            try:
                async for entry in (listing := kv.list(limit=4 - len(found), cursor=listing.cursor)):
                    found.append(entry.key[0])
            except Undecodable:
                found.append("lost")
        assert found == ["a", "lost", "lost", "d"]
        with pytest.raises(keyloft.NotACounter):
            await kv.atomic().sum(("n" * 600,), 1).commit()


@pytest.mark.parametrize("value", [b"small", b"y" * 1000, "y" * 2000, 5], ids=repr)
async def test_a_lost_value_can_be_replaced_and_removed(robbed: Path, value: object) -> None:
    async with keyloft.open(robbed) as kv:
        for key in ("b", "c", "n" * 600):
            await kv.set((key,), value)
            assert (await kv.get((key,))).value == value
        assert [entry.value async for entry in kv.list()] == [1, value, value, 4, value]
        await kv.delete_many([("b",), ("n" * 600,)])
        await kv.delete(("c",))
        assert [entry.value async for entry in kv.list()] == [1, 4]
    assert await damage(robbed) == []
    assert large_values(robbed) == []


@pytest.mark.parametrize("size", [1, 5000])
async def test_an_import_replaces_a_lost_value(robbed: Path, size: int) -> None:
    maintenance = await open_maintenance(robbed)
    lost = Record(b"\x02c\x00", value(size), Encoding.BYTES, 9, None, 5, 6)
    done = await maintenance.load([(Space.TUPLES, lost)], 9, Existing.REPLACE)
    assert done.replaced == 1
    await maintenance.aclose()
    async with keyloft.open(robbed) as kv:
        assert (await kv.get(("c",))).value == value(size)


async def test_an_entry_that_lost_its_value_never_shows_another_ones(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set(("one",), "1" * 1000)
        await kv.set(("victim",), "2" * 1000)
    rows(path, "DELETE FROM keyloft_tuples_large WHERE id = 2")
    async with keyloft.open(path) as kv:
        await kv.set(("other",), "3" * 1000)
        assert rows(path, "SELECT large FROM keyloft_tuples ORDER BY key") == [(1,), (2,), (2,)]
        with pytest.raises(Undecodable, match="the stored value is lost"):
            await kv.get(("victim",))
        await kv.delete(("victim",))
        assert (await kv.get(("other",))).value == "3" * 1000
    assert await damage(path) == []


async def test_a_lost_envelope_is_reported(tmp_path: Path) -> None:
    path, key = tmp_path / "app.db", "tenant/acme/project/web/plan"
    async with keyloft.open(path) as kv, SemanticStore(kv) as store:
        await store.put(key, "x" * 2000, expected_version=0, writer="tests", semantics=Semantics("config"))
    rows(path, "DELETE FROM keyloft_semantic_large")
    async with keyloft.open(path) as kv, SemanticStore(kv) as store:
        with pytest.raises(Undecodable, match="is damaged"):
            await store.get(key)


async def test_a_text_written_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 1)
        rows(path, "UPDATE keyloft_tuples SET checksum = NULL, value = '\"hello\"'")
        assert (await kv.get(("k",))).value == "hello"
        assert [entry.value for entry in await kv.get_many([("k",)] * 6)] == ["hello"] * 6
        assert [entry.value async for entry in kv.list()] == ["hello"]


async def test_a_number_written_by_hand_does_not_stop_the_sweeper(clock: ManualClock, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with opened(path, clock) as engine:
        await write(engine, *[put(b"%d" % number, value(5000), expire_in=5) for number in range(3)])
        rows(path, "UPDATE keyloft_tuples_large SET value = 5 WHERE id = 2")
        clock.advance(1)
        assert await sweep(engine, Space.TUPLES) == 3
    assert large_values(path) == []


async def test_two_values_of_one_entry_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set(("k",), "x" * 1000)
    rows(path, "UPDATE keyloft_tuples SET value = x'31'")
    assert await damage(path) == ["1 rows of keyloft_tuples have two values"]


async def test_a_commit_that_fails_leaves_no_large_value(clock: ManualClock, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with opened(path, clock) as engine:
        await write(engine, put(b"k", value(5000)))
        with closing(apsw.Connection(str(path))) as other:
            other.execute(
                "CREATE TRIGGER no BEFORE INSERT ON keyloft_tuples WHEN NEW.key = x'6c' "
                "BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        with pytest.raises(keyloft.DatabaseError):
            await engine.commit(Batch((put(b"k", value(6000)), put(b"l", value(7000)))))
        assert isinstance(await engine.commit(Batch((put(b"m", value(8000)),))), Committed)
    assert large_values(path) == [5000, 8000]


async def test_a_checked_set_leaves_nothing_of_the_large_value_that_it_replaces(tmp_path: Path) -> None:
    path, clock = tmp_path / "app.db", ManualClock()
    async with opened(path, clock) as engine:
        last = await write(engine, put(b"k", value(FITS + 1)))
        done = await engine.commit(Batch((put(b"k", value(1)),), (Check(Space.TUPLES, b"k", last.version),)))
        assert isinstance(done, Committed)
    assert large_values(path) == []
    assert await damage(path) == []


@pytest.mark.parametrize("call", ["get", "list"])
def test_a_value_that_is_replaced_while_it_is_read_belongs_to_its_version(tmp_path: Path, call: str) -> None:
    path = tmp_path / "app.db"
    # No sweep: while another thread has the writing connection, a read does without it.
    with keyloft.open_sync(path, sweep_every=None) as kv, keyloft.open_sync(path, sweep_every=None) as other:
        first = kv.set(("k",), "a" * 5000)
        engine = kv.engine
        assert isinstance(engine, BlockingSqliteEngine)
        written: list[int] = []

        def trace(cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
            if not written and "_large" in sql and sql.startswith("SELECT value"):
                written.append(other.set(("k",), "b" * 6000))
            return True

        engine.connection.exec_trace = trace
        entry = kv.get(("k",)) if call == "get" else kv.list(prefix=()).all()[0]
        engine.connection.exec_trace = None
        assert written, "nothing was written between the two statements"
        assert (entry.versionstamp, entry.value) in [(first, "a" * 5000), (written[0], "b" * 6000)]
