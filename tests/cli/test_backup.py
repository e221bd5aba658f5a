"""`keyloft backup`, `restore` and `compact`, on a file and on PostgreSQL: nothing is lost, nothing left half done."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft import limits
from keyloft.engines import open_maintenance
from tests.cli.commands import LONGEST_SECONDS, ON_A_FILE, SURROUNDINGS, WITHOUT_TABLES, Keyloft, at_a_terminal
from tests.faults.children import child
from tests.faults.moves import Chain, after, chains, contents_of, made_in
from tests.support.everything import filled, run_sql, stored
from tests.support.fork_server import PipedProcess
from tests.support.postgres_proxy import Message, proxy

WRITERS = 2
LARGE = 24 * 2**20
"""So much takes a backup or a restore a moment, in which it can be killed."""


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    return environment["KEYLOFT_DATABASE_URL"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for backups alone."""
    (tmp_path / "backups").mkdir()
    return tmp_path / "backups"


def shown(outcome: tuple[int, str, str]) -> Any:
    code, stdout, stderr = outcome
    assert (code, stderr) == (0, "")
    return json.loads(stdout)


def names(folder: Path) -> list[str]:
    return sorted(there.name for there in folder.iterdir())


async def fill_up(url: str) -> None:
    async with keyloft.open(url, sweep_every=None) as kv:
        for number in range(LARGE // 2**19):
            await kv.set(("large", number), os.urandom(2**19))


def started(environment: dict[str, str], *arguments: str) -> PipedProcess:
    """A command that runs."""
    return PipedProcess(["-m", "keyloft", *arguments], env=environment)


def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def midway(attempt: Callable[[], tuple[int, str]], prepare: Callable[[], object]) -> tuple[int, str]:
    """What came of a command that was ended in its middle; on a busy machine it may be done before that."""
    for _ in range(5):
        code, stderr = attempt()
        if code:
            return code, stderr
        prepare()
    pytest.fail("it was never caught in the middle")


class TestBackup:
    def test_it_holds_all_that_is_stored_and_nothing_is_wrong_with_it(
        self, run: Keyloft, url: str, place: Path
    ) -> None:
        filled(url)
        file = place / "nightly.db"
        report = shown(run("backup", str(file)))
        before = stored(url)
        assert report == {
            "file": str(file),
            "rows": len(before) - 1,
            "bytes": file.stat().st_size,
            "version": before[0],
        }
        assert stored(file) == before
        assert names(place) == ["nightly.db"]
        assert run("check", "--database", str(file))[:2] == (0, "[]\n")
        assert names(place) == ["nightly.db"]

    def test_a_file_that_exists_is_replaced_only_with_force(self, run: Keyloft, url: str, place: Path) -> None:
        filled(url)
        file = place / "nightly.db"
        file.write_text("dear to me")
        code, stdout, stderr = run("backup", str(file))
        assert (code, stdout) == (2, "")
        assert "exists already" in stderr
        assert "--force" in stderr
        assert file.read_text() == "dear to me"
        shown(run("backup", str(file), "--force"))
        assert stored(file) == stored(url)
        assert names(place) == ["nightly.db"]

    @pytest.mark.parametrize("umask", [0, 0o377, 0o777], ids=oct)
    def test_a_file_is_readable_by_its_owner_alone_whatever_the_umask(
        self, run: Keyloft, url: str, place: Path, umask: int
    ) -> None:
        filled(url)
        if "://" not in url:
            Path(url).chmod(0o644)
        file, restored, exported = place / "nightly.db", place / "restored.db", place / "all.jsonl"
        before = os.umask(umask)
        try:
            shown(run("backup", str(file)))
            assert file.stat().st_mode & 0o777 == 0o600
            file.chmod(0o644)
            shown(run("backup", str(file), "--force"))
            assert file.stat().st_mode & 0o777 == 0o600
            file.chmod(0o644)
            shown(run("restore", str(file), "--database", str(restored)))
            assert restored.stat().st_mode & 0o777 == 0o600
            shown(run("export", str(exported)))
            assert exported.stat().st_mode & 0o777 == 0o600
        finally:
            os.umask(before)

    def test_a_backup_that_can_not_be_made_names_its_reason_and_makes_no_file(
        self, run: Keyloft, url: str, place: Path
    ) -> None:
        filled(url)
        for arguments, code, words in (
            ((str(place / "no" / "folder.db"),), 1, "folder.db can't be written: the folder "),
            ((str(place), "--force"), 2, "is a folder: name a file in it"),
            (("postgresql://somewhere/else",), 2, "a backup is an SQLite file"),
            ((str(place / "b.db"), "--database", str(place / "absent.db")), 1, "there is no file"),
            ((str(place / "b.db"), "--database", "mysql://nowhere"), 1, "no engine for mysql"),
            ((str(place / "b.db"), "--database", ":memory:"), 1, "in memory"),
            ((url, "--database", url, "--force"), 2, "SQLite file" if "://" in url else "the database itself"),
        ):
            outcome = run("backup", *arguments)
            assert outcome[:2] == (code, ""), outcome
            assert words in outcome[2]
        assert names(place) == []

    async def test_under_full_load_it_holds_every_write_acknowledged_before_it_began(
        self, run: Keyloft, url: str, place: Path
    ) -> None:
        file = place / "nightly.db"
        made: dict[Chain, int] = {}

        async def listen() -> None:
            async for line in writer.lines():
                match line.split():
                    case [kind, number, last, _]:
                        made[Chain(kind, int(number))] = int(last)

        async with child("writer", url, str(WRITERS)) as writer:
            listening = asyncio.create_task(listen())
            async with asyncio.timeout(LONGEST_SECONDS):
                while sum(made.values()) < 500:
                    await asyncio.sleep(0.01)
            acknowledged = dict(made)
            report = shown(await asyncio.to_thread(run, "backup", str(file)))
            meanwhile = sum(made.values()) - sum(acknowledged.values())
            writer.kill()
            await listening
        assert meanwhile > 50, "nothing was written while the backup was made"
        async with keyloft.open(file) as kv:
            contents, stamps = await contents_of(kv)
        saved = made_in(contents, chains(WRITERS))
        assert contents == after(saved)
        assert max(stamps.values()) <= report["version"]
        for chain, last in acknowledged.items():
            assert saved[chain] >= last
        assert (await asyncio.to_thread(run, "check", "--database", str(file)))[:2] == (0, "[]\n")

    def test_damage_is_not_saved_in_silence(self, run: Keyloft, tmp_path: Path, place: Path) -> None:
        file = tmp_path / "damaged.db"
        filled(str(file))
        run_sql(str(file), "DROP INDEX idx_plugin_kv_prefix")
        code, stdout, stderr = run("backup", str(place / "nightly.db"), "--database", str(file))
        assert (code, stdout) == (1, "")
        assert f"{file} is damaged: idx_plugin_kv_prefix is missing" in stderr
        assert names(place) == []

    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
    @pytest.mark.slow
    def test_one_that_ends_midway_leaves_the_file_as_it_was(
        self, environment: dict[str, str], url: str, place: Path, end: signal.Signals
    ) -> None:
        asyncio.run(fill_up(url))
        (place / "nightly.db").write_text("the one of yesterday")

        def ended() -> tuple[int, str]:
            with started(environment, "backup", str(place / "nightly.db"), "--force") as backup:
                until(lambda: _sizes(place) or backup.poll() is not None)
                backup.send_signal(end)
                return backup.wait(LONGEST_SECONDS), backup.stderr.read()

        code, stderr = midway(ended, lambda: (place / "nightly.db").write_text("the one of yesterday"))
        assert (place / "nightly.db").read_text() == "the one of yesterday"
        if end is signal.SIGINT:
            assert (code, stderr) == (130, "")
            assert names(place) == ["nightly.db"]

    def test_a_full_disk_is_reported_and_no_file_is_left(
        self, environment: dict[str, str], url: str, place: Path
    ) -> None:
        asyncio.run(fill_up(url))

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE // 4, LARGE // 4))

        done = subprocess.run(
            [sys.executable, "-m", "keyloft", "backup", str(place / "nightly.db")],
            env=environment,
            preexec_fn=limit,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"keyloft: DISK_FULL: no space is left for {place / 'nightly.db'}")
        assert names(place) == []

    def test_a_bar_shows_how_far_it_has_come(self, environment: dict[str, str], url: str, place: Path) -> None:
        filled(url)
        rows = len(stored(url)) - 1
        code, screen = at_a_terminal({**environment, "COLUMNS": "200"}, "backup", str(place / "nightly.db"))
        assert code == 0
        assert "saving" in screen
        assert f"holds {rows} rows in " in screen


@pytest.fixture
def saved(url: str, place: Path, run: Keyloft) -> Path:
    """A backup of something of every kind; the database is empty again, and not there if it is a file."""
    filled(url)
    shown(run("backup", str(place / "nightly.db")))
    if "://" in url:
        for table in ("keyloft_tuples", "keyloft_semantic", "plugin_kv_storage"):
            run_sql(url, f"DELETE FROM {table}")
        run_sql(url, "UPDATE keyloft_version_counter SET version = 1")
        run_sql(url, "DELETE FROM keyloft_changes WHERE version > 1")
    else:
        Path(url).unlink()
    return place / "nightly.db"


class TestRestore:
    @WITHOUT_TABLES
    def test_into_an_empty_database_all_comes_back(self, run: Keyloft, url: str, saved: Path) -> None:
        wanted = stored(saved)
        report = shown(run("restore", str(saved)))
        assert report["verified"] is True
        assert (report["rows"], report["version"]) == (len(wanted) - 1, limits.VERSION_JUMP)
        assert stored(url) == [limits.VERSION_JUMP, *wanted[1:]]
        assert names(saved.parent) == [saved.name]

    def test_stored_entries_are_replaced_only_with_replace_and_yes(self, run: Keyloft, url: str, saved: Path) -> None:
        run("set", "mine", "1")
        before = stored(url)
        code, stdout, stderr = run("restore", str(saved))
        assert (code, stdout) == (2, "")
        assert "holds 1 row," in stderr
        assert "--replace" in stderr
        assert run("restore", str(saved), "--yes")[0] == 2
        code, stdout, stderr = run("restore", str(saved), "--replace")
        assert (code, stdout) == (2, "")
        assert "--yes" in stderr
        assert stored(url) == before
        assert shown(run("restore", str(saved), "--replace", "--yes"))["verified"] is True
        assert stored(url)[1:] == stored(saved)[1:]

    @pytest.mark.parametrize("answer", ["y\n", "n\n"])
    @ON_A_FILE
    def test_at_a_terminal_it_asks(
        self, run: Keyloft, environment: dict[str, str], url: str, saved: Path, answer: str
    ) -> None:
        run("set", "mine", "1")
        code, screen = at_a_terminal(environment, "restore", str(saved), "--replace", answer=answer)
        assert "Replace the 1 row in " in screen
        assert f"by the {len(stored(saved)) - 1} of the backup?" in screen
        assert code == (0 if answer == "y\n" else 1)
        assert len(stored(url)) == (len(stored(saved)) if answer == "y\n" else 2)

    @ON_A_FILE
    def test_ctrl_c_at_the_question_ends_it_as_anywhere_else(
        self, run: Keyloft, environment: dict[str, str], saved: Path
    ) -> None:
        run("set", "mine", "1")
        code, screen = at_a_terminal(environment, "restore", str(saved), "--replace", answer="\x03", after="[y/N]")
        assert code == 130
        assert screen.endswith("Nothing was changed.\r\n")
        assert run("get", "mine")[1] == "1\n"

    @ON_A_FILE
    def test_an_export_is_refused_with_the_command_that_reads_it(self, run: Keyloft, saved: Path, place: Path) -> None:
        run("export", str(place / "all.jsonl"), "--database", str(saved))
        code, _, stderr = run("restore", str(place / "all.jsonl"))
        assert code == 1
        assert "is an export, not a backup: `keyloft import` reads it" in stderr

    async def test_a_service_that_runs_goes_on(self, run: Keyloft, url: str, place: Path) -> None:
        file = str(place / "nightly.db")

        async def command(*arguments: str) -> Any:
            return shown(await asyncio.to_thread(run, *arguments))

        async with keyloft.open(url) as kv:
            await kv.set(("k",), "saved")
            await command("backup", file)
            version = await kv.set(("k",), "later")
            await kv.set(("new",), 1)
            watching = kv.watch(("k",))
            assert [entry.value for entry in await anext(watching)] == ["later"]
            assert (await command("restore", file, "--replace", "--yes"))["verified"] is True
            async with asyncio.timeout(LONGEST_SECONDS):
                assert [entry.value for entry in await anext(watching)] == ["saved"]
            assert not (await kv.get(("new",))).exists
            assert await kv.set(("k",), "and on") > version + 1

    def test_a_damaged_or_foreign_backup_is_refused_and_nothing_is_changed(
        self, run: Keyloft, url: str, saved: Path, place: Path
    ) -> None:
        content = saved.read_bytes()
        (place / "diary.txt").write_text("Dear diary,\n" * 1000)
        (place / "cut.db").write_bytes(content[: len(content) // 2 // 4096 * 4096])
        damaged = bytearray(content)
        for page in range(2, len(content) // 4096):
            damaged[page * 4096 : page * 4096 + 200] = os.urandom(200)
        (place / "damaged.db").write_bytes(damaged)
        (place / "older.db").write_bytes(content)
        run_sql(str(place / "older.db"), "UPDATE keyloft_version SET version_num = '0001'")
        (place / "newer.db").write_bytes(content)
        run_sql(str(place / "newer.db"), "UPDATE keyloft_version SET version_num = '9999'")
        run_sql(str(place / "other.db"), "CREATE TABLE other_program (x)")
        for name, words in (
            ("diary.txt", "not an SQLite database"),
            ("cut.db", "damaged"),
            ("damaged.db", "damaged"),
            ("older.db", f"keyloft migrate --database {place / 'older.db'}"),
            ("newer.db", "upgrade keyloft"),
            ("other.db", "no database of Keyloft"),
            ("absent.db", "there is no file"),
        ):
            code, stdout, stderr = run("restore", str(place / name))
            assert (code, stdout) == (1, ""), name
            assert words in stderr
            assert "Traceback" not in stderr
            if "://" in url:
                assert stored(url) == [1]
            else:
                assert not Path(url).exists()
        assert run("restore", "postgresql://somewhere/else")[0] == 2

    @pytest.mark.slow
    def test_one_that_is_killed_midway_leaves_the_database_as_it_was(
        self, environment: dict[str, str], run: Keyloft, url: str, place: Path
    ) -> None:
        asyncio.run(fill_up(url))
        shown(run("backup", str(place / "nightly.db")))
        before: list[Any] = []

        def prepare() -> None:
            run("delete", "--prefix", "large", "--yes")
            run("set", "mine", "1")
            before[:] = stored(url)

        def killed() -> tuple[int, str]:
            with started(environment, "restore", str(place / "nightly.db"), "--replace", "--yes") as restore:
                until(lambda: _writes(url) or restore.poll() is not None)
                restore.kill()
                return restore.wait(LONGEST_SECONDS), ""

        prepare()
        midway(killed, prepare)
        assert stored(url) == before
        assert shown(run("restore", str(place / "nightly.db"), "--replace", "--yes"))["verified"] is True


def _sizes(folder: Path) -> list[int]:
    """How large the files are that are not finished; one may just be taken away."""
    with suppress(FileNotFoundError):
        return [size for there in folder.glob(".*.unfinished") if (size := there.stat().st_size)]
    return []


def _writes(url: str) -> bool:
    """Whether a process is in the middle of writing a lot."""
    if "://" not in url:
        with suppress(FileNotFoundError):
            return Path(f"{url}-wal").stat().st_size > 2**21
        return False
    activity = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'INSERT INTO keyloft_%'"
    )
    return bool(run_sql(url, activity))


async def test_a_write_made_since_the_version_was_read_is_not_replaced(url: str, tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "source.db") as kv:
        await kv.set(("k",), 1)
    async with keyloft.open(url) as kv:
        seen = await kv.set(("mine",), 1)
        await kv.set(("mine",), 2)
        source, target = await open_maintenance(tmp_path / "source.db"), await open_maintenance(url)
        async with source.snapshot() as snapshot:
            with pytest.raises(keyloft.Busy):
                await target.become(snapshot, lambda done, of: None, expected_version=seen)
            assert (await kv.get(("mine",))).value == 2
            assert await target.become(snapshot, lambda done, of: None, expected_version=seen + 1) == 1
        assert not (await kv.get(("mine",))).exists
        await source.aclose()
        await target.aclose()


async def test_a_restore_whose_answer_was_lost_is_made(postgres_url: str, tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "source.db") as kv:
        saved = await kv.set(("k",), 1)
    async with keyloft.open(postgres_url):
        pass
    async with proxy(postgres_url) as (between, way):
        source, target = await open_maintenance(tmp_path / "source.db"), await open_maintenance(way)

        def lose_the_commit(message: Message) -> bool:
            if message.kind == b"C" and message.body.startswith(b"COMMIT"):
                between.lets_answer = lambda message: True
                between.cut()
                return False
            return True

        between.lets_answer = lose_the_commit
        async with source.snapshot() as snapshot:
            assert await target.become(snapshot, lambda done, of: None, expected_version=1) == 1
        assert between.accepted == 2
        await source.aclose()
        await target.aclose()
    async with keyloft.open(postgres_url) as kv:
        assert (await kv.get(("k",))).versionstamp == saved


class TestRestoreOfFiles:
    """What only a file can be."""

    @pytest.fixture
    def environment(self, tmp_path: Path) -> dict[str, str]:
        return {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": str(tmp_path / "app.db")}

    def test_other_programs_tables_come_along_into_a_fresh_file_and_stay_in_another(
        self, run: Keyloft, url: str, saved: Path, tmp_path: Path
    ) -> None:
        run_sql(str(saved), "CREATE TABLE other_program (x)")
        shown(run("restore", str(saved)))
        assert run_sql(url, "SELECT * FROM other_program") == []
        other = str(tmp_path / "bot.db")
        run_sql(other, "CREATE TABLE own (x)")
        shown(run("restore", str(saved), "--database", other))
        assert run_sql(other, "SELECT * FROM own") == []
        assert stored(other)[1:] == stored(saved)[1:]

    def test_an_empty_file_is_an_empty_database(self, run: Keyloft, url: str, saved: Path) -> None:
        Path(url).touch()
        shown(run("restore", str(saved)))
        assert stored(url)[1:] == stored(saved)[1:]

    def test_a_file_of_another_kind_is_left_as_it_is(self, run: Keyloft, url: str, saved: Path) -> None:
        Path(url).write_text("Dear diary,\n" * 1000)
        assert run("restore", str(saved), "--replace", "--yes")[0] == 1
        assert Path(url).read_text() == "Dear diary,\n" * 1000

    def test_a_log_without_its_file_is_in_the_way(self, run: Keyloft, url: str, saved: Path) -> None:
        Path(f"{url}-wal").write_bytes(b"of another file")
        code, stdout, stderr = run("restore", str(saved))
        assert (code, stdout) == (1, "")
        assert "move it away" in stderr
        assert not Path(url).exists()

    def test_the_backup_is_not_restored_into_itself(self, run: Keyloft, saved: Path) -> None:
        assert run("restore", str(saved), "--database", str(saved), "--replace", "--yes")[0] == 2

    def test_one_that_is_interrupted_makes_no_file(
        self, environment: dict[str, str], run: Keyloft, url: str, place: Path
    ) -> None:
        asyncio.run(fill_up(url))
        shown(run("backup", str(place / "nightly.db")))
        Path(url).unlink()
        with started(environment, "restore", str(place / "nightly.db")) as restore:
            until(lambda: _sizes(Path(url).parent))
            restore.send_signal(signal.SIGINT)
            assert restore.wait(LONGEST_SECONDS) == 130
        assert names(Path(url).parent) == ["backups"]

    def test_a_compact_file_takes_less_and_holds_the_same(self, run: Keyloft, url: str) -> None:
        asyncio.run(fill_up(url))
        run("delete", "--prefix", "large", "--yes")
        run("set", "k", "1")
        before = stored(url)
        report = shown(run("compact"))
        assert report["before"]["database_bytes"] > LARGE
        assert report["after"]["database_bytes"] < 200_000
        assert report["after"]["wal_bytes"] == 0
        assert Path(url).stat().st_size == report["after"]["database_bytes"]
        assert stored(url) == before

    def test_a_file_locked_by_another_process_is_not_compacted(
        self, run: Keyloft, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        filled(url)
        monkeypatch.setattr(limits, "BUSY_SECONDS", 0.05)
        for hold in ("BEGIN IMMEDIATE", "BEGIN; SELECT * FROM keyloft_changes"):
            other = apsw.Connection(url)
            other.execute(hold).fetchall()
            code, stdout, stderr = run("compact")
            other.close()
            assert (code, stdout) == (1, "")
            assert stderr.startswith("keyloft: BUSY: ")
        assert run("compact")[0] == 0

    def test_ctrl_c_ends_the_wait_for_a_lock(self, environment: dict[str, str], url: str) -> None:
        filled(url)
        other = apsw.Connection(url)
        other.execute("BEGIN IMMEDIATE").fetchall()
        with started(environment, "compact") as compacting:
            # It has opened the file, and what follows needs the lock.
            until(lambda: _has_open(compacting.pid, Path(url)))
            time.sleep(0.3)
            began = time.monotonic()
            compacting.send_signal(signal.SIGINT)
            assert compacting.wait(LONGEST_SECONDS) == 130
        assert time.monotonic() - began < limits.BUSY_SECONDS / 2
        other.close()


def _has_open(process: int, file: Path) -> bool:
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not tell which files a process has open")
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            if handle.samefile(file):
                return True
    return False


async def test_a_table_locked_by_another_session_is_not_compacted(postgres_url: str) -> None:
    async with keyloft.open(postgres_url):
        pass
    other = await asyncpg.connect(postgres_url)
    maintenance = await open_maintenance(postgres_url)
    async with other.transaction():
        await other.execute("LOCK TABLE keyloft_tuples")
        with pytest.raises(keyloft.Busy):
            await maintenance.compact()
    await maintenance.compact()
    await maintenance.aclose()
    await other.close()


def test_compacting_loses_nothing_on_either_database(run: Keyloft, url: str) -> None:
    filled(url)
    before = stored(url)
    report = shown(run("compact"))
    # PostgreSQL keeps the room for new rows, and adds what it learns about them.
    assert report["after"]["database_bytes"] <= report["before"]["database_bytes"] or url.startswith("postgres")
    assert stored(url) == before


@pytest.mark.parametrize("command", ["stats", "backup", "restore", "check", "compact", "migrate"])
@ON_A_FILE
def test_help_has_an_example(run: Keyloft, command: str) -> None:
    code, stdout, _ = run(command, "--help")
    assert code == 0
    assert f"Example: keyloft {command}" in stdout
    assert "--json" in stdout
