"""Migrations make the same schema as opening does, go back, and keep what is stored."""

import asyncio
import contextlib
import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest
from alembic import command
from alembic.config import CommandLine, Config
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import keyloft
from keyloft import CannotOpen, DatabaseError, InvalidArgument, SchemaTooOld, WrongLoop, migrations
from keyloft.core.schema import REVISION, REVISION_TABLE
from keyloft.plugins.models import Base
from tests.support.examples import rounds
from tests.support.fork_server import ForkedProcess, run
from tools.postgres import connected, fresh_database, query

ROOT = Path(__file__).parents[2]
PLUGIN_ROW = "INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES ('trivia', 'score', '7')"
TABLES = [
    "keyloft_changes",
    "keyloft_semantic",
    "keyloft_store",
    "keyloft_tuples",
    "keyloft_version",
    "plugin_kv_storage",
]
SQLITE_TABLES = sorted([*TABLES, "keyloft_semantic_large", "keyloft_tuples_large"])
FIRST_CHANGE = (1, 0, -1, 0, 0)
LOG = "SELECT version, part, base, at, size FROM keyloft_changes"

# They wait for the URL of a database, so that several processes do something with it at the same moment.
CHILD = """
import sys
from alembic import command, config, context
from keyloft import migrations
print("ready", flush=True)
for line in sys.stdin:
    migrations.upgrade(line.strip())
    print("done", flush=True)
"""
OPENING_CHILD = """
import asyncio, os, sys
import asyncpg, keyloft
from keyloft.engines.postgres import engine as postgres
async def main(url):
    async with keyloft.open(url) as kv:
        await kv.set((os.getpid(),), 1)
print("ready", flush=True)
for line in sys.stdin:
    asyncio.run(main(line.strip()))
    print("done", flush=True)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, file: Path) -> str:
    return f"sqlite:///{file}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def rows(file: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(apsw.Connection(str(file))) as connection:
        return list(connection.execute(sql).fetchall())


def rows_at(url: str, sql: str) -> list[tuple[Any, ...]]:
    return rows(Path(url.removeprefix("sqlite:///")), sql) if url.startswith("sqlite") else query(url, sql)


def tables(url: str) -> list[str]:
    """But for those that only one of the databases has."""
    if url.startswith("sqlite"):
        found = rows_at(url, "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
        return [name for (name,) in found if not name.endswith("_large")]
    found = query(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename")
    return [name for (name,) in found if name != "keyloft_version_counter"]


def schema(file: Path) -> dict[str, Any]:
    """All that SQLite knows about each table and its indexes, but for how their SQL is laid out."""
    with closing(apsw.Connection(str(file))) as connection:

        def ask(sql: str, *bindings: str) -> list[tuple[Any, ...]]:
            return list(connection.execute(sql, bindings).fetchall())

        known: dict[str, Any] = {}
        for (table,) in ask("SELECT name FROM sqlite_schema WHERE type = 'table'"):
            indexes = ask("SELECT name, [unique], origin, partial FROM pragma_index_list(?) ORDER BY name", table)
            known[table] = {
                "kind": ask("SELECT type, ncol, wr, strict FROM pragma_table_list WHERE name = ?", table),
                "columns": ask("SELECT * FROM pragma_table_xinfo(?)", table),
                "indexes": indexes,
                "index columns": [ask("SELECT * FROM pragma_index_xinfo(?)", name) for name, *_ in indexes],
                "index SQL": ask(
                    """SELECT replace(sql, '"', '') FROM sqlite_schema
                    WHERE tbl_name = ? AND type = 'index' ORDER BY name""",
                    table,
                ),
            }
        for table in ("keyloft_changes", "keyloft_version"):
            if table in known:
                known[table]["rows"] = ask(f"SELECT * FROM {table}")
        return known


def postgres_schema(url: str, table: str = "%") -> list[tuple[Any, ...]]:
    """The same for PostgreSQL, by its catalogue."""
    columns = query(
        url,
        f"""
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, o.collname,
               pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_collation o ON o.oid = a.attcollation
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND c.relname LIKE '{table}'
        ORDER BY c.relname, a.attnum
        """,
    )
    indexes = query(
        url,
        "SELECT indexname, indexdef FROM pg_indexes "
        f"WHERE schemaname = 'public' AND tablename LIKE '{table}' ORDER BY indexname",
    )
    constraints = query(
        url,
        f"""
        SELECT k.conname, pg_get_constraintdef(k.oid) FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
        WHERE c.relnamespace = 'public'::regnamespace AND c.relname LIKE '{table}' ORDER BY 1
        """,
    )
    return [*columns, *indexes, *constraints]


class Shown(NamedTuple):
    """What became of a command of Alembic."""

    code: object
    text: str


def alembic(url: str | None, *arguments: str) -> Shown:
    """Run Alembic's command line in this process; without its ini file, which would set up this process's logs."""
    line, shown = CommandLine(), io.StringIO()
    options = line.parser.parse_args(arguments)
    config = Config(stdout=shown, output_buffer=shown, cmd_opts=options)
    config.set_main_option("script_location", "keyloft:migrations")
    config.set_main_option("path_separator", "os")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        if url is None:
            patch.delenv("DATABASE_URL", raising=False)
        else:
            patch.setenv("DATABASE_URL", url)
        try:
            line.run_cmd(config, options)
        except SystemExit as ended:
            return Shown(ended.code, shown.getvalue())
    return Shown(0, shown.getvalue())


async def opened_and_filled(url: str | Path) -> None:
    async with keyloft.open(url) as kv:
        await kv.set(("users", "alice"), {"name": "Alice"})
        await kv.set(("users", "bob"), {"name": "Bob"}, expire_in=3600)


async def test_a_migrated_file_has_the_schema_of_an_opened_one(tmp_path: Path) -> None:
    opened, migrated = tmp_path / "opened.db", tmp_path / "migrated.db"
    async with keyloft.open(opened):
        pass
    await asyncio.to_thread(migrations.upgrade, f"sqlite:///{migrated}")
    assert schema(migrated) == schema(opened)
    assert sorted(schema(opened)) == SQLITE_TABLES
    assert rows(migrated, LOG) == [FIRST_CHANGE]
    ids = [rows(file, "SELECT store_id FROM keyloft_store")[0][0] for file in (opened, migrated)]
    assert ids[0] != ids[1]
    assert [len(bytes.fromhex(store_id)) for store_id in ids] == [16, 16]
    for file in (opened, migrated):
        with pytest.raises(apsw.ConstraintError):
            rows(file, "INSERT INTO keyloft_store VALUES (2, 'another')")


async def test_a_migrated_server_has_the_schema_of_an_opened_one(postgres_server: str) -> None:
    with fresh_database(postgres_server) as opened, fresh_database(postgres_server) as migrated:
        async with keyloft.open(opened):
            pass
        await asyncio.to_thread(migrations.upgrade, migrated)
        assert postgres_schema(migrated) == postgres_schema(opened)
        assert tables(opened) == TABLES
        for table in ("keyloft_version_counter", "keyloft_changes", "keyloft_version"):
            assert query(migrated, f"SELECT * FROM {table}") == query(opened, f"SELECT * FROM {table}")
        for url in (opened, migrated):
            with pytest.raises(asyncpg.CheckViolationError):
                query(url, "INSERT INTO keyloft_version_counter VALUES (2, 0, 0)")


def test_the_last_revision_is_the_one_that_opening_stamps(file: Path) -> None:
    migrations.upgrade(file)
    assert rows(file, f"SELECT version_num FROM {REVISION_TABLE}") == [(REVISION,)]


def test_alembic_finds_no_difference_between_the_model_and_the_tables(url: str) -> None:
    migrations.upgrade(url)
    assert alembic(url, "check") == (0, "No new upgrade operations detected.\n")
    rows_at(url, "DROP INDEX idx_plugin_kv_prefix")
    refused = alembic(url, "check")
    assert refused.code != 0
    assert "idx_plugin_kv_prefix" in refused.text


def test_the_model_makes_the_table_of_the_migration_on_sqlite(tmp_path: Path) -> None:
    modelled, migrated = tmp_path / "modelled.db", tmp_path / "migrated.db"
    engine = create_engine(f"sqlite:///{modelled}")
    Base.metadata.create_all(engine)
    engine.dispose()
    migrations.upgrade(f"sqlite:///{migrated}")
    assert schema(modelled) == {"plugin_kv_storage": schema(migrated)["plugin_kv_storage"]}


def test_the_model_makes_the_table_of_the_migration_on_postgresql(postgres_url: str) -> None:
    async def connect() -> Any:
        return await asyncpg.connect(postgres_url)

    async def create_all() -> None:
        engine = create_async_engine("postgresql+asyncpg://", async_creator=connect)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await engine.dispose()

    asyncio.run(create_all())
    modelled = postgres_schema(postgres_url)
    query(postgres_url, "DROP TABLE plugin_kv_storage")
    migrations.upgrade(postgres_url)
    assert modelled == postgres_schema(postgres_url, "plugin_kv_storage")


async def test_a_migrated_file_can_be_opened(file: Path) -> None:
    await asyncio.to_thread(migrations.upgrade, str(file))
    await opened_and_filled(file)
    async with keyloft.open(file) as kv:
        assert (await kv.get(("users", "alice"))).value == {"name": "Alice"}


async def test_upgrading_an_opened_file_changes_nothing(file: Path) -> None:
    await opened_and_filled(file)
    before = schema(file), rows(file, "SELECT * FROM keyloft_tuples")
    await asyncio.to_thread(migrations.upgrade, f"sqlite+aiosqlite:///{file}")
    assert (schema(file), rows(file, "SELECT * FROM keyloft_tuples")) == before


async def test_a_step_down_drops_the_plugin_table_and_keeps_the_rest(file: Path) -> None:
    held = "SELECT key, version, expires_at, created_at, updated_at, value FROM keyloft_tuples"
    await opened_and_filled(file)
    rows(file, PLUGIN_ROW)
    before = schema(file), rows(file, held)
    with pytest.raises(DatabaseError, match=r"plugin_kv_storage has rows.*--drop.*-x drop=yes"):
        await asyncio.to_thread(migrations.downgrade, str(file), "-1")
    assert (schema(file), rows(file, held)) == before
    await asyncio.to_thread(partial(migrations.downgrade, str(file), "-1", drop=True))
    assert tables(f"sqlite:///{file}") == TABLES[:-1]
    assert rows(file, held) == before[1]
    with pytest.raises(SchemaTooOld, match=r"schema 0010.*keyloft migrate --database .*app\.db"):
        await keyloft.open(file)
    await asyncio.to_thread(migrations.upgrade, str(file))
    assert (schema(file), rows(file, held)) == before
    assert rows(file, "SELECT * FROM plugin_kv_storage") == []
    async with keyloft.open(file) as kv:
        assert [entry.key async for entry in kv.list()] == [("users", "alice"), ("users", "bob")]


async def test_a_step_down_on_a_server_drops_the_plugin_table_and_keeps_the_rest(postgres_url: str) -> None:
    def stored() -> list[list[tuple[Any, ...]]]:
        kept = ("keyloft_semantic", "keyloft_tuples", "keyloft_version_counter", "keyloft_changes", "keyloft_store")
        return [query(postgres_url, f"SELECT * FROM {table} ORDER BY 1") for table in kept]

    await opened_and_filled(postgres_url)
    query(postgres_url, PLUGIN_ROW)
    before = postgres_schema(postgres_url), stored()
    refused = await asyncio.to_thread(alembic, postgres_url, "downgrade", "-1")
    assert refused.code != 0
    assert "plugin_kv_storage has rows" in refused.text
    assert postgres_schema(postgres_url) == before[0]
    done = await asyncio.to_thread(alembic, postgres_url, "-x", "drop=yes", "downgrade", "-1")
    assert done.code == 0, done.text
    assert tables(postgres_url) == TABLES[:-1]
    kept = [row for row in before[0] if "plugin_kv" not in f"{row[0]} {row[1]}"]
    assert (postgres_schema(postgres_url), stored()) == (kept, before[1])
    with pytest.raises(SchemaTooOld, match=r"schema 0010.*keyloft migrate --database 'postgresql://"):
        await keyloft.open(postgres_url)
    await asyncio.to_thread(migrations.upgrade, postgres_url)
    assert (postgres_schema(postgres_url), stored()) == before
    assert query(postgres_url, "SELECT * FROM plugin_kv_storage") == []
    async with keyloft.open(postgres_url) as kv:
        assert [entry.key async for entry in kv.list()] == [("users", "alice"), ("users", "bob")]
        await kv.set(("users", "carol"), 1)


async def test_a_file_taken_down_to_the_base_is_a_fresh_one(file: Path) -> None:
    await opened_and_filled(file)
    await asyncio.to_thread(migrations.downgrade, str(file), "base")
    assert tables(f"sqlite:///{file}") == []
    await opened_and_filled(file)
    assert sorted(schema(file)) == SQLITE_TABLES


async def test_a_server_taken_down_to_the_base_has_nothing_of_keyloft(postgres_url: str) -> None:
    functions = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'keyloft%'"
    await opened_and_filled(postgres_url)
    assert query(postgres_url, functions) != [(0,)]
    await asyncio.to_thread(partial(migrations.downgrade, postgres_url, "base"))
    assert (tables(postgres_url), query(postgres_url, functions)) == ([], [(0,)])
    await opened_and_filled(postgres_url)


def test_up_down_and_up_again(url: str) -> None:
    migrations.upgrade(url)
    assert tables(url) == TABLES
    rows_at(url, PLUGIN_ROW)
    rows_at(url, "UPDATE keyloft_changes SET version = 5")
    migrations.downgrade(url, "-1", drop=True)
    assert tables(url) == TABLES[:-1]
    assert rows_at(url, "SELECT version_num FROM keyloft_version") == [("0010",)]
    migrations.upgrade(url)
    assert tables(url) == TABLES
    assert rows_at(url, "SELECT * FROM plugin_kv_storage") == []
    assert rows_at(url, LOG) == [(5, *FIRST_CHANGE[1:])]
    migrations.downgrade(url, "base")
    assert tables(url) == []
    migrations.upgrade(url, "0010")
    assert tables(url) == TABLES[:-1]
    migrations.upgrade(url, "+1")
    assert tables(url) == TABLES


def test_a_plugin_table_that_is_not_keylofts_is_not_taken_over(url: str) -> None:
    migrations.upgrade(url, "0010")
    rows_at(url, "CREATE TABLE plugin_kv_storage (plugin_name TEXT, key TEXT)")
    with pytest.raises(
        DatabaseError, match=r"plugin_kv_storage.*column value_json: expected a text, found no such column"
    ):
        migrations.upgrade(url)
    assert rows_at(url, "SELECT version_num FROM keyloft_version") == [("0010",)]


def whole(url: str) -> Any:
    return schema(Path(url.removeprefix("sqlite:///"))) if url.startswith("sqlite") else postgres_schema(url)


def carry_out(url: str, sql: str) -> None:
    """Run the statements of a plan, each by itself."""
    statements = re.split(r";(?=\n|$)", sql)
    run_each(url, [statement for statement in statements if statement.strip() not in ("BEGIN", "COMMIT", "")])


def run_each(url: str, statements: Iterable[str]) -> None:
    async def run(connection: Any) -> None:
        for statement in statements:
            await connection.execute(statement)

    if not url.startswith("sqlite"):
        connected(url, run)
        return
    with closing(apsw.Connection(url.removeprefix("sqlite:///"))) as connection:
        for statement in statements:
            connection.execute(statement).fetchall()


def test_a_plan_shows_what_would_be_done_and_changes_nothing(url: str, file: Path) -> None:
    plan = migrations.plan(url)
    assert (plan.current, plan.target, plan.is_down) == (None, REVISION, False)
    assert [step.revision for step in plan.steps] == ["0010", "0011"]
    assert plan.steps[1].name.startswith("The plugins' table")
    assert "CREATE TABLE plugin_kv_storage" in plan.sql
    assert not file.exists()
    assert tables(url) == []
    assert migrations.plan(url, "base", down=True).steps == ()

    migrations.upgrade(url)
    rows_at(url, PLUGIN_ROW)
    before = whole(url)
    assert migrations.plan(url) == migrations.MigrationPlan(REVISION, REVISION, (), "", False)
    back = migrations.plan(url, "-1", down=True)
    assert (back.current, back.target, [step.revision for step in back.steps]) == ("0011", "0010", ["0011"])
    assert "DROP TABLE plugin_kv_storage" in back.sql
    away = migrations.plan(url, "base", down=True)
    assert (away.target, [step.revision for step in away.steps]) == (None, ["0011", "0010"])
    assert whole(url) == before
    assert len(rows_at(url, "SELECT * FROM plugin_kv_storage")) == 1
    with pytest.raises(InvalidArgument, match="nowhere"):
        migrations.plan(url, "nowhere")


def test_what_a_plan_shows_is_what_a_migration_does(url: str) -> None:
    made = migrations.plan(url).sql
    migrations.upgrade(url)
    migrated = whole(url)
    carry_out(url, migrations.plan(url, "base", down=True).sql)
    assert tables(url) == []
    carry_out(url, made)
    assert whole(url) == migrated
    carry_out(url, migrations.plan(url, "-1", down=True).sql)
    assert tables(url) == TABLES[:-1]
    carry_out(url, migrations.plan(url).sql)
    assert whole(url) == migrated


def test_a_plan_of_a_database_of_a_later_version_is_refused(url: str) -> None:
    migrations.upgrade(url)
    rows_at(url, "UPDATE keyloft_version SET version_num = '0099'")
    with pytest.raises(DatabaseError, match="0099"):
        migrations.plan(url)


def test_other_tables_are_left_alone(url: str) -> None:
    """A bot may keep its own tables, and its own chain of migrations, in the same database."""
    for sql in ("CREATE TABLE alembic_version (version_num VARCHAR(32))", "INSERT INTO alembic_version VALUES ('abc')"):
        rows_at(url, sql)
    migrations.upgrade(url)
    migrations.downgrade(url, "base")
    assert tables(url) == ["alembic_version"]
    assert rows_at(url, "SELECT * FROM alembic_version") == [("abc",)]


def test_a_migration_that_fails_leaves_nothing(url: str) -> None:
    rows_at(url, "CREATE TABLE keyloft_semantic (mine INTEGER)")
    with pytest.raises(DatabaseError, match=r"nothing of it was kept: .*keyloft_semantic.*already exists"):
        migrations.upgrade(url)
    assert tables(url) == ["keyloft_semantic"]


@contextlib.contextmanager
def at_the_same_moment(*scripts: str) -> Iterator[Callable[[str], None]]:
    """Processes that do something with the database that they are given, at once; each succeeds, in silence."""
    with contextlib.ExitStack() as ends:
        children = [Sibling(script, ends) for script in scripts]

        def all_say(line: str) -> None:
            for child in children:
                assert child.printed.readline() == line, child.errors()

        def give(url: str) -> None:
            for child in children:
                child.given.write(f"{url}\n")
                child.given.flush()
            all_say("done\n")

        all_say("ready\n")
        yield give
        for child in children:
            child.given.close()
            assert (child.process.wait(), child.errors()) == (0, "")


class Sibling:
    """One of several processes that run a script; it reads lines, prints lines, and is killed if it does not end."""

    def __init__(self, script: str, ends: contextlib.ExitStack) -> None:
        (stdin, its_input), (its_output, stdout) = os.pipe(), os.pipe()
        self.given = ends.enter_context(os.fdopen(its_input, "w"))
        self.printed = ends.enter_context(os.fdopen(its_output))
        self._stderr = ends.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (`ends` closes it)
        self.process = ForkedProcess(["-c", script], stdin=stdin, stdout=stdout, stderr=self._stderr)
        ends.callback(self.process.kill)
        for end in (stdin, stdout):
            os.close(end)

    def errors(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()


@pytest.mark.slow
def test_processes_that_migrate_at_the_same_moment_all_succeed(url: str) -> None:
    with at_the_same_moment(*[CHILD] * 4) as give:
        give(url)
    assert tables(url) == TABLES
    assert rows_at(url, LOG) == [FIRST_CHANGE]
    assert rows_at(url, "SELECT version_num FROM keyloft_version") == [("0011",)]


def test_processes_that_open_an_empty_server_at_the_same_moment_can_all_write(postgres_server: str) -> None:
    with at_the_same_moment(*[OPENING_CHILD] * 5) as give:
        for _ in rounds(5):  # they meet at different places each time
            with fresh_database(postgres_server) as url:
                give(url)
                assert tables(url) == TABLES
                assert query(url, "SELECT id, version FROM keyloft_version_counter") == [(1, 6)]
                assert query(url, "SELECT count(*), count(DISTINCT version) FROM keyloft_tuples") == [(5, 5)]


def test_processes_that_open_and_migrate_a_server_at_the_same_moment_all_succeed(postgres_url: str) -> None:
    with at_the_same_moment(CHILD, OPENING_CHILD, CHILD, OPENING_CHILD) as give:
        give(postgres_url)
    assert tables(postgres_url) == TABLES


def test_threads_migrate_one_after_the_other(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.db" for number in range(4)]
    threads = [threading.Thread(target=migrations.upgrade, args=(str(file),)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(schema(file)) for file in files] == [SQLITE_TABLES] * 4


@pytest.mark.slow
async def test_opening_and_migrating_at_the_same_moment_both_succeed(file: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    await child.stdout.readline()
    child.stdin.write(f"{file}\n".encode())
    child.stdin.write_eof()
    await opened_and_filled(file)
    await child.communicate()
    assert child.returncode == 0
    assert sorted(schema(file)) == SQLITE_TABLES


def test_the_command_line_migrates_up_and_down(url: str) -> None:
    shown = []
    for arguments in ("upgrade head", "downgrade -1", "current", "upgrade head", "current"):
        done = alembic(url, *arguments.split())
        assert done.code == 0, done.text
        shown += done.text.splitlines()
    assert shown == ["0010", "0011 (head)"]
    assert tables(url) == TABLES


@pytest.mark.slow
def test_alembic_finds_its_ini_file_in_a_clone(file: Path) -> None:
    for arguments, code, shown in (
        (("upgrade", "head"), 0, "Running upgrade 0010 -> 0011"),
        (("downgrade", "nowhere"), 255, "nowhere"),
    ):
        done = run(["-m", "alembic", *arguments], cwd=ROOT, env={**os.environ, "DATABASE_URL": f"sqlite:///{file}"})
        assert done.returncode == code, done.stderr
        assert shown in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(schema(file)) == SQLITE_TABLES


@pytest.mark.parametrize("scheme", ["sqlite:///", "sqlite+aiosqlite:///", "sqlite+pysqlite:///", "SQLite:///", ""])
def test_any_driver_in_the_url_of_a_file_will_do(scheme: str, file: Path) -> None:
    migrations.upgrade(f"{scheme}{file}")
    assert sorted(schema(file)) == SQLITE_TABLES


def test_a_relative_path_and_a_home_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    migrations.upgrade("sqlite:///relative 100%.db")
    migrations.upgrade("~/home.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home.db", "relative 100%.db"]


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg", "postgres", "postgresql+psycopg2"])
def test_any_driver_in_the_url_of_a_server_will_do(scheme: str, postgres_url: str) -> None:
    migrations.upgrade(postgres_url.replace("postgresql", scheme, 1))
    assert tables(postgres_url) == TABLES


def test_the_url_may_come_from_alembics_own_option(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "sqlite:///elsewhere.db")
    config = Config()
    config.set_main_option("script_location", "keyloft:migrations")
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", f"sqlite:///{file}")
    command.upgrade(config, "head")
    assert sorted(schema(file)) == SQLITE_TABLES


def test_without_a_url_the_command_line_says_what_to_set() -> None:
    done = alembic(None, "upgrade", "head")
    assert done.code != 0
    assert "set DATABASE_URL" in done.text


def test_a_server_that_is_not_there_is_no_traceback_on_the_command_line(tmp_path: Path) -> None:
    done = alembic(f"postgresql://postgres:secret@/x?host={tmp_path}", "upgrade", "head")
    assert done.code != 0
    assert "the migration failed" in done.text
    assert "secret" not in done.text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://localhost/bot", "no engine for mysql://"),
        ("", "named by a path or a URL"),
        (":memory:", "in memory"),
        ("sqlite://", "in memory"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite://app.db", "three slashes"),
        ("sqlite:///app.db?mode=ro", "leave .mode=ro out"),
    ],
)
def test_what_can_not_be_migrated_is_named(
    url: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/another.db")
    with pytest.raises((CannotOpen, InvalidArgument), match=reason):
        migrations.upgrade(url)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"missing/app\.db: the migration failed.*unable to open"):
        migrations.upgrade(f"sqlite:///{tmp_path}/missing/app.db")


def test_a_file_that_is_no_database_is_left_as_it_is(file: Path) -> None:
    file.write_bytes(b"not a database, but long enough to look like one. " * 100)
    before = file.read_bytes()
    with pytest.raises(DatabaseError, match="not a database"):
        migrations.upgrade(str(file))
    assert file.read_bytes() == before


def test_a_revision_of_a_later_version_is_an_error(file: Path) -> None:
    migrations.upgrade(str(file))
    rows(file, "UPDATE keyloft_version SET version_num = '9999'")
    with pytest.raises(DatabaseError, match="9999"):
        migrations.upgrade(str(file))


async def test_a_file_that_is_open_in_this_process_is_not_touched(file: Path) -> None:
    async with keyloft.open(file) as kv:
        with pytest.raises(CannotOpen, match="open in this process"):
            await asyncio.to_thread(migrations.upgrade, str(file))
        await kv.set(("k",), 1)


async def test_a_migration_does_not_block_an_event_loop(file: Path) -> None:
    with pytest.raises(WrongLoop, match="to_thread"):
        migrations.upgrade(str(file))


@pytest.mark.parametrize("missing", ["alembic", "asyncpg"])
def test_what_is_not_installed_is_named(missing: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(CannotOpen, match=r'pip install "\.\[sql'):
        migrations.upgrade("postgresql://localhost/x")


def in_a_script(dialect_url: str) -> Iterator[str]:
    done = alembic(dialect_url, "upgrade", "head", "--sql")
    assert done.code == 0, done.text
    return iter(done.text.split(";\n"))


def test_a_script_of_the_migration_makes_the_same_file(tmp_path: Path) -> None:
    scripted, migrated = tmp_path / "scripted.db", tmp_path / "migrated.db"
    with closing(apsw.Connection(str(scripted))) as connection:
        for statement in in_a_script(f"sqlite:///{tmp_path}/not-touched.db"):
            connection.execute(statement).fetchall()
    migrations.upgrade(str(migrated))
    assert schema(scripted) == schema(migrated)
    assert not (tmp_path / "not-touched.db").exists()


def test_a_script_for_postgresql_needs_no_server() -> None:
    assert any('COLLATE "C"' in statement for statement in in_a_script("postgresql://nowhere/x"))


def columns(known: Sequence[tuple[Any, ...]], table: str) -> dict[str, tuple[Any, ...]]:
    return {row[1]: row[2:] for row in known if row[0] == table}


def test_the_schema_on_postgresql(postgres_url: str) -> None:
    migrations.upgrade(postgres_url)
    known = postgres_schema(postgres_url)
    assert columns(known, "plugin_kv_storage") == {
        "plugin_name": ("character varying(100)", True, "C", None),
        "key": ("character varying(255)", True, "C", None),
        "value_json": ("text", True, "default", None),
        "expires_at": ("timestamp with time zone", False, None, None),
        "created_at": ("timestamp with time zone", True, None, "CURRENT_TIMESTAMP"),
        "updated_at": ("timestamp with time zone", True, None, "CURRENT_TIMESTAMP"),
        "version": ("bigint", True, None, "0"),
    }
    for table in ("keyloft_tuples", "keyloft_semantic"):
        assert columns(known, table) == {
            "key": ("bytea", True, None, None),
            "encoding": ("integer", True, None, None),
            "version": ("bigint", True, None, None),
            "expires_at": ("bigint", False, None, None),
            "created_at": ("bigint", True, None, None),
            "updated_at": ("bigint", True, None, None),
            "value": ("bytea", True, None, None),
        }
    assert columns(known, "keyloft_version_counter") == {
        "id": ("bigint", True, None, None),
        "version": ("bigint", True, None, None),
        "at": ("bigint", True, None, None),
        "timeline": ("bigint", True, None, "0"),
    }
    definitions = {row[0]: row[1] for row in known if len(row) == 2}
    assert definitions["pk_plugin_kv_storage"] == "PRIMARY KEY (plugin_name, key)"
    for index, table in (
        ("idx_plugin_kv_expires", "plugin_kv_storage"),
        ("keyloft_tuples_expires", "keyloft_tuples"),
        ("keyloft_semantic_expires", "keyloft_semantic"),
    ):
        assert definitions[index] == (
            f"CREATE INDEX {index} ON public.{table} USING btree (expires_at) WHERE (expires_at IS NOT NULL)"
        )
    assert definitions["idx_plugin_kv_prefix"].endswith("(plugin_name, key)")
    assert query(postgres_url, "SELECT * FROM keyloft_version_counter") == [(1, 1, 0, 1)]
    assert query(postgres_url, "SELECT * FROM keyloft_version") == [("0011",)]


def test_a_row_inserted_by_hand_into_postgresql_is_whole(postgres_url: str) -> None:
    migrations.upgrade(postgres_url)
    query(postgres_url, PLUGIN_ROW)
    fresh = (
        "now() - created_at < interval '1 minute' AND created_at = updated_at AND version = 0 AND expires_at IS NULL"
    )
    assert query(postgres_url, f"SELECT {fresh} FROM plugin_kv_storage") == [(True,)]
