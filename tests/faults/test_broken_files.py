"""A file that can't be used is left as it is, and the error says which file, and why."""

import asyncio
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import keyloft
from keyloft.core.schema import REVISION
from keyloft.engines import open_maintenance

from .children import child


async def made(path: Path, entries: int = 300) -> bytes:
    """A database with something in it, closed in order; returns its bytes."""
    async with keyloft.open(path) as kv:
        await kv.set_many({("made", number): "x" * 100 for number in range(entries)})
    return contents_of(path.parent)[path]


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {there: there.read_bytes() for there in folder.glob("*") if there.is_file()}


async def refused(path: Path, kind: type[keyloft.DatabaseError], *words: str) -> None:
    """Opening fails with this error, which names the file and these words, and leaves nothing behind."""
    before = contents_of(path.parent)
    with pytest.raises(keyloft.DatabaseError) as caught:
        await keyloft.open(path)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    for word in (str(path), *words):
        assert word in message
    assert contents_of(path.parent) == before


@pytest.mark.parametrize("text", ["hi", "Dear diary,\n", "Dear diary,\n" * 1000], ids=["word", "line", "book"])
async def test_text_file_is_refused_as_no_database_and_left_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "diary.txt"
    path.write_text(text)
    await refused(path, keyloft.NotADatabase, "not an SQLite database")


@pytest.mark.parametrize("size", [2, 100, 512, 4096, 100_000])
async def test_random_bytes_are_refused_as_no_database_and_left_as_they_are(
    size: int, tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "noise.bin"
    path.write_bytes(rng.randbytes(size))
    await refused(path, keyloft.NotADatabase, "not an SQLite database")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
async def test_truncated_database_is_refused_as_damaged_and_left_as_it_is(share: float, tmp_path: Path) -> None:
    path = tmp_path / "short.db"
    content = await made(path)
    path.write_bytes(content[: int(len(content) * share) // 4096 * 4096])
    await refused(path, keyloft.DatabaseError, "damaged", "backup")


@pytest.mark.parametrize("size", [2, 15, 50, 99, 512, 2000])
async def test_database_cut_within_its_first_page_is_refused_and_left_as_it_is(size: int, tmp_path: Path) -> None:
    path = tmp_path / "short.db"
    content = await made(path)
    path.write_bytes(content[:size])
    before = path.read_bytes()
    with pytest.raises(keyloft.DatabaseError) as caught:
        await keyloft.open(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


async def test_damage_in_the_middle_is_an_error_of_the_read_that_meets_it_and_names_the_file(
    tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "damaged.db"
    content = bytearray(await made(path, entries=3000))
    for page in range(12, len(content) // 4096):
        content[page * 4096 : page * 4096 + 200] = rng.randbytes(200)
    path.write_bytes(content)
    async with keyloft.open(path) as kv:
        with pytest.raises(keyloft.DatabaseError, match=f"{path} is damaged"):
            async for _ in kv.list(prefix=()):
                pass
        with pytest.raises(keyloft.DatabaseError, match=f"{path} is damaged"):
            await kv.set_many({("made", number): "y" * 200 for number in range(3000)})


async def test_writes_that_meet_a_damaged_page_harm_no_other_write_of_their_group(tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    async with keyloft.open(path) as kv:
        await kv.set_many({("k", number): "x" * 60 for number in range(2000)})
    with closing(apsw.Connection(str(path))) as connection:
        find = "SELECT pageno FROM dbstat WHERE name = 'keyloft_tuples' AND pagetype = 'leaf' ORDER BY path"
        leaves = [page for (page,) in connection.execute(find)]
    with path.open("r+b") as file:
        file.seek((leaves[len(leaves) // 2] - 1) * 4096)
        file.write(b"\xaa" * 64)
    async with keyloft.open(path) as kv:
        read = await asyncio.gather(*[kv.get(("k", number)) for number in range(2000)], return_exceptions=True)
        lost = [number for number, entry in enumerate(read) if isinstance(entry, keyloft.DatabaseError)]
        assert 0 < len(lost) < 200
        for _ in range(5):
            writes = [
                kv.set(("k", lost[0]), 1),
                kv.increment(("count",)),
                kv.set(("k", 1), 2),
                kv.delete(("k", lost[1])),
            ]
            first, *fine, last = await asyncio.gather(*writes, return_exceptions=True)
            assert isinstance(first, keyloft.DatabaseError)
            assert isinstance(last, keyloft.DatabaseError)
            assert [type(one) for one in fine] == [int, int]
        assert (await kv.get(("count",))).value == 5


async def test_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "app.db"
    await refused(path, keyloft.CannotOpen, str(path.parent), "does not exist")
    assert not path.parent.exists()


async def test_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    await refused(tmp_path / "file" / "app.db", keyloft.CannotOpen)


async def test_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    await refused(path, keyloft.CannotOpen, "it is a folder")


def stamp(path: Path, revision: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE keyloft_version SET version_num = ?", (revision,)).fetchall()
    connection.close()


@pytest.mark.parametrize("revision", [f"{int(REVISION) + 1:04}", "9999"])
async def test_database_of_a_newer_keyloft_is_refused_and_left_as_it_is(revision: str, tmp_path: Path) -> None:
    path = tmp_path / "newer.db"
    await made(path)
    stamp(path, revision)
    await refused(path, keyloft.SchemaTooNew, revision, "upgrade")


async def test_database_of_another_program_is_shared_and_not_harmed(tmp_path: Path) -> None:
    path = tmp_path / "bot.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE other_program (x); INSERT INTO other_program VALUES (1), (2)").fetchall()
    connection.close()
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 1)
        connection = apsw.Connection(str(path))
        assert connection.execute("SELECT x FROM other_program").fetchall() == [(1,), (2,)]
        connection.close()


async def test_empty_file_is_a_fresh_database(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    async with keyloft.open(path) as kv:
        assert await kv.set(("k",), 1) == 2


def _open_to_all(folder: Path) -> bool:
    within = [folder, *folder.parents]
    return folder.is_dir() and os.access(folder, os.W_OK) and all(each.stat().st_mode & 0o001 for each in within)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's own are not, nor is every TMPDIR."""
    bases = [base for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm") if _open_to_all(Path(base))]
    if not bases:
        pytest.skip("no folder for temporary files here is open to other users")
    folder = Path(tempfile.mkdtemp(prefix="keyloft-shared-", dir=bases[0]))
    folder.chmod(0o777)
    yield folder
    for inner in folder.glob("*/"):
        inner.chmod(0o700)
    shutil.rmtree(folder)


def _read_only_file(path: Path) -> Path:
    path.chmod(0o444)
    return path


def _secret_file(path: Path) -> Path:
    path.chmod(0o000)
    return path


def _read_only_folder(path: Path) -> Path:
    path.parent.chmod(0o555)
    return path


def _fresh_file_in_a_read_only_folder(path: Path) -> Path:
    path.parent.chmod(0o555)
    return path.with_name("fresh.db")


def _closed_folder(path: Path) -> Path:
    path.parent.chmod(0o000)
    return path


@pytest.mark.parametrize(
    ("lock", "kinds", "reason"),
    [
        (_read_only_file, {"ReadOnly"}, "read-only for this user; to read it, open sqlite:////"),
        (_secret_file, {"CannotOpen"}, "may not read"),
        (_read_only_folder, {"ReadOnly", "CannotOpen"}, "folder"),
        (_fresh_file_in_a_read_only_folder, {"CannotOpen"}, "may not write to the folder"),
        (_closed_folder, {"CannotOpen"}, "may not"),
    ],
)
async def test_missing_permission_is_named_and_nothing_is_changed(
    lock: Callable[[Path], Path], kinds: set[str], reason: str, shared_folder: Path
) -> None:
    folder = shared_folder / "data"
    folder.mkdir()
    folder.chmod(0o777)
    before = await made(folder / "app.db")
    (folder / "app.db").chmod(0o666)
    path = lock(folder / "app.db")
    async with child("other_user", path) as other_user:
        line = await other_user.line()
        assert await other_user.ended() == (0, "")
    kind, code, message = json.loads(line)
    assert kind in kinds, message
    assert code in ("READ_ONLY", "CANNOT_OPEN")
    assert str(path) in message
    assert reason in message
    folder.chmod(0o777)
    (folder / "app.db").chmod(0o666)
    assert [file.name for file in folder.iterdir()] == ["app.db"]
    assert (folder / "app.db").read_bytes() == before


async def visited(database: str) -> list[str] | None:
    """The error of a user without special rights who opens a database: its class, code and message."""
    async with child("other_user", database) as other_user:
        outcome: list[str] | None = json.loads(await other_user.line())
        assert await other_user.ended() == (0, "")
    return outcome


async def test_a_folder_that_can_not_be_written_is_named_when_its_database_is_opened_for_reading(
    shared_folder: Path,
) -> None:
    """SQLite needs a file beside one with a write-ahead log; a backup has none, and can be read anywhere."""
    folder = shared_folder / "data"
    folder.mkdir()
    await made(folder / "app.db")
    maintenance = await open_maintenance(folder / "app.db")
    await maintenance.backup(str(folder / "backup.db"), lambda done, of: None)
    await maintenance.aclose()
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    outcome = await visited(f"sqlite:///{folder}/app.db?mode=ro")
    assert outcome is not None
    assert outcome[:2] == ["CannotOpen", "CANNOT_OPEN"]
    for word in (f"{folder}/app.db", "app.db-shm", "may not write", "keyloft backup", "&immutable=1"):
        assert word in outcome[2]
    assert await visited(f"sqlite:///{folder}/backup.db?mode=ro") is None
    assert await visited(f"sqlite:///{folder}/app.db?mode=ro&immutable=1") is None
    assert sorted(file.name for file in folder.iterdir()) == ["app.db", "backup.db"]


async def test_user_with_the_permissions_can_write_what_another_user_made(shared_folder: Path) -> None:
    path = shared_folder / "shared.db"
    await made(path)
    path.chmod(0o666)
    async with child("other_user", path) as other_user:
        assert json.loads(await other_user.line()) is None
        assert await other_user.ended() == (0, "")
    async with keyloft.open(path) as kv:
        assert (await kv.get(("used",))).value is True
