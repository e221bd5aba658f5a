"""`keyloft export`, `import` and `copy`: whatever is stored arrives as it was, whatever happens on the way."""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyloft
from keyloft import U64, Store, admin
from keyloft.admin import export_format as lines
from keyloft.admin.export_files import ExportWriter
from keyloft.admin.selection import Selection
from keyloft.admin.transfer import compare
from keyloft.clock import SystemClock
from keyloft.core import keys
from keyloft.core.maintenance import EVERYTHING, Existing, Loaded, Maintenance
from keyloft.core.records import SERVICE_ROWS, Key, Record, Space
from keyloft.engines import open_maintenance
from keyloft.errors import InvalidArgument, Undecodable
from keyloft.limits import LAST_VERSION, MAINTENANCE_ROWS
from keyloft.plugins import BotDatabase
from keyloft.semantic import Semantics, SemanticStore
from tests.cli.commands import LONGEST_SECONDS, ON_A_FILE, Keyloft, at_a_terminal, run_command
from tests.support.everything import run_sql
from tests.support.examples import examples
from tools.postgres import fresh_database

THEME = "tenant/acme/project/web/config/theme"

# Rows of all kinds

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=12)
moments = st.integers(0, 253_402_300_799_999)
tuple_keys = st.lists(
    st.one_of(texts, st.integers(), st.floats(), st.booleans(), st.binary(max_size=6)), min_size=1, max_size=3
).map(lambda parts: keys.encode(tuple(parts)))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
).map(lambda value: json.dumps(value, ensure_ascii=False).encode())
json_texts = st.one_of(json_values, json_values.map(lambda value: b" " + value + b"\n"), texts.map(str.encode))
stored_values = st.one_of(
    st.tuples(json_values, st.just(0)),
    st.tuples(st.binary(max_size=20), st.just(1)),
    st.tuples(st.binary(min_size=8, max_size=8), st.just(2)),
    st.tuples(st.binary(max_size=20), st.integers(0, 9)),
)


def rows(key: st.SearchStrategy[Key], value: st.SearchStrategy[tuple[bytes, int]]) -> st.SearchStrategy[Record]:
    def row(key: Key, value: tuple[bytes, int], version: int, due: int | None, made: int, changed: int) -> Record:
        return Record(key, *value, version, due, made, changed)

    return st.builds(row, key, value, st.integers(1, LAST_VERSION), st.none() | st.just(2**45), moments, moments)


named_keys = st.builds(
    lambda name, key: keys.store_prefix(name) + key, st.sampled_from(["a", "B-2", "x/y"]), tuple_keys
)
any_key = st.one_of(tuple_keys, named_keys, st.binary(min_size=1, max_size=12))
# Exports leave out the rows of services.
semantic_keys = st.binary(min_size=1, max_size=12).filter(lambda key: not key.startswith(SERVICE_ROWS))
any_row = st.one_of(
    st.tuples(st.just(Space.TUPLES), rows(any_key, stored_values)),
    st.tuples(st.just(Space.SEMANTIC), rows(semantic_keys, stored_values)),
    st.tuples(st.just(Space.PLUGINS), rows(st.tuples(texts, texts), st.tuples(json_texts, st.just(0)))),
)


@given(any_row)
def test_a_row_comes_back_from_its_line(row: tuple[Space, Record]) -> None:
    space, record = row
    line = lines.write(space, [record])
    assert line.find(b"\n") == len(line) - 1
    assert json.loads(line)["space"] == space
    assert lines.read(line, now=0) == row


@contextlib.asynccontextmanager
async def maintenance_of(url: str | Path) -> AsyncIterator[Maintenance]:
    maintenance = await open_maintenance(url, make=True)
    try:
        yield maintenance
    finally:
        await maintenance.aclose()


async def exported(url: str | Path) -> bytes:
    out = io.BytesIO()
    await admin.export(url, out)
    return out.getvalue()


@examples(5)
@given(rows=st.lists(any_row, min_size=1, max_size=12, unique_by=lambda row: (row[0], row[1].key)))
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_export_import_export_is_the_same_byte_by_byte(
    engine: str,
    rows: list[tuple[Space, Record]],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    version = max(row.version for _, row in rows)

    async def moved(first: str | Path, second: str | Path) -> tuple[bytes, bytes]:
        async with maintenance_of(first) as origin:
            assert await origin.load(rows, version, Existing.REFUSE) == Loaded(new=len(rows))
        text = await exported(first)
        await admin.import_(io.BytesIO(text), second)
        return text, await exported(second)

    with contextlib.ExitStack() as stack:
        if engine == "sqlite":
            folder = tmp_path_factory.mktemp("moved")
            first, second = str(folder / "a.db"), str(folder / "b.db")
        else:
            server = request.getfixturevalue("postgres_server")
            first, second = [stack.enter_context(fresh_database(server)) for _ in range(2)]
        text, again = asyncio.run(moved(first, second))
    assert text == again
    assert text.count(b"\n") == len(rows) + 2


# The commands


async def fill(url: str) -> None:
    """Something of every interface."""
    async with keyloft.open(url) as kv:
        await kv.set_many({("users", name): {"name": name} for name in ("alice", "bob", "é")})
        await kv.set(("log", 1, -2.5, True), b"\x00\xff", expire_in=3600)
        await kv.set(("visits",), U64(7))
        await kv.set(("deep",), [[[{"a": None}]], 10**30, "\u2028"])
        await kv.delete(("users", "bob"))
        async with SemanticStore(kv, sweep_every=None) as store:
            kind = Semantics(purpose="config", producer="test")
            entry = await store.put(THEME, "dark", expected_version=0, writer="me", semantics=kind)
            await store.put(
                THEME, "light", expected_version=entry.version, writer="me", semantics=kind, request_id="r1"
            )
    db = BotDatabase(url)
    await db.kv_set("trivia", "score", {"alice": 3}, ttl_seconds=1000)
    await db.kv_set("quotes", "1", "é")
    await db.close()


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    return environment["KEYLOFT_DATABASE_URL"]


@pytest.fixture
def other(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "other.db")


def test_a_database_is_exported_and_imported(url: str, other: str, run: Keyloft, tmp_path: Path) -> None:
    asyncio.run(fill(url))
    file = tmp_path / "all.jsonl"
    code, stdout, stderr = run("export", str(file))
    assert (code, stderr) == (0, "")
    report = json.loads(stdout)
    assert report["entries"] == len(file.read_bytes().splitlines()) - 2 > 10
    assert run("import", str(file), "--database", other) == (
        0,
        f'{{"new":{report["entries"]},"same":0,"kept":0,"replaced":0}}\n',
        "",
    )
    assert run("export", "--database", other)[1].encode() == file.read_bytes()
    assert run("get", "visits", "--database", other)[1] == "7\n"
    assert json.loads(run("semantic", "get", THEME, "--database", other)[1])["value"] == "light"
    audit = run("semantic", "audit", THEME)[1]
    assert audit
    assert run("semantic", "audit", THEME, "--database", other)[1] == audit


def test_versions_go_on_where_they_were(url: str, other: str, run: Keyloft, tmp_path: Path) -> None:
    asyncio.run(fill(url))
    file = str(tmp_path / "all.jsonl")
    version = json.loads(run("export", file)[1])["version"]
    run("import", file, "--database", other)
    assert run("set", "new", "1", "--database", other)[1] == f"{version + 1}\n"


def test_entries_of_named_stores_are_moved_as_such(url: str, other: str, run: Keyloft, tmp_path: Path) -> None:
    run("set", "a", "1")
    run("set", "users/=5", "2", "--name", "shop", "--expire-in", "1000")
    run("set", "users/=6", "3", "--name", "shop.2")
    file = tmp_path / "all.jsonl"
    run("export", str(file))
    found = [json.loads(line) for line in file.read_text().splitlines()[1:-1]]
    assert [(line.get("store"), line["key"]) for line in found] == [
        (None, "a"),
        ("shop", "users/=5"),
        ("shop.2", "users/=6"),
    ]
    assert run("import", str(file), "--database", other)[0] == 0
    assert run("export", "--database", other)[1] == file.read_text()
    assert run("get", "users/=5", "--name", "shop", "--database", other)[1] == "2\n"
    assert run("count", "--database", other)[1] == "1\n"

    def keys_of(*options: str) -> list[str]:
        return [json.loads(line)["key"] for line in run("export", *options)[1].splitlines()[1:-1]]

    assert keys_of("--prefix", "") == ["a"]
    assert keys_of("--name", "shop") == keys_of("--name", "shop", "--prefix", "users") == ["users/=5"]
    assert keys_of("--name", "shop", "--prefix", "nothing") == keys_of("--name", "sho") == []
    part = str(tmp_path / "part.db")
    assert run("copy", url, part, "--name", "shop.2")[0] == 0
    assert (run("count", "--database", part)[1], run("count", "--name", "shop.2", "--database", part)[1]) == (
        "0\n",
        "1\n",
    )
    for line, words in (
        (b'{"key":"a","value":1,"store":"a/b"}', "store: expected 1 to 64"),
        (b'{"plugin":"p","key":"a","value":1,"store":"shop"}', "store: only an entry of a tuple store"),
        (b'{"key_hex":"0261","value":1,"store":"shop"}', "store: only an entry of a tuple store"),
    ):
        assert words in run("import", "-", given=line)[2]
    assert run("export", "--name", "a/b")[0] == 2


def test_sqlite_to_postgresql_to_sqlite_loses_nothing(postgres_url: str, tmp_path: Path) -> None:
    first, last = str(tmp_path / "first.db"), str(tmp_path / "last.db")
    asyncio.run(fill(first))
    for source, target in ((first, postgres_url), (postgres_url, last)):
        code, stdout, stderr = run_command({}, "copy", source, target)
        assert (code, stderr) == (0, "")
        report = json.loads(stdout)
        assert report["missing"] == report["different"] == report["other_versions"] == 0
        assert report["new"] == report["compared"] > 10
        assert report["source_sha256"] == report["target_sha256"]

    async def both() -> tuple[bytes, bytes]:
        return await exported(first), await exported(last)

    before, after = asyncio.run(both())
    # The version counter has jumped twice: the first and the last line tell that.
    assert before.splitlines()[1:-1] == after.splitlines()[1:-1]


def test_only_a_part_is_moved(url: str, other: str, run: Keyloft) -> None:
    asyncio.run(fill(url))

    def keys_of(*which: str) -> list[str]:
        _, stdout, _ = run("export", *which)
        return [json.loads(line)["key"] for line in stdout.split("\n")[1:-2]]

    assert keys_of("--prefix", "users") == ["users/alice", "users/é"]
    assert keys_of("--prefix", "") == ["deep", "log/=1/=-2.5/=true", "users/alice", "users/é", "visits"]
    assert keys_of("--plugin", "trivia") == ["score"]
    assert keys_of("--plugin", "triv") == []
    assert "e/acme/web/config/theme" in keys_of("--project", "tenant/acme/project/web")
    assert keys_of("--project", "tenant/acme/project/we") == []
    assert len(keys_of("--prefix", "users", "--plugin", "quotes")) == 3
    assert run("export", "--project", THEME)[0] == 2
    assert run("copy", url, other, "--prefix", "users")[0] == 0
    assert run("keys", "--database", other)[1] == "users/alice\nusers/é\n"


def test_what_has_expired_is_gone_but_workflows_may_still_restore_it(url: str, run: Keyloft) -> None:
    async def work() -> None:
        async with maintenance_of(url) as maintenance:
            gone = [
                (Space.TUPLES, Record(keys.encode(("gone",)), b"1", 0, 1, 1, 1, 1)),
                (Space.PLUGINS, Record(("trivia", "gone"), b"1", 0, 1, 1, 1, 1)),
                (Space.SEMANTIC, Record(b"e/acme/web/gone", b"1", 0, 1, 1, 1, 1)),
            ]
            await maintenance.load(gone, 1, Existing.REFUSE)

    asyncio.run(work())
    assert [json.loads(line)["key"] for line in run("export")[1].split("\n")[1:-2]] == ["e/acme/web/gone"]


def test_what_is_there_already_is_refused_kept_or_replaced(environment: dict[str, str], run: Keyloft) -> None:
    run("set", "a", "1")
    run("set", "b", "2")
    lines = b'{"key":"b","value":3}\n{"key":"a","value":1}\n{"key":"c","value":[1, 2]}\n'
    code, stdout, stderr = run("import", "-", given=lines)
    assert (code, stdout) == (1, "")
    assert "tuples b is stored already" in stderr
    assert "--keep" in stderr
    assert "--replace" in stderr
    assert run("count")[1] == "2\n", "a slice is stored as a whole, or not at all"
    assert run("import", "-", "--keep", given=lines)[:2] == (0, '{"new":1,"same":1,"kept":1,"replaced":0}\n')
    assert run("get", "b")[1] == "2\n"
    before = json.loads(run("get", "a", "--entry")[1])["versionstamp"]
    assert run("import", "-", "--replace", given=lines)[:2] == (0, '{"new":0,"same":2,"kept":0,"replaced":1}\n')
    assert json.loads(run("get", "b", "--entry")[1]) == {"key": "b", "value": 3, "versionstamp": before + 3}
    assert json.loads(run("get", "a", "--entry")[1])["versionstamp"] == before
    assert run("import", "-", "--keep", "--replace")[0] == 2


@pytest.mark.parametrize(("how", "left"), [((), '"mine"\n'), (("--keep",), '"mine"\n'), (("--replace",), "2\n")])
def test_stored_entries_are_found_whatever_the_order_of_the_lines(
    environment: dict[str, str], run: Keyloft, how: tuple[str, ...], left: str
) -> None:
    run("set", "c", '"mine"')
    code, _, stderr = run("import", "-", *how, given=b'{"key":"c","value":2}\n{"key":"a","value":1}\n')
    assert (code, "is stored already" in stderr) == ((0, False) if how else (1, True))
    assert run("get", "c")[1] == left


@pytest.mark.parametrize(
    ("how", "printed"),
    [
        ((), None),
        (("--keep",), '{"new":1,"same":1,"kept":1,"replaced":0}\n'),
        (("--replace",), '{"new":1,"same":1,"kept":0,"replaced":1}\n'),
    ],
)
def test_a_key_that_appears_twice_in_an_import_conflicts_with_itself(
    environment: dict[str, str], run: Keyloft, how: tuple[str, ...], printed: str | None
) -> None:
    code, stdout, stderr = run("import", "-", *how, given=b'{"key":"a","value":1}\n' * 2 + b'{"key":"a","value":2}\n')
    if printed is None:
        assert (code, stdout) == (1, "")
        assert "tuples a is stored already" in stderr
        return
    assert (code, stdout) == (0, printed)
    assert run("get", "a")[1] == ("1\n" if "--keep" in how else "2\n")


def test_times_by_hand_can_be_moved_and_saved(
    url: str, other: str, run: Keyloft, environment: dict[str, str], tmp_path: Path
) -> None:
    run("set", "a", "1")
    times = ["'9999-12-31 23:59:59.999999'", "'1969-01-01 00:00:00'"]
    times += (
        ["'infinity'", "'-infinity'", "'20000-01-01'", "'0044-01-01 BC'"] if "://" in url else ["'never'", "20300101"]
    )
    for number, time in enumerate(times):
        run_sql(
            url,
            "INSERT INTO plugin_kv_storage (plugin_name, key, value_json, expires_at, created_at) "
            f"VALUES ('trivia', 'k{number}', '1', {time}, {time})",
        )
    file, saved = str(tmp_path / "all.jsonl"), str(tmp_path / "saved.db")
    assert run("export", file)[0] == 0
    exported = {line["key"]: line for line in map(json.loads, Path(file).read_text().splitlines()[2:-1])}
    last = 253_402_300_799_999
    if "://" in url:
        assert {key: line.get("expires_at") for key, line in exported.items()} == {"k0": last, "k2": None, "k4": last}
    else:
        assert {key: line.get("expires_at") for key, line in exported.items()} == {"k0": last, "k2": None}
    same = {"new": 0, "same": len(exported) + 1, "kept": 0, "replaced": 0}
    assert json.loads(run("import", file)[1]) == same, "it meets its own rows"
    assert run("copy", url, other)[0] == 0
    assert run("backup", saved)[0] == 0
    assert run("restore", saved, "--replace", "--yes")[0] == 0
    assert run("restore", saved, "--replace", "--yes", "--database", other)[0] == 0
    assert run("export", "--database", other)[1].splitlines()[1:-1] == Path(file).read_text().splitlines()[1:-1]


BAD_LINES = [
    b"nonsense",
    b'{"value":1}',
    b'{"key":"a"}',
    b'{"key":"","value":1}',
    b'{"key":"a","value":1,"bytes":"AA=="}',
    b'{"key":"a","bytes":"?"}',
    b'{"key":"a","u64":-1}',
    b'{"key":"a","u64":18446744073709551616}',
    b'{"key":"a","raw":"AA=="}',
    b'{"key":"a","value":1,"version":"7"}',
    b'{"key":"a","value":1,"version":-2}',
    b'{"key":"a","value":1,"expires_at":1e300}',
    b'{"key":"a","value":1,"expires_at":99999999999999999}',
    b'{"key":"a","value":1,"colour":"red"}',
    b'{"key":"=oops","value":1}',
    b'{"key":"a%G0","value":1}',
    b'{"key_hex":"xyz","value":1}',
    b'{"space":"plugins","key":"a","value":1}',
    b'{"plugin":"trivia","key":"a","bytes":"AA=="}',
    b'{"plugin":"tri\\u0000via","key":"a","value":1}',
    b'{"space":"attic","key":"a","value":1}',
    b"[1]",
    b'{"key":"\xff","value":1}',
    b'{"key":"a","value":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"key":"' + b"a" * 3000 + b'","value":1}',
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_holds_no_entry_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidArgument):
        lines.read(line, 0)


def test_a_bad_line_is_named_and_what_comes_before_it_is_stored(url: str, run: Keyloft) -> None:
    code, stdout, stderr = run("import", "-", given=b'{"key":"a","value":1}\n\n{"key":"b","value":secret}\n')
    assert (code, stdout) == (1, "")
    assert stderr.startswith("keyloft: TRANSFER_FAILED: line 3: ")
    assert "The entry before it is stored, and stays. " in stderr
    assert "secret" not in stderr
    assert run("keys")[1] == "a\n"
    assert "the file was cut inside line 1" in run("import", "-", given=b'{"keyloft":"export","for')[2]
    code, _, stderr = run("import", "-", given=b"\n\n")
    assert (code, "the file is empty" in stderr) == (1, True)
    later = b'{"keyloft":"export","format":3,"version":1}\n'
    assert "format 3, which is that of a later version" in run("import", "-", given=later)[2]
    earlier = b'{"keyloft":"export","format":1,"clock":1}\n'
    assert (
        "format 1, which is that of an earlier version: export the database again"
        in run("import", "-", given=earlier)[2]
    )


def many(number: int, size: int = 10) -> bytes:
    """An export with this many entries."""
    out = io.BytesIO()
    writer = ExportWriter(out)
    writer.begin(number, {})
    value = b'"%s"' % (b"x" * size)
    writer.write(Space.TUPLES, [Record(keys.encode(("n", at)), value, 0, at + 1, None, 1, 1) for at in range(number)])
    writer.finish(number)
    return out.getvalue()


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.slow
def test_an_import_that_was_stopped_goes_on(
    url: str, environment: dict[str, str], run: Keyloft, tmp_path: Path, stop: signal.Signals
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_bytes(many(3 * MAINTENANCE_ROWS))
    command = [sys.executable, "-m", "keyloft", "import", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(b"".join(file.read_bytes().splitlines(keepends=True)[: MAINTENANCE_ROWS + 100]))
        child.stdin.flush()
        asyncio.run(until(url, MAINTENANCE_ROWS))
        child.send_signal(stop)
        assert child.wait(LONGEST_SECONDS) == (130 if stop is signal.SIGINT else -stop)
        stderr = child.stderr.read().decode()
        assert stderr == ("" if stop is signal.SIGKILL else f"{STOPPED}\n")
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    assert run("count")[1] == f"{MAINTENANCE_ROWS}\n"
    done = Loaded(new=2 * MAINTENANCE_ROWS, same=MAINTENANCE_ROWS)
    report = json.loads(run("import", str(file))[1])
    assert report == {"new": done.new, "same": done.same, "kept": 0, "replaced": 0}
    # Each slice took a version: the first and the last line tell that.
    assert run("export")[1].encode().splitlines()[1:-1] == file.read_bytes().splitlines()[1:-1]


STOPPED = "Stopped. What is stored stays stored; the same command continues from there."


async def until(url: str, entries: int) -> None:
    """Wait for the commit of another process."""
    async with asyncio.timeout(LONGEST_SECONDS), keyloft.open(url) as kv:
        async for _ in kv.watch(("n", entries - 1)):
            if await kv.count() == entries:
                return


# Files that were cut


def cut_last_line(text: bytes) -> bytes:
    return b"".join(text.splitlines(keepends=True)[:-1])


def cut_in_a_line(text: bytes) -> bytes:
    return text[: len(text) // 2]


def cut_in_the_last_line(text: bytes) -> bytes:
    return text[:-10]


def lose_lines_in_the_middle(text: bytes) -> bytes:
    whole = text.splitlines(keepends=True)
    return b"".join(whole[:10] + whole[15:])


def lose_the_first_line(text: bytes) -> bytes:
    return b"".join(text.splitlines(keepends=True)[1:])


def lose_all_but_the_first_line(text: bytes) -> bytes:
    return text.splitlines(keepends=True)[0]


def cut_to_nothing(text: bytes) -> bytes:
    return b""


def change_a_value(text: bytes) -> bytes:
    return text.replace(b"xxx", b"xyz", 1)


@pytest.mark.parametrize("through_a_pipe", [False, True])
@pytest.mark.parametrize(
    ("damage", "stored", "message"),
    [
        (cut_last_line, 33, "the file was cut after 33 entries"),
        (cut_in_a_line, 16, "the file was cut inside line 18, after 16 entries"),
        (cut_in_the_last_line, 33, "the file was cut inside line 35, after 33 entries"),
        (lose_lines_in_the_middle, 28, "the file has 28 entries, and its last line says 33"),
        (lose_the_first_line, 33, "the first line of the export is missing"),
        (lose_all_but_the_first_line, 0, "the file was cut after 0 entries"),
        (cut_to_nothing, 0, "the file is empty: it was cut, or the export that wrote it failed"),
        (change_a_value, 33, "the file was changed since it was written"),
    ],
)
def test_a_file_that_was_cut_is_noticed(
    run: Keyloft,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    stored: int,
    message: str,
    through_a_pipe: bool,
) -> None:
    whole, file = many(33), tmp_path / "cut.jsonl"
    file.write_bytes(damage(whole))
    outcome = run("import", "-", given=file.read_bytes()) if through_a_pipe else run("import", str(file))
    assert outcome[:2] == (1, "")
    assert outcome[2].startswith("keyloft: TRANSFER_FAILED: ")
    assert message in outcome[2]
    assert (f"The {stored} entries before it are stored, and stay. Get the whole file" in outcome[2]) == (stored > 0)
    assert ("Nothing is stored." in outcome[2]) == (stored == 0)
    assert run("count")[1] == f"{stored}\n"
    file.write_bytes(whole)
    again = ["--replace"] if damage is change_a_value else []
    report = json.loads(run("import", str(file), *again)[1])
    assert report["new"] == 33 - stored
    assert run("count")[1] == "33\n"


def test_an_export_without_its_end_is_cut_also_between_two_of_them(run: Keyloft) -> None:
    assert run("import", "-", given=many(3) + many(5))[0] == 0
    code, _, stderr = run("import", "-", given=cut_last_line(many(3)) + many(5))
    assert (code, "line 5 begins another export" in stderr) == (1, True)


def test_a_line_that_was_added_after_the_end_of_an_export_is_refused(run: Keyloft) -> None:
    added = b'{"key":"added","value":1}\n'
    code, _, stderr = run("import", "-", given=many(3) + b"\n" + added)
    assert (code, "line 7 comes after the last line of the export" in stderr) == (1, True)
    assert run("import", "-", given=many(3) + many(5) + added)[0] == 1
    assert run("get", "added")[0] == 1
    assert run("import", "-", given=many(3) + b"\n \n")[0] == 0


def test_a_file_by_hand_needs_neither_a_first_nor_a_last_line(run: Keyloft) -> None:
    assert run("import", "-", given=b'{"key":"a","value":1}\n{"key":"b","value":2}')[0] == 0
    assert run("count")[1] == "2\n"


def test_only_a_part_of_a_whole_file_is_imported(run: Keyloft, tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_bytes(many(33))
    assert run("import", str(tmp_path / "many.jsonl"), "--prefix", "nothing")[0] == 0
    assert run("count")[1] == "0\n"


def test_the_last_line_of_an_export_has_the_number_and_the_hash_of_the_others(run: Keyloft, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    run("import", "-", given=many(33))
    report = json.loads(run("export", str(file))[1])
    *others, last = file.read_bytes().splitlines(keepends=True)
    sha256 = hashlib.sha256(b"".join(others)).hexdigest()
    assert json.loads(last) == {"keyloft": "end", "entries": 33, "version": 33, "sha256": sha256}
    assert report == {"file": str(file), "entries": 33, "version": 33, "sha256": sha256}


@pytest.mark.parametrize("cut", [0, 20, 60, 100, 1000, 5000, -1, -10])
def test_an_export_that_was_cut_goes_on(run: Keyloft, environment: dict[str, str], tmp_path: Path, cut: int) -> None:
    if "postgresql" in environment["KEYLOFT_DATABASE_URL"] and cut != 1000:
        pytest.skip("the file is the same whatever the database: one cut is enough there")
    file, again = tmp_path / "all.jsonl", tmp_path / "again.jsonl"
    (tmp_path / "source.jsonl").write_bytes(many(100))
    run("import", str(tmp_path / "source.jsonl"))
    asyncio.run(fill(environment["KEYLOFT_DATABASE_URL"]))
    run("export", str(file))
    partial = tmp_path / "again.jsonl.partial"
    partial.write_bytes(file.read_bytes()[:cut])
    assert run("export", str(again))[0] == 2, "an export that did not end is not overwritten unasked"
    code, _, stderr = run("export", str(again), "--resume")
    assert (code, stderr) == (0, "")
    assert not partial.exists()
    assert again.read_bytes() == file.read_bytes(), "the same entries, the same number and the same hash"
    assert run("export", str(again))[0] == 2
    assert run("export", str(again), "--force")[0] == 0
    assert again.read_bytes() == file.read_bytes()
    assert run("import", str(again), "--database", str(tmp_path / "fresh.db"))[0] == 0


@ON_A_FILE
def test_an_export_onto_a_full_disk_says_which_and_goes_on_once_there_is_space(
    run: Keyloft, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "source.jsonl").write_bytes(many(100, 1000))
    run("import", str(tmp_path / "source.jsonl"))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    file = tmp_path / "all.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "keyloft", "export", str(file)],
        env=environment,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    expected = f"keyloft: DISK_FULL: no space is left for {file}.partial: --resume continues it once there is space\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)
    assert run("export", str(file), "--resume")[0] == 0
    assert len(file.read_bytes().splitlines()) == 102


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@ON_A_FILE
def test_output_for_which_no_space_is_left_is_named_as_such(run: Keyloft, environment: dict[str, str]) -> None:
    run("set", "a", "1")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "keyloft", "export"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=LONGEST_SECONDS,
        )
    assert (done.returncode, done.stderr) == (1, "keyloft: no space is left where the output is written\n")


def test_an_export_goes_on_with_the_same_part_only(run: Keyloft, tmp_path: Path) -> None:
    run("set", "u/a", "1")
    run("set", "v/a", "2")
    file = tmp_path / "some.jsonl"
    run("export", str(file), "--prefix", "v")
    partial = file.rename(tmp_path / "some.jsonl.partial")
    code, _, stderr = run("export", str(file), "--resume")
    assert (code, "another part" in stderr) == (2, True)
    assert partial.exists()
    assert run("export", str(file), "--resume", "--prefix", "v")[0] == 0


async def test_an_entry_that_expires_during_a_copy_is_not_reported_as_missing(url: str, other: str) -> None:
    soon = Record(keys.encode(("soon",)), b"1", 0, 1, SystemClock().now() + 3_600_000, 1, 1)
    async with maintenance_of(url) as a, maintenance_of(other) as b:
        await a.load([(Space.TUPLES, soon)], 1, Existing.REFUSE)
        async with a.snapshot() as source, b.snapshot() as target:
            assert (await compare(source, target, Selection())).missing == 1
            target.now = soon.expires_at or 0
            found = await compare(source, target, Selection())
            assert (found.missing, found.source_sha256) == (0, found.target_sha256)


async def test_a_plugins_value_that_is_no_text_is_named(url: str) -> None:
    if url.startswith("etcd:"):
        pytest.skip("etcd stores bytes; `keyloft check` names such a value")
    damaged = Record(("trivia", "score"), b"\xff", 0, 1, None, 1, 1)
    async with maintenance_of(url) as maintenance:
        with pytest.raises(Undecodable, match="trivia"):
            await maintenance.load([(Space.PLUGINS, damaged)], 1, Existing.REFUSE)


async def test_a_snapshot_shows_one_moment_while_others_write(url: str) -> None:
    async with keyloft.open(url) as kv, maintenance_of(url) as maintenance:
        await kv.set_many({("n", at): at for at in range(100)})
        async with maintenance.snapshot() as snapshot:
            await kv.set_many({("n", at): "changed" for at in range(0, 200, 2)})
            await kv.delete_range(prefix=("n",), start=("n", 50))
            seen = [row async for some in snapshot.rows(EVERYTHING[0]) for row in some]
            sizes = [size async for some in snapshot.sizes(EVERYTHING[0]) for size in some]
            assert [(keys.decode(row.key), row.value) for row in seen] == [
                (("n", at), str(at).encode()) for at in range(100)
            ]
            assert [(size.key, size.value_bytes) for size in sizes] == [(row.key, len(row.value)) for row in seen]
            assert await snapshot.count(EVERYTHING[0]) == 100


async def test_large_values_come_a_few_at_a_time(url: str) -> None:
    async with keyloft.open(url) as kv, maintenance_of(url) as maintenance:
        for at in range(8):
            await kv.set(("large", at), "x" * 900_000)
        await kv.set_many({("small", at): at for at in range(500)})
        async with maintenance.snapshot() as snapshot:
            pages = [len(some) async for some in snapshot.rows(EVERYTHING[0])]
        assert sum(pages) == 508
        assert max(pages[:4]) <= 2


async def test_a_copy_that_differs_is_found_out(url: str, other: str, run: Keyloft) -> None:
    async def compared(a: Maintenance, b: Maintenance) -> tuple[int, int, int, str | None, bool]:
        async with a.snapshot() as source, b.snapshot() as target:
            found = await compare(source, target, Selection())
        return (
            found.compared,
            found.missing,
            found.different,
            found.first_difference,
            found.source_sha256 == found.target_sha256,
        )

    async def fresh(kv: Store) -> None:
        await kv.set_many({("n", at): at for at in range(5)})

    async with (
        keyloft.open(url) as one,
        keyloft.open(other) as two,
        maintenance_of(url) as a,
        maintenance_of(other) as b,
    ):
        await fresh(one)
        await fresh(two)
        assert await compared(a, b) == (5, 0, 0, None, True)
        await two.set(("extra",), 1)
        assert await compared(a, b) == (5, 0, 0, None, True)
        await two.delete(("n", 0))
        assert await compared(a, b) == (5, 1, 0, "tuples n/=0", False)
        await two.set(("n", 4), 5)
        assert await compared(a, b) == (5, 2 - 1, 1, "tuples n/=0", False)
        await two.delete_range(prefix=("n",))
        assert await compared(a, b) == (5, 5, 0, "tuples n/=0", False)


def test_a_reader_that_has_seen_enough_is_no_error(run: Keyloft, environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_bytes(many(2 * MAINTENANCE_ROWS, 100))
    run("import", str(file))
    done = subprocess.run(
        f'"{sys.executable}" -m keyloft export | head -n 1; echo "${{PIPESTATUS[0]}}"',
        shell=True,
        executable="/bin/bash",
        env=environment,
        capture_output=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.stdout == lines.head(2 * MAINTENANCE_ROWS + 1, {}) + b"0\n"
    assert done.stderr == b""


def test_mistakes_are_explained_and_no_file_is_made(
    run: Keyloft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("set", "a", "1")
    before = sorted(tmp_path.iterdir())
    for arguments, message in (
        (("export", "--database", "nowhere.db"), "there is no file"),
        (("export", "nowhere.jsonl", "--database", "nowhere.db"), "there is no file"),
        (("import", "nowhere.jsonl", "--database", "new.db"), "there is no file nowhere.jsonl"),
        (("export", "--database", "mysql://x"), "no engine"),
        (("export", "--database", ":memory:"), "in memory"),
        (("copy", "nowhere.db", "new.db"), "there is no file"),
        (("import", ".", "--database", "new.db"), "is a folder"),
        (("export", ".", "--force"), "is a folder"),
        (("export", "nowhere/all.jsonl"), "there is no folder nowhere"),
        (("export", "-", "--resume"), "for a file"),
        (("export", "--plugin", "Not A Name"), "plugin"),
    ):
        code, out, stderr = run(*arguments)
        assert (code in (1, 2), out) == (True, ""), arguments
        assert message in stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
@ON_A_FILE
def test_a_terminal_shows_the_progress(run: Keyloft, environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_bytes(many(2 * MAINTENANCE_ROWS))
    code, shown = at_a_terminal(environment, "import", str(file))
    assert code == 0
    assert "import" in shown
    assert f"{2 * MAINTENANCE_ROWS:,} entries stored in " in shown
    out, copied = str(tmp_path / "sentence.jsonl"), str(tmp_path / "copied.db")
    assert (
        f"{out} holds {2 * MAINTENANCE_ROWS:,} entries, up to version " in at_a_terminal(environment, "export", out)[1]
    )
    assert at_a_terminal(environment, "export", "--prefix", "nothing")[1].startswith('{"keyloft"'), (
        "no bar beside lines"
    )
    shown = at_a_terminal(environment, "copy", environment["KEYLOFT_DATABASE_URL"], copied, "--prefix", "nothing")[1]
    assert "0 entries stored in " in shown
    assert "0 entries compared, 0 missing, 0 different" in shown
    shown = at_a_terminal(environment, "copy", environment["KEYLOFT_DATABASE_URL"], copied)[1]
    assert f"{2 * MAINTENANCE_ROWS:,} of {2 * MAINTENANCE_ROWS:,}" in shown, "the last number of a stage"
    assert at_a_terminal({**environment, "TERM": "dumb"}, "export", str(tmp_path / "out.jsonl"))[1].startswith("{")


def test_a_file_is_readable_by_its_owner_alone_whatever_the_umask(run: Keyloft, url: str, tmp_path: Path) -> None:
    run("set", "a", "1")
    if "://" not in url:
        Path(url).chmod(0o644)
    file, partial = tmp_path / "all.jsonl", tmp_path / "all.jsonl.partial"
    before = os.umask(0)
    try:
        assert run("export", str(file))[0] == 0
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o644)
        assert run("export", str(file), "--force")[0] == 0
        assert file.stat().st_mode & 0o777 == 0o600
        file.rename(partial).chmod(0o666)
        assert run("export", str(file), "--resume")[0] == 0
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert run("export", str(tmp_path))[::2] == (2, f"keyloft: {tmp_path} is a folder: name a file in it\n")


@pytest.mark.parametrize(
    "row",
    [
        "plugin_kv_storage (plugin_name, key, value_json) VALUES ('trivia', x'61', '1')",
        "keyloft_tuples (key, value, encoding, version, created_at, updated_at) VALUES ('a', x'31', 0, 1, 0, 0)",
        "keyloft_tuples (key, value, encoding, version, created_at, updated_at) VALUES (5, x'31', 0, 1, 0, 0)",
        "keyloft_semantic (key, value, encoding, version, created_at, updated_at) VALUES (5, x'31', 0, 1, 0, 0)",
        "keyloft_tuples (key, value, encoding, version, expires_at, created_at, updated_at) "
        "VALUES (x'026100', x'31', 0, 1, 'soon', 0, 0)",
        # Its value is lost.
        "keyloft_tuples (key, large, encoding, version, created_at, updated_at) VALUES (x'026100', 77, 0, 1, 0, 0)",
    ],
)
def test_a_row_by_hand_that_is_no_entry_is_named_and_not_changed_on_the_way(
    run: Keyloft, environment: dict[str, str], tmp_path: Path, row: str
) -> None:
    url = str(tmp_path / "hand.db")
    assert run("set", "b", "1", "--database", url)[0] == 0
    run_sql(url, f"INSERT INTO {row}")
    for command in (("export", "--database", url), ("copy", url, str(tmp_path / "copy.db"))):
        code, _, stderr = run(*command)
        assert (code, stderr.count("\n")) == (1, 1)
        assert stderr.startswith("keyloft: UNDECODABLE: the row ")
    assert run("stats", "--database", url)[0] == 0
    assert run("check", "--database", url)[0] == 1


async def test_an_error_names_arguments_as_its_caller_wrote_them(tmp_path: Path) -> None:
    database, file, saved = (str(tmp_path / name) for name in ("app.db", "all.jsonl", "saved.db"))
    async with keyloft.open(database) as kv:
        await kv.set(("a",), 1)
    async with keyloft.open(tmp_path / "other.db") as kv:
        await kv.set(("a",), 2)
    await admin.export(database, file)
    await admin.backup(database, saved)
    (tmp_path / "cut.jsonl.partial").write_bytes(Path(file).read_bytes()[:-20])
    (tmp_path / "odd.jsonl.partial").write_text('{"key":"a","value":1}\n')
    cut, odd, other = str(tmp_path / "cut.jsonl"), str(tmp_path / "odd.jsonl"), str(tmp_path / "other.db")
    calls: list[tuple[Awaitable[object], list[str], list[str], list[str]]] = [
        (admin.export(database, file), ["export", file], ["overwrite=True"], ["--force"]),
        (admin.backup(database, saved), ["backup", saved], ["overwrite=True"], ["--force"]),
        (
            admin.export(database, cut),
            ["export", cut],
            ["resume=True continues", "overwrite=True"],
            ["--resume continues", "--force"],
        ),
        (
            admin.export(database, cut, prefix=("a",), resume=True),
            ["export", cut, "--prefix", "a", "--resume"],
            ["prefix=, plugin=, project= and name=", "overwrite=True"],
            ["--prefix, --plugin, --project and --name", "--force"],
        ),
        (
            admin.export(database, odd, resume=True),
            ["export", odd, "--resume"],
            ["overwrite=True replaces it"],
            ["--force replaces it"],
        ),
        (
            admin.export(database, io.BytesIO(), resume=True),
            ["export", "-", "--resume"],
            ["resume=True and overwrite=True"],
            ["--resume and --force"],
        ),
        (admin.restore(saved, other), ["restore", saved, "--database", other], ["replace=True"], ["--replace"]),
        (admin.restore(saved, saved), ["restore", saved, "--database", saved], ["database="], ["--database"]),
        (
            admin.copy(database, other),
            ["copy", database, other],
            ['existing="keep"', 'existing="replace"'],
            ["--keep leaves", "--replace replaces"],
        ),
        (
            admin.check(database, limit=-1),
            ["check", "--limit", "-1"],
            ["limit: expected"],
            ["keyloft: --limit: expected"],
        ),
        (admin.stats(database, soon=-1), ["stats", "--soon", "-1"], ["soon: expected"], ["keyloft: --soon: expected"]),
    ]
    for call, command, arguments, options in calls:
        with pytest.raises(keyloft.KeyloftError) as failed:
            await call
        code, _, stderr = run_command({"KEYLOFT_DATABASE_URL": database}, *command)
        assert code in (1, 2)
        assert [word for word in arguments if word not in str(failed.value)] == []
        assert [word for word in options if word not in stderr] == []
        assert "--" not in str(failed.value)
        assert "=True" not in stderr
        assert "existing=" not in stderr
