"""`keyloft check`: what it finds, and that it finds nothing where nothing is wrong."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyloft
from keyloft import ManualClock, limits
from keyloft.admin.export_format import row_name
from keyloft.clock import SystemClock
from keyloft.core import keys
from keyloft.core.records import ChangeKind, LoggedChange, Record, Space
from keyloft.engines import change_log, open_engine
from keyloft.semantic import Semantics, SemanticStore
from keyloft.semantic.row_checks import RowChecker
from keyloft.tuples.store import Store
from tests.cli.commands import Keyloft, at_a_terminal
from tests.support.everything import API, WEB, FilledCopies, run_sql, stored

FLAG = Semantics("feature_flag")


@pytest.fixture(scope="module")
def copies() -> FilledCopies:
    return FilledCopies()


@pytest.fixture
def url(environment: dict[str, str], copies: FilledCopies) -> str:
    """A database with something of every kind."""
    copies.fill(environment["KEYLOFT_DATABASE_URL"])
    return environment["KEYLOFT_DATABASE_URL"]


def problems(outcome: tuple[int, str, str]) -> list[dict[str, Any]]:
    code, stdout, stderr = outcome
    found: list[dict[str, Any]] = json.loads(stdout)
    assert code == (1 if found else 0), stderr
    assert "Traceback" not in stderr
    return found


def test_nothing_is_wrong_with_what_keyloft_stored(run: Keyloft, url: str) -> None:
    code, stdout, stderr = run("check")
    assert (code, stdout) == (0, "[]\n")
    assert stderr.endswith(f": nothing is wrong with its {len(stored(url)) - 1} rows\n")


def test_nothing_is_wrong_after_a_life_with_locks_expiries_and_dead_letters(
    run: Keyloft, environment: dict[str, str]
) -> None:
    url = environment["KEYLOFT_DATABASE_URL"]
    clock = ManualClock(SystemClock().now() - 1000 * (61 + 2 * 50 * 86_400))  # the life ends now

    async def live() -> None:
        kv = Store(await open_engine(url, clock))
        store = SemanticStore(kv, sweep_every=None)

        async def put(key: str, semantics: Semantics = FLAG, expected_version: int | str = "*") -> Any:
            return await store.put(key, 1, expected_version=expected_version, writer="a:b", semantics=semantics)

        lock = Semantics("lock", ttl_seconds=60)
        for path in ("held", "released", "expired", "taken"):
            await put(f"{API}/locks/{path}", lock)
        await store.delete(f"{API}/locks/released", expected_version="*", writer="a:b")
        clock.advance(61)
        await put(f"{API}/locks/taken", lock)
        await store.sweep()
        await put(f"{API}/locks/held", lock)
        await put(f"{WEB}/flags/x")
        await store.delete(f"{WEB}/flags/x", expected_version="*", writer="a:b")
        await store.restore(f"{WEB}/flags/x", writer="a:b")
        with pytest.raises(keyloft.KeyloftError):
            await put(f"{WEB}/flags/x", expected_version=1)
        await store.shorten("acme", "web", "https://example.org/é", writer="a:b")
        for _ in range(2):
            clock.advance(50 * 86_400)
            await put(f"{WEB}/flags/x")
            await store.sweep()
        await store.aclose()
        await kv.aclose()

    asyncio.run(live())
    assert problems(run("check")) == []


ROW = "(key, value, encoding, version, expires_at, created_at, updated_at) VALUES"


def row(table: str, key: bytes, value: bytes = b"1", encoding: int = 0, version: int = 1, due: str = "NULL") -> str:
    name = f"keyloft_{table}"
    return f"INSERT INTO {name} {ROW} (x'{key.hex()}', x'{value.hex()}', {encoding}, {version}, {due}, 0, 0)"


def plugin_row(plugin: str, key: str, value: str) -> str:
    return f"INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES ('{plugin}', '{key}', '{value}')"


FUTURE = "99999999999999"
USER = keys.encode(("users", "eve"))
POINTER = b"k/acme/web/flags/zzz\x00" + (3).to_bytes(8) + b"\x00\x00"
INDEX = b"i" + POINTER[1:]


@pytest.mark.parametrize(
    ("sql", "where", "code", "key"),
    [
        (row("tuples", b"\x02no end"), "tuples", "key", r"\x02no end"),
        (row("tuples", b"\x16\x00\x01"), "tuples", "key", r"\x16\x00\x01"),  # a long form of a short number
        (row("tuples", b"\xffsho"), "tuples", "key", r"\xffsho"),
        (row("tuples", b"\xffsho\x00"), "tuples", "key", r"\xffsho\x00"),
        (row("tuples", keys.store_prefix("s/o") + USER), "tuples", "key", r"\xffs/o\x00\x02users\x00\x02eve\x00"),
        (row("tuples", keys.store_prefix("shop") + USER, b"{"), "tuples", "value", "users/eve of store shop"),
        (row("tuples", USER, b"{secret"), "tuples", "value", "users/eve"),
        (row("tuples", USER, b"secret", encoding=2), "tuples", "value", "users/eve"),
        (row("tuples", USER, b"secret", encoding=9), "tuples", "value", "users/eve"),
        (row("tuples", USER, version=10_000), "tuples", "version", "users/eve"),
        (plugin_row("Trivia!", "a b", "1"), "plugins", "key", "Trivia!/a%20b"),
        (plugin_row("trivia", "bad", "{secret"), "plugins", "value", "trivia/bad"),
        (row("semantic", b"q/what"), "semantic", "key", "q/what"),
        (row("semantic", b"e/acme/web"), "semantic", "key", "e/acme/web"),
        (row("semantic", b"e/acme/web/UPPER"), "semantic", "key", f"{WEB}/UPPER"),
        (row("semantic", b"e/acme/web/flags/zzz", b'{"secret'), "semantic", "value", f"{WEB}/flags/zzz"),
        (row("semantic", b"d/acme/web/flags/zzz", b"secret"), "semantic", "value", "d/acme/web/flags/zzz"),
        (row("semantic", b"a/acme/web/" + bytes(10), b"secret"), "semantic", "value", "a/acme/web/" + "%00" * 10),
        (row("semantic", b"r/acme/web/flags/a\x00id", b"secret"), "semantic", "value", "r/acme/web/flags/a%00id"),
        (row("semantic", b"x/acme/web/id", b"secret"), "semantic", "value", "x/acme/web/id"),
        (row("semantic", POINTER, b"", 1, due=FUTURE), "semantic", "orphan", quote(POINTER)),
        (row("semantic", INDEX, b"", 1, due=FUTURE), "semantic", "orphan", quote(INDEX)),
        (row("semantic", INDEX, b"secret", 1), "semantic", "value", quote(INDEX)),
        (row("semantic", b"f/acme/web/" + bytes(8), b"locks/x", 1), "semantic", "orphan", "f/acme/web/" + "%00" * 8),
        ("DROP INDEX idx_plugin_kv_prefix", "database", "damage", None),
    ],
)
def test_what_is_wrong_is_found_and_no_value_is_shown(
    run: Keyloft, url: str, sql: str, where: str, code: str, key: str | None
) -> None:
    run_sql(url, sql)
    outcome = run("check")
    [found] = problems(outcome)
    assert (found["severity"], found["code"]) == ("problem", code)
    assert found["where"] == (where if key is None else f"{where} {key}")
    assert found["cure"]
    assert "secret" not in "".join(map(str, outcome))
    assert ": 1 problem, in " in outcome[2]


def test_a_lost_change_log_is_found(run: Keyloft, url: str) -> None:
    """On SQLite it is the version counter, without which nothing can be written."""
    run_sql(url, "DELETE FROM keyloft_changes")
    [found] = problems(run("check"))
    assert found["code"] == ("log" if "postgresql" in url else "damage")
    assert "has no row" in found["what"]


NEWEST = "version = (SELECT max(version) FROM keyloft_changes)"


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("DELETE FROM keyloft_changes WHERE version = 4", "but the row before it ends with 3"),
        ("UPDATE keyloft_changes SET at = 5 WHERE version = 4", "older than the row before it"),
        ("UPDATE keyloft_changes SET size = 1 WHERE version = 4", "size is below that of the row before"),
        (f"UPDATE keyloft_changes SET base = version WHERE {NEWEST}", "which is not below its own"),
        ("UPDATE keyloft_changes SET part = 1 WHERE version = 1", "begins in the middle of a version"),
        ("UPDATE keyloft_changes SET part = 2 WHERE version = 4", "does not continue the row before it, part 0 of"),
        ("UPDATE keyloft_changes SET changes = {cut} WHERE version = 4", "changes don't match their checksum"),
        ("UPDATE keyloft_changes SET changes = {other} WHERE version = 4", "lists a change of another version"),
    ],
)
def test_a_defect_of_the_change_log_is_found_and_cured(
    run: Keyloft, url: str, sql: str, what: str, tmp_path: Path
) -> None:
    blobs = {"cut": b"\x91", "other": change_log.pack([LoggedChange(9, Space.TUPLES, USER, ChangeKind.PUT, 0)], 3)[0]}
    run_sql(url, sql.format(**{name: f"x'{data.hex()}'" for name, data in blobs.items()}))
    found = problems(run("check"))
    assert found
    assert {(one["code"], one["where"]) for one in found} == {("log", "change log")}
    assert any(what in one["what"] for one in found)
    assert run("backup", str(tmp_path / "cure.db"))[0] == 0
    assert run("restore", str(tmp_path / "cure.db"), "--replace", "--yes")[0] == 0
    assert problems(run("check")) == []


def test_the_cure_for_a_version_that_was_never_given_works(run: Keyloft, url: str, tmp_path: Path) -> None:
    run_sql(url, row("tuples", USER, version=3 * limits.VERSION_JUMP))
    [found] = problems(run("check"))
    assert (found["code"], found["where"]) == ("version", "tuples users/eve")
    assert run("backup", str(tmp_path / "cure.db"))[0] == 0
    assert run("restore", str(tmp_path / "cure.db"), "--replace", "--yes")[0] == 0
    assert problems(run("check")) == []


def test_a_pointer_that_has_expired_may_outlive_its_record(run: Keyloft, url: str) -> None:
    run_sql(url, row("semantic", POINTER, b"", 1, due="5"))
    assert problems(run("check")) == []


def test_an_older_or_newer_schema_is_reported(run: Keyloft, url: str) -> None:
    for revision, advice in (("0001", "keyloft migrate"), ("9999", "upgrade keyloft")):
        run_sql(url, f"UPDATE keyloft_version SET version_num = '{revision}'")
        [found] = problems(run("check"))
        assert found["code"] == "schema"
        assert advice in found["what"]


def test_a_file_that_is_no_database_is_not_to_be_exported(run: Keyloft, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("Dear diary\n" * 100)
    [found] = problems(run("check", "--database", str(tmp_path / "diary.txt")))
    assert (found["code"], found["cure"]) == ("damage", "name another file; if this was the database, restore a backup")


def test_all_are_counted_and_some_are_shown(run: Keyloft, url: str, environment: dict[str, str]) -> None:
    for number in range(5):
        run_sql(url, row("tuples", keys.encode(("bad\x1b", number)), b"{"))
    outcome = run("check", "--limit", "2")
    assert [found["where"] for found in problems(outcome)] == ["tuples bad%1B/=0", "tuples bad%1B/=1"]
    assert ": 5 problems, of which 2 are shown, in " in outcome[2]
    code, screen = at_a_terminal({**environment, "NO_COLOR": "1"}, "check", "--limit", "1")
    assert code == 1
    assert "tuples bad%1B/=0: a stored value of 1 bytes is not JSON" in screen
    assert run("check", "--limit", "-1")[0] == 2


class TestDamagedFiles:
    """In a file of many pages."""

    @pytest.fixture
    def environment(self, tmp_path: Path) -> dict[str, str]:
        return {"KEYLOFT_DATABASE_URL": str(tmp_path / "many.db")}

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "many.db"

        async def make() -> None:
            async with keyloft.open(path) as kv:
                await kv.set_many({("made", number): "x" * 100 for number in range(3000)})

        asyncio.run(make())
        return path

    @pytest.mark.parametrize("seed", range(6))
    def test_garbage_in_pages_is_reported_without_a_traceback(self, file: Path, run: Keyloft, seed: int) -> None:
        rng = random.Random(seed)
        content = bytearray(file.read_bytes())
        for page in rng.sample(range(1, len(content) // 4096), 1 + seed * 3):
            content[page * 4096 : page * 4096 + 300] = rng.randbytes(300)
        file.write_bytes(content)
        found = problems(run("check"))
        assert found[0]["code"] == "damage"
        assert file.read_bytes() == content

    def test_keys_that_lead_back_to_earlier_ones_are_not_followed_for_ever(self, file: Path, run: Keyloft) -> None:
        index = "SELECT pageno FROM dbstat WHERE name = 'keyloft_tuples' AND pagetype = 'leaf'"
        leaves = [number for (number,) in run_sql(str(file), f"{index} ORDER BY path")]
        content = bytearray(file.read_bytes())
        first, last = [(number - 1) * 4096 for number in (leaves[0], leaves[-1])]
        content[last : last + 4096] = content[first : first + 4096]
        file.write_bytes(content)
        [found] = [one for one in problems(run("check", "--limit", "1000")) if one["where"] == "tuples"]
        assert "not in the order of its keys" in found["what"]

    @pytest.mark.parametrize("size", [2, 99, 2000, 4096 * 3, 4096 * 50])
    def test_a_truncated_file_is_reported(self, file: Path, run: Keyloft, size: int) -> None:
        file.write_bytes(file.read_bytes()[:size])
        assert problems(run("check"))[0]["code"] == "damage"

    @pytest.mark.parametrize("content", [b"", b"Dear diary,\n" * 1000])
    def test_another_file_is_no_database(self, tmp_path: Path, run: Keyloft, content: bytes) -> None:
        (tmp_path / "diary.txt").write_bytes(content)
        assert "database" in problems(run("check", "--database", str(tmp_path / "diary.txt")))[0]["what"]
        assert (tmp_path / "diary.txt").read_bytes() == content

    def test_text_that_is_not_utf_8_is_reported(self, file: Path, run: Keyloft) -> None:
        run_sql(str(file), plugin_row("fine", "k", "1"))
        run_sql(str(file), "UPDATE plugin_kv_storage SET plugin_name = CAST(x'ff' AS TEXT)")
        [found] = problems(run("check"))
        assert (found["where"], found["code"]) == ("plugins", "damage")
        assert "not UTF-8" in found["what"]
        code, _, stderr = run("stats")
        assert code == 1
        assert "not UTF-8" in stderr

    def test_a_missing_file_is_no_finding(self, tmp_path: Path, run: Keyloft) -> None:
        code, stdout, stderr = run("check", "--database", str(tmp_path / "nowhere.db"))
        assert (code, stdout) == (1, "")
        assert "there is no file" in stderr
        assert list(tmp_path.iterdir()) == []


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
kinds = st.sampled_from([b"a/", b"d/", b"e/", b"f/", b"h/", b"i/", b"k/", b"r/", b"x/", b""])
beginnings = st.sampled_from([b"", b"acme/web/", b"acme/web/flags/a", b"acme/web/flags/a\x00", b"audit"])


@given(st.lists(st.tuples(kinds, beginnings, st.binary(max_size=12), st.binary(max_size=20)), max_size=20))
def test_the_row_checker_raises_nothing_whatever_the_rows_hold(rows: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
    checker = RowChecker(0)
    for kind, beginning, ending, value in sorted(rows):
        key = kind + beginning + ending
        checker.defect(Record(key, value, 0, 1, None))
        for space in (Space.SEMANTIC, Space.TUPLES):
            assert not CONTROL.search(row_name(space, key))


@given(st.text(), st.text())
def test_whatever_a_plugin_row_is_called_it_can_be_shown(plugin: str, key: str) -> None:
    assert not CONTROL.search(row_name(Space.PLUGINS, (plugin, key)))
