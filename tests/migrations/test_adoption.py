"""A table `plugin_kv_storage` of another program: adopted with its rows if its columns fit, else refused by name."""

import asyncio
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import keyloft
from keyloft import CannotOpen, InvalidArgument, migrations
from keyloft.cli.doctor import database as doctor
from keyloft.plugins import BotDatabase, PluginKVStorage
from keyloft.plugins.models import Base
from tests.migrations.test_migrations import (
    CHILD,
    OPENING_CHILD,
    ROOT,
    alembic,
    at_the_same_moment,
    carry_out,
    file,
    postgres_schema,
    rows_at,
    schema,
    url,
    whole,
)
from tests.server.test_serve import refused as serve_refused
from tools.postgres import fresh_database

__all__ = ["file", "url"]

BY_THE_SPECIFICATION = """\
CREATE TABLE plugin_kv_storage (
    plugin_name VARCHAR(100) NOT NULL,
    key VARCHAR(255) NOT NULL,
    value_json TEXT NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (plugin_name, key)
);
CREATE INDEX idx_plugin_kv_expires ON plugin_kv_storage (expires_at);
CREATE INDEX idx_plugin_kv_prefix ON plugin_kv_storage (plugin_name, key);
"""
INSERT = "INSERT INTO plugin_kv_storage (plugin_name, key, value_json, expires_at) VALUES "
ROWS = {
    "('trivia', 'score', '{\"alice\": 3}', NULL)": {"alice": 3},
    "('trivia', 'soon', '7', '2100-01-01 00:00:00')": 7,
    "('trivia', 'zone', '8', '2100-01-01T02:00:00+02:00')": 8,
    "('trivia', 'over', '9', '2001-01-01 00:00:00')": None,
    "('trivia', 'B', '10', NULL)": 10,
    "('trivia', 'a', '11', NULL)": 11,
}


def made(url: str, create: str = BY_THE_SPECIFICATION) -> str:
    """A database in which a bot has made its table, with some rows."""
    carry_out(url, create)
    for row in ROWS:
        rows_at(url, INSERT + row)
    return url


def by_create_all(url: str) -> None:
    if url.startswith("sqlite"):
        engine = create_engine(url)
        Base.metadata.create_all(engine)
        engine.dispose()
        return

    async def create() -> None:
        engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await engine.dispose()

    asyncio.run(create())


async def shows_its_rows(url: str) -> None:
    """Keyloft reads the rows, in its own order, and writes beside them."""
    db = BotDatabase(url)
    try:
        for row, value in ROWS.items():
            found = await db.kv_get("trivia", row.split("'")[3])
            assert (found["exists"], found.get("value")) == (value is not None, value), row
        listed = await db.kv_list("trivia")
        assert listed["keys"] == ["B", "a", "score", "soon", "zone"]
        await db.kv_set("trivia", "a", 12, ttl_seconds=60)
        await db.kv_set("trivia", "new", 13)
        assert [(await db.kv_get("trivia", key))["value"] for key in ("a", "new")] == [12, 13]
        assert await db.kv_cleanup_expired() == 1
    finally:
        await db.aclose()


def test_a_table_by_the_specification_is_adopted_with_its_rows(url: str) -> None:
    made(url)
    asyncio.run(shows_its_rows(url))


def test_a_migration_adopts_it_too(url: str) -> None:
    made(url)
    migrations.upgrade(url)
    asyncio.run(shows_its_rows(url))
    assert not alembic(url, "check").code


def test_what_a_plan_shows_adopts_it(url: str) -> None:
    made(url)
    before = whole(url)
    plan = migrations.plan(url)
    assert whole(url) == before
    if url.startswith("sqlite"):
        rows_at(url, plan.sql)  # in one session: the rows go through a temporary table
    else:
        carry_out(url, plan.sql)
    asyncio.run(shows_its_rows(url))


def test_an_adopted_table_has_keylofts_schema(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    made(url)
    migrations.upgrade(url)
    if url.startswith("sqlite"):
        other = f"sqlite:///{tmp_path / 'fresh.db'}"
        migrations.upgrade(other)
        assert whole(url) == whole(other)
        return
    with fresh_database(request.getfixturevalue("postgres_server")) as other:
        migrations.upgrade(other)
        assert without_key_name(url) == without_key_name(other)


def without_key_name(url: str) -> set[str]:
    """All that is known of the table, but for the name of its primary key, which stays."""
    return {
        str(row).replace("plugin_kv_storage_pkey", "pk_plugin_kv_storage")
        for row in postgres_schema(url, "plugin_kv_storage")
    }


def test_a_table_of_the_model_is_adopted_as_it_is(url: str) -> None:
    by_create_all(url)
    rows_at(url, INSERT + "('trivia', 'score', '7', NULL)")
    before = rows_at(url, "SELECT * FROM plugin_kv_storage")
    finding = adoption(url)
    assert finding["severity"] == "ok"
    assert "leaves it as it is" in finding["what"]

    async def read() -> Any:
        db = BotDatabase(url)
        try:
            return await db.kv_get("trivia", "score")
        finally:
            await db.aclose()

    assert asyncio.run(read())["value"] == 7
    assert rows_at(url, "SELECT * FROM plugin_kv_storage") == before


def test_what_a_table_lacks_is_added(url: str) -> None:
    carry_out(url, "CREATE TABLE plugin_kv_storage (plugin_name VARCHAR(50), key VARCHAR(50), value_json TEXT)")
    rows_at(url, "INSERT INTO plugin_kv_storage VALUES ('trivia', 'score', '7')")
    assert adoption(url)["severity"] == "warning"

    async def use() -> None:
        db = BotDatabase(url)
        try:
            assert (await db.kv_get("trivia", "score"))["value"] == 7
            await db.kv_set("trivia", "k" * 255, 1, ttl_seconds=60)
            assert (await db.kv_get("trivia", "k" * 255))["value"] == 1
        finally:
            await db.aclose()

    asyncio.run(use())
    assert rows_at(url, "SELECT count(*), count(created_at), min(version) FROM plugin_kv_storage") == [(2, 2, 0)]


def test_versions_of_another_counter_do_not_stay(url: str) -> None:
    by_create_all(url)
    rows_at(url, INSERT + "('trivia', 'score', '7', NULL)")
    rows_at(url, "UPDATE plugin_kv_storage SET version = 1000000")
    migrations.upgrade(url)
    assert rows_at(url, "SELECT version FROM plugin_kv_storage") == [(0,)]


def test_an_unlogged_table_becomes_durable(postgres_url: str) -> None:
    made(postgres_url, BY_THE_SPECIFICATION.replace("CREATE TABLE", "CREATE UNLOGGED TABLE"))
    asyncio.run(shows_its_rows(postgres_url))
    assert rows_at(postgres_url, "SELECT relpersistence::text FROM pg_class WHERE relname = 'plugin_kv_storage'") == [
        ("p",)
    ]


@pytest.mark.parametrize("rule", ["CHECK (length(value_json) < 30)", "UNIQUE (value_json)"])
def test_what_would_refuse_writes_to_a_file_does_not_stay(file: Path, rule: str) -> None:
    url = f"sqlite:///{file}"
    by_create_all(url)
    [(create,)] = rows_at(url, "SELECT sql FROM sqlite_schema WHERE name = 'plugin_kv_storage'")
    rows_at(url, "DROP TABLE plugin_kv_storage")
    carry_out(url, f"{create.rpartition(')')[0]}, {rule})")

    async def same_long_values() -> None:
        async with BotDatabase(file) as db:
            for key in ("a", "b"):
                await db.kv_set("trivia", key, "long" * 10)

    asyncio.run(same_long_values())


def test_times_without_a_zone_count_as_utc(postgres_url: str) -> None:
    made(postgres_url, BY_THE_SPECIFICATION.replace("WITH TIME ZONE", "(3) WITHOUT TIME ZONE"))
    rows_at(postgres_url, "SET timezone = 'Asia/Tokyo'")
    migrations.upgrade(postgres_url)
    sql = "SELECT expires_at FROM plugin_kv_storage WHERE key = 'soon'"
    assert rows_at(postgres_url, sql) == [(datetime(2100, 1, 1, tzinfo=UTC),)]


@pytest.mark.parametrize("children", [[OPENING_CHILD] * 3, [CHILD, OPENING_CHILD] * 2], ids=["opening", "migrating"])
@pytest.mark.slow
def test_processes_that_adopt_at_the_same_moment_all_succeed(url: str, children: list[str]) -> None:
    made(url)
    at_the_same_moment(url, *children)
    asyncio.run(shows_its_rows(url))


# What can't be adopted

COLUMNS = BY_THE_SPECIFICATION.split(";")[0]
BOTH = {
    "integer expiries": (
        COLUMNS.replace("expires_at TIMESTAMP WITH TIME ZONE", "expires_at INTEGER"),
        "column expires_at: expected (DATETIME|TIMESTAMP WITH TIME ZONE), found INTEGER",
    ),
    "another column": (
        COLUMNS.replace("PRIMARY KEY", "owner VARCHAR(9), PRIMARY KEY"),
        "column owner: expected no such column",
    ),
    "no value": (COLUMNS.replace("value_json TEXT NOT NULL,", ""), "column value_json: expected a text, found no such"),
    "numbers as keys": (COLUMNS.replace("key VARCHAR(255)", "key INTEGER"), "column key: expected .*, found INTEGER"),
    "JSON": (COLUMNS.replace("value_json TEXT", "value_json JSON"), "column value_json: expected TEXT.*, found JSON"),
    "no value in a row": (
        "CREATE TABLE plugin_kv_storage (plugin_name TEXT, key TEXT, value_json TEXT); "
        "INSERT INTO plugin_kv_storage VALUES ('trivia', 'score', NULL)",
        "column value_json: expected a text, found .* in 1 row",
    ),
    "a key twice": (
        "CREATE TABLE plugin_kv_storage (plugin_name TEXT, key TEXT, value_json TEXT); "
        "INSERT INTO plugin_kv_storage VALUES ('trivia', 'score', '1'), ('trivia', 'score', '2')",
        "primary key: expected each .plugin_name, key. once, found 1 row more",
    ),
    "a view": (
        "CREATE TABLE real (plugin_name TEXT, key TEXT, value_json TEXT); "
        "CREATE VIEW plugin_kv_storage AS SELECT * FROM real",
        "plugin_kv_storage: expected a table, found a view",
    ),
}
SQLITE = {
    "numbers as times": (
        f"{COLUMNS}; {INSERT} ('trivia', 'score', '7', 1735689600)",
        "column expires_at: expected a time such as .*, found something else in 1 row",
    ),
    "no time": (f"{COLUMNS}; {INSERT} ('trivia', 'score', '7', 'tomorrow')", "column expires_at: expected a time"),
}
POSTGRES = {
    "another primary key": (
        COLUMNS.replace("PRIMARY KEY (plugin_name, key)", "PRIMARY KEY (key)"),
        "primary key: expected plugin_name, key, found key",
    ),
    "a deferrable primary key": (
        COLUMNS.replace("key)\n", "key) DEFERRABLE\n"),
        "deferrable constraint plugin_kv_storage_pkey: expected none",
    ),
    "a check": (
        COLUMNS.replace("PRIMARY KEY", "CONSTRAINT short CHECK (length(value_json) < 9), PRIMARY KEY"),
        "constraint short: expected none",
    ),
    "a foreign key": (
        "CREATE TABLE bots (name VARCHAR(100) PRIMARY KEY); "
        + COLUMNS.replace("PRIMARY KEY", "CONSTRAINT known FOREIGN KEY (plugin_name) REFERENCES bots, PRIMARY KEY"),
        "constraint known: expected none",
    ),
    "values that are unique": (
        f"{COLUMNS}; CREATE UNIQUE INDEX once ON plugin_kv_storage (value_json)",
        "unique index once: expected none",
    ),
    "a trigger": (
        f"{COLUMNS}; CREATE TRIGGER lazy BEFORE UPDATE ON plugin_kv_storage "
        "FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "trigger lazy: expected none",
    ),
    "a rule": (
        f"{COLUMNS}; CREATE RULE kept AS ON DELETE TO plugin_kv_storage DO INSTEAD NOTHING",
        "rule kept: expected none",
    ),
    "row security": (
        f"{COLUMNS}; ALTER TABLE plugin_kv_storage ENABLE ROW LEVEL SECURITY",
        "row security: expected none",
    ),
    "partitions": (
        f"{COLUMNS} PARTITION BY LIST (plugin_name)",
        "plugin_kv_storage: expected a table, found a partitioned one",
    ),
    "a child": (f"{COLUMNS}; CREATE TABLE more () INHERITS (plugin_kv_storage)", "inheritance: expected none"),
}


def refused(url: str, sql: str, reason: str) -> None:
    carry_out(url, sql)
    before = whole(url)
    for attempt in (lambda: migrations.upgrade(url), lambda: migrations.plan(url), lambda: asyncio.run(opened(url))):
        with pytest.raises(CannotOpen, match=reason) as caught:
            attempt()
        assert caught.value.code == "CANNOT_OPEN"
        assert "docs/DATABASE.md" in str(caught.value)
        assert whole(url) == before
    finding = adoption(url)
    assert finding["severity"] == "problem"
    assert re.search(reason, finding["what"])
    assert whole(url) == before


async def opened(url: str) -> None:
    async with keyloft.open(url):
        pass


def adoption(url: str) -> dict[str, Any]:
    """What `keyloft doctor` says of the table, which stays as it is."""
    found = [finding for finding in asyncio.run(doctor.examine(url)) if finding.code == "adoption"]
    [finding] = found
    return {"severity": finding.severity, "what": finding.what, "cure": finding.cure}


@pytest.mark.parametrize("case", BOTH)
def test_a_table_that_does_not_fit_is_refused_by_name(url: str, case: str) -> None:
    refused(url, *BOTH[case])


@pytest.mark.parametrize("case", SQLITE)
def test_a_file_with_rows_that_do_not_fit_is_refused(file: Path, case: str) -> None:
    refused(f"sqlite:///{file}", *SQLITE[case])


@pytest.mark.parametrize("case", POSTGRES)
def test_a_server_with_a_table_that_does_not_fit_is_refused(postgres_url: str, case: str) -> None:
    refused(postgres_url, *POSTGRES[case])


def test_a_trigger_is_not_lost(file: Path) -> None:
    carry_out(f"sqlite:///{file}", COLUMNS)
    rows_at(
        f"sqlite:///{file}",
        "CREATE TRIGGER counting AFTER INSERT ON plugin_kv_storage BEGIN SELECT 1; END",
    )
    with pytest.raises(CannotOpen, match="trigger counting: expected none"):
        asyncio.run(opened(str(file)))


def test_another_table_with_a_name_of_keylofts_is_named(file: Path) -> None:
    carry_out(f"sqlite:///{file}", "CREATE TABLE keyloft_tuples (a)")
    before = schema(file)
    with pytest.raises(CannotOpen, match="keyloft_tuples already exists; rename"):
        asyncio.run(opened(str(file)))
    assert schema(file) == before


def test_a_table_of_another_owner_is_refused_with_the_reason(postgres_url: str) -> None:
    made(postgres_url)
    rows_at(postgres_url, "CREATE VIEW seen AS SELECT key FROM plugin_kv_storage")
    with pytest.raises(CannotOpen, match=r"can't adopt: .*view.*; nothing was changed"):
        asyncio.run(opened(postgres_url))


@pytest.mark.slow
def test_serve_does_not_wait_for_a_table_to_change(url: str, tmp_path: Path) -> None:
    carry_out(url, BOTH["integer expiries"][0])
    code, error = asyncio.run(serve_refused(tmp_path, "--database", url, "--nats-port", "0"))
    assert code == 1
    assert "CANNOT_OPEN" in error
    assert "column expires_at" in error


# Expiries in Unix seconds, as docs/DATABASE.md says

CHAPTER = (ROOT / "docs/DATABASE.md").read_text().split("## A table that is there already")[1].split("\n## ")[0]
CONVERT = {
    "sqlite": CHAPTER.split("BEGIN;")[1].split("COMMIT;")[0],
    "postgresql": "ALTER TABLE" + CHAPTER.split("```sql postgres\nALTER TABLE")[1].split("```")[0],
}


def test_a_table_with_unix_seconds_is_adopted_once_it_is_converted(url: str) -> None:
    carry_out(url, COLUMNS.replace("expires_at TIMESTAMP WITH TIME ZONE", "expires_at BIGINT"))
    moments = {"soon": 4102444800, "over": 978307200, "never": "NULL"}
    for key, moment in moments.items():
        rows_at(url, f"{INSERT} ('trivia', '{key}', '1', {moment})")
    with pytest.raises(CannotOpen, match="column expires_at"):
        migrations.upgrade(url)
    carry_out(url, CONVERT[url.split(":")[0]])

    async def read() -> None:
        db = BotDatabase(url)
        try:
            assert (await db.kv_list("trivia"))["keys"] == ["never", "soon"]
        finally:
            await db.aclose()

    asyncio.run(read())
    [(moment,)] = rows_at(url, "SELECT expires_at FROM plugin_kv_storage WHERE key = 'soon'")
    assert moment in ("2100-01-01 00:00:00.000000", datetime(2100, 1, 1, tzinfo=UTC))


# The model


@pytest.mark.parametrize("moment", [1735689600, 1735689600.5, "2030-01-31", date(2030, 1, 31)])
@pytest.mark.parametrize("column", ["expires_at", "created_at", "updated_at"])
def test_the_model_refuses_what_is_no_datetime(column: str, moment: object) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"{column}: expected a datetime, got (int|float|str|date); .*fromtimestamp"
    ):
        PluginKVStorage(plugin_name="trivia", key="score", **{column: moment})


def test_the_model_takes_a_datetime_and_none(file: Path) -> None:
    by_create_all(f"sqlite:///{file}")
    engine = create_engine(f"sqlite:///{file}")
    soon = datetime.now(UTC) + timedelta(hours=1)
    with Session(engine) as session:
        for key, moment in (("a", soon), ("b", None)):
            session.add(PluginKVStorage(plugin_name="trivia", key=key, value_json="1", expires_at=moment))
        session.commit()
    engine.dispose()
    assert rows_at(f"sqlite:///{file}", "SELECT count(*), count(expires_at) FROM plugin_kv_storage") == [(2, 1)]
