"""`keyloft get`, `list`, `set` and the other commands of the tuple store, on a file and on PostgreSQL."""

import asyncio
import json
import re
import signal
import socket
from pathlib import Path

import pytest

from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.limits import TRIM_EVERY
from keyloft.plugins import BotDatabase
from tests.cli.commands import (
    LONGEST_SECONDS,
    ON_A_FILE,
    SURROUNDINGS,
    WITHOUT_TABLES,
    Keyloft,
    at_a_terminal,
    run_command,
)
from tests.support.everything import run_sql
from tests.support.fork_server import PipedProcess


@WITHOUT_TABLES
def test_what_is_set_is_read_with_its_kind(run: Keyloft, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\x00")
    assert run("set", "users/alice", '{"name": "é"}')[:2] == (0, "2\n")
    assert run("set", "users/=5", "-5")[0] == 0
    assert run("set", "text", "100", "--text")[0] == 0
    assert run("set", "read", "-", given=b'["from", "input"]')[0] == 0
    assert run("set", "count", "7", "--counter")[0] == 0
    assert run("set", "bytes", str(tmp_path / "picture"), "--file")[0] == 0
    for key, shown in (
        ("users/alice", '{"name":"é"}'),
        ("users/=5", "-5"),
        ("text", '"100"'),
        ("read", '["from","input"]'),
        ("count", "7"),
        ("bytes", '{"bytes":"iVBORwA="}'),
    ):
        assert run("get", key) == (0, f"{shown}\n", "")
    assert run("get", "users/=5") == (0, "-5\n", "")
    assert run("get", "text", "--raw") == (0, "100", "")
    entry = json.loads(run("get", "count", "--entry")[1])
    assert entry == {"key": "count", "u64": 7, "versionstamp": 6}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"name": "Alice", secret}', "Expecting property name enclosed in double quotes (line 1, column 19)"),
        ("[1, 2", "Expecting ',' delimiter (line 1, column 6)"),
        ('"secret', "Unterminated string starting at (line 1, column 1)"),
        ('\n {"a":\n secret}', "Expecting value (line 3, column 2)"),
        ('{"secret": NaN}', "it contains NaN"),
        ("[" * 100_000 + "]" * 100_000, "it nests too deep"),
    ],
)
@ON_A_FILE
def test_a_value_that_begins_like_json_but_is_not_json_is_refused(run: Keyloft, value: str, message: str) -> None:
    run("set", "k", "1")
    code, stdout, stderr = run("set", "k", "-", given=value.encode())
    assert (code, stdout) == (2, "")
    assert f"VALUE is not JSON: {message}" in stderr
    assert "--text stores it as text" in stderr
    assert "secret" not in stderr
    assert run("get", "k")[1] == "1\n"
    assert run("set", "k", "-", "--text", given=value.encode())[0] == 0
    assert json.loads(run("get", "k")[1]) == value


def test_lists_show_what_they_are_asked_for(run: Keyloft) -> None:
    for number in range(5):
        run("set", f"log/={number}", str(number))
    run("set", "other", "1", "--expire-in", "1000")
    lines = run("list")[1].splitlines()
    assert [json.loads(line)["key"] for line in lines] == [*[f"log/={number}" for number in range(5)], "other"]
    assert "expires_at" in json.loads(lines[-1])
    assert run("keys", "log", "--limit", "2", "--reverse") == (0, "log/=4\nlog/=3\n", "")
    assert run("keys", "log/", "--start", "log/=1", "--end", "log/=3") == (0, "log/=1\nlog/=2\n", "")
    assert run("count", "log") == (0, "5\n", "")
    assert run("count") == (0, "6\n", "")
    assert run("list", "nothing") == (0, "", "")


def test_what_is_not_there_ends_with_code_1(run: Keyloft) -> None:
    run("set", "k", "1")
    assert run("get", "absent") == (1, "", "keyloft: there is no key absent\n")
    hint = "; keys are written users/alice"
    assert run("get", '["users","dave"]') == (1, "", f'keyloft: there is no key ["users","dave"]{hint}\n')
    assert run("touch", "absent", "--never") == (1, "", "keyloft: there is no key absent\n")
    assert run("delete", "absent") == (1, "0\n", "")
    assert run("delete", "--prefix", "absent", "--yes")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "a//b"),
        ("get", "=zz"),
        ("set", "k", "1", "--expire-in", "0"),
        ("set", "k", "1", "--text", "--counter"),
        ("set", "k", "-1", "--counter"),
        ("touch", "k"),
        ("touch", "k", "--never", "--expire-in", "5"),
        ("delete",),
        ("delete", "k", "--prefix", "x"),
        ("list", "--limit", "0"),
        ("list", "--start", "b", "--end", "a"),
        ("count", "--database", "mysql://nowhere"),
    ],
)
@ON_A_FILE
def test_a_wrong_call_is_explained(run: Keyloft, arguments: tuple[str, ...]) -> None:
    run("set", "k", "1")
    code, stdout, stderr = run(*arguments)
    assert code in (1, 2)
    assert stdout == ""
    assert stderr.startswith("keyloft: ")
    assert "Traceback" not in stderr


PUT = ("semantic", "put", "tenant/acme/project/web/k", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "--limit", "0"), "--limit: expected a whole number of at least 1"),
        (("semantic", "list", "tenant/acme/project/web", "--limit", "0"), "--limit: expected a whole number"),
        (("list", "a", "--start", "b"), "--start: outside the prefix"),
        (("set", "k", "1", "--expire-in", "0"), "leave it out for an entry that never expires"),
        (("semantic", "put", "tenant/acme", "1", "--purpose", "config"), "KEY: expected tenant/<tenant>/project/"),
        ((*PUT, "--purpose", "x"), "--purpose: expected one of checkpoint, "),
        ((*PUT, "--purpose", "x"), "`keyloft serve --purposes …`, registers another one"),
        ((*PUT, "--purpose", "config", "--ttl", "0"), "--ttl: expected a whole number of seconds"),
        ((*PUT, "--purpose", "config", "--consumer", ""), "--consumer[0]: expected a non-empty str"),
        (("set", "k", '"abc'), "VALUE is not JSON: Unterminated string starting at (line 1, column 1)."),
        (("export", "--plugin", "A B"), "keyloft: --plugin must contain only lowercase letters"),
        (("semantic", "locks", "x"), "keyloft: PROJECT: expected a tenant and a project"),
        (("doctor", "--plugin", "A B"), "keyloft: --plugin must contain only lowercase letters"),
        (("set", "k", "1", "--database", "memory://app"), "write :memory: for a store in memory"),
    ],
)
@ON_A_FILE
def test_an_error_names_what_was_typed(run: Keyloft, arguments: tuple[str, ...], message: str) -> None:
    run("set", "a/b", "1")
    code, _, stderr = run(*arguments)
    assert code == 2
    assert message in stderr


@pytest.mark.parametrize(
    "arguments", [("set", "k", "gone", "--file"), ("import", "gone"), ("plugin", "import-json", "trivia", "gone")]
)
def test_a_missing_file_is_printed_in_the_same_words(run: Keyloft, arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == (2, "", "keyloft: there is no file gone\n")


def test_a_file_that_is_not_there_is_not_made(run: Keyloft, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    code, _, stderr = run("list", "--database", str(tmp_path / "nowhere.db"))
    assert code == 1
    assert "there is no file" in stderr
    assert sorted(tmp_path.iterdir()) == before


def test_touching_changes_the_expiry_alone(run: Keyloft) -> None:
    version = int(run("set", "k", "1", "--expire-in", "1000")[1])
    assert run("touch", "k", "--never") == (0, "", "")
    assert json.loads(run("get", "k", "--entry")[1]) == {"key": "k", "value": 1, "versionstamp": version}


class TestDeleting:
    def test_several_keys_go_together(self, run: Keyloft) -> None:
        for key in ("a", "b", "c"):
            run("set", key, "1")
        assert run("delete", "a", "b", "absent") == (0, "2\n", "")
        assert run("keys") == (0, "c\n", "")

    def test_without_a_terminal_deleting_a_prefix_needs_the_option_yes(self, run: Keyloft) -> None:
        for key in ("users/a", "users/b", "other"):
            run("set", key, "1")
        code, stdout, stderr = run("delete", "--prefix", "users")
        assert (code, stdout) == (2, "")
        assert "Remove 2 entries below users?" in stderr
        assert run("delete", "--prefix", "users", "--yes") == (0, "2\n", "")
        assert run("keys") == (0, "other\n", "")

    @pytest.mark.parametrize(("answer", "left"), [("y\n", ""), ("n\n", "users/a\n"), ("\n", "users/a\n")])
    @ON_A_FILE
    def test_at_a_terminal_it_asks(self, run: Keyloft, environment: dict[str, str], answer: str, left: str) -> None:
        run("set", "users/a", "1")
        code, shown = at_a_terminal(environment, "delete", "--prefix", "users", answer=answer)
        assert "Remove 1 entry below users?" in shown
        assert code == (1 if left else 0)
        assert run("keys") == (0, left, "")


class TestTerminal:
    @pytest.mark.slow
    @ON_A_FILE
    def test_values_are_laid_out_for_people(self, run: Keyloft, environment: dict[str, str]) -> None:
        run("set", "users/alice", '{"name": "Alice"}')
        code, shown = at_a_terminal(environment, "get", "users/alice")
        assert code == 0
        assert "\x1b[" in shown
        assert len(shown.splitlines()) == 3
        plain = at_a_terminal({**environment, "NO_COLOR": "1"}, "get", "users/alice")[1]
        assert plain.replace("\r\n", "\n") == '{\n  "name": "Alice"\n}\n'
        assert at_a_terminal({**environment, "TERM": "dumb"}, "get", "users/alice")[1] == '{"name":"Alice"}\r\n'
        assert at_a_terminal(environment, "get", "users/alice", "--json")[1] == '{"name":"Alice"}\r\n'
        assert at_a_terminal(environment, "list")[1] == 'users/alice = {"name":"Alice"}\r\n'
        nothing = "the tuple store has no entries; `keyloft stats` shows what plugins and workflows store\r\n"
        assert at_a_terminal(environment, "list", "--name", "empty")[1] == nothing
        assert at_a_terminal(environment, "list", "no")[1] == "there are no entries below no\r\n"
        assert at_a_terminal(environment, "keys", "no")[1] == "there are no keys below no\r\n"


@ON_A_FILE
def test_a_list_whose_reader_stops_ends_in_silence(run: Keyloft, environment: dict[str, str]) -> None:
    for number in range(3):
        run("set", f"k{number}", json.dumps("x" * 100_000))
    with PipedProcess(["-m", "keyloft", "list"], env=environment) as listing:
        listing.stdout.read(10)
        listing.stdout.close()
        assert (listing.wait(LONGEST_SECONDS), listing.stderr.read()) == (0, "")


def test_changes_are_shown_until_it_is_interrupted(run: Keyloft, environment: dict[str, str]) -> None:
    run("set", "users/alice", "1")
    with PipedProcess(["-m", "keyloft", "watch", "--key", "users/alice"], env=environment) as watching:
        assert json.loads(watching.stdout.readline())["value"] == 1
        run("set", "users/alice", "2")
        assert json.loads(watching.stdout.readline())["value"] == 2
        run("delete", "users/alice")
        assert json.loads(watching.stdout.readline()) == {"key": "users/alice", "value": None}
        watching.send_signal(signal.SIGINT)
        assert (watching.wait(LONGEST_SECONDS), watching.stderr.read()) == (130, "")


@WITHOUT_TABLES
@pytest.mark.parametrize(
    "command",
    ["get a", "list", "keys", "count", "watch", "delete a", "touch a --never", "semantic list tenant/acme/project/web"],
)
def test_no_tables_are_made_in_a_database_of_another_program(
    environment: dict[str, str], run: Keyloft, command: str
) -> None:
    url = environment["KEYLOFT_DATABASE_URL"]
    run_sql(url, "CREATE TABLE other_program (x INTEGER)")
    code, stdout, stderr = run(*command.split())
    assert (code, stdout) == (1, "")
    assert "NOT_A_DATABASE" in stderr
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    assert run_sql(url, tables if "://" in url else "SELECT name FROM sqlite_schema") == [("other_program",)]


def test_a_home_folder_of_an_unknown_user_is_named(run: Keyloft) -> None:
    code, stdout, stderr = run("count", "--database", "~no-such-user/app.db")
    assert (code, stdout) == (1, "")
    assert "~no-such-user/app.db can't be opened: there is no such user" in stderr


def test_a_named_store_is_apart_from_the_others(run: Keyloft) -> None:
    run("set", "users/alice", "1")
    run("set", "users/alice", "2", "--name", "shop")
    run("set", "users/bob", "3", "--name", "shop")
    assert run("get", "users/alice")[1] == "1\n"
    assert run("get", "users/alice", "--name", "shop")[1] == "2\n"
    assert run("keys", "--name", "shop")[1] == "users/alice\nusers/bob\n"
    assert run("count")[1] == "1\n"
    assert run("count", "--name", "another")[1] == "0\n"
    assert run("touch", "users/bob", "--name", "shop", "--expire-in", "1000")[0] == 0
    assert run("delete", "--prefix", "", "--yes", "--name", "shop")[1] == "2\n"
    assert run("keys")[1] == "users/alice\n"
    code, _, stderr = run("get", "a", "--name", "no/slash")
    assert code == 2
    assert stderr.startswith("keyloft: --name: expected 1 to 64")


@pytest.mark.parametrize("named", [(), ("--name", "shop")])
def test_a_watch_begins_with_what_changed_since_a_version(
    run: Keyloft, environment: dict[str, str], named: tuple[str, ...]
) -> None:
    run("set", "a", "1", *named)
    version = run("set", "b", "1", *named)[1].strip()
    run("set", "b", "2", *named)
    run("set", "b", "3", "--name", "elsewhere")
    with PipedProcess(["-m", "keyloft", "watch", "--since", version, *named], env=environment) as child:
        assert json.loads(child.stdout.readline())["value"] == 2
        run("set", "c", "3", *named)
        assert json.loads(child.stdout.readline())["key"] == "c"
        child.send_signal(signal.SIGINT)
        assert child.wait(LONGEST_SECONDS) == 130
    for unknown, reason in (
        ("9999", "version 9999 is above the last one"),
        ("0", "the change log begins with version"),
    ):
        run_sql(environment["KEYLOFT_DATABASE_URL"], "DELETE FROM keyloft_changes WHERE version < 2")
        code, stdout, stderr = run("watch", "--since", unknown, *named)
        assert (code, stdout) == (1, "")
        assert stderr.startswith(f"keyloft: HISTORY_GONE: {reason}")


def test_changes_are_shown_without_values(run: Keyloft, environment: dict[str, str]) -> None:
    url = environment["KEYLOFT_DATABASE_URL"]
    run("set", "users/alice", '"secret"')
    run("set", "users/=5", '"secret"', "--name", "shop")
    run("touch", "users/alice", "--expire-in", "1000")
    run("delete", "users/alice")
    run("import", "-", given=b'{"plugin":"trivia","key":"score","value":"secret"}\n{"key_hex":"ff","value":"secret"}')
    code, stdout, stderr = run("changes")
    assert (code, stderr) == (0, "")
    found = [json.loads(line) for line in stdout.splitlines()]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT.*Z", change.pop("at")) for change in found)
    assert found == [
        {"version": 2, "kind": "put", "space": "tuples", "key": "users/alice"},
        {"version": 3, "kind": "put", "space": "tuples", "store": "shop", "key": "users/=5"},
        {"version": 4, "kind": "touch", "space": "tuples", "key": "users/alice"},
        {"version": 5, "kind": "delete", "space": "tuples", "key": "users/alice"},
        {"version": 6, "kind": "put", "space": "tuples", "key_hex": "ff"},
        {"version": 6, "kind": "put", "space": "plugins", "plugin": "trivia", "key": "score"},
    ]
    assert run("changes", "--since", "3", "--limit", "2")[1] == "".join(stdout.splitlines(keepends=True)[2:4])
    assert run("changes", "--since", "6") == (0, "", "")
    lines = stdout.splitlines(keepends=True)
    for options, chosen in (
        (("--name", "shop"), [1]),
        (("--name", "another"), []),
        (("--prefix", "users"), [0, 2, 3]),
        (("--prefix", "users", "--limit", "2"), [0, 2]),
        (("--prefix", "users", "--since", "3", "--limit", "1"), [2]),
        (("--prefix", "users", "--name", "shop"), [1]),
        (("--plugin", "trivia"), [5]),
        (("--plugin", "trivia", "--name", "shop"), [1, 5]),
        (("--project", "tenant/a/project/b"), []),
    ):
        assert run("changes", *options) == (0, "".join([lines[at] for at in chosen]), "")
    assert run("changes", "--name", "")[0] == 2
    code, screen = at_a_terminal({**environment, "COLUMNS": "120", "NO_COLOR": "1"}, "changes")
    assert code == 0
    for words in ("shop: users/=5", "trivia: score", "hex ff", "interface"):
        assert words in screen
    assert "secret" not in stdout + screen
    assert "nothing was changed" in at_a_terminal({**environment, "NO_COLOR": "1"}, "changes", "--since", "6")[1]
    run_sql(url, "DELETE FROM keyloft_changes WHERE version < 4")
    for since, reason in (("3", "the change log begins with version"), ("7", "version 7 is above the last one")):
        code, stdout, stderr = run("changes", "--since", since)
        assert (code, stdout) == (1, "")
        assert f"HISTORY_GONE: {reason}" in stderr
    assert len(run("changes", "--since", "4")[1].splitlines()) == 3
    assert run("changes", "--since", "-1")[0] == run("changes", "--limit", "-1")[0] == 2


def test_a_key_with_tabs_is_shown_whole_at_a_terminal(environment: dict[str, str]) -> None:
    async def fill() -> None:
        async with BotDatabase(environment["KEYLOFT_DATABASE_URL"]) as db:
            await db.kv_set("trivia", "one\ttwo\tthree\tfour_five", 1)

    asyncio.run(fill())
    screen = at_a_terminal({**environment, "COLUMNS": "120", "NO_COLOR": "1"}, "changes")[1]
    assert re.search(r"trivia: one +two +three +four_five", screen)


def test_a_command_trims_the_change_log_no_more_than_the_service_does(tmp_path: Path) -> None:
    file = str(tmp_path / "app.db")
    kept = {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": file, "KEYLOFT_HISTORY_SECONDS": str(10 * 365 * 86_400)}
    long_ago = SystemClock().now() - 2 * 86_400_000

    def grow() -> None:
        """Let the next commit be one that trims."""
        [[last, at]] = run_sql(file, "SELECT max(version), max(at) FROM keyloft_changes")
        first = (last // TRIM_EVERY + 1) * TRIM_EVERY - 3
        for version, base in ((first, last), (first + 1, first), (first + 2, first + 1)):
            row = f"{version}, 0, {base}, max({long_ago}, {at}), 100, x'90'"
            run_sql(file, f"INSERT INTO keyloft_changes (version, part, base, at, size, changes) VALUES ({row})")

    def rows() -> int:
        return int(run_sql(file, "SELECT count(*) FROM keyloft_changes")[0][0])

    assert run_command(kept, "set", "a", "1")[0] == 0
    run_sql(file, f"UPDATE keyloft_changes SET at = {long_ago}")
    grow()
    before = rows()
    assert run_command(kept, "set", "a", "1")[0] == 0
    assert rows() == before + 1
    run_sql(file, f"UPDATE keyloft_changes SET at = {long_ago}")
    grow()
    assert run_command({**kept, "KEYLOFT_HISTORY_SECONDS": ""}, "set", "a", "1")[0] == 0
    assert rows() < before
    code, _, stderr = run_command({**kept, "KEYLOFT_HISTORY_MIB": "-1"}, "set", "a", "1")
    assert code == 2
    assert "KEYLOFT_HISTORY_MIB: expected a number of at least 0" in stderr


async def test_a_service_that_does_not_answer_is_reported_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPERATOR_SERVER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with asyncio.timeout(LONGEST_SECONDS):  # a store waits for a minute
        command = ("get", "k", "--database", f"http://127.0.0.1:{port}")
        code, _, stderr = await asyncio.to_thread(run_command, SURROUNDINGS, *command)
    assert code == 1
    assert "UNREACHABLE: http://127.0.0.1" in stderr
