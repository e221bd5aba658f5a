"""The command `keyloft`: what it prints, where to, and how it ends."""

import json
import os
import re
import shlex
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import keyloft
from keyloft import limits
from keyloft.admin import export_format
from keyloft.cli.app import all_commands
from tests.cli.commands import LONGEST_SECONDS, SURROUNDINGS, Keyloft, run_command
from tests.server.test_serve import Serving
from tests.support import fork_server
from tests.support.fork_server import PipedProcess


@pytest.fixture
def environment() -> dict[str, str]:
    """No settings."""
    return SURROUNDINGS


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of NATS, where a service runs."""
    served = Serving(tmp_path_factory.mktemp("served"), "--nats-port", "0")
    try:
        deadline = time.monotonic() + LONGEST_SECONDS
        while not served.is_ready and time.monotonic() < deadline:
            time.sleep(0.01)
        yield served.nats
    finally:
        served.end()


@pytest.fixture
def plugin(environment: dict[str, str], nats: str) -> Keyloft:
    """Runs `keyloft plugin …` against that service."""
    return partial(run_command, {**environment, "KEYLOFT_NATS_URL": nats}, "plugin")


def test_the_version_is_shown(run: Keyloft) -> None:
    assert run("--version") == (0, f"keyloft {keyloft.__version__}\n", "")
    command = [sys.executable, "-m", "keyloft", "--version"]
    assert subprocess.check_output(command, env=SURROUNDINGS, text=True) == f"keyloft {keyloft.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [(), ("fly",), ("plugin",), ("plugin", "get", "trivia"), ("serve", "--prot", "1")]
)
def test_a_wrong_call_ends_with_code_2(run: Keyloft, arguments: tuple[str, ...]) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert "Usage: keyloft" in stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("export", "--prefx", "users"), "--prefix"),
        (("list", "--limt", "1"), "--limit"),
        (("semantic", "get", "--databse", "x", "k"), "--database"),
        (("exprt",), "export"),
        (("semantic", "gett"), "get"),
        (("plugin", "prge"), "purge"),
        (("set", "k", "-5", "--txt"), "--text"),
        (("--verison",), "--version"),
        (("set", "k", "1", "--ttl", "5"), "--expire-in"),
        (("plugin", "touch", "trivia", "score", "--expire-in", "5"), "--ttl"),
    ],
)
def test_what_was_mistyped_is_suggested(run: Keyloft, arguments: tuple[str, ...], meant: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.rstrip().endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("--database", "a.db", "get", "x"), "keyloft get --database"),
        (("--database=a.db", "list"), "keyloft list --database"),
        (("--databse", "a.db", "get", "x"), "keyloft get --database"),
        (("semantic", "--database", "a.db", "locks", "acme/web"), "keyloft semantic locks --database"),
        (("--force", "plugin", "list"), "keyloft COMMAND --force"),
        (("--database", "a.db"), "keyloft COMMAND --database"),
    ],
)
def test_an_option_before_its_command_is_explained(run: Keyloft, arguments: tuple[str, ...], meant: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.rstrip().endswith(f"Options follow the command: {meant} …")


@pytest.mark.parametrize(
    ("arguments", "explained"),
    [
        (("list", "--prefix", "users"), "No such option: --prefix. PREFIX stands alone: keyloft list PREFIX"),
        (("plugin", "get", "--key", "score"), "--key. KEY stands alone: keyloft plugin get PLUGIN KEY"),
        (("set", "k", "{name:", "Alice}"), 'A VALUE with spaces needs quotes around it, as in \'{"name": "Alice"}\''),
        (
            ("plugin", "trivia", "get", "score"),
            "No such command 'trivia'. The command comes first: keyloft plugin get …",
        ),
        (
            ("token", "new", "ci", "--scope", "read:users"),
            "--scope: expected admin, or an access and an area, as in read:kv/users",
        ),
        (("stats", "app.db"), "extra argument(s) (app.db). If that is a database, name it by --database"),
        (("set", "k", "1", "--expire-in", "1h"), "'--expire-in': expected a number of seconds, as in 3600 or 0.5"),
        (("stats", "--soon", "x"), "'--soon': expected a number of seconds, as in 3600 or 0.5"),
        (("plugin", "get", "Trivia", "score"), "INVALID_PLUGIN_NAME: PLUGIN must contain only lowercase letters"),
    ],
)
def test_a_wrong_call_is_explained(run: Keyloft, arguments: tuple[str, ...], explained: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (1 if "INVALID" in explained else 2, "")
    assert explained in stderr


def test_help_explains_every_setting_of_serve(run: Keyloft) -> None:
    from keyloft.server.config import SETTINGS

    code, stdout, _ = run("serve", "--help")
    words = " ".join(stdout.split())
    assert code == 0
    for setting in SETTINGS.values():
        assert f"{setting.flag} " in words
        assert re.search(rf"\[ ?{setting.environment}; default: \S+\]", words)
        assert len(setting.description) > 10


def commands(of: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """All commands, by the words that call them."""
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, *names, name)
    if not hasattr(of, "commands"):
        yield names


def groups(of: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """All groups of commands, by the words that call them."""
    for name, command in of.commands.items():
        if hasattr(command, "commands"):
            yield (*names, name)
            yield from groups(command, *names, name)


COMMANDS = list(commands(all_commands))
GROUPS = list(groups(all_commands))
WITHOUT_RESULT = {("serve",), ("nats-config",), ("asyncapi",), ("open",)}
"""One runs, one writes a configuration of NATS, one prints JSON in any case, and one prints a link."""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_prints_json_if_asked(
    run: Keyloft, command: tuple[str, ...]
) -> None:
    shown = run(*command, "--help")[1]
    assert f"Usage: keyloft {' '.join(command)}" in shown
    assert f"Example: keyloft {' '.join(command)}" in shown
    assert ("--json" in shown) == (command not in WITHOUT_RESULT)
    assert run("--help")[1].count(command[0])


@pytest.mark.parametrize("group", [(), *GROUPS], ids=" ".join)
def test_the_help_of_a_group_has_an_example_and_cuts_no_summary(run: Keyloft, group: tuple[str, ...]) -> None:
    shown = run(*group, "--help")[1]
    assert "Example: keyloft" in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_help_is_quick() -> None:
    script = "import sys, keyloft.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: print('nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONGEST_SECONDS)
    assert done.stdout.endswith("False\n")


class TestPlugin:
    @pytest.mark.parametrize(
        ("given", "stored"),
        [
            ("100", "100"),
            ("-5", "-5"),
            ("1.50", "1.5"),
            ("true", "true"),
            ("null", "null"),
            ('{"a": [1, "é"]}', '{"a":[1,"é"]}'),
            ("bob", '"bob"'),
            ("NaN", '"NaN"'),
            ("007", '"007"'),
            ("", '""'),
            ("9" * 400, "9" * 400),
        ],
    )
    def test_a_value_is_json_or_else_text(self, plugin: Keyloft, given: str, stored: str) -> None:
        assert plugin("set", "values", "key", given) == (0, f"{stored}\n", "")
        assert plugin("get", "values", "key") == (0, f"{stored}\n", "")

    def test_a_value_that_begins_like_json_but_is_not_json_is_refused(self, plugin: Keyloft) -> None:
        code, stdout, stderr = plugin("set", "values", "broken", '{"a": secret}')
        assert (code, stdout) == (2, "")
        assert stderr == "keyloft: VALUE is not JSON: Expecting value (line 1, column 7). --text stores it as text\n"
        assert plugin("get", "values", "broken")[0] == 1
        assert plugin("set", "values", "broken", '{"a": secret}', "--text")[0] == 0

    def test_a_name_twice_in_an_object_is_refused(self, plugin: Keyloft) -> None:
        for twice in ('{"a": 1, "a": 2}', '[{"b": {"a": 1, "\\u0061": 2}}]'):
            code, stdout, stderr = plugin("set", "values", "twice", twice)
            assert (code, stdout) == (2, "")
            assert stderr.startswith("keyloft: VALUE: expected each name once in an object, got one twice.")
        assert plugin("get", "values", "twice")[0] == 1
        assert plugin("set", "values", "twice", '[{"a": "\\"a\\\\"}, {"a": "\\u0022"}]')[0] == 0

    def test_a_ttl_with_a_unit_is_refused_with_the_rule(self, plugin: Keyloft) -> None:
        code, _, stderr = plugin("set", "values", "k", "1", "--ttl", "30m")
        assert code == 2
        assert "'--ttl': expected a whole number of seconds, as in 1800" in stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("incr", "values", "k", "x"), "'BY': expected a whole number, as in 10"),
            (("set", "values", "k", "1", "--expected-version", "1.5"), "'--expected-version': expected a whole number"),
            (("list", "values", "--limit", "many"), "'--limit': expected a whole number, as in 10"),
            (("set", "values", "k", "1", "--if-absent", "--expected-version", "0"), "expected one of them, got both"),
            (
                ("set", "values", "k", "1", "--keep-ttl", "--ttl", "5"),
                "--keep-ttl, --ttl: expected one of them, got both",
            ),
            (("delete-many", "values"), "KEY, --prefix: expected one of them"),
            (("delete-many", "values", "k", "--prefix", "k"), "KEY, --prefix: expected one of them"),
            (("watch", "values", "k", "--prefix", "k"), "KEY, --prefix: expected one of them, got both"),
        ],
    )
    def test_a_wrong_call_names_what_was_typed(self, plugin: Keyloft, arguments: tuple[str, ...], message: str) -> None:
        code, stdout, stderr = plugin(*arguments)
        assert (code, stdout) == (2, "")
        assert message in stderr.replace("'[BY]'", "'BY'")  # the lowest allowed Typer writes optional arguments so

    def test_text_stays_text_if_asked_for(self, plugin: Keyloft) -> None:
        assert plugin("set", "--text", "values", "number", "100") == (0, '"100"\n', "")

    def test_a_value_can_be_read_from_the_input(self, plugin: Keyloft) -> None:
        assert plugin("set", "values", "read", "-", given=b'{"a":\n 1}\n') == (0, '{"a":1}\n', "")

    def test_an_absent_key_ends_with_code_1(self, plugin: Keyloft) -> None:
        assert plugin("get", "absent", "key") == (1, "", "keyloft: absent has no key 'key'\n")

    def test_delete_tells_whether_there_was_one(self, plugin: Keyloft) -> None:
        plugin("set", "deleting", "key", "1")
        assert plugin("delete", "deleting", "key") == (0, "true\n", "")
        assert plugin("delete", "deleting", "key") == (1, "false\n", "")

    def test_list_shows_keys_by_prefix_and_limit(self, plugin: Keyloft) -> None:
        for key in ("user_1", "user_2", "userX"):
            plugin("set", "listing", key, "1")
        assert plugin("list", "listing") == (0, '["userX","user_1","user_2"]\n', "")
        assert plugin("list", "listing", "--prefix", "user_", "--limit", "1") == (0, '["user_1"]\n', "")

    def test_a_ttl_is_passed_on(self, plugin: Keyloft) -> None:
        assert plugin("set", "passing", "key", "1", "--ttl", "1")[0] == 0
        deadline = time.monotonic() + LONGEST_SECONDS
        while plugin("get", "passing", "key")[0] == 0:
            assert time.monotonic() < deadline

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("get", "Trivia", "k"), "INVALID_PLUGIN_NAME: "),
            (("get", "trivia", ""), "INVALID_KEY: KEY must be a non-empty string"),
            (("set", "trivia", "k", "1", "--ttl", "0"), "VALIDATION_ERROR: --ttl must be a whole number of seconds"),
            (
                ("touch", "trivia", "k", "--ttl", "0"),
                f"VALIDATION_ERROR: --ttl must be a whole number of seconds from 1 to {limits.LONGEST_TTL_SECONDS}; "
                "--never is for an entry that never expires",
            ),
            (("set", "trivia", "k", "1", "--expected-version", "-1"), "VALIDATION_ERROR: --expected-version must be"),
            (("set", "trivia", "k", "x" * 70_000), "VALUE_TOO_LARGE: "),
            (("list", "trivia", "--limit", "0"), "VALIDATION_ERROR: --limit: expected a whole number"),
            (("get", "trivia", "k", "--subjects", "nowhere.there"), "NO_SERVICE: no service answers nowhere.there"),
        ],
    )
    def test_an_error_is_printed_with_its_code(self, plugin: Keyloft, arguments: tuple[str, ...], message: str) -> None:
        code, stdout, stderr = plugin(*arguments)
        assert (code, stdout) == (1, "")
        assert stderr.startswith(f"keyloft: {message}")

    def test_all_of_a_plugin_is_purged_and_nothing_of_others(self, plugin: Keyloft) -> None:
        for key in ("a", "b"):
            plugin("set", "purged", key, "1")
        plugin("set", "purged-2", "a", "1")
        code, stdout, stderr = plugin("purge", "purged")
        assert (code, stdout) == (2, "")
        assert "Remove 2 keys, all that purged stores?" in stderr
        assert plugin("purge", "purged", "--yes") == (0, "2\n", "")
        assert plugin("purge", "purged") == (0, "0\n", "")
        assert plugin("list", "purged-2") == (0, '["a"]\n', "")

    def test_the_other_operations_print_what_they_return(self, plugin: Keyloft, tmp_path: Path) -> None:
        assert plugin("incr", "more", "games") == (0, "1\n", "")
        assert plugin("incr", "more", "games", "-3", "--ttl", "60") == (0, "-2\n", "")
        (tmp_path / "scores.json").write_text('{"score:a": 1, "score:b": [2]}')
        assert plugin("set-many", "more", str(tmp_path / "scores.json"), "--ttl", "60") == (0, "2\n", "")
        no_file = "keyloft: FILE: expected the name of a file, got JSON; - reads JSON from the standard input\n"
        assert plugin("set-many", "more", '{"score:a": 1}') == (2, "", no_file)
        assert plugin("get-many", "more", "score:b", "none", "score:a") == (0, '{"score:b":[2],"score:a":1}\n', "")
        assert plugin("list", "more", "--prefix", "score:", "--values") == (0, '{"score:a":1,"score:b":[2]}\n', "")
        assert plugin("count", "more") == (0, "3\n", "")
        assert plugin("count", "more", "--prefix", "score:") == (0, "2\n", "")
        assert plugin("touch", "more", "score:a", "--never") == (0, "true\n", "")
        one_of = (2, "", "keyloft: pass --ttl SECONDS, or --never\n")
        assert plugin("touch", "more", "score:a") == one_of
        assert plugin("touch", "more", "score:a", "--never", "--ttl", "5") == one_of
        assert plugin("touch", "more", "none", "--ttl", "5") == (1, "false\n", "")
        entry = json.loads(plugin("get", "more", "score:a", "--meta")[1])
        assert (entry["value"], entry["ttl"]) == (1, None)
        assert entry.keys() == {"value", "version", "ttl", "created_at", "updated_at"}
        assert plugin("set", "more", "score:a", "2", "--expected-version", str(entry["version"])) == (0, "2\n", "")
        code, stdout, stderr = plugin("set", "more", "score:a", "3", "--if-absent")
        assert (code, stdout) == (1, "")
        assert stderr.startswith("keyloft: VERSION_CONFLICT: key 'score:a': expected no entry, got version")
        assert plugin("get", "more", "none", "--meta") == (1, "", "keyloft: more has no key 'none'\n")
        assert plugin("delete-many", "more", "games", "none") == (0, "1\n", "")
        assert plugin("delete-many", "more", "--prefix", "score:") == (0, "2\n", "")
        assert plugin("delete-many", "more", "--prefix", "")[0] == 2
        used = {"keys": 0, "bytes": 0, "most_keys": None, "most_bytes": None}
        assert json.loads(plugin("usage", "unused")[1]) == used

    def test_an_old_json_file_is_imported_and_a_second_try_goes_on(self, plugin: Keyloft, tmp_path: Path) -> None:
        file = tmp_path / "old.json"
        file.write_text(json.dumps({f"user:{number}": {"score": number} for number in range(500)}))
        plugin("set", "imported", "user:7", '"newer"')
        code, stdout, stderr = plugin("import-json", "imported", str(file))
        assert (code, stdout) == (0, "499\n")
        assert "1 of 500 keys were there already" in stderr
        assert plugin("import-json", "imported", str(file))[1] == "0\n"
        assert plugin("get", "imported", "user:7")[1] == '"newer"\n'
        assert plugin("import-json", "imported", str(file), "--replace")[1] == "500\n"
        assert plugin("get", "imported", "user:7")[1] == '{"score":7}\n'

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"[1]", "must be a JSON object"),
            (b"{", "Invalid JSON: it ends too early\n"),
            (export_format.head(1, {}) + b"{}\n", "; what `keyloft export` writes is for `keyloft import`\n"),
            (b'{"a": 1, "a": 2}', "twice"),
            (b'{"": 1}', "key must be a non-empty string"),
            (b'{"fine": 1, "large": "' + b"x" * 70_000 + b'"}', "64KB limit"),
        ],
    )
    def test_a_file_that_can_not_be_imported_stores_nothing(
        self, plugin: Keyloft, tmp_path: Path, content: bytes, message: str
    ) -> None:
        (tmp_path / "old.json").write_bytes(content)
        code, stdout, stderr = plugin("import-json", "refused", str(tmp_path / "old.json"))
        assert (code in (1, 2), stdout) == (True, "")
        assert message in stderr
        assert plugin("list", "refused") == (0, "[]\n", "")
        assert plugin("import-json", "refused", str(tmp_path / "absent.json"))[0] == 2

    def test_a_missing_nats_server_is_reported_at_once(self, run: Keyloft) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"nats://me:secret@127.0.0.1:{unused.getsockname()[1]}"
            code, _, stderr = run("plugin", "get", "trivia", "k", "--nats", address)
        assert code == 1
        assert stderr.startswith("keyloft: UNANSWERED: no NATS server answers at nats://127.0.0.1:")
        assert "keyloft serve" in stderr
        assert "secret" not in stderr

    def test_wrong_settings_end_with_code_2(self, plugin: Keyloft) -> None:
        assert plugin("get", "trivia", "k", "--nats-creds", "nowhere")[0] == 2
        assert plugin("get", "trivia", "k", "--timeout", "-1")[0] == 2
        assert "VALIDATION_ERROR: --limit: expected a whole number" in plugin("list", "trivia", "--limit", "0")[2]

    def test_a_reader_that_has_seen_enough_is_no_error(self, nats: str) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        command = ["-m", "keyloft", "plugin", "list", "listing", "--nats", nats]
        with os.fdopen(writing) as closed, PipedProcess(command, stdout=closed) as listing:
            assert (listing.wait(LONGEST_SECONDS), listing.stderr.read()) == (0, "")


class TestNatsConfig:
    def test_it_is_printed_with_what_to_do_next(self, run: Keyloft) -> None:
        code, stdout, stderr = run(
            "nats-config", "--plugin", "trivia", "--plugin", "quote-db", "--listen", "0.0.0.0:5222"
        )
        assert code == 0
        assert 'user: "trivia"' in stdout
        assert '"rosey.db.kv.quote-db.set"' in stdout
        assert 'listen: "0.0.0.0:5222"' in stdout
        assert "nats-server -c FILE" in stderr
        assert "keyloft serve --nats nats://THIS-HOST:5222" in stderr

    def test_it_is_written_for_its_owner_alone(self, run: Keyloft, tmp_path: Path) -> None:
        file = tmp_path / "nats.conf"
        code, stdout, stderr = run("nats-config", "--plugin", "trivia", "--output", str(file))
        assert (code, stdout) == (0, "")
        assert f"{file} is written" in stderr
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_a_plugin_is_added_and_the_others_keep_their_passwords(self, run: Keyloft, tmp_path: Path) -> None:
        file = tmp_path / "nats.conf"

        def passwords() -> dict[str, str]:
            return dict(re.findall(r'user: "(.+)"\n *password: "(.+)"', file.read_text()))

        run("nats-config", "--plugin", "trivia", "--plugin", "old", "--output", str(file))
        before = passwords()
        code, _, stderr = run("nats-config", "--plugin", "trivia", "--plugin", "new", "--output", str(file))
        assert code == 2
        assert "exists already" in stderr
        assert passwords() == before
        assert run("nats-config", "--plugin", "trivia", "--plugin", "new", "--output", str(file), "--replace")[0] == 0
        after = passwords()
        assert after.keys() == {"SERVICE", "ADMIN", "trivia", "new"}
        assert {name: after[name] for name in ("SERVICE", "ADMIN", "trivia")} == {
            name: before[name] for name in ("SERVICE", "ADMIN", "trivia")
        }

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--plugin", "Trivia"), "--plugin must contain only"),
            (("--plugin", "a", "--plugin", "a"), "plugin named twice: a"),
            (("--plugin", "a", "--listen", "here"), "--listen: expected HOST:PORT, as in 127.0.0.1:4222"),
            (("--plugin", "a", "--route", "here"), "--cluster: expected the name of the cluster"),
            (("--plugin", "a", "--cluster", "bot"), "--cluster-listen: expected where this node listens"),
            (("--plugin", "a", "--leaf-of", "hub:7422"), "--leaf-name: expected the name"),
            (("--plugin", "a", "--leaf-name", "edge"), "--leaf-of: expected where a server listens"),
            (("--plugin", "a", "--leaf-listen", "x:1", "--leaf", "edge=b"), "--leaf: edge=b: there is no plugin or"),
            (
                ("--plugin", "a", "--leaf-of", "hub:7422", "--leaf-name", "edge"),
                "--users-of: expected the file of a server of the cluster, whose passwords this leaf needs\n",
            ),
            (("--plugin", "a", "--output", "nodir/x"), "nodir/x can't be written: the folder nodir does not exist\n"),
            (("--plugin", "a", "--replace"), "--replace needs --output"),
            (("--plugin", "a", "--prefixes", "x.>"), "--prefixes: expected a prefix such as db.kv"),
        ],
    )
    def test_a_wrong_call_is_explained(self, run: Keyloft, flags: tuple[str, ...], message: str) -> None:
        code, stdout, stderr = run("nats-config", *flags)
        assert (code, stdout) == (2, "")
        assert message in stderr


class TestMigrate:
    def test_a_database_goes_up_and_back(self, run: Keyloft, tmp_path: Path) -> None:
        database = tmp_path / "app.db"
        up = run("migrate", "--database", str(database))
        assert up == (0, "", f"{database} has the schema of this version\n")
        unconfirmed = run("migrate", "--to", "-1", "--database", str(database))
        assert unconfirmed[0] == 2
        assert "pass --yes" in unconfirmed[2]
        down = run("migrate", "--to", "-1", "--yes", "--database", str(database))
        assert (down[0], down[2]) == (0, f"{database} went back (-1)\n")
        run("migrate", "--database", str(database))
        named = run("migrate", "--to", "0010", "--database", str(database))
        assert (named[0], "--yes" in named[2]) == (2, True), "an earlier one, by its name, is a way back, too"
        shown = json.loads(run("migrate", "--to", "0010", "--dry-run", "--database", str(database))[1])
        assert (shown["from"], shown["to"]) == ("0011", "0010")

    def test_going_back_keeps_entries_of_plugins_unless_they_may_be_dropped(self, run: Keyloft, tmp_path: Path) -> None:
        database = str(tmp_path / "app.db")
        run("migrate", "--database", database)
        row = "INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES ('trivia', 'score', '7')"
        with closing(sqlite3.connect(database, isolation_level=None)) as connection:
            connection.execute(row)
        code, _, error = run("migrate", "--to", "-1", "--yes", "--database", database)
        assert (code, "plugin_kv_storage has rows" in error, "--drop" in error) == (1, True, True)
        with closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT count(*) FROM plugin_kv_storage").fetchall() == [(1,)]
        assert run("migrate", "--to", "-1", "--yes", "--drop", "--database", database)[0] == 0
        with closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT 1 FROM sqlite_master WHERE name LIKE 'plugin%'").fetchall() == []

    def test_what_would_be_done_is_shown_and_not_done(self, run: Keyloft, tmp_path: Path, postgres_url: str) -> None:
        for database in (str(tmp_path / "app.db"), postgres_url):
            shown = run("migrate", "--dry-run", "--database", database)
            assert (shown[0], shown[2]) == (0, "")
            plan = json.loads(shown[1])
            assert (plan["from"], plan["to"]) == (None, "0011")
            assert [step["revision"] for step in plan["steps"]] == ["0010", "0011"]
            assert "CREATE TABLE keyloft_changes" in plan["sql"]
            assert run("migrate", "--database", database)[0] == 0
            back = json.loads(run("migrate", "--dry-run", "--to", "-1", "--database", database)[1])
            assert (back["from"], back["to"]) == ("0011", "0010")
            assert json.loads(run("migrate", "--dry-run", "--database", database)[1])["steps"] == []
        assert run("migrate", "--dry-run", "--database", str(tmp_path / "no" / "app.db"))[0] == 0
        assert not (tmp_path / "no").exists()
        unknown = run("migrate", "--dry-run", "--to", "nowhere", "--database", str(tmp_path / "app.db"))
        assert (unknown[0], unknown[1]) == (2, "")
        assert "nowhere" in unknown[2]

    def test_what_goes_wrong_is_one_line(self, run: Keyloft, tmp_path: Path) -> None:
        failed = run("migrate", "--database", str(tmp_path / "no" / "folder" / "app.db"))
        assert failed[0] == 1
        assert failed[2].startswith("keyloft: ")
        assert len(failed[2].splitlines()) == 1

    @pytest.mark.parametrize("revision", ["9999", "nowhere", "-9", "+9", ""])
    def test_a_revision_that_does_not_exist_is_refused_with_those_that_do(
        self, run: Keyloft, tmp_path: Path, revision: str
    ) -> None:
        database = str(tmp_path / "app.db")
        rule = r"head, base, at most \d steps back as in -1, or one of \d{4}, \d{4}"
        for options in ([], ["--dry-run"]):
            code, stdout, stderr = run("migrate", "--yes", "--database", database, "--to", revision, *options)
            assert (code, stdout) == (2, "")
            assert re.fullmatch(rf"keyloft: --to: expected {rule}, got {re.escape(ascii(revision))}\n", stderr)

    def test_an_earlier_revision_that_does_not_exist_is_refused_without_a_question(
        self, run: Keyloft, tmp_path: Path
    ) -> None:
        database = str(tmp_path / "app.db")
        assert run("migrate", "--database", database)[0] == 0
        for revision in ("0005", "-9"):
            code, _, stderr = run("migrate", "--database", database, "--to", revision)
            assert code == 2
            assert stderr.startswith("keyloft: --to: expected head, base, ")


@pytest.mark.slow
def test_a_traceback_is_shown_only_if_asked_for(tmp_path: Path) -> None:
    arguments = ("serve", "--nats-port", "0", "--http", "off", "--database", str(tmp_path / "no" / "app.db"))
    for debug, is_shown in (({}, False), ({"KEYLOFT_DEBUG": "1"}, True)):
        done = fork_server.run(["-m", "keyloft", *arguments], env={**SURROUNDINGS, **debug})
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) is is_shown


def test_output_is_json_that_others_can_read(plugin: Keyloft) -> None:
    value = {"text": 'quotes " and \\', "list": [1, None, True]}
    plugin("set", "reading", "key", json.dumps(value))
    assert json.loads(plugin("get", "reading", "key")[1]) == value


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        ("set a 1 >&-", 0, ""),
        ("set a - <&-", 0, ""),
        ("import - <&-", 1, "keyloft: TRANSFER_FAILED: the file is empty"),
        ("get nothing 2>&-", 1, ""),
        ("stats >&- 2>&- <&-", 0, ""),
    ],
)
@pytest.mark.slow
def test_a_closed_standard_stream_is_no_error(tmp_path: Path, command: str, code: int, stderr: str) -> None:
    environment = {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": str(tmp_path / "app.db")}
    program = f"{shlex.quote(sys.executable)} -W error -m keyloft"
    assert run_command(environment, "set", "b", "1")[0] == 0
    done = subprocess.run(
        ["sh", "-c", f"{program} {command}"], env=environment, capture_output=True, timeout=LONGEST_SECONDS
    )
    assert (done.returncode, done.stderr.decode().partition(":")[0]) == (code, stderr.partition(":")[0])
    assert done.stderr.decode().startswith(stderr)
    assert b"Traceback" not in done.stderr
