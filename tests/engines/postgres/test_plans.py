"""Every statement of the PostgreSQL engine reads no more rows than it has to, whenever its plan was made.

A plan that a connection keeps is as old as the first few uses of the statement: the table may have been empty then, or
so small that walking all of it was the best way. So statements are planned in several worlds, and carried out in a
table that is large by then; what counts is how many of its rows they touched.
"""

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest

from keyloft import limits
from keyloft.core.records import Add, Batch, Check, Delete, Set, Space, Touch
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.postgres.log import LOCK_VERSION, READ_VERSION, TRIM
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import CREATE, LAYOUTS, PLUGIN_USAGE, PostgresLayout
from tools.postgres import fresh_database, query

T = TypeVar("T")
Node: TypeAlias = dict[str, Any]

ROWS = 20_000
MANY = 64
LARGE = 2000
PLUGINS = LAYOUTS[Space.PLUGINS]

# In an order that has nothing to do with that of the keys, as rows come in life. One in ten has an expiry, and half of
# these are due.
_DUE = f"CASE WHEN n % 10 <> 0 THEN NULL WHEN n < {ROWS // 2} THEN 1 ELSE {2**52} END"
_FILL = """
INSERT INTO keyloft_tuples SELECT {key}, 0, n, {due}, 0, 0, '1' {numbers};
INSERT INTO keyloft_semantic SELECT {key}, 0, n, {due}, 0, 0, '1' {numbers};
INSERT INTO plugin_kv_storage SELECT 'p' || n % 2, {text}, '1', to_timestamp({due} / 1000), now(), now(), n {numbers}
"""


def fill(first: int, last: int) -> str:
    return _FILL.format(
        key="convert_to('k' || lpad(n::text, 6, '0'), 'UTF8')",
        text="'k' || lpad(n::text, 6, '0')",
        due=_DUE,
        numbers=f"FROM generate_series({first}, {last}) AS n ORDER BY md5(n::text)",
    )


class Statement(NamedTuple):
    """What is asked, and how many rows of the table the answer needs at most."""

    sql: str
    bindings: tuple[Any, ...]
    needs: int


@cache
def statements(layout: PostgresLayout) -> dict[str, Statement]:
    """Each statement of a layout, as the engine uses it; scans and counts over wide ranges and narrow ones."""
    numbers, large = range(1000, 1000 + 2 * MANY, 2), range(1000, 1000 + 2 * LARGE, 2)
    if layout is PLUGINS:
        key: tuple[Any, ...] = ("p0", "k001000")
        keys: tuple[Any, ...] = (["p0"] * MANY, [f"k{n:06d}" for n in numbers])
        wide: tuple[Any, ...] = ("p0", "k", "l")
        narrow: tuple[Any, ...] = ("p0", "k001000", "k001060")
        puts = (*keys, ["1"] * MANY, [1] * MANY, [None] * MANY)
        own = {"usage": Statement(PLUGIN_USAGE, (None, *key, MANY), MANY)}
        large_keys: tuple[Any, ...] = (["p0"] * LARGE, [f"k{n:06d}" for n in large])
        large_puts = (*large_keys, ["1"] * LARGE, [1] * LARGE, [None] * LARGE)
    else:
        key = (b"k001000",)
        keys = ([b"k%06d" % n for n in numbers],)
        wide, narrow = (b"k", b"l"), (b"k001000", b"k001030")
        puts = (*keys, [b"1"] * MANY, [0] * MANY, [1] * MANY, [None] * MANY)
        own = {}
        large_keys = ([b"k%06d" % n for n in large],)
        large_puts = (*large_keys, [b"1"] * LARGE, [0] * LARGE, [1] * LARGE, [None] * LARGE)
    asked = {
        **own,
        "get": Statement(layout.get, (None, *key), 1),
        "gets": Statement(layout.gets, (None, *keys), MANY),
        "count": Statement(layout.count, (None, *narrow), 30),
        "expired": Statement(layout.expired, (None, MANY), MANY),
        # All that expire in one millisecond come together: the half of one in ten.
        "due": Statement(layout.due, (None, 0, MANY), ROWS // 20 + MANY + 2),
        "next_expiry": Statement(layout.next_expiry, (None,), 1),
        "load_heads": Statement(layout.load_heads, keys, MANY),
        "load_moment": Statement(layout.load_moment, (None, *keys), MANY),
        "load_values": Statement(layout.load_values, keys, MANY),
        "lock": Statement(layout.lock, keys, 2 * MANY),
        "find_locked": Statement(layout.find_locked, keys, 2 * MANY),
        "remove": Statement(layout.remove, keys, MANY),
        "set_expiries": Statement(layout.set_expiries, (*keys, [None] * MANY), MANY),
        "put": Statement(layout.put, (1, *puts), 0),
        "update": Statement(update_of(layout), (1, *puts), MANY),
        "load_heads large": Statement(layout.load_heads, large_keys, LARGE),
        "load_moment large": Statement(layout.load_moment, (None, *large_keys), LARGE),
        "lock large": Statement(layout.lock, large_keys, 2 * LARGE),
        "find_locked large": Statement(layout.find_locked, large_keys, 2 * LARGE),
        "remove large": Statement(layout.remove, large_keys, LARGE),
        "set_expiries large": Statement(layout.set_expiries, (*large_keys, [None] * LARGE), LARGE),
        "update large": Statement(update_of(layout), (1, *large_puts), LARGE),
    }
    for (reverse, keys_only, after, times), sql in layout.scans.items():
        name = f"scan{' back' * reverse}{' keys' * keys_only}{' after' * after}{' times' * times}"
        # Of the rows between those that it shows, some have expired.
        asked[name] = Statement(sql, (None, *wide, MANY), 2 * MANY)
        asked[f"{name} narrow"] = Statement(sql, (None, *narrow, 1001), 30)
    return asked


def update_of(layout: PostgresLayout) -> str:
    """The statement of the function that commits by which rows are updated."""
    columns = [*layout.columns.values(), "bigint", "bigint"]
    arrays = [f"${at}::{kind}[]" for at, kind in enumerate(columns, 2)]
    return layout.update_rows("0", "$1::bigint", arrays, condition="old.xmax = '0'")


def literal(value: Any) -> str:
    """SQL for a value; EXECUTE takes no bindings."""
    match value:
        case list():
            inner = ",".join(literal(each).strip("'") for each in value)
            return f"'{{{inner}}}'".replace("\\", "\\\\")
        case None:
            return "NULL"
        case bytes():
            return rf"'\x{value.hex()}'"
        case str():
            return f"'{value}'"
    return str(value)


@cache
def bound(layout: PostgresLayout, name: str) -> str:
    """SQL for the bindings of a statement."""
    return ", ".join(map(literal, statements(layout)[name].bindings))


class AnalyzedDatabase:
    """A database, and a connection to it as the engine has it."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        address = DatabaseUrl.parse(url).postgres
        assert address is not None
        self._connection = self._run(PostgresServer(address, durability="full", patience=10).connect())
        for statement in CREATE:
            self.execute(statement)
        for layout in LAYOUTS.values():
            # Autovacuum must not analyze meanwhile.
            self.execute(f"ALTER TABLE {layout.table} SET (autovacuum_enabled = off)")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def execute(self, sql: str) -> None:
        self._run(self._connection.execute(sql))

    def rows(self, sql: str) -> list[Any]:
        found: list[Any] = self._run(self._connection.fetch(sql))
        return found

    def prepare_all(self, mode: str, *, plan: bool = False) -> None:
        """Prepare all statements; each is planned when it is first carried out, which `plan` does here."""
        self.execute(f"DEALLOCATE ALL; SET plan_cache_mode = {mode}")
        for layout in LAYOUTS.values():
            for name, statement in statements(layout).items():
                self.execute(f'PREPARE "{layout.table} {name}" AS {statement.sql}')
                if plan:
                    self.carried_out(layout, name)

    def carried_out(self, layout: PostgresLayout, name: str) -> Node:
        """Run a statement and roll back; returns its plan."""
        done = f'EXECUTE "{layout.table} {name}"({bound(layout, name)})'
        self.execute("BEGIN")
        shown = self._run(self._connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {done}"))
        self.execute("ROLLBACK")
        plan: Node = json.loads(shown)[0]["Plan"]
        return plan

    def close(self) -> None:
        self._run(self._connection.close())
        self._runner.close()


def nodes(plan: Node) -> Iterator[Node]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def due_index(layout: PostgresLayout) -> str:
    return "idx_plugin_kv_expires" if layout is PLUGINS else f"{layout.table}_expires"


def looked_at(plan: Node, table: str) -> int:
    """How many rows of a table were looked at, whether they were of use or not.

    A row that is compared with many keys counts as often.
    """
    counts: list[float] = [
        node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
        for node in nodes(plan)
        if node.get("Relation Name") == table and "Scan" in node["Node Type"]
    ]
    compared: list[float] = [node["Actual Loops"] * node.get("Rows Removed by Join Filter", 0) for node in nodes(plan)]
    return round(sum(counts) + sum(compared))


@pytest.fixture(
    scope="module",
    params=[
        "analyzed, generic plans",
        "analyzed, custom plans",
        "not analyzed, generic plans",
        "not analyzed, custom plans",
        "planned while it was empty",
        "planned while it was small",
        "analyzed while it had a row, generic plans",
        "analyzed while it had a row, custom plans",
    ],
)
def database(request: pytest.FixtureRequest, postgres_server: str) -> Iterator[AnalyzedDatabase]:
    with fresh_database(postgres_server) as url:
        database = AnalyzedDatabase(url)
        try:
            if request.param.startswith("planned"):
                if request.param.endswith("small"):
                    database.execute(fill(1, 100))
                    database.execute("ANALYZE")
                database.prepare_all("force_generic_plan", plan=True)
                database.execute(fill(101, ROWS))
                if request.param.endswith("empty"):
                    database.execute(fill(1, 100))
            else:
                if "had a row" in request.param:
                    database.execute(fill(1, 1))
                    database.execute("ANALYZE")
                    database.execute(fill(2, ROWS))
                else:
                    database.execute(fill(1, ROWS))
                if request.param.startswith("analyzed, "):
                    database.execute("ANALYZE")
                database.prepare_all(f"force_{'generic' if 'generic' in request.param else 'custom'}_plan")
            yield database
        finally:
            database.close()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.table)
class TestPostgresPlans:
    def test_each_statement_reads_only_the_rows_it_needs(
        self, database: AnalyzedDatabase, layout: PostgresLayout
    ) -> None:
        too_many = {}
        for name, statement in statements(layout).items():
            count = looked_at(database.carried_out(layout, name), layout.table)
            if count > statement.needs:
                too_many[name] = count
        assert too_many == {}

    def test_scans_walk_the_key_index_in_order(self, database: AnalyzedDatabase, layout: PostgresLayout) -> None:
        assert len(layout.scans) == 16
        for name in [name for name in statements(layout) if name.startswith("scan") and "narrow" not in name]:
            plan = database.carried_out(layout, name)
            [scan] = [node for node in nodes(plan) if node.get("Relation Name") == layout.table]
            assert scan["Node Type"] == "Index Scan"
            assert scan["Scan Direction"] == ("Backward" if "back" in name else "Forward")
            assert scan["Actual Rows"] == MANY
            assert re.search(r"key\)?(::text)? >=? .* AND .*key\)?(::text)? < ", scan["Index Cond"])
            assert "Sort" not in {node["Node Type"] for node in nodes(plan)}

    def test_what_is_due_is_found_by_its_index(self, database: AnalyzedDatabase, layout: PostgresLayout) -> None:
        plan = database.carried_out(layout, "expired")
        [scan] = [node for node in nodes(plan) if node.get("Relation Name") == layout.table]
        assert (scan["Node Type"], scan["Index Name"]) == ("Index Scan", due_index(layout))
        assert scan["Actual Rows"] == MANY
        assert "Sort" not in {node["Node Type"] for node in nodes(plan)}

    def test_an_upsert_searches_for_its_key_alone(self, database: AnalyzedDatabase, layout: PostgresLayout) -> None:
        key = "pk_plugin_kv_storage" if layout is PLUGINS else f"{layout.table}_pkey"
        [write] = [node for node in nodes(database.carried_out(layout, "put")) if "Conflict Resolution" in node]
        assert write["Conflict Arbiter Indexes"] == [key]
        assert (write["Tuples Inserted"], write["Conflicting Tuples"]) == (0, MANY)


def test_the_version_counter_is_one_row(database: AnalyzedDatabase) -> None:
    assert [tuple(row) for row in database.rows("SELECT id FROM keyloft_version_counter")] == [(1,)]
    for statement in (READ_VERSION.replace("$1", "NULL"), LOCK_VERSION):
        [shown] = database.rows(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
        assert looked_at(json.loads(shown[0])[0]["Plan"], "keyloft_version_counter") == 1


@pytest.mark.parametrize("may_go", [0, 3, limits.TRIM_ROWS])
def test_trimming_reads_few_rows_of_the_log_unless_many_may_go(database: AnalyzedDatabase, may_go: int) -> None:
    now, hour, rows = 10**13, 3_600_000, 2 * limits.TRIM_ROWS
    database.execute("BEGIN")
    database.execute(
        "INSERT INTO keyloft_changes (version, part, base, at, size, changes) SELECT n, 0, n - 1, "
        f"CASE WHEN n < {2 + may_go} THEN 0 ELSE {now} END, n, '' FROM generate_series(2, {rows}) AS n"
    )
    bindings = ", ".join([f"{number}::bigint" for number in (now, 0, hour, 2**40)])
    database.execute(f"PREPARE trim AS {TRIM}")
    [shown] = database.rows(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE trim({bindings})")
    [[kept]] = database.rows("SELECT count(*) FROM keyloft_changes")
    database.execute("DEALLOCATE trim; ROLLBACK")
    assert rows - kept == min(may_go, limits.TRIM_ROWS - 1)
    needed = 2 * limits.TRIM_FIRST_ROWS if may_go < limits.TRIM_FIRST_ROWS else 2 * limits.TRIM_ROWS
    assert looked_at(json.loads(shown[0])[0]["Plan"], "keyloft_changes") <= needed + 2 * limits.TRIM_FIRST_ROWS


async def test_the_function_that_commits_scans_no_table(postgres_url: str) -> None:
    """Its plans are made while the tables are empty, and used when they are large."""
    spaces = ((Space.TUPLES, b"k%06d"), (Space.SEMANTIC, b"k%06d"), (Space.PLUGINS, "k%06d"))
    engine = await open_engine(postgres_url)

    async def write(first: int) -> None:
        for number in range(first, first + 10):
            for space, form in spaces:
                key: Any = form % number if isinstance(form, bytes) else ("p0", form % number)
                other: Any = form % (number + 1) if isinstance(form, bytes) else ("p0", form % (number + 1))
                checks = (Check(space, key, None),)
                await engine.commit(Batch((Set(space, key, b"1", Encoding.JSON),)))
                await engine.commit(Batch((Add(space, key, 1), Touch(space, other, 5000)), checks))
                await engine.commit(Batch((Add(space, key, 1), Touch(space, other, 5000))))
                await engine.commit(Batch((Delete(space, key),)))

    await write(ROWS + 1)
    query(postgres_url, fill(1, ROWS).split(";")[0])
    for statement in fill(1, ROWS).split(";")[1:]:
        query(postgres_url, statement)
    await write(1000)
    await engine.aclose()
    await asyncio.sleep(0.2)
    read = query(postgres_url, "SELECT relname, seq_tup_read FROM pg_stat_user_tables WHERE seq_tup_read > 2000")
    assert read == []
