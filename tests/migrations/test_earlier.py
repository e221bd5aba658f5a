"""A database that an earlier version made is refused as it is, and migrated with all that it holds."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import keyloft
from keyloft import DatabaseError, SchemaTooOld, admin, migrations
from keyloft.core.engine import write
from keyloft.core.records import Changes, Delete, Latest, LogPosition, Space
from keyloft.core.schema import REVISION
from keyloft.engines import open_engine
from keyloft.errors import HistoryGone
from keyloft.plugins import BotDatabase
from keyloft.semantic import SemanticStore
from tests.migrations.earlier import DATABASES, LONG_TEXT
from tests.migrations.test_migrations import alembic, carry_out, rows_at, run_each, tables, whole
from tools.postgres import fresh_database


@pytest.fixture(params=DATABASES)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database of an earlier version."""
    if request.param.startswith("sqlite"):
        url = f"sqlite:///{tmp_path}/earlier.db"
    else:
        url = request.getfixturevalue("postgres_url")
    run_each(url, DATABASES[request.param])
    return url


@pytest.fixture
def todays_schema(earlier: str, request: pytest.FixtureRequest) -> Any:
    """The schema that a migration makes in an empty database of the same kind."""
    return request.getfixturevalue("sqlite_schema" if earlier.startswith("sqlite") else "postgres_schema")


@pytest.fixture(scope="module")
def sqlite_schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    url = f"sqlite:///{tmp_path_factory.mktemp('fresh')}/fresh.db"
    migrations.upgrade(url)
    return schema_of(url)


@pytest.fixture(scope="module")
def postgres_schema(postgres_server: str) -> Any:
    with fresh_database(postgres_server) as url:
        migrations.upgrade(url)
        return schema_of(url)


def schema_of(url: str) -> Any:
    """Without the order of columns, which differs where one was added to a table of SQLite."""
    known = whole(url)
    if url.startswith("sqlite"):
        for table in known.values():
            table["columns"] = sorted([column[1:] for column in table["columns"]], key=str)
            table["index columns"] = [
                sorted([column[2:] for column in index], key=str) for index in table["index columns"]
            ]
            table.pop("rows", None)
    return known


def continues_after_the_last_version(url: str) -> None:
    """A reader of the last version continues from there; one of an earlier version must list again."""
    assert rows_at(url, "SELECT version, part, base FROM keyloft_changes") == [(9, 0, 8)]
    [[store_id]] = rows_at(url, "SELECT store_id FROM keyloft_store")
    assert re.fullmatch("[0-9a-f]{32}", store_id)

    async def follow() -> None:
        engine = await open_engine(url)
        try:
            assert await engine.read(Latest()) == [9]
            with pytest.raises(HistoryGone):
                await engine.read(Changes(LogPosition(8)))
            [found] = await engine.read(Changes(LogPosition(9)))
            assert (list(found.changes), found.is_last) == ([], True)
            done = await write(engine, Delete(Space.TUPLES, b"\x02gone\x00"))
            assert done.version == 10
        finally:
            await engine.aclose()

    asyncio.run(follow())


def has_plugins(url: str) -> bool:
    return "plugin_kv_storage" in tables(url)


async def stored(url: str, *, plugins: bool) -> None:
    async with keyloft.open(url) as kv:
        entries = [entry async for entry in kv.list()]
        assert [(entry.key, entry.value, entry.versionstamp) for entry in entries] == [
            (("long",), LONG_TEXT, 3),
            (("users", "alice"), {"name": "Alice"}, 1),
            (("users", "bob"), {"name": "Bob"}, 2),
        ]
        assert [entry.expires_at is None for entry in entries] == [True, True, False]
        assert await kv.set(("long",), "short") > 9
        assert (await kv.get(("long",))).value == "short"
        async with SemanticStore(kv, sweep_every=None) as semantic:
            trail = await semantic.audit("tenant/acme/project/web/config/flags")
        # The conflict is found by a pointer of its own, which these databases lack.
        assert [(record.action, record.sequence) for record in trail] == [("put", 6), ("put", 7), ("put", 9)]
    database = BotDatabase(url)
    found = await database.kv_get("trivia", "score")
    await database.close()
    assert found == ({"exists": True, "value": 7} if plugins else {"exists": False})


def test_it_is_refused_with_what_to_run(earlier: str) -> None:
    async def open_it() -> None:
        await keyloft.open(earlier)

    before = whole_earlier(earlier)
    with pytest.raises(SchemaTooOld, match="keyloft migrate --database"):
        asyncio.run(open_it())
    assert whole_earlier(earlier) == before


def whole_earlier(url: str) -> object:
    return whole(url), rows_at(url, "SELECT * FROM keyloft_tuples ORDER BY key")


def test_it_is_migrated_with_all_that_it_holds(earlier: str, todays_schema: Any) -> None:
    plugins = has_plugins(earlier)
    migrations.upgrade(earlier)
    assert migrations.current_revision(earlier) == REVISION
    continues_after_the_last_version(earlier)
    asyncio.run(stored(earlier, plugins=plugins))
    assert schema_of(earlier) == todays_schema


@pytest.mark.parametrize("earlier", ["sqlite, 0003", "postgresql, 0003", "postgresql, 0007"], indirect=True)
def test_the_counter_of_an_empty_store_moves_to_1(earlier: str) -> None:
    """It began with 0: the next commit would get the version that rows by hand have."""
    counter = "keyloft_clock" if "keyloft_clock" in tables(earlier) else "keyloft_version_counter"
    rows_at(earlier, f"UPDATE {counter} SET version = 0")
    for table in ("keyloft_tuples", "keyloft_semantic"):
        rows_at(earlier, f"DELETE FROM {table}")
    rows_at(earlier, "UPDATE plugin_kv_storage SET version = 0")
    migrations.upgrade(earlier)
    assert asyncio.run(admin.check(earlier)).findings == ()

    async def next_version() -> int:
        async with keyloft.open(earlier) as kv:
            return await kv.set(("k",), 1)

    assert asyncio.run(next_version()) == 2


@pytest.mark.parametrize(("kind", "stamp"), [("sqlite", "0008"), ("sqlite", "0009"), ("postgresql", "0009")])
def test_a_database_without_timelines_is_migrated(
    kind: str, stamp: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres_url") if kind == "postgresql" else f"sqlite:///{tmp_path}/earlier.db"
    migrations.upgrade(url, "0010" if stamp == "0008" else "head")
    if kind == "postgresql":
        rows_at(url, "ALTER TABLE keyloft_version_counter DROP COLUMN timeline")
    rows_at(url, f"UPDATE keyloft_version SET version_num = '{stamp}'")

    async def write() -> int:
        async with keyloft.open(url) as kv:
            return await kv.set(("k",), 1)

    with pytest.raises(SchemaTooOld, match=f"schema {stamp}"):
        asyncio.run(write())
    migrations.upgrade(url)
    if kind == "postgresql":
        assert rows_at(url, "SELECT timeline > 0 FROM keyloft_version_counter") == [(True,)]
    assert asyncio.run(write()) == 2


def test_its_rows_get_checksums_where_rows_have_them(earlier: str) -> None:
    migrations.upgrade(earlier)
    assert "damage" not in [finding.code for finding in asyncio.run(admin.check(earlier)).findings]
    if earlier.startswith("sqlite"):
        for table in ("keyloft_tuples", "keyloft_semantic"):
            [[rows, checksums]] = rows_at(earlier, f"SELECT count(*), count(checksum) FROM {table}")
            assert rows == checksums > 0
            rows_at(earlier, f"UPDATE {table} SET value = x'30' WHERE value IS NOT NULL")
        found = [finding.code for finding in asyncio.run(admin.check(earlier)).findings]
        [[changed]] = rows_at(
            earlier,
            "SELECT count(*) FROM (SELECT value FROM keyloft_tuples UNION ALL SELECT value FROM "
            "keyloft_semantic) WHERE value IS NOT NULL",
        )
        assert found.count("damage") == changed


def test_its_plan_is_shown_and_can_be_carried_out(earlier: str, todays_schema: Any) -> None:
    before, plugins = whole_earlier(earlier), has_plugins(earlier)
    stamp = migrations.current_revision(earlier)
    plan = migrations.plan(earlier)
    assert (plan.current, plan.target) == (stamp, REVISION)
    assert [step.revision for step in plan.steps] == ([REVISION] if plugins else ["0010", REVISION])
    assert f"earlier revision {stamp}" in plan.steps[0].name
    assert whole_earlier(earlier) == before
    carry_out(earlier, plan.sql)
    continues_after_the_last_version(earlier)
    asyncio.run(stored(earlier, plugins=plugins))
    assert schema_of(earlier) == todays_schema


def test_a_step_down_drops_its_plugin_table(earlier: str) -> None:
    if has_plugins(earlier):
        before = migrations.current_revision(earlier)
        with pytest.raises(DatabaseError, match="plugin_kv_storage has rows"):
            migrations.downgrade(earlier, "-1")
        assert migrations.current_revision(earlier) == before
        migrations.downgrade(earlier, "-1", drop=True)
        assert not has_plugins(earlier)
        assert migrations.current_revision(earlier) == "0010"


@pytest.mark.parametrize("earlier", ["sqlite, 0003", "postgresql, 0003"], indirect=True)
def test_alembic_brings_it_along_too_but_not_when_it_only_reads(earlier: str) -> None:
    for reading in ("current", "check"):
        done = alembic(earlier, reading)
        assert done.code != 0
        assert "revision 0003 of an earlier version: run `alembic upgrade head`" in done.text
        assert migrations.current_revision(earlier) == "0003"
    done = alembic(earlier, "upgrade", "head")
    assert done.code == 0, done.text
    asyncio.run(stored(earlier, plugins=True))


@pytest.mark.parametrize("earlier", ["sqlite, 0001", "postgresql, 0001"], indirect=True)
def test_a_plugin_table_that_is_not_keylofts_is_not_taken_over(earlier: str) -> None:
    rows_at(earlier, "CREATE TABLE plugin_kv_storage (plugin_name TEXT, key TEXT)")
    before = whole_earlier(earlier)
    with pytest.raises(
        DatabaseError, match=r"plugin_kv_storage.*column value_json: expected a text, found no such column"
    ):
        migrations.upgrade(earlier)
    assert whole_earlier(earlier) == before
