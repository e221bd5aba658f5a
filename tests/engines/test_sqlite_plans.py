"""Every hot statement of the SQLite engine uses its index, and never sorts."""

from pathlib import Path

import apsw
import pytest

from keyloft.engines.layouts import LAYOUTS, READ_CLOCK, WRITE_CLOCK, Layout
from keyloft.engines.sqlite_file import SqliteFile
from keyloft.records import Space


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> apsw.Connection:
    path: Path = tmp_path_factory.mktemp("plans") / "app.db"
    return SqliteFile(str(path), "full").open_writer()


def plan(connection: apsw.Connection, statement: str) -> str:
    count = max((statement.count(f"?{n}") and n for n in range(1, 9)), default=0)
    rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", (None,) * count).fetchall()
    return "\n".join(str(row[3]) for row in rows)


PLUGINS = LAYOUTS[Space.PLUGINS]


def own(layout: Layout) -> str:
    return "plugin_name=? AND " if layout is PLUGINS else ""


def key_index(layout: Layout) -> str:
    return f"sqlite_autoindex_{layout.table}_1"


def range_index(layout: Layout) -> str:
    return "idx_plugin_kv_prefix" if layout is PLUGINS else key_index(layout)


def due_index(layout: Layout) -> str:
    return "idx_plugin_kv_expires" if layout is PLUGINS else f"{layout.table}_expires"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.table)
class TestPlans:
    def test_points_are_looked_up_by_the_key(self, connection: apsw.Connection, layout: Layout) -> None:
        for statement in (layout.get, layout.remove, layout.retime):
            shown = plan(connection, statement)
            assert shown == f"SEARCH {layout.table} USING INDEX {key_index(layout)} ({own(layout)}key=?)"

    def test_many_points_are_looked_up_by_the_key_too(self, connection: apsw.Connection, layout: Layout) -> None:
        count = layout.gets.count("?")
        rows = connection.execute(f"EXPLAIN QUERY PLAN {layout.gets}", (None,) * count).fetchall()
        *_, last = [str(row[3]) for row in rows]
        assert last == f"SEARCH {layout.table} USING INDEX {key_index(layout)} ({own(layout)}key=?)"

    def test_scans_walk_the_key_index_in_order(self, connection: apsw.Connection, layout: Layout) -> None:
        assert len(layout.scans) == 8
        for statement in layout.scans.values():
            assert plan(connection, statement) == (
                f"SEARCH {layout.table} USING INDEX {range_index(layout)} ({own(layout)}key>? AND key<?)"
            )

    def test_counting_reads_no_rows_but_the_expired(self, connection: apsw.Connection, layout: Layout) -> None:
        shown = plan(connection, layout.count)
        assert f"USING COVERING INDEX {range_index(layout)} ({own(layout)}key>? AND key<?)" in shown
        assert f"USING INDEX {due_index(layout)} (expires_at<?)" in shown

    def test_the_sweeper_finds_what_is_due_by_its_index(self, connection: apsw.Connection, layout: Layout) -> None:
        assert plan(connection, layout.expired) == (
            f"SEARCH {layout.table} USING INDEX {due_index(layout)} (expires_at<?)"
        )

    def test_an_upsert_needs_no_plan(self, connection: apsw.Connection, layout: Layout) -> None:
        assert plan(connection, layout.put) == ""


def test_the_clock_is_one_row(connection: apsw.Connection) -> None:
    for statement in (READ_CLOCK, WRITE_CLOCK):
        assert plan(connection, statement) == "SCAN keyloft_clock"
    assert connection.execute("SELECT count(*) FROM keyloft_clock").fetchall() == [(1,)]
