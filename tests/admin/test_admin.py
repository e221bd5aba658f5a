"""`keyloft.admin`: what operators' commands do, as functions."""

import inspect
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import keyloft
from keyloft import InvalidArgument, InvalidKey, NotEmpty, TransferFailed, admin, limits
from tests.support.everything import fill, run_sql
from tests.support.postgres import database_url

T = TypeVar("T")
FUNCTIONS = ["backup", "check", "compact", "copy", "export", "import_", "import_from", "restore", "stats"]
OTHERS = ["ChangeLogFacts", "DiskUsage", "Finding", "ForeignStore", "KeyChange", "Progress", "Tally", "changes"]


@pytest.fixture(params=["sqlite file", "postgresql", "etcd"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    # Not within the event loop: the first one starts a server.
    url = database_url(request.param, request, tmp_path)
    assert url is not None
    return url


@pytest.fixture
async def url(empty_url: str) -> str:
    """A database with something of every kind."""
    await fill(empty_url)
    return empty_url


class Heard:
    """Remembers the progress that was reported."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, int | None]] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        assert done >= 0
        assert total is None or total >= done
        self.last[stage] = done, total

    @property
    def stages(self) -> list[str]:
        return list(self.last)


def test_the_public_names_are_these() -> None:
    reports = [f"{name.title().replace('_', '')}Report" for name in FUNCTIONS]
    assert sorted(admin.__all__) == sorted([*FUNCTIONS, *reports, *OTHERS])
    assert all(hasattr(admin, name) for name in admin.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_documented_with_an_example_and_reports_progress(name: str) -> None:
    function = getattr(admin, name)
    assert inspect.iscoroutinefunction(function)
    documentation = inspect.getdoc(function) or ""
    for heading in ("Example:", "Args:", "Returns:", "Raises:"):
        assert f"\n{heading}\n" in documentation
    parameters = inspect.signature(function).parameters
    assert parameters["progress"].annotation == admin.Progress | None
    for parameter in parameters:
        assert f"    {parameter}: " in documentation


def test_it_needs_none_of_the_extras() -> None:
    code = (
        "import sys\n"
        "for name in ('nats', 'sqlalchemy', 'alembic', 'typer', 'rich', 'asyncpg'): sys.modules[name] = None\n"
        "from keyloft import admin; print(admin.__all__[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert (done.stdout, done.stderr) == ("BackupReport\n", "")


async def test_a_database_is_saved_checked_and_restored(url: str, tmp_path: Path) -> None:
    file, target, heard = tmp_path / "nightly.db", tmp_path / "restored.db", Heard()
    saved = await admin.backup(url, file, progress=heard)
    assert (saved.file, saved.bytes) == (str(file), file.stat().st_size)
    checked = await admin.check(file, progress=heard)
    assert checked == admin.CheckReport(rows=saved.rows, problems=0, findings=())
    restored = await admin.restore(file, target, progress=heard)
    assert (restored.rows, restored.version, restored.verified) == (saved.rows, limits.VERSION_JUMP, True)
    assert heard.stages == [
        "saving",
        "checking",
        "checking the database",
        "checking the change log",
        "checking rows",
        "reading",
        "restoring",
        "comparing",
    ]
    with pytest.raises(InvalidArgument, match="exists already"):
        await admin.backup(url, file)
    assert await admin.backup(url, file, overwrite=True) == saved


async def test_the_event_loop_never_waits_until_a_file_is_on_disk(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_by: list[threading.Thread] = []
    sync = os.fsync

    def watched_sync(handle: int) -> None:
        synced_by.append(threading.current_thread())
        sync(handle)

    monkeypatch.setattr(os, "fsync", watched_sync)
    for written in (
        admin.backup(url, tmp_path / "nightly.db"),
        admin.restore(tmp_path / "nightly.db", tmp_path / "restored.db"),
        admin.export(url, tmp_path / "all.jsonl"),
    ):
        synced_by.clear()
        await written
        assert synced_by
        assert threading.current_thread() not in synced_by


async def test_an_argument_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    file, given = tmp_path / "app.db", tmp_path / "all.jsonl"
    async with keyloft.open(file) as kv:
        await kv.set(("a",), 1)
    await admin.export(file, given)
    wrong: Any = 5
    for call, argument in (
        (admin.export(file, wrong), "target"),
        (admin.import_(wrong, file), "source"),
        (admin.import_(given, file, progress=wrong), "progress"),
        (admin.check(file, progress=wrong), "progress"),
    ):
        with pytest.raises(InvalidArgument, match=rf"^{argument}: expected .*, got int$"):
            await call
    wrong = ""
    with pytest.raises(InvalidArgument, match=r"^soon: expected a number of seconds"):
        await admin.stats(file, soon=wrong)
    with pytest.raises(InvalidKey, match=r"^prefix: expected a tuple of parts, got a bare str"):
        await admin.export(file, tmp_path / "part.jsonl", prefix=wrong)


async def test_every_stage_ends_with_all_of_it_done(url: str, tmp_path: Path) -> None:
    async def heard(function: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> tuple[T, dict[str, int]]:
        heard = Heard()
        report = await function(*arguments, **options, progress=heard)
        assert all(done == total for done, total in heard.last.values()), heard.last
        return report, {stage: done for stage, (done, _) in heard.last.items()}

    file, lines = tmp_path / "nightly.db", tmp_path / "all.jsonl"
    saved, ended = await heard(admin.backup, url, file)
    pages = file.stat().st_size // 4096 if "://" not in url else saved.rows
    assert ended == {"saving": pages, "checking": 1}
    for target in (str(tmp_path / "restored.db"), url):
        _, ended = await heard(admin.restore, file, target, replace=True)
        restoring = saved.rows if target == url else file.stat().st_size // 4096
        assert ended == {"checking": 1, "reading": saved.rows, "restoring": restoring, "comparing": saved.rows}
    _, ended = await heard(admin.check, url)
    assert ended.pop("checking the change log") > 0
    assert ended == {"checking the database": 1, "checking rows": saved.rows}
    assert (await heard(admin.stats, url))[1] == {"counting": saved.rows}
    exported, ended = await heard(admin.export, url, lines)
    assert ended == {"exporting": exported.entries}
    size = lines.stat().st_size
    assert (await heard(admin.import_, lines, tmp_path / "one.db"))[1] == {"importing": size}
    assert (await heard(admin.import_, io.BytesIO(lines.read_bytes()), tmp_path / "two.db"))[1] == {"importing": size}
    nothing = await heard(admin.import_, lines, tmp_path / "two.db", prefix=("nothing",))
    assert nothing == (admin.ImportReport(), {"importing": size})
    by_hand = tmp_path / "one.jsonl"
    by_hand.write_bytes(b'{"key":"a","value":1}')
    assert (await heard(admin.import_, by_hand, tmp_path / "two.db"))[1] == {"importing": by_hand.stat().st_size}
    copied, ended = await heard(admin.copy, url, tmp_path / "three.db")
    assert ended == {"copying": exported.entries, "comparing": copied.compared}
    assert (await heard(admin.compact, url))[1] == {"compacting": 1}
    # Nothing is stored here.
    async with keyloft.open(tmp_path / "empty.db"):
        pass
    assert (await heard(admin.copy, tmp_path / "empty.db", tmp_path / "four.db"))[1] == {"copying": 0, "comparing": 0}


async def test_what_is_stored_is_replaced_only_if_allowed(url: str, tmp_path: Path) -> None:
    file = tmp_path / "nightly.db"
    saved = await admin.backup(url, file)
    with pytest.raises(NotEmpty) as refused:
        await admin.restore(file, url)
    assert (refused.value.rows, refused.value.backup_rows) == (saved.rows, saved.rows)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.rows) == (str(refused.value), saved.rows)
    assert (await admin.restore(file, url, replace=True)).verified


async def test_entries_travel_through_a_stream(url: str, tmp_path: Path) -> None:
    out, heard, other = io.BytesIO(), Heard(), tmp_path / "other.db"
    report = await admin.export(url, out, progress=heard)
    assert report.file is None
    out.seek(0)
    assert await admin.import_(out, other, progress=heard) == admin.ImportReport(new=report.entries)
    assert heard.stages == ["exporting", "importing"]
    again = io.BytesIO()
    assert await admin.export(other, again) == report
    assert again.getvalue() == out.getvalue()


async def test_an_export_does_not_replace_what_another_process_made_meanwhile(url: str, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"

    def make_it(stage: str, done: int, total: int | None) -> None:
        if done:
            file.write_text("of another process")

    with pytest.raises(InvalidArgument, match="exists already"):
        await admin.export(url, file, progress=make_it)
    assert file.read_text() == "of another process"
    assert (tmp_path / "all.jsonl.partial").exists()
    await admin.export(url, file, overwrite=True)
    assert not (tmp_path / "all.jsonl.partial").exists()


async def test_an_import_that_fails_returns_what_was_stored(url: str, tmp_path: Path) -> None:
    out = io.BytesIO()
    report = await admin.export(url, out)
    cut = b"".join(out.getvalue().splitlines(keepends=True)[:-1])
    with pytest.raises(TransferFailed, match="the file was cut") as failed:
        await admin.import_(io.BytesIO(cut), tmp_path / "other.db")
    assert failed.value.result == admin.ImportReport(new=report.entries)


async def test_entries_are_copied_compared_and_kept_or_replaced(url: str, tmp_path: Path) -> None:
    other, heard = str(tmp_path / "other.db"), Heard()
    copied = await admin.copy(url, other, progress=heard)
    assert (copied.new, copied.missing, copied.different) == (copied.compared, 0, 0)
    assert copied.source_sha256 == copied.target_sha256
    assert heard.stages == ["copying", "comparing"]
    async with keyloft.open(other) as kv:
        await kv.set(("users", "alice"), "another")
    with pytest.raises(TransferFailed, match="tuples users/alice is stored already"):
        await admin.copy(url, other)
    assert (await admin.copy(url, other, existing="keep")).kept == 1
    assert (await admin.copy(url, other, existing="replace")).replaced == 1
    with pytest.raises(InvalidArgument, match='existing: expected "refuse", "keep" or "replace"'):
        await admin.copy(url, other, existing="whatever")  # type: ignore[arg-type]


async def test_what_is_stored_is_counted(url: str) -> None:
    heard = Heard()
    report = await admin.stats(url, progress=heard)
    assert report.total.entries == sum(tally.entries for tally in report.interfaces.values()) == 11
    assert set(report.interfaces) == {"tuples", "semantic", "plugins"}
    assert (set(report.plugins), set(report.projects)) == ({"quotes", "trivia"}, {"acme/api", "acme/web"})
    assert {name: tally.entries for name, tally in report.stores.items()} == {"shop": 1}
    assert heard.stages == ["counting"]
    with pytest.raises(InvalidArgument, match="soon"):
        await admin.stats(url, soon=-1)


async def test_space_is_given_back(url: str) -> None:
    async with keyloft.open(url) as kv:
        await kv.set_many({("large", number): "x" * 10_000 for number in range(200)})
        await kv.delete_range(prefix=("large",))
    report = await admin.compact(url)
    if "://" not in url:
        assert report.after.database_bytes < report.before.database_bytes


async def test_findings_say_what_is_wrong_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("Dear diary,\n" * 1000)
    report = await admin.check(tmp_path / "diary.txt")
    [finding] = report.findings
    assert (finding.severity, finding.code, finding.where) == ("problem", "damage", "database")
    assert finding.what
    assert finding.cure


@pytest.mark.parametrize("empty_url", ["sqlite file", "postgresql"], indirect=True)
async def test_stats_holds_nothing_between_two_slices(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others can checkpoint the write-ahead log, and remove rows for good, while a large database is counted."""
    monkeypatch.setattr(limits, "MAINTENANCE_ROWS", 2)
    held: list[Any] = []

    def look(stage: str, done: int, total: int | None) -> None:
        if url.startswith("postgresql"):
            held.append(run_sql(url, "SELECT state FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"))
        else:
            run_sql(url, "UPDATE keyloft_store SET store_id = store_id")
            [(is_busy, _, _)] = run_sql(url, "PRAGMA wal_checkpoint(TRUNCATE)")
            held.append([is_busy] * is_busy)

    whole = await admin.stats(url)
    sliced = await admin.stats(url, progress=look)
    assert sliced.total == whole.total
    assert len(held) > 5
    assert not any(held)
