"""Runs the services: the database, NATS, metrics and health, from the first signal of life to the last answer."""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from nats.aio.client import Client as Nats

import keyloft
from keyloft.core.records import Batch, Check, Get, Space
from keyloft.core.urls import DatabaseUrl, without_password
from keyloft.errors import (
    CannotOpen,
    DatabaseError,
    InvalidArgument,
    KeyloftError,
    NatsServerFailed,
    NotADatabase,
    NotPermitted,
    ReadOnly,
    SchemaTooNew,
    SchemaTooOld,
    Unanswered,
)
from keyloft.nats.connection import Login, cancel, connect
from keyloft.plugins.client import PREFIX
from keyloft.plugins.meters import Meters
from keyloft.plugins.service import NAME, DatabaseService
from keyloft.plugins.store import BotDatabase
from keyloft.semantic.monitoring import Signals
from keyloft.semantic.service import SemanticService
from keyloft.semantic.store import SemanticStore
from keyloft.server.config import DEFAULT_NATS_PORT, Config
from keyloft.server.http import HttpServer, Response, shown
from keyloft.server.logging import set_up_logging
from keyloft.server.metrics import Metrics
from keyloft.server.nats_process import NatsServer
from keyloft.tuples.store import Store

logger = logging.getLogger(__name__)

_INCURABLE: Final = (CannotOpen, NotADatabase, ReadOnly, SchemaTooNew, SchemaTooOld)
"""What is wrong with a database that waiting does not cure."""

_LOOK: Final = Get(Space.PLUGINS, ("keyloft", "health"))

_LONGEST_PAUSE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
_SAME_SIGNAL_SECONDS: Final = 0.5
"""Some supervisors signal a process and its group: that is one request to end, not two."""

_HEALTH_SECONDS: Final = 2.0
_NOT_SERVED: Final = re.compile(r"permissions violation for subscription to \"([^\"]+)\"", re.IGNORECASE)


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then answer what was taken and return.

    Raises:
        KeyloftError: The service can't be started, for a reason that waiting does not cure.
    """
    set_up_logging(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_told(App(config)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _until_told(app: "App") -> None:
    """Run the service; the first signal asks it to end, a second one does not wait for that."""
    serving = asyncio.ensure_future(app.run())
    told: float | None = None

    def tell(number: signal.Signals) -> None:
        nonlocal told
        now = asyncio.get_running_loop().time()
        if told is None:
            told = now
            logger.info("%s: answering what was taken, then ending", number.name)
            serving.cancel()
        elif now - told > _SAME_SIGNAL_SECONDS:
            app.abandon(128 + number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
    try:
        await serving
    except asyncio.CancelledError:
        if told is None:
            raise


class App:
    """The parts of a service, and in which order they start and end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._meters = Meters()
        # The database is given up before a request is, so that its answer can still be told.
        self._db = BotDatabase(config.database, durability=config.durability, patience=0.8 * config.deadline)
        self._signals = Signals()
        self._metrics = Metrics(self._meters, self._db, self._signals, prefix=config.metrics_prefix)
        self._own_server: NatsServer | None = None
        self._nats: Nats | None = None
        self._is_open = False
        self._greeting = ""
        """What is still to be said, once we serve."""

    async def run(self) -> None:
        """Serve until cancelled, then end in good order.

        Raises:
            KeyloftError: It can't be started, for a reason that waiting does not cure.
        """
        async with AsyncExitStack() as stack:
            pages = await self._show_pages(stack)
            await self._open_database()
            stack.push_async_callback(self._db.close)
            stack.push_async_callback(self._metrics.aclose)
            store = await self._semantic_store()
            stack.push_async_callback(store.aclose)
            addresses = await self._find_nats(stack)
            self._greeting = _greeting(self._config, addresses, self._own_server, pages)
            while True:
                await self._serve(addresses, store)

    async def _semantic_store(self) -> SemanticStore:
        config = self._config
        return SemanticStore(
            Store(await self._db.engine()),
            audit_key=config.audit_key,
            purposes=config.purposes,
            request_memory=config.request_memory,
            restore_within=config.restore_within,
            audit_retention=config.audit_retention,
            sweep_every=config.cleanup_every,
            signals=self._signals,
        )

    def abandon(self, code: int) -> NoReturn:
        """End at once. What was acknowledged is on disk."""
        if self._own_server is not None:
            with contextlib.suppress(OSError, NatsServerFailed):
                os.kill(self._own_server.pid, signal.SIGTERM)
        os._exit(code)

    # Metrics and health

    async def _show_pages(self, stack: AsyncExitStack) -> str | None:
        """Show metrics and health, from the beginning: whoever watches over us wants to know what we wait for."""
        address = self._config.http_address()
        if address is None:
            return None
        server = HttpServer({"/metrics": self._show_metrics, "/healthz": self._show_health})
        try:
            host, port = await server.start(*address)
        except OSError as error:
            reason = error.strerror or str(error)
            logger.warning("no metrics and health: %s can't be listened on: %s", self._config.http, reason)
            return None
        stack.push_async_callback(server.stop)
        return shown(host, port)

    async def _show_metrics(self) -> Response:
        if not self._is_open:
            return Response(b"the database is not open yet\n", HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            return Response(await self._metrics.render(), content_type=self._metrics.content_type)
        except ImportError:
            missing = b'metrics need prometheus-client: in a clone of Keyloft, pip install ".[server]" installs it\n'
            return Response(missing, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _show_health(self) -> Response:
        wrong = await self._what_is_wrong()
        if wrong is None:
            return Response(b"ok\n")
        return Response(f"{wrong}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)

    async def _what_is_wrong(self) -> str | None:
        if not self._is_open:
            return "the database is not open yet"
        if self._nats is None or not self._nats.is_connected:
            return "not connected to NATS"
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                engine = await self._db.engine()
                await engine.read(_LOOK)
                await self._try_to_write()
        except TimeoutError:
            return f"the database has not answered within {_HEALTH_SECONDS:g} s"
        except KeyloftError as error:
            # What exactly it says may name files and hosts: it belongs in the log.
            logger.warning("the database can't be used: %s", error)
            return f"the database can't be used ({error.code})"
        return None

    async def _try_to_write(self) -> None:
        """A check that fails goes all the way to where writes are made, and writes nothing."""
        engine = await self._db.engine()
        await engine.commit(Batch((), (Check(_LOOK.space, _LOOK.key, -1),)))

    # The database

    async def _open_database(self) -> None:
        pause = 0.25
        while True:
            try:
                await self._db.create_tables()
                await self._try_to_write()
            except InvalidArgument as error:
                raise InvalidArgument(f"the setting `database`: {error}") from None
            except _INCURABLE:
                raise
            except DatabaseError as error:
                logger.warning("the database is not ready, trying again: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                self._is_open = True
                return

    # NATS

    async def _find_nats(self, stack: AsyncExitStack) -> list[str]:
        """The addresses of NATS; where none is given, those of a server of our own, which is kept running."""
        if self._config.nats:
            return list(self._config.nats)
        port = self._config.nats_port
        self._own_server = server = NatsServer(port=port or None)
        try:
            await server.start()
        except NatsServerFailed as error:
            if "address already in use" not in str(error):
                raise
            raise NatsServerFailed(
                f"port {port} is taken. If a Keyloft runs there already, use that one; if it is another NATS server, "
                f"--nats nats://127.0.0.1:{port} serves there; if neither, --nats-port chooses another port for ours"
            ) from None
        stack.push_async_callback(server.stop)
        keeping = asyncio.create_task(_keep_running(server), name="keyloft nats-server keeper")
        stack.push_async_callback(cancel, keeping)
        return [server.url]

    async def _serve(self, addresses: list[str], store: SemanticStore) -> None:
        """Serve until the connection to NATS ends for good."""
        is_first = self._greeting != ""
        not_served: list[str] = []

        def heard(error: Exception) -> None:
            not_served.extend(_NOT_SERVED.findall(str(error)))

        async with AsyncExitStack() as stack:
            self._nats, closed = await self._connect(addresses, heard, is_first)
            stack.push_async_callback(_closed, self._nats)
            service = DatabaseService(
                self._nats,
                self._db,
                prefixes=self._config.prefixes,
                reserved=[self._config.semantic_prefix],
                queue=self._config.queue,
                requests_per_plugin=self._config.requests_per_plugin,
                requests_in_all=self._config.requests_in_all,
                deadline=self._config.deadline,
                cleanup_every=self._config.cleanup_every,
                meters=self._meters,
                metadata=self._metadata(),
            )
            semantic = SemanticService(
                self._nats,
                store,
                prefix=self._config.semantic_prefix,
                reserved=self._config.prefixes,
                queue=self._config.queue,
                requests_per_tenant=self._config.requests_per_plugin,
                requests_in_all=self._config.requests_in_all,
                deadline=self._config.deadline,
                metadata=self._metadata(),
            )
            if is_first and self._config.login() == Login():
                await self._look_for_others(self._nats)
            stack.push_async_callback(service.stop)
            stack.push_async_callback(semantic.stop)
            try:
                await service.start()
                await semantic.start()
            except Exception as error:
                logger.warning("the service can't begin yet, trying again: %s", error or type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
                return
            if not_served:
                if is_first:
                    raise NotPermitted(
                        f"NATS does not let this user serve {', '.join(not_served)}: "
                        "log in as the service with --nats-user or --nats-creds"
                    )
                logger.error("NATS does not let this user serve %s", ", ".join(not_served))
            _say(self._greeting)
            self._greeting = ""
            await closed.wait()
            logger.error("NATS has ended the connection; connecting anew")

    def _metadata(self) -> dict[str, str]:
        return {"host": socket.gethostname(), "pid": str(os.getpid()), "database": _place(self._config.database)}

    async def _look_for_others(self, nats: Nats) -> None:
        """Whoever starts a second service by mistake would find each value in one of two databases."""
        try:
            message = await nats.request(f"$SRV.PING.{NAME}", b"", timeout=_HEALTH_SECONDS)
            other = msgspec.json.decode(message.data)["metadata"]
        except Exception:
            return  # nobody there, or nobody of ours
        mine = self._metadata()
        where = f"{other.get('database')} (process {other.get('pid')} on {other.get('host')})"
        if (other.get("database"), other.get("host")) == (mine["database"], mine["host"]):
            logger.info("sharing the requests with another instance on %s", where)
        else:
            logger.warning(
                "another Keyloft serves here already, from %s: each request goes to one of the two, and each has its "
                "own data. Stop one, or give them different --prefixes or NATS servers",
                where,
            )

    async def _connect(
        self, addresses: list[str], heard: Callable[[Exception], None], is_first: bool
    ) -> tuple[Nats, asyncio.Event]:
        """Connect, as soon as there is somebody to connect to; the event tells that it ended for good."""
        where = ", ".join(map(without_password, addresses))
        logger.info("connecting to NATS at %s", where)
        while True:
            closed = asyncio.Event()

            async def tell(closed: asyncio.Event = closed) -> None:
                closed.set()

            try:
                connection = await connect(
                    addresses,
                    name="keyloft serve",
                    login=self._config.login(),
                    on_error=heard,
                    closed_cb=tell,
                    skip_subject_validation=True,  # whatever we answer to, NATS has let through
                )
                return connection, closed
            except NotPermitted as error:
                if is_first:
                    hint = "--nats-user, --nats-creds, --nats-ca … say how to log in"
                    raise NotPermitted(f"{where}: {error}; {hint}") from error
                # Who was let in before, and is no longer, waits to be let in again.
                await asyncio.sleep(_RETRY_SECONDS)
            except KeyloftError:
                raise
            except Exception as error:
                raise Unanswered(f"NATS at {where} can't be used: {error or type(error).__name__}") from error


async def _keep_running(server: NatsServer) -> None:
    """Start our own nats-server again whenever it ends; plugins come back by themselves, the port is the same."""
    while True:
        await asyncio.wait([server.died])
        logger.error("%s; starting it again", server.died.result())
        while True:
            try:
                await server.start()
            except NatsServerFailed as error:
                logger.error("%s; trying again", error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                break


async def _closed(connection: Nats) -> None:
    if not connection.is_closed:
        await connection.close()


# What is said at the start


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens
        sys.stdout.write(text)
        sys.stdout.flush()


def _greeting(config: Config, addresses: list[str], own_server: NatsServer | None, pages: str | None) -> str:
    nats = ", ".join(map(without_password, addresses))
    command = _command()
    options = ""
    if nats != f"nats://127.0.0.1:{DEFAULT_NATS_PORT}":
        options += f" --nats {shlex.quote(','.join(map(without_password, addresses)))}"
    if PREFIX not in config.prefixes:
        options += f" --subjects {config.prefixes[0]}"
    needs_login = own_server is None and (config.login() != Login() or any("@" in url for url in addresses))
    login = "; with the login of a user that may do so, see keyloft plugin get --help" if needs_login else ""
    return f"""\
Keyloft {keyloft.__version__} is running.

  data      {_place(config.database)}
  NATS      {nats}{" (our own)" if own_server is not None else ""}
  metrics   {"off" if pages is None else f"{pages}/metrics, health at {pages}/healthz"}

Store a first value and read it, in another terminal{login}:

  {command} plugin set{options} trivia score 100
  {command} plugin get{options} trivia score

Ctrl-C ends it.
"""


def _command() -> str:
    """How this program is called in another terminal, where no virtual environment is active."""
    beside = Path(sys.executable).with_name("keyloft")
    found = shutil.which("keyloft")
    if found is not None and "VIRTUAL_ENV" not in os.environ and Path(found).resolve() == beside.resolve():
        return "keyloft"
    return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m keyloft"


def _place(database: str) -> str:
    url = DatabaseUrl.parse(database)
    return "in memory: it is gone when the service ends" if url.is_in_memory else str(url.file or url.shown)
