"""PostgreSQL for tests: a test asks for what it needs, and nothing is started in a run without such a test.

`postgres_url` is a database of its own, empty, on the server that KEYLOFT_TEST_POSTGRES names, or on one that ends with
the run; `mortal_postgres` is a server that a test may kill, and that wants a password.
PYTEST_DONT_REWRITE: modules may import from here, too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tools.postgres import (
    TIMEOUT_SECONDS,
    NoFolder,
    Server,
    fresh_database,
    initdb,
    named_server,
    own_folder,
    own_server,
)

PASSWORD = "open-sesame"
"""Of the server that wants one."""


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server on which databases can be made."""
    if given := named_server():
        yield given
        return
    try:
        with own_server() as url:
            yield url
    except NoFolder as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mortal_postgres() -> Iterator["MortalServer"]:
    """A server that tests may kill, as long as it runs in the end; it waits for the disk, and wants a password."""
    with own_folder() as (folder, programs, options):
        secret = folder / "secret"
        secret.write_text(f"{PASSWORD}\n")
        secret.chmod(0o644)
        initdb(programs, folder, options, "--auth=scram-sha-256", f"--pwfile={secret}")
        settings = ("-c", "deadlock_timeout=100ms")
        with MortalServer(programs, folder, options, *settings, password=PASSWORD) as server:
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


class MortalServer(Server):
    """A server that can be killed, and started again."""

    def kill(self) -> None:
        """SIGKILL, for the server and each of its processes: not one more instruction. Returns when all have ended."""
        postmaster = int((self.data / "postmaster.pid").read_text().split()[0])
        # Stopped first: a child that starts after its children were listed would keep the next server from starting.
        os.kill(postmaster, signal.SIGSTOP)
        _until(lambda: _processes()[postmaster][1].startswith("T"))
        family = [postmaster, *(pid for pid, (parent, _) in _processes().items() if parent == postmaster)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: all(state.startswith("Z") for pid, (_, state) in _processes().items() if pid in family))


def _processes() -> dict[int, tuple[int, str]]:
    """The parent and the state of each process there is."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    return {int(pid): (int(parent), state) for pid, parent, state in map(str.split, table.splitlines())}


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "a signal has no effect"
        time.sleep(0.005)
