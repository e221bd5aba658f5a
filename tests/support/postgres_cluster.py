"""A primary with standbys by streaming replication, for tests that promote, kill, stop and part them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.postgres import MortalServer
from tests.support.temporary_files import MEMORY
from tools.postgres import TIMEOUT_SECONDS, initdb, own_folder, query
from tools.process_family import processes, until

_SETTINGS = ("-F", "-c", "wal_receiver_status_interval=100ms", "-c", "wal_retrieve_retry_interval=100ms")


class ReplicatedServer(MortalServer):
    """A server of a cluster."""

    def __init__(self, programs: Path, folder: Path, options: dict[str, Any], *settings: str) -> None:
        super().__init__(programs, folder, options, *settings)
        self.host = str(folder)
        self._programs, self._options = programs, options

    def promote(self) -> None:
        """Let this standby become a primary, on a new timeline; returns when it is."""
        run(self._programs / "pg_ctl", "promote", "-D", self.data, "-w", **self._options)

    def follow(self, primary: "ReplicatedServer | None") -> None:
        """Let this standby follow another primary, or none: what is written there from now on does not arrive."""
        query(self.url, f"ALTER SYSTEM SET primary_conninfo = '{conninfo(primary) if primary else ''}'")
        query(self.url, "SELECT pg_reload_conf()")
        if primary is None:
            until(lambda: not query(self.url, "SELECT FROM pg_stat_wal_receiver"))

    def caught_up_with(self, primary: "ReplicatedServer") -> bool:
        [[lsn]] = query(primary.url, "SELECT pg_current_wal_lsn()::text")
        return bool(query(self.url, f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'::pg_lsn")[0][0])

    def pids(self) -> list[int]:
        """Of the server and all its processes."""
        postmaster = int((self.data / "postmaster.pid").read_text().split()[0])
        return [postmaster, *(pid for pid, (parent, _) in processes().items() if parent == postmaster)]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs meanwhile: connections to it stay open, and nothing is answered."""
        pids = self.pids()
        try:
            _send(pids, signal.SIGSTOP)
            yield
        finally:
            _send(pids, signal.SIGCONT)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # of a session that has just ended
            os.kill(pid, number)


class ReplicatedServers:
    """Servers with the same data; the first one is the primary at the beginning."""

    def __init__(self, nodes: list[ReplicatedServer]) -> None:
        self.nodes = nodes

    def url(self, *nodes: ReplicatedServer, options: str = "") -> str:
        """The URL with all hosts, or with some of them."""
        hosts = ",".join([node.host for node in nodes or self.nodes])
        return f"postgresql://postgres@/postgres?host={hosts}{options}"


@contextmanager
def cluster(standbys: int = 1) -> Iterator[ReplicatedServers]:
    """Start a primary and its standbys."""
    with own_folder(MEMORY) as (folder, programs, options), ExitStack() as stack:
        nodes: list[ReplicatedServer] = []
        for name in "abcde"[: standbys + 1]:
            home = folder / name
            home.mkdir()
            if "user" in options:
                os.chown(home, options["user"], options["group"])
            if nodes:
                backup = ("pg_basebackup", "-D", home / "data", "-R", "-c", "fast", "--no-sync")
                run(programs / backup[0], *backup[1:], "-d", conninfo(nodes[0]), **options)
            else:
                initdb(programs, home, options, "--auth=trust")
            nodes.append(stack.enter_context(ReplicatedServer(programs, home, options, *_SETTINGS)))
        yield ReplicatedServers(nodes)


def conninfo(node: ReplicatedServer) -> str:
    return f"host={node.host} user=postgres"


def run(*command: object, **options: Any) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, **options
    )
    assert done.returncode == 0, done.stderr
