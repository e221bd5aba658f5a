"""Starts PostgreSQL with Patroni, for tests and benchmarks: three servers from the files in deploy/, which may die."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tools import etcd
from tools.machines import Machine, MachineGroup, loopback
from tools.postgres import own_folder
from tools.process_family import kill_family, stop_family

PASSWORD: Final = "open-sesame"
SECONDS: Final = 60.0
"""How long a cluster may take to start, or to elect a leader."""
_FILE: Final = Path(__file__).parents[1] / "deploy" / "patroni" / "patroni.yml"
_STANDBYS: Final = ("quorum_standby", "sync_standby")


def missing() -> str | None:
    """What a cluster needs and this machine doesn't have, and how to get it."""
    if find_spec("patroni") is None or find_spec("psycopg") is None:
        return 'Patroni is not installed: pip install ".[test]" in a clone'
    if not etcd.is_installed():
        return etcd.NOT_INSTALLED
    return None


class PatroniNode:
    """One machine of the cluster: a Patroni, and the PostgreSQL server that it starts."""

    def __init__(self, name: str, machine: Machine, folder: Path, programs: Path, options: dict[str, Any]) -> None:
        self.name, self.machine = name, machine
        port, api_port = machine.free_ports(2)
        self.address, self._api = f"{machine.host}:{port}", f"{machine.host}:{api_port}"
        self.data, self.log = folder / name, folder / f"{name}.log"
        self._folder, self._programs, self._options = folder, programs, options
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: list[int] = []

    def start(self, etcd_hosts: str) -> None:
        """Start it, with its data if it had any; returns at once."""
        environment = {
            **self._options["env"],
            "PATRONI_NAME": self.name,
            "PATRONI_RESTAPI_LISTEN": self._api,
            "PATRONI_RESTAPI_CONNECT_ADDRESS": self._api,
            "PATRONI_POSTGRESQL_LISTEN": self.address,
            "PATRONI_POSTGRESQL_CONNECT_ADDRESS": self.address,
            "PATRONI_POSTGRESQL_DATA_DIR": str(self.data),
            "PATRONI_POSTGRESQL_BIN_DIR": str(self._programs),
            "PATRONI_POSTGRESQL_PGPASS": str(self._folder / f"{self.name}.pgpass"),
            "PATRONI_ETCD3_HOSTS": etcd_hosts,
            "PATRONI_SUPERUSER_USERNAME": "postgres",
            "PATRONI_SUPERUSER_PASSWORD": PASSWORD,
            "PATRONI_REPLICATION_USERNAME": "replicator",
            "PATRONI_REPLICATION_PASSWORD": PASSWORD,
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.machine.command, *self._as_user(), sys.executable, "-m", "patroni", _FILE],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._folder,
                env=environment,
            )

    def _as_user(self) -> list[str]:
        user = self._options.get("user")
        if user is None:
            return []
        # The user may not be allowed to read the folder of this Python: root's right to read goes with it.
        return [
            *("setpriv", f"--reuid={user}", f"--regid={self._options['group']}", "--clear-groups"),
            *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
        ]

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """The status and the JSON that Patroni's HTTP interface answers; status 0 if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self._api}{path}", body, timeout=2) as reply:
                return reply.status, json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, None
        except (OSError, ValueError):
            return 0, None

    @property
    def is_leader(self) -> bool:
        return self.ask("/primary")[0] == 200

    # Faults

    def kill_postgres(self) -> None:
        """PostgreSQL dies; Patroni lives, and notices."""
        kill_family(self._postmaster())

    def kill(self) -> None:
        """The machine dies: Patroni and PostgreSQL at once."""
        self.go_on()
        if self._process is not None:
            self._process.kill()
            self._process.wait(SECONDS)
            self._process = None
        with suppress(FileNotFoundError, ProcessLookupError, ValueError, IndexError):
            kill_family(self._postmaster())
        for left in Path("/tmp").glob(f".s.PGSQL.{self.address.rpartition(':')[2]}*"):
            left.unlink(missing_ok=True)

    def hang_patroni(self) -> None:
        """Patroni stops, as a process that gets no processor; PostgreSQL goes on, and takes writes."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._stopped.append(self._process.pid)

    def freeze(self) -> None:
        """The whole machine stops, as a virtual one that is moved."""
        self.hang_patroni()
        with suppress(FileNotFoundError, ProcessLookupError):
            self._stopped += stop_family(self._postmaster())

    def go_on(self) -> None:
        """What was stopped goes on."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []

    def _postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])


class PatroniCluster:
    """Three nodes, or more, and the etcd in which they elect their leader."""

    def __init__(self, nodes: list[PatroniNode], electors: list[etcd.Node], group: MachineGroup) -> None:
        self.nodes, self.electors, self.group = nodes, electors, group
        self.reinitialized: list[str] = []
        """Standbys that did not follow by themselves after a fault."""

    @property
    def url(self) -> str:
        """The URL with all hosts."""
        hosts = ",".join(node.address for node in self.nodes)
        return f"postgresql://postgres:{PASSWORD}@{hosts}/postgres"

    def url_of(self, node: PatroniNode) -> str:
        return f"postgresql://postgres:{PASSWORD}@{node.address}/postgres"

    def start(self, node: PatroniNode) -> None:
        """Start a node, for the first time or after it was killed."""
        node.start(",".join(elector.client for elector in self.electors))

    def leader(self, *, other_than: PatroniNode | None = None) -> PatroniNode:
        """The leader, as soon as there is one."""

        def find() -> PatroniNode | None:
            return next((node for node in self.nodes if node is not other_than and node.is_leader), None)

        leader: PatroniNode = self._until(find, "no leader")
        return leader

    def followers(self) -> list[PatroniNode]:
        leader = self.leader()
        return [node for node in self.nodes if node is not leader]

    def wait_until_whole(self) -> None:
        """Return once there is a leader, and all others follow it synchronously."""

        def is_whole() -> bool:
            leader = next((node for node in self.nodes if node.is_leader), None)
            return leader is not None and self._follow(leader)

        try:
            self._until(is_whole, "the cluster does not become whole")
        except RuntimeError:
            if not self._reinitialize():
                raise
            self._until(is_whole, "the cluster does not become whole, a standby made from scratch included")

    def _follow(self, leader: PatroniNode) -> bool:
        """Whether all others follow: by what Patroni knows, which may be old, and by the leader's connections."""
        _, cluster = leader.ask("/cluster")
        members = (cluster or {}).get("members", [])
        standbys = [one for one in members if one["role"] in _STANDBYS and one["state"] == "streaming"]
        _, status = leader.ask("/patroni")
        streams = [one for one in (status or {}).get("replication", []) if one["state"] == "streaming"]
        return len(standbys) == len(streams) == len(self.nodes) - 1

    def _reinitialize(self) -> list[str]:
        """Let standbys that don't follow be made again from the leader, as an operator would; returns their names."""
        _, cluster = self.leader().ask("/cluster")
        lost = [
            member["name"]
            for member in (cluster or {}).get("members", [])
            if member["role"] not in ("leader", *_STANDBYS) or member["state"] not in ("running", "streaming")
        ]
        for node in self.nodes:
            if node.name in lost:
                node.ask("/reinitialize", b'{"force": true}')
                self.reinitialized.append(node.name)
        return lost

    def end_leadership(self) -> None:
        """The leader's lease in etcd ends now, instead of after the TTL: as if those seconds had passed."""
        key = "L3NlcnZpY2Uva2V5bG9mdC9sZWFkZXI="  # /service/keyloft/leader

        def is_over() -> bool:
            """One that was cut off or stopped a moment ago may not answer yet."""
            for elector in self.electors:
                with suppress(OSError):
                    for entry in json.loads(elector.request("/v3/kv/range", {"key": key})).get("kvs", []):
                        elector.request("/v3/kv/lease/revoke", {"ID": entry["lease"]})
                    return True
            return False

        self._until(is_over, "no etcd node ends the leadership")

    def _until(self, look: Callable[[], Any], otherwise: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (found := look()):
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{node.name}: {node.log.read_text()[-1500:]}" for node in self.nodes if node.log.exists()
                )
                raise RuntimeError(f"{otherwise} after {SECONDS:g} s\n{logs}")
            time.sleep(0.2)
        return found


@contextmanager
def patroni_cluster(
    *, size: int = 3, electors: int = 1, machines: MachineGroup | None = None, within: Path | None = None
) -> Iterator[PatroniCluster]:
    """A cluster that is whole, and ends with the block.

    Args:
        size: How many PostgreSQL servers, if no machines are given.
        electors: How many etcd nodes. On machines with networks of their own there is one on each.
        machines: Where the servers run, instead of on loopback.
        within: The folder for the servers' files, instead of the one for temporary files.
    """
    group = machines or loopback(size)
    with ExitStack() as stack:
        folder, programs, options = stack.enter_context(own_folder(within))
        voting = stack.enter_context(etcd.own_cluster(folder, electors, machines=machines))
        nodes = [
            PatroniNode(f"node{number}", machine, folder, programs, options)
            for number, machine in enumerate(group.machines, 1)
        ]
        cluster = PatroniCluster(nodes, voting, group)
        first, *others = nodes
        for node in nodes:
            stack.callback(node.kill)
        cluster.start(first)
        cluster.leader()
        for node in others:
            cluster.start(node)
        cluster.wait_until_whole()
        yield cluster
