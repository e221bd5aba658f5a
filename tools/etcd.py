"""Starts etcd on loopback, for tests and benchmarks: one node, or a cluster of several that can be killed."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tools.machines import Machine, MachineGroup, loopback

NOT_INSTALLED: Final = "etcd is not installed: apt-get install etcd-server (Debian), or put etcd 3.4 or later in PATH"
_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 10.0


def is_installed() -> bool:
    return shutil.which("etcd") is not None


class Node:
    """A member of a cluster, in a folder of its own."""

    def __init__(self, name: str, folder: Path, options: tuple[str, ...] = (), machine: Machine | None = None) -> None:
        """With the option --cert-file, clients use TLS; with --client-cert-auth, this one uses the same certificate.

        Without a machine, it runs on loopback.
        """
        self.name = name
        self.machine = machine or Machine("127.0.0.1")
        self.client, self.peer = (f"{self.machine.host}:{port}" for port in self.machine.free_ports(2))
        self._scheme = "https" if any(option.startswith("--cert-file") for option in options) else "http"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: "list[Node]", *, joins: bool = False) -> None:
        """Start it, with its data if it had any, or as one that joins a cluster; returns at once."""
        peers = ",".join(f"{node.name}=http://{node.peer}" for node in cluster)
        arguments = {
            "name": self.name,
            "data-dir": str(self._folder / self.name),
            "listen-client-urls": f"{self._scheme}://{self.client}",
            "advertise-client-urls": f"{self._scheme}://{self.client}",
            "listen-peer-urls": f"http://{self.peer}",
            "initial-advertise-peer-urls": f"http://{self.peer}",
            "initial-cluster": peers,
            "initial-cluster-state": "existing" if joins else "new",
            "log-level": "error",
        }
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self.machine.command,
                    "etcd",
                    *[f"--{option}={value}" for option, value in arguments.items()],
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                # The terminal's Ctrl-C is for the tests: they end the node themselves.
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            )

    def wait_until_ready(self) -> None:
        """Return once it answers and knows a leader."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self._is_healthy():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self._folder / f"{self.name}.log").read_text(errors="replace")
                raise RuntimeError(f"etcd does not start: {log[-2000:]}")
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        try:
            return b'"true"' in self.request("/health")
        except OSError:
            return False

    def _tls(self) -> ssl.SSLContext:
        trusting = ssl._create_unverified_context()
        if "--client-cert-auth" in self._options:
            files = dict(option.split("=", 1) for option in self._options if "=" in option)
            trusting.load_cert_chain(files["--cert-file"], files["--key-file"])
        return trusting

    def request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What the node's HTTP interface answers: to a GET, or to a POST of JSON."""
        trusting = self._tls() if self._scheme == "https" else None
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._scheme}://{self.client}{path}", data)
        with urllib.request.urlopen(request, timeout=5, context=trusting) as reply:
            return bytes(reply.read())

    def send(self, number: int) -> None:
        """Send a signal, as SIGSTOP."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: not one more instruction."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
            self._process = None

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        self._process = None


@contextmanager
def own_cluster(
    folder: Path, size: int = 1, *options: str, machines: MachineGroup | None = None
) -> Iterator[list[Node]]:
    """A cluster that ends with the block: a node on each machine, or so many on loopback."""
    group = machines or loopback(size)
    nodes = [Node(f"n{number}", folder, options, machine) for number, machine in enumerate(group.machines, 1)]
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.stop)
            node.start(nodes)
        for node in nodes:
            node.wait_until_ready()
        yield nodes


def url_of(nodes: list[Node], prefix: str) -> str:
    return f"etcd://{','.join(node.client for node in nodes)}/{prefix}"


def leader_of(nodes: list[Node]) -> Node:
    """The node that leads the cluster, as soon as there is one that answers."""
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        for node in nodes:
            with suppress(OSError):
                status = json.loads(node.request("/v3/maintenance/status", {}))
                if status.get("leader") == status["header"]["member_id"]:
                    return node
        time.sleep(0.02)
    raise RuntimeError("etcd has no leader")
