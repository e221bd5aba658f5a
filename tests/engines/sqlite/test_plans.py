"""Every hot statement of the SQLite engine uses its index, and never sorts."""

from pathlib import Path

import apsw
import pytest

from keyloft.core.records import Space
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.tables import LAYOUTS, READ_VERSION, WRITE_VERSION, SqliteLayout


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> apsw.Connection:
    path: Path = tmp_path_factory.mktemp("plans") / "app.db"
    return SqliteFile(str(path), "full").open_writer()


def plan(connection: apsw.Connection, statement: str) -> str:
    count = max((statement.count(f"?{n}") and n for n in range(1, 10)), default=0)
    rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", (None,) * count).fetchall()
    return "\n".join(str(row[3]) for row in rows)


PLUGINS = LAYOUTS[Space.PLUGINS]


def by_key(layout: SqliteLayout) -> str:
    """The rows of a table without a rowid lie in the tree of its key."""
    if layout is not PLUGINS:
        return f"SEARCH {layout.table} USING PRIMARY KEY (key=?)"
    return f"SEARCH {layout.table} USING INDEX sqlite_autoindex_{layout.table}_1 (plugin_name=? AND key=?)"


def by_range(layout: SqliteLayout) -> str:
    if layout is not PLUGINS:
        return f"SEARCH {layout.table} USING PRIMARY KEY (key>? AND key<?)"
    return f"SEARCH {layout.table} USING INDEX idx_plugin_kv_prefix (plugin_name=? AND key>? AND key<?)"


def large(layout: SqliteLayout) -> str:
    """How a large value is found."""
    return "" if layout is PLUGINS else "\nSEARCH big USING INTEGER PRIMARY KEY (rowid=?) LEFT-JOIN"


def due_index(layout: SqliteLayout) -> str:
    return "idx_plugin_kv_expires" if layout is PLUGINS else f"{layout.table}_expires"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.table)
class TestSqlitePlans:
    def test_points_are_looked_up_by_the_key(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        for statement in (layout.get, layout.remove, layout.set_expiry):
            assert plan(connection, statement) == by_key(layout)

    def test_many_points_are_looked_up_by_the_key_too(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        count = layout.gets.count("?")
        rows = connection.execute(f"EXPLAIN QUERY PLAN {layout.gets}", (None,) * count).fetchall()
        shown = [str(row[3]) for row in rows]
        assert by_key(layout) in shown
        assert not [
            line for line in shown if line.startswith("SCAN") and line not in ("SCAN asked", "SCAN 16 CONSTANT ROWS")
        ]

    def test_scans_walk_the_key_index_in_order(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        assert len(layout.scans) == 8
        for (_, keys_only, _), statement in layout.scans.items():
            assert plan(connection, statement) == by_range(layout) + ("" if keys_only else large(layout))

    def test_counting_walks_the_range_alone_and_what_has_expired(
        self, connection: apsw.Connection, layout: SqliteLayout
    ) -> None:
        shown = plan(connection, layout.count)
        assert by_range(layout).replace("USING INDEX", "USING COVERING INDEX") in shown
        assert f"INDEX {due_index(layout)} (expires_at<?)" in shown

    def test_the_sweeper_finds_what_is_due_by_its_index(
        self, connection: apsw.Connection, layout: SqliteLayout
    ) -> None:
        assert plan(connection, layout.expired) == (
            f"SEARCH {layout.table} USING INDEX {due_index(layout)} (expires_at<?)"
        )

    def test_an_upsert_needs_no_plan(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        assert plan(connection, layout.put) == ""

    def test_large_values_are_found_by_their_id(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        if layout.large is None:
            assert layout is PLUGINS
            return
        assert plan(connection, layout.large.find) == by_key(layout)
        for statement in (layout.large.get, layout.large.replace, layout.large.remove):
            assert plan(connection, statement) == f"SEARCH {layout.large.table} USING INTEGER PRIMARY KEY (rowid=?)"
        for statement in (layout.large.add, layout.put_large):
            assert plan(connection, statement) == ""


def test_the_version_counter_is_one_row(connection: apsw.Connection) -> None:
    for statement in (READ_VERSION, WRITE_VERSION):
        assert plan(connection, statement) == "SCAN keyloft_version_counter"
    assert connection.execute("SELECT count(*) FROM keyloft_version_counter").fetchall() == [(1,)]
