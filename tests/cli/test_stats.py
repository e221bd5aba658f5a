"""`keyloft stats`: what it counts, on a file and on PostgreSQL."""

import json
import re
from typing import Any

import pytest

from keyloft.core.schema import REVISION
from tests.cli.commands import Keyloft, at_a_terminal
from tests.support.everything import filled, run_sql, stored


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    """A database with something of every kind."""
    filled(environment["KEYLOFT_DATABASE_URL"])
    return environment["KEYLOFT_DATABASE_URL"]


def shown(outcome: tuple[int, str, str]) -> Any:
    code, said, told = outcome
    assert (code, told) == (0, "")
    return json.loads(said)


def counts(tally: dict[str, Any]) -> tuple[int, int, int, int]:
    return tally["entries"], tally["other_rows"], tally["expiring_soon"], tally["expired"]


def test_entries_are_counted_by_interface_plugin_and_project(run: Keyloft, url: str) -> None:
    told = shown(run("stats"))
    assert counts(told["interfaces"]["tuples"]) == (4, 0, 1, 1)
    assert counts(told["interfaces"]["plugins"]) == (3, 0, 1, 0)
    plugins = {plugin: counts(tally) for plugin, tally in told["plugins"].items()}
    assert plugins == {"quotes": (1, 0, 0, 0), "trivia": (2, 0, 1, 0)}
    projects = {project: counts(tally) for project, tally in told["projects"].items()}
    # web: five audit records and an index of one, three requests, one deleted entry; api: a record and a token.
    assert projects == {"acme/api": (1, 2, 1, 0), "acme/web": (2, 10, 0, 0)}
    assert counts(told["interfaces"]["semantic"]) == (3, 13, 1, 0)  # with the key of the audit's hashes
    assert counts(told["total"]) == (10, 13, 3, 1)
    total = told["total"]
    assert total["entries"] + total["other_rows"] + total["expired"] == len(stored(url)) - 1


def test_bytes_are_those_of_keys_and_values(run: Keyloft, url: str) -> None:
    told = shown(run("stats", "--json"))
    assert told["plugins"]["quotes"]["bytes"] == len("quotes") + len("1") + len("null")
    assert told["total"]["bytes"] == sum(interface["bytes"] for interface in told["interfaces"].values())
    assert told["database_bytes"] > 10_000
    assert (told["wal_bytes"] is None) == ("postgresql" in url)
    assert told["version"] == stored(url)[0]


def test_what_soon_means_can_be_said(run: Keyloft, url: str) -> None:
    assert shown(run("stats", "--soon", "0"))["total"]["expiring_soon"] == 0
    assert shown(run("stats", "--soon", "900"))["total"]["expiring_soon"] == 2
    assert shown(run("stats", "--soon", str(11 * 86_400)))["total"]["expiring_soon"] == 4
    assert run("stats", "--soon", "-1")[0] == 2
    assert run("stats", "--soon", "nan")[0] == 2


def test_the_oldest_expiry_is_that_of_what_is_not_yet_swept(run: Keyloft, url: str) -> None:
    told = shown(run("stats"))
    assert (
        told["total"]["oldest_expiry"]
        == told["interfaces"]["tuples"]["oldest_expiry"]
        < told["interfaces"]["plugins"]["oldest_expiry"]
    )
    run_sql(url, "DELETE FROM keyloft_tuples WHERE expires_at IS NOT NULL")
    assert shown(run("stats"))["interfaces"]["tuples"]["oldest_expiry"] is None


def test_a_terminal_shows_tables_and_no_values(environment: dict[str, str], url: str) -> None:
    code, said = at_a_terminal({**environment, "COLUMNS": "160", "NO_COLOR": "1"}, "stats")
    assert code == 0
    for word in ("trivia", "acme/web", "other rows", "on disk", f"schema {REVISION}"):
        assert word in said
    assert "Alice" not in said
    assert "\u2501" not in said, "a bar without a total says nothing"
    last = at_a_terminal(environment, "stats", "--json")[1].splitlines()[-1]
    assert json.loads(last[last.index("{") :])["total"]["entries"] == 10  # behind what took the bar away


def test_a_narrow_terminal_breaks_no_day(environment: dict[str, str], url: str) -> None:
    said = at_a_terminal({**environment, "COLUMNS": "80", "NO_COLOR": "1"}, "stats")[1]
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    assert re.search(r" \d{4}-\d\d-\d\d ?\s*$", said, re.MULTILINE)
    assert max(len(line.rstrip()) for line in said.splitlines() if "interface" in line or "─" in line) <= 80
    assert not re.search(r"\d{4}-\d?\d?-?\d?\s", said)


def test_an_empty_database_has_nothing(run: Keyloft) -> None:
    run("set", "k", "1")
    run("delete", "k")
    told = shown(run("stats"))
    assert (counts(told["total"]), told["total"]["oldest_expiry"], told["plugins"]) == ((0, 0, 0, 0), None, {})
