"""Arms for Keyloft as it is here and as it was at another commit, each in a process of its own.

Both run with the libraries that are installed here, so only Keyloft's own code differs.
"""

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from nats.aio.client import Client
from nats.errors import NoRespondersError

from bench.arms.nats.requests import KEYLOFT_SUBJECTS, clients
from bench.arms.nats.services import ON_DISK, OnNats
from bench.arms.store_process import StoreProcess, entered
from bench.harness import processes
from bench.harness.children import Child
from bench.harness.contest import IN_FLIGHT, Contestant, Entrant, Operation, StoreSetup
from bench.harness.race import Unavailable
from keyloft.server.nats_process import NatsServer

ROOT = Path(__file__).parents[2]
_START_SECONDS = 30.0
_POLL_SECONDS = 0.05


def source_of(commit: str, folder: Path) -> Path:
    """The folder with the packages of a commit.

    Raises:
        SystemExit: Git does not know the commit.
    """
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, check=False)
    if packed.returncode:
        raise SystemExit(f"--against {commit}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def tuple_entrant(name: str, source: Path) -> Entrant:
    """The tuple store on a file, from this source."""
    return _store_entrant(name, source, "tuples", frozenset({"get", "get_many", "list", "set", "swap"}))


def semantic_entrant(name: str, source: Path) -> Entrant:
    """The semantic store on a file, from this source."""
    return _store_entrant(name, source, "semantic", frozenset({"get", "list", "set", "swap"}))


def _store_entrant(name: str, source: Path, kind: str, operations: frozenset[Operation]) -> Entrant:
    async def enter(setup: StoreSetup) -> StoreProcess:
        task = setup.task
        use = f"beside {task.writers}" if task.writers else "writes" if task.durable else "relaxed"
        if not task.writes and not task.writers:
            use = "reads"
        return await store_process(setup, source, kind, str(setup.folder / "keyloft.db"), use)

    return Entrant(name, enter, operations, durable=ON_DISK, relaxed="the newest may be lost (WAL)")


def store_process(setup: StoreSetup, source: Path, kind: str, where: str, use: str) -> Awaitable[StoreProcess]:
    """Start a process with a store of this source, and fill it; `keyloft_process` says what the arguments mean."""
    command = (sys.executable, "-m", "bench.arms.keyloft_process", kind, where, use)
    return entered(setup, *command, environment=_environment(source))


class _ServiceProcess(Child):
    """`keyloft serve`, which ends upon a signal."""

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self) -> None:
        self._process.terminate()
        async with processes.ending(self._process):
            pass


def service_entrant(name: str, source: Path) -> Entrant:
    """`keyloft serve` from this source, with a nats-server of its own, and a stock nats-py client."""
    return Entrant(
        name,
        _entering_service(source),
        frozenset({"get", "set"}),
        durable=ON_DISK,
        loop="uvloop",
        cpu_seconds=lambda contestant: contestant.process.cpu_seconds(),
    )


def _entering_service(source: Path) -> Callable[[StoreSetup], Awaitable[Contestant]]:
    async def enter(setup: StoreSetup) -> OnNats:
        async with AsyncExitStack() as closing:
            server = await closing.enter_async_context(NatsServer())
            options = ("--nats", server.url, "--database", str(setup.folder / "keyloft.db"), "--http", "off")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "keyloft.server", *options),
                env={**_environment(source), "KEYLOFT_LOG_LEVEL": "WARNING"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            service = _ServiceProcess(process)
            closing.push_async_callback(service.end)
            [client] = await closing.enter_async_context(clients(server.url, 1))
            await _answered(client, service)
            contestant = OnNats(client, service, KEYLOFT_SUBJECTS, closing.pop_all())
        for pairs in setup.chunks():
            await contestant.lap("set", pairs, IN_FLIGHT)
        return contestant

    return enter


async def _answered(client: Client, service: _ServiceProcess) -> None:
    """Wait until the service answers.

    Raises:
        Unavailable: It does not, in time.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            await client.request(f"{KEYLOFT_SUBJECTS}.bench.get", b'{"key":"started"}', timeout=_START_SECONDS)
            return
        except NoRespondersError:
            if time.monotonic() > deadline or service.has_ended:
                raise Unavailable("the service did not start") from None
            await asyncio.sleep(_POLL_SECONDS)


def _environment(source: Path) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
