"""A database that Keyloft makes is readable by its owner alone, whatever the umask; an existing one keeps its mode."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import keyloft
from keyloft import migrations
from keyloft.engines import open_maintenance


@pytest.fixture(params=[0, 0o022, 0o077, 0o377, 0o777], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}


@pytest.mark.usefixtures("_umask")
async def test_a_new_database_and_what_lies_beside_it_are_private(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db") as kv:
        await kv.set(("k",), 1)
        assert modes(tmp_path) == {"app.db": 0o600, "app.db-wal": 0o600, "app.db-shm": 0o600}
    assert modes(tmp_path) == {"app.db": 0o600}


@pytest.mark.usefixtures("_umask")
def test_a_database_that_a_migration_makes_is_private(tmp_path: Path) -> None:
    migrations.upgrade(tmp_path / "app.db")
    assert modes(tmp_path) == {"app.db": 0o600}


@pytest.mark.usefixtures("_umask")
async def test_the_target_of_a_symbolic_link_is_private(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "target.db")
    async with keyloft.open(tmp_path / "link.db") as kv:
        await kv.set(("k",), 1)
    assert (tmp_path / "target.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("_umask")
async def test_a_backup_is_private(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db") as kv:
        await kv.set(("k",), 1)
    maintenance = await open_maintenance(tmp_path / "app.db")
    await maintenance.backup(str(tmp_path / "backup.db"), lambda done, of: None)
    await maintenance.aclose()
    assert modes(tmp_path)["backup.db"] == 0o600


async def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    path.touch()
    path.chmod(0o640)
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 1)
        assert modes(tmp_path) == {"app.db": 0o640, "app.db-wal": 0o640, "app.db-shm": 0o640}
