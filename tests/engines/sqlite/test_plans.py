"""Every hot statement of the SQLite engine uses its index, and never sorts."""

from pathlib import Path

import apsw
import pytest

from keyloft.core.records import Space
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.tables import (
    FIND_LOGGED,
    IS_LOGGED_AFTER,
    LAYOUTS,
    OLDEST_LOGGED,
    PLUGIN_USAGE,
    READ_LOG,
    READ_VERSION,
    TRIM_LOG,
    SqliteLayout,
)


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> apsw.Connection:
    path: Path = tmp_path_factory.mktemp("plans") / "app.db"
    return SqliteFile(str(path), "full").open_writer()


def plan(connection: apsw.Connection, statement: str) -> str:
    count = max((statement.count(f"?{n}") and n for n in range(1, 11)), default=0)
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


def due_index(layout: SqliteLayout) -> str:
    return "idx_plugin_kv_expires" if layout is PLUGINS else f"{layout.table}_expires"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.table)
class TestSqlitePlans:
    def test_points_are_looked_up_by_the_key(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        for statement in (
            layout.get,
            layout.get_without_times,
            layout.get_head,
            layout.remove,
            layout.remove_expected,
            layout.replace_expected,
            layout.set_expiry,
        ):
            assert plan(connection, statement) == by_key(layout)

    def test_many_points_are_looked_up_by_the_key_too(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        for count, statement in [*enumerate(layout.gets)][1:]:
            assert statement.count("?") == count * len(layout.key)
            rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", (None,) * statement.count("?")).fetchall()
            shown = [str(row[3]) for row in rows]
            assert by_key(layout) in shown
            scanned = {line for line in shown if line.startswith("SCAN")}
            assert scanned <= {"SCAN asked", "SCAN CONSTANT ROW", f"SCAN {count} CONSTANT ROWS"}

    def test_scans_walk_the_key_index_in_order(self, connection: apsw.Connection, layout: SqliteLayout) -> None:
        assert len(layout.scans) == 16
        for statement in layout.scans.values():
            assert plan(connection, statement) == by_range(layout)

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

    def test_watches_find_what_expired_and_what_expires_next_by_the_same_index(
        self, connection: apsw.Connection, layout: SqliteLayout
    ) -> None:
        for statement in (layout.due, layout.next_expiry):
            shown = plan(connection, statement).splitlines()
            searches = [line for line in shown if line.startswith(("SEARCH", "SCAN"))]
            assert searches
            assert all([f"INDEX {due_index(layout)} (expires_at>?" in line for line in searches]), shown

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


def test_usage_is_counted_along_the_key_index(connection: apsw.Connection) -> None:
    shown = plan(connection, PLUGIN_USAGE)
    assert "INDEX idx_plugin_kv_prefix ((plugin_name,key)>(?,?))" in shown
    assert "TEMP B-TREE" not in shown


@pytest.mark.parametrize(
    "statement",
    [READ_VERSION, OLDEST_LOGGED, FIND_LOGGED, READ_LOG, IS_LOGGED_AFTER, TRIM_LOG],
    ids=["read version", "oldest", "find", "read", "is logged after", "trim"],
)
def test_the_change_log_is_read_in_the_order_of_its_key(connection: apsw.Connection, statement: str) -> None:
    shown = plan(connection, statement)
    assert "USING TEMP B-TREE" not in shown
    without_condition = (READ_VERSION, OLDEST_LOGGED)  # both end of the key's tree
    scans = [line for line in shown.splitlines() if line.startswith("SCAN keyloft_changes")]
    assert bool(scans) == (statement in (*without_condition, TRIM_LOG)), shown
    if statement not in without_condition:
        assert "SEARCH keyloft_changes USING PRIMARY KEY (" in shown


def test_a_scan_is_compiled_once_whatever_is_bound(connection: apsw.Connection) -> None:
    compiled: list[object] = []

    def note(*action: object) -> int:
        compiled.append(action)
        return apsw.SQLITE_OK

    statements = [scan for layout in LAYOUTS.values() if layout is not PLUGINS for scan in layout.scans.values()]
    connection.authorizer = note  # called for each statement that is compiled
    try:
        for rows in (64, 1000, 64):
            if rows == 1000:
                assert compiled
                compiled.clear()
            for statement in statements:
                connection.execute(statement, (rows, b"a", b"z", rows)).fetchall()
    finally:
        connection.authorizer = None
    assert not compiled
