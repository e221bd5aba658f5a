"""`keyloft stats`: what it counts, on a file and on PostgreSQL."""

import json
import re
from typing import Any

import pytest

from keyloft.core.schema import REVISION
from tests.cli.commands import ON_A_FILE, Keyloft, at_a_terminal
from tests.support.everything import filled, run_sql, stored


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    """A database with something of every kind."""
    filled(environment["KEYLOFT_DATABASE_URL"])
    return environment["KEYLOFT_DATABASE_URL"]


def shown(outcome: tuple[int, str, str]) -> Any:
    code, stdout, stderr = outcome
    assert (code, stderr) == (0, "")
    return json.loads(stdout)


def counts(tally: dict[str, Any]) -> tuple[int, int, int, int]:
    return tally["entries"], tally["other_rows"], tally["expiring_soon"], tally["expired"]


def test_entries_are_counted_by_interface_plugin_and_project(run: Keyloft, url: str) -> None:
    stats = shown(run("stats"))
    assert counts(stats["interfaces"]["tuples"]) == (5, 0, 1, 1)
    assert {store: counts(tally) for store, tally in stats["stores"].items()} == {"shop": (1, 0, 0, 0)}
    assert counts(stats["interfaces"]["plugins"]) == (3, 0, 1, 0)
    plugins = {plugin: counts(tally) for plugin, tally in stats["plugins"].items()}
    assert plugins == {"quotes": (1, 0, 0, 0), "trivia": (2, 0, 1, 0)}
    projects = {project: counts(tally) for project, tally in stats["projects"].items()}
    # web: five audit records and an index of one, three requests, one deleted entry; api: a record and a token.
    assert projects == {"acme/api": (1, 2, 1, 0), "acme/web": (2, 10, 0, 0)}
    assert counts(stats["interfaces"]["semantic"]) == (3, 13, 1, 0)  # with the key of the audit's hashes
    assert counts(stats["total"]) == (11, 13, 3, 1)
    total = stats["total"]
    assert total["entries"] + total["other_rows"] + total["expired"] == len(stored(url)) - 1


def test_bytes_are_those_of_keys_and_values(run: Keyloft, url: str) -> None:
    stats = shown(run("stats", "--json"))
    assert stats["plugins"]["quotes"]["bytes"] == len("quotes") + len("1") + len("null")
    assert stats["total"]["bytes"] == sum(interface["bytes"] for interface in stats["interfaces"].values())
    assert stats["database_bytes"] > 10_000
    assert (stats["wal_bytes"] is None) == ("://" in url)
    assert stats["version"] == stored(url)[0]


def test_the_option_soon_sets_what_counts_as_soon(run: Keyloft, url: str) -> None:
    assert shown(run("stats", "--soon", "0"))["total"]["expiring_soon"] == 0
    assert shown(run("stats", "--soon", "900"))["total"]["expiring_soon"] == 2
    assert shown(run("stats", "--soon", str(11 * 86_400)))["total"]["expiring_soon"] == 4
    assert run("stats", "--soon", "-1")[0] == 2
    assert run("stats", "--soon", "nan")[0] == 2


def test_the_oldest_expiry_is_that_of_what_is_not_yet_swept(run: Keyloft, url: str) -> None:
    stats = shown(run("stats"))
    assert (
        stats["total"]["oldest_expiry"]
        == stats["interfaces"]["tuples"]["oldest_expiry"]
        < stats["interfaces"]["plugins"]["oldest_expiry"]
    )
    run_sql(url, "DELETE FROM keyloft_tuples WHERE expires_at IS NOT NULL")
    assert shown(run("stats"))["interfaces"]["tuples"]["oldest_expiry"] is None


def test_the_size_of_the_change_log_is_shown(run: Keyloft, environment: dict[str, str], url: str) -> None:
    log = shown(run("stats"))["change_log"]
    [[rows, size]] = run_sql(url, "SELECT count(*), sum(length(changes)) FROM keyloft_changes")
    assert log == {"rows": rows, "bytes": size, "oldest_version": 0, "oldest_at": None}
    run_sql(url, "DELETE FROM keyloft_changes WHERE version < 4")
    log = shown(run("stats"))["change_log"]
    assert (log["rows"], log["oldest_version"], log["oldest_at"][:2]) == (rows - 3, 4, "20")
    screen = at_a_terminal({**environment, "COLUMNS": "160", "NO_COLOR": "1"}, "stats")[1]
    assert re.search(rf"change log: {rows - 3} rows, .* since version 4, \d\d\d\d-", screen)


@ON_A_FILE
def test_a_terminal_shows_tables_and_no_values(environment: dict[str, str], url: str) -> None:
    code, screen = at_a_terminal({**environment, "COLUMNS": "160", "NO_COLOR": "1"}, "stats")
    assert code == 0
    for word in ("trivia", "acme/web", "shop", "other rows", "on disk", f"schema {REVISION}"):
        assert word in screen
    assert "Alice" not in screen
    assert "\u2501" not in screen, "a bar without a total says nothing"
    last = at_a_terminal(environment, "stats", "--json")[1].splitlines()[-1]
    assert json.loads(last[last.index("{") :])["total"]["entries"] == 11  # behind what took the bar away


@ON_A_FILE
def test_a_narrow_terminal_breaks_no_day(environment: dict[str, str], url: str) -> None:
    screen = at_a_terminal({**environment, "COLUMNS": "80", "NO_COLOR": "1"}, "stats")[1]
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    assert re.search(r" \d{4}-\d\d-\d\d ?\s*$", screen, re.MULTILINE)
    assert max(len(line.rstrip()) for line in screen.splitlines() if "interface" in line or "─" in line) <= 80
    assert not re.search(r"\d{4}-\d?\d?-?\d?\s", screen)


@ON_A_FILE
def test_a_terminal_too_narrow_for_the_titles_shows_row_by_row(environment: dict[str, str], url: str) -> None:
    screen = at_a_terminal({**environment, "COLUMNS": "50", "NO_COLOR": "1"}, "stats")[1]
    assert "interface: plugins\r\n  entries: 3\r\n" in screen
    assert "plugin: trivia\r\n  entries: 2\r\n" in screen


def test_an_empty_database_has_nothing(run: Keyloft) -> None:
    run("set", "k", "1")
    run("delete", "k")
    stats = shown(run("stats"))
    assert (counts(stats["total"]), stats["total"]["oldest_expiry"], stats["plugins"]) == ((0, 0, 0, 0), None, {})
