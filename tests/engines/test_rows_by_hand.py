"""Rows that a person inserts into the plugins' table with SQL count as version 1, which no commit gets."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from keyloft import ManualClock, admin, limits
from keyloft.core.engine import Engine
from keyloft.core.records import (
    Add,
    Batch,
    Check,
    Committed,
    Conflict,
    Delete,
    Expired,
    Get,
    Latest,
    Purge,
    Record,
    Scan,
    Set,
    Space,
    Touch,
)
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.postgres.engine import PostgresEngine
from tests.support.everything import run_sql
from tests.support.postgres import database_url
from tests.support.postgres_commits import before_commit, opened

P = Space.PLUGINS
KEY = ("trivia", "k")
EVERY = Scan(P, ("trivia", ""), ("trivia", "z"), 10)
LARGE = '"' + "x" * (2 * limits.POSTGRES_HEAD_BYTES) + '"'


@pytest.fixture(params=["sqlite", "postgresql by function", "postgresql by locking"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = "sqlite file" if kind == "sqlite" else "postgresql"
    return database_url(name, request, tmp_path) or ""


@pytest.fixture
async def engine(kind: str, url: str, clock: ManualClock) -> AsyncIterator[Engine]:
    engine = await open_engine(url, clock)
    if isinstance(engine, PostgresEngine):
        engine.server.has_function = kind == "postgresql by function"
    yield engine
    await engine.aclose()


async def by_hand(url: str, sql: str) -> None:
    """Run a statement as another program does."""
    await asyncio.to_thread(run_sql, url, sql)


async def insert(url: str, value: str = "1", key: str = "k", expires_at: str = "NULL") -> None:
    await by_hand(
        url,
        "INSERT INTO plugin_kv_storage (plugin_name, key, value_json, expires_at) "
        f"VALUES ('trivia', '{key}', '{value}', {expires_at})",
    )


async def stored(engine: Engine) -> Record:
    [record] = await engine.read(Get(P, KEY))
    assert isinstance(record, Record)
    return record


def put(value: bytes) -> Set:
    return Set(P, KEY, value, Encoding.JSON)


async def test_every_read_tells_version_1(engine: Engine, url: str) -> None:
    keys = [f"k{number:02}" for number in range(2 * limits.SQLITE_GETS_WORTH_A_STATEMENT)]
    await by_hand(
        url,
        "INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES "
        + ", ".join([f"('trivia', '{key}', '1')" for key in keys]),
    )
    pages = await engine.read(EVERY, replace(EVERY, keys_only=True), replace(EVERY, times=True))
    assert {record.version for page in pages for record in page} == {1}
    [even_expired] = await engine.read(Get(P, ("trivia", "k00"), include_expired=True))
    several = await engine.read(*[Get(P, ("trivia", key)) for key in keys])
    assert [record and record.version for record in (even_expired, *several)] == [1] * (1 + len(keys))
    assert await engine.read(Latest()) == [1]


@pytest.mark.parametrize("value", ["1", LARGE], ids=["a small value", "a large value"])
async def test_a_check_for_version_1_holds_and_for_any_other_it_fails(engine: Engine, url: str, value: str) -> None:
    await insert(url, value)
    for wrong in (None, 0, 2):
        refused = await engine.commit(Batch((put(b"2"),), (Check(P, KEY, wrong),)))
        assert isinstance(refused, Conflict)
        assert [failed.current for failed in refused.failed] == [await stored(engine)]
    assert (await stored(engine)).version == 1
    done = await engine.commit(Batch((put(b"2"),), (Check(P, KEY, 1),)))
    assert isinstance(done, Committed)
    assert done.version == (await stored(engine)).version == 2
    assert isinstance(await engine.commit(Batch((put(b"3"),), (Check(P, KEY, 1),))), Conflict)


async def test_every_mutation_finds_the_row(engine: Engine, url: str) -> None:
    for mutation in (Add(P, KEY, 1), Touch(P, KEY, 60_000), Delete(P, KEY), put(b"2")):
        for checks in ((), (Check(P, KEY, 1),)):
            await insert(url)
            done = await engine.commit(Batch((mutation,), checks))
            assert isinstance(done, Committed)
            assert done.found in ((), (True,))
            await by_hand(url, "DELETE FROM plugin_kv_storage")


async def test_an_expired_row_is_swept(engine: Engine, url: str, clock: ManualClock) -> None:
    await insert(url, expires_at="'1999-01-01 00:00:00.000000'")
    [[due]] = await engine.read(Expired(P, 10))
    assert due.version == 1
    done = await engine.commit(Batch((Purge(P, KEY, due.version),)))
    assert isinstance(done, Committed)
    assert done.found == (True,)


async def test_concurrent_read_check_write_loses_no_update(engine: Engine, url: str, clock: ManualClock) -> None:
    await insert(url, "0")
    other = await open_engine(url, clock)

    async def count(at: Engine) -> None:
        while True:
            record = await stored(at)
            batch = Batch((put(b"%d" % (int(record.value) + 1)),), (Check(P, KEY, record.version),))
            if isinstance(await at.commit(batch), Committed):
                return

    await asyncio.gather(*[count(at) for at in (engine, other) for _ in range(10)])
    assert (await stored(engine)).value == b"20"
    await other.aclose()


async def test_a_row_rewritten_by_hand_keeps_version_1(engine: Engine, url: str) -> None:
    """So a check does not notice it, whereas a commit between the two always is noticed."""
    await insert(url)
    await by_hand(url, "UPDATE plugin_kv_storage SET value_json = '7'")
    record = await stored(engine)
    assert (record.value, record.version) == (b"7", 1)
    assert isinstance(await engine.commit(Batch((Add(P, KEY, 1),), (Check(P, KEY, 1),))), Committed)
    assert (await stored(engine)).value == b"8"


async def test_a_row_rewritten_by_hand_between_read_and_commit_is_read_again(
    emptied_postgres_url: str, clock: ManualClock
) -> None:
    async with opened(emptied_postgres_url, clock) as engine:
        await insert(emptied_postgres_url)
        change = "UPDATE plugin_kv_storage SET value_json = '7', updated_at = now()"
        before_commit(engine, lambda: by_hand(emptied_postgres_url, change))
        assert isinstance(await engine.commit(Batch((Add(P, KEY, 1),), (Check(P, KEY, 1),))), Committed)
        assert (await stored(engine)).value == b"8"


async def test_a_watch_does_not_see_the_row(engine: Engine, url: str) -> None:
    watch = engine.watch(EVERY)
    await insert(url)
    done = await engine.commit(Batch((Set(P, ("trivia", "other"), b"2", Encoding.JSON),)))
    assert isinstance(done, Committed)
    async with asyncio.timeout(60):
        assert [change.key for change in await anext(aiter(watch))] == [("trivia", "other")]


async def test_it_is_moved_with_its_version(engine: Engine, url: str, tmp_path: Path) -> None:
    await insert(url)
    file = io.BytesIO()
    await admin.export(url, file)
    first, line, _ = [json.loads(line) for line in file.getvalue().splitlines()]
    assert (first["version"], line["version"]) == (1, 1)
    imported, copied = tmp_path / "imported.db", tmp_path / "copied.db"
    await admin.import_(io.BytesIO(file.getvalue()), imported)
    await admin.copy(url, copied)
    for moved in (url, imported, copied):
        assert (await admin.check(moved)).findings == ()
    for moved in (imported, copied):
        other = await open_engine(moved)
        assert ((await stored(other)).value, (await stored(other)).version) == (b"1", 1)
        await other.aclose()


async def test_version_0_of_an_export_counts_as_1(tmp_path: Path) -> None:
    """Exports of earlier versions have it for rows by hand."""
    await admin.import_(io.BytesIO(b'{"plugin":"trivia","key":"k","value":1,"version":0}\n'), tmp_path / "app.db")
    assert run_sql(str(tmp_path / "app.db"), "SELECT version FROM plugin_kv_storage") == [(1,)]
