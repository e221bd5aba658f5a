"""Runs the services: opens the database, connects to NATS, serves, and ends in order."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Final, NoReturn

from keyloft import errors, limits
from keyloft.core.addresses import without_login
from keyloft.core.records import StoreId
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import (
    AnotherStore,
    DatabaseError,
    InvalidArgument,
    KeyloftError,
    NatsServerFailed,
    NotPermitted,
    Unanswered,
)
from keyloft.http.meters import HttpMeters
from keyloft.http.page.service import NatsState
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.connection import cancel, connect
from keyloft.nats.messages import NatsConnection
from keyloft.nats.meters import ServiceMeters
from keyloft.plugins.meters import Meters
from keyloft.plugins.service import DatabaseService
from keyloft.plugins.store import BotDatabase
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic.monitoring import Signals
from keyloft.semantic.service import SemanticService
from keyloft.semantic.store import SemanticStore
from keyloft.server.banner import show_banner
from keyloft.server.config import VARIABLES, Config
from keyloft.server.environment import mistyped_variables
from keyloft.server.health import ServiceHealth, try_to_write
from keyloft.server.http_service import HttpService
from keyloft.server.logging import set_up_logging
from keyloft.server.members import QueueGroup, new_store, store_of
from keyloft.server.metrics import Metrics
from keyloft.server.nats_process import NatsServer
from keyloft.server.page_parts import page_parts
from keyloft.tuples.store import Store

logger = logging.getLogger(__name__)

_PERMANENT: Final = (errors.CannotOpen, errors.NotADatabase, errors.ReadOnly, errors.SchemaTooNew, errors.SchemaTooOld)
"""Failures to open a database that are not worth another attempt."""

_LOG_IN: Final = (
    "serve logs in as SERVICE: set --nats-user SERVICE and KEYLOFT_NATS_PASSWORD, with the password that the "
    "configuration of NATS has for it; or --nats-creds"
)


def run(config: Config, end_process: Callable[[int], NoReturn]) -> None:
    """Serve until SIGTERM or SIGINT, then answer the accepted requests and return.

    Args:
        config: The settings.
        end_process: Ends the process with an exit code at once, for a second signal.

    Raises:
        KeyloftError: The service can't be started, and no later attempt could succeed.
    """
    set_up_logging(config.log_level, config.log_format)
    for mistyped, meant in mistyped_variables(VARIABLES):
        logger.warning("the environment variable %s is ignored: did you mean %s?", mistyped, meant)
    new_loop = asyncio.new_event_loop
    with suppress(ImportError):
        from uvloop import new_event_loop as new_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_until_signal(App(config), end_process))


async def _until_signal(app: "App", end_process: Callable[[int], NoReturn]) -> None:
    """Run the service. A first signal asks it to end; a second one ends it at once, and loses no acknowledged write."""
    serving = asyncio.ensure_future(app.run())
    first_signal: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_signal
        now = loop.time()
        if first_signal is None:
            first_signal = now
            logger.info("%s: answering the accepted requests, then ending", number.name)
            app.http.stop_accepting()
            serving.cancel()
        elif now - first_signal > limits.SAME_SIGNAL_SECONDS:
            app.end_nats_server()
            end_process(128 + number)

    # `nohup` ignores SIGHUP.
    ends_with_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def on_hangup() -> None:
        if ends_with_terminal and not _has_terminal():
            on_signal(signal.SIGHUP)
        else:
            app.http.reload_tokens()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await serving
    except asyncio.CancelledError:
        if first_signal is None:
            raise


def _has_terminal() -> bool:
    """Whether a terminal controls this process. One that was closed, as a window, no longer does."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class App:
    """The parts of a service, and the order in which they start and end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._meters = Meters()
        # A call to the database times out before its request does, so that the answer can name the reason.
        self._db = BotDatabase(
            config.database,
            durability=config.durability,
            patience=0.8 * config.deadline,
            history_seconds=config.history_seconds,
            history_mib=config.history_mib,
        )
        self._signals = Signals()
        self._tenants = ServiceMeters()
        self._usage = PluginUsage(self._db, config.plugin_quotas())
        requests = HttpMeters()
        self._health = ServiceHealth(
            lambda health: Metrics(
                self._meters,
                self._usage,
                self._signals,
                self._tenants,
                requests,
                prefix=config.metrics_prefix,
                health=health.servers,
            )
        )
        self._nats_server: NatsServer | None = None
        self._addresses: list[str] = []
        self._page = page_parts(
            config,
            meters=self._meters,
            tenants=self._tenants,
            usage=self._usage,
            signals=self._signals,
            nats=self._nats_state,
        )
        self.http = HttpService(config, self._health, self._page, requests)
        self._group: QueueGroup | None = None
        self._has_served = False

    async def run(self) -> None:
        """Serve until cancelled, then end in order.

        Raises:
            KeyloftError: The service can't be started, and no later attempt could succeed.
        """
        async with AsyncExitStack() as stack:
            # First of all, so that the health page says what a starting service waits for.
            await stack.enter_async_context(self.http)
            await self.http.start()
            self._addresses = addresses = await self._find_nats(stack)
            await self._check_before_new_file()
            await self._open_database()
            self._health.is_open = True
            stack.push_async_callback(self._db.aclose)
            stack.push_async_callback(self.http.aclose)  # a second time, so that its requests end before the database
            await stack.enter_async_context(self._usage)
            config = self._config
            self._health.engine = engine = await self._db.engine()
            self.http.opened(engine)
            [store_id] = await engine.read(StoreId())
            self._group = QueueGroup(config, store_of(engine, store_id))
            store = SemanticStore(
                Store(engine),
                audit_key=config.audit_key,
                purposes=config.purposes,
                request_memory=config.request_memory,
                restore_within=config.restore_within,
                audit_retention=config.audit_retention,
                sweep_every=config.cleanup_every,
                signals=self._signals,
            )
            await stack.enter_async_context(store)
            self._page.semantic = store
            while True:
                await self._serve(addresses, store)

    def end_nats_server(self) -> None:
        """End the nats-server that the service runs itself, without waiting for it."""
        if self._nats_server is not None:
            with suppress(OSError, NatsServerFailed):
                os.kill(self._nats_server.pid, signal.SIGTERM)

    # The admin page

    def _nats_state(self) -> NatsState:
        return NatsState(
            is_connected=self._health.is_connected,
            addresses=[without_login(address) for address in self._addresses],
            is_own=not self._config.nats,
        )

    # The database

    async def _open_database(self) -> None:
        pause, longest = limits.OPENING_PAUSES
        while True:
            try:
                await self._db.create_tables()
                return await try_to_write(await self._db.engine())
            except InvalidArgument as error:
                raise InvalidArgument(f"the setting `database`: {error}") from None
            except _PERMANENT:
                raise
            except DatabaseError as error:
                logger.warning("the database is not ready, trying again: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    async def _check_before_new_file(self) -> None:
        """Find out whether NATS refuses this service, before it makes a database file that would be left behind.

        Raises:
            AnotherStore: Services here serve another store.
            NotPermitted: NATS refuses the login.
        """
        file = None
        with suppress(KeyloftError):  # a URL that can't be used is refused when the database is opened
            file = DatabaseUrl.parse(self._config.database).file
        if file is None or file.exists() or not self._config.nats:
            return
        with suppress(TimeoutError):  # a NATS server that is not yet up is waited for later
            async with asyncio.timeout(limits.NEW_FILE_CHECK_SECONDS), AsyncExitStack() as stack:
                nats = await self._connect(list(self._config.nats), is_first=True)
                stack.push_async_callback(nats.close)
                await self._may_join(QueueGroup(self._config, new_store), nats)

    # NATS

    async def _find_nats(self, stack: AsyncExitStack) -> list[str]:
        """The addresses of NATS; if none is configured, that of a nats-server which is started and kept running."""
        if self._config.nats:
            return list(self._config.nats)
        port = self._config.nats_port
        self._nats_server = server = NatsServer(port=port or None)
        try:
            await stack.enter_async_context(server)
        except NatsServerFailed as error:
            if "address already in use" not in str(error):
                raise
            raise NatsServerFailed(
                f"port {port} is taken. If a Keyloft runs there already, use that one; if it is another NATS server, "
                f"--nats nats://127.0.0.1:{port} serves there; otherwise choose another port with --nats-port"
            ) from None
        keeping = asyncio.create_task(_keep_running(server), name="keyloft nats-server keeper")
        stack.push_async_callback(cancel, keeping)
        return [server.url]

    async def _serve(self, addresses: list[str], store: SemanticStore) -> None:
        """Serve until the connection to NATS ends for good."""
        _check_cancelled()
        config, is_first = self._config, not self._has_served
        self._health.is_serving = False
        closed, restored = asyncio.Event(), asyncio.Event()

        async def on_closed() -> None:
            closed.set()

        group = self._group
        assert group is not None, "set when the database was opened"
        async with AsyncExitStack() as stack:
            self._health.nats = nats = await self._connect(
                addresses, is_first, closed_cb=on_closed, on_restored=restored.set
            )
            closed.clear()  # a refused login has closed its connection
            stack.push_async_callback(nats.close)
            shared: dict[str, Any] = {
                "queue": config.queue,
                "bounds": IntakeBounds(
                    owner_bytes=int(config.owner_mib * 2**20),
                    all_bytes=int(config.intake_mib * 2**20),
                    requests_per_second=config.requests_per_second or None,
                ),
                "deadline": config.deadline,
            }
            service = DatabaseService(
                nats,
                self._db,
                prefixes=config.prefixes,
                reserved=[config.semantic_prefix],
                cleanup_every=config.cleanup_every,
                usage=self._usage,
                meters=self._meters,
                metadata=partial(group.metadata, DatabaseService.name),
                **shared,
            )
            semantic = SemanticService(
                nats,
                store,
                prefix=config.semantic_prefix,
                reserved=config.prefixes,
                meters=self._tenants,
                metadata=partial(group.metadata, SemanticService.name),
                **shared,
            )
            if not await self._may_join(group, nats):
                await asyncio.sleep(limits.RECONNECT_SECONDS)
                return

            async def close_services() -> None:
                await asyncio.gather(service.aclose(), semantic.aclose())  # together: both may wait for the database

            stack.push_async_callback(close_services)
            try:
                await service.start()
                await semantic.start()
            except Exception as error:
                logger.warning("the service can't start yet, trying again: %s", error or type(error).__name__)
                await asyncio.sleep(limits.RECONNECT_SECONDS)
                return
            if not_served := [subject for subject in group.subjects if subject.lower() in nats.refused]:
                refusal = f"NATS refused to let this user subscribe to {', '.join(not_served)}"
                if is_first:
                    raise NotPermitted(f"{refusal}; {_LOG_IN}")
                logger.error("%s", refusal)
            group.warn_of_unknown()
            self.http.serving(service, semantic)
            stack.callback(self.http.serving, None, None)
            if is_first:
                show_banner(config, addresses, self.http)
            self._health.is_serving = True
            leaving = asyncio.create_task(self._until_others_serve(group, nats, restored), name="keyloft queue group")
            stack.push_async_callback(cancel, leaving)
            _check_cancelled()
            ending = asyncio.create_task(closed.wait(), name="keyloft connection")
            stack.push_async_callback(cancel, ending)
            await asyncio.wait([leaving, ending], return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                leaving.result()
                return
            self._has_served = True
            logger.error("NATS has ended the connection; connecting again")

    async def _until_others_serve(self, group: QueueGroup, nats: NatsConnection, restored: asyncio.Event) -> None:
        """Return once another store is served here, too: then this service leaves.

        It may have been joined at the same moment as this one, or while this service was not connected.

        Raises:
            AnotherStore: That is so at the start.
        """
        while await self._may_join(group, nats):
            self._has_served = True
            await restored.wait()
            restored.clear()

    async def _may_join(self, group: QueueGroup, nats: NatsConnection) -> bool:
        """Whether all services of the queue group serve this store.

        Raises:
            AnotherStore: One of them serves another store, and this service has not served yet.
        """
        user = self._config.login().user or (nats.connected_url.username if nats.connected_url else None)
        try:
            await group.check(nats, user)
        except AnotherStore as error:
            if not self._has_served:
                raise
            logger.error("not joining again, %s: %s", error.code, error)
            return False
        except Exception as error:
            logger.warning("other services can't be asked for their stores: %s", error or type(error).__name__)
        return True

    async def _connect(self, addresses: list[str], is_first: bool, **callbacks: Any) -> NatsConnection:
        """Connect as soon as a server answers."""
        where = ", ".join(map(without_login, addresses))
        logger.info("connecting to NATS at %s", where)
        while True:
            try:
                return await connect(
                    addresses,
                    name="keyloft serve",
                    login=self._config.login(),
                    skip_subject_validation=True,  # NATS has checked the reply subjects already
                    subjects=lambda: (*self._config.prefixes, self._config.semantic_prefix),
                    **callbacks,
                )
            except Unanswered as error:
                if is_first and isinstance(error, NotPermitted):
                    raise NotPermitted(f"{where}: {error}; {_LOG_IN}") from error
                if is_first:
                    raise Unanswered(f"{where}: {error}") from error
                # A login that worked before may work again.
                await asyncio.sleep(limits.RECONNECT_SECONDS)
            except KeyloftError:
                raise
            except Exception as error:
                raise Unanswered(f"connecting to NATS at {where} failed: {error or type(error).__name__}") from error


def _check_cancelled() -> None:
    """End this task if it was cancelled: what it awaited may have taken that for a failure, as nats-py can do."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _keep_running(server: NatsServer) -> None:
    """Start the nats-server again whenever it ends; clients reconnect by themselves, since the port stays the same."""
    while True:
        await asyncio.wait([server.died])
        logger.error("%s; starting it again", server.died.result())
        while True:
            try:
                await server.start()
            except NatsServerFailed as error:
                logger.error("%s; trying again", error)
                await asyncio.sleep(limits.RECONNECT_SECONDS)
            else:
                break
