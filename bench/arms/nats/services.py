"""Arms for services on NATS: Keyloft's, an echo that does nothing, and handlers over an ORM.

Each has its own nats-server and process; the client is stock nats-py unless the name says otherwise.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from nats.aio.client import Client

from bench.arms.nats.echo import echo_of
from bench.arms.nats.keyloft_service import filled
from bench.arms.nats.requests import KEYLOFT_SUBJECTS, clients, getting, setting
from bench.harness.children import Child, child
from bench.harness.contest import Contestant, Entrant, Operation, PlannedLap, StoreSetup, same
from bench.harness.data import Key, Pair, Value, value_of
from bench.harness.race import Timed
from keyloft.plugins import DatabaseClient
from keyloft.server.nats_process import NatsServer

_TIMEOUT_SECONDS = 30.0
ON_DISK = "on disk (WAL, synced, group commit)"

# As long as Keyloft's: the length of a subject is a part of the request.
_ECHO = "ec.kv"
_ORM = "or.kv"


class OnNats(Contestant):
    """A service that answers gets and sets, and a connection to it."""

    def __init__(self, client: Client, process: Child, prefix: str, closing: AsyncExitStack) -> None:
        self.client = client
        self.process = process
        self._prefix = prefix
        self._closing = closing

    def asks(self, operation: Operation, planned: Any) -> list[Any]:
        if operation == "get":
            return [getting(key, self._prefix) for key in planned]
        return [setting(key, value, self._prefix) for key, value in planned]

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        request = self.client.request
        return lambda ask: request(ask[0], ask[1], timeout=_TIMEOUT_SECONDS)

    def seen(self, operation: Operation, answer: Any) -> Any:
        reply = msgspec.json.decode(answer.data)
        same(reply.get("success", True), True)
        return reply["value"]

    async def check(self, operation: Operation, plan: PlannedLap, done: Timed[Any]) -> None:
        if operation == "set":
            wrong = [answer for answer in done.answers if msgspec.json.decode(answer.data).get("success") is not True]
            same(wrong, [])
        await super().check(operation, plan, done)

    def close(self) -> Any:
        return self._closing.aclose()


class Echo(OnNats):
    """A service that sends the same reply to every request."""

    def __init__(self, client: Client, process: Child, size: int, closing: AsyncExitStack) -> None:
        super().__init__(client, process, _ECHO, closing)
        self._echo = echo_of(size)

    async def check(self, operation: Operation, plan: PlannedLap, done: Timed[Any]) -> None:
        same([answer.data for answer in done.answers], [self._echo] * len(plan.asked))


class ByClient(OnNats):
    """Keyloft's service through `DatabaseClient`, which decodes values and errors; one per plugin on one connection."""

    def __init__(self, service: OnNats, *, gather: bool = True) -> None:
        super().__init__(service.client, service.process, KEYLOFT_SUBJECTS, service._closing)
        self._gather = gather
        self._plugins: dict[str, DatabaseClient] = {}

    def asks(self, operation: Operation, planned: Any) -> list[Any]:
        return list(planned)

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        def get(key: Key) -> Any:
            return self._plugin(key[0]).kv.get(key[1])

        def put(pair: Pair) -> Any:
            (plugin, key), value = pair
            return self._plugin(plugin).kv.set(key, value)

        return get if operation == "get" else put

    def _plugin(self, name: str) -> DatabaseClient:
        found = self._plugins.get(name)
        if found is None:
            found = self._plugins[name] = DatabaseClient(self.client, name, gather=self._gather)
        return found

    def seen(self, operation: Operation, answer: Any) -> Any:
        return answer

    async def check(self, operation: Operation, plan: PlannedLap, done: Timed[Any]) -> None:
        await Contestant.check(self, operation, plan, done)


async def _enter_keyloft(setup: StoreSetup) -> OnNats:
    async def serve(closing: AsyncExitStack, url: str) -> Child:
        path, to_fill = setup.folder / "keyloft.db", setup.stored
        if not setup.task.writes:
            # For reads the file is closed once it is full, so that the keys are in it. For writes the service fills it,
            # so that the write-ahead log has its full size: while it grows, a sync takes twice as long on ext4.
            await filled(path, setup.stored)
            to_fill = 0
        return await closing.enter_async_context(child("bench.arms.nats.keyloft_service", url, path, to_fill))

    return await _entered(serve, lambda client, process, closing: OnNats(client, process, KEYLOFT_SUBJECTS, closing))


async def _enter_by_client(setup: StoreSetup) -> OnNats:
    return ByClient(await _enter_keyloft(setup))


async def _enter_without_gathering(setup: StoreSetup) -> OnNats:
    return ByClient(await _enter_keyloft(setup), gather=False)


async def _enter_echo(setup: StoreSetup) -> OnNats:
    reply: dict[str, Value | bool] = {"success": True}
    if setup.task.operation == "get":
        reply |= {"exists": True, "value": value_of(0)}
    size = len(msgspec.json.encode(reply))

    async def serve(closing: AsyncExitStack, url: str) -> Child:
        return await closing.enter_async_context(child("bench.arms.nats.echo", url, _ECHO, size))

    return await _entered(serve, lambda client, process, closing: Echo(client, process, size, closing))


async def _enter_handlers(setup: StoreSetup) -> OnNats:
    async def serve(closing: AsyncExitStack, url: str) -> Child:
        path = setup.folder / "orm.db"
        return await closing.enter_async_context(child("bench.arms.nats.orm_handlers", url, _ORM, path, setup.stored))

    return await _entered(serve, lambda client, process, closing: OnNats(client, process, _ORM, closing))


async def _entered(
    serve: Callable[[AsyncExitStack, str], Any], made: Callable[[Client, Child, AsyncExitStack], OnNats]
) -> OnNats:
    async with AsyncExitStack() as closing:
        server = await closing.enter_async_context(NatsServer())
        process = await serve(closing, server.url)
        [client] = await closing.enter_async_context(clients(server.url, 1))
        return made(client, process, closing.pop_all())


def _entrant(name: str, enter: Callable[[StoreSetup], Any], durable: str) -> Entrant:
    return Entrant(
        name,
        enter,
        frozenset({"get", "set"}),
        durable=durable,
        loop="uvloop",
        cpu_seconds=lambda contestant: contestant.process.cpu_seconds(),
    )


KEYLOFT = _entrant("Keyloft's service", _enter_keyloft, ON_DISK)
BY_CLIENT = _entrant("Keyloft's service through DatabaseClient", _enter_by_client, ON_DISK)
WITHOUT_GATHERING = _entrant("DatabaseClient, a message per call", _enter_without_gathering, ON_DISK)
ECHO = _entrant("nats-py echo (the limit)", _enter_echo, "nothing is kept")
HANDLERS = _entrant("handlers over SQLAlchemy", _enter_handlers, "on disk (WAL, synced)")
