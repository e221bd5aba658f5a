"""Both services on a database, reached over NATS and over HTTP, within the test's own process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from nats.aio.client import Client as Nats

from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.semantic import SemanticService, SemanticStore
from keyloft.tuples.store import Store
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, RunningApi, running_api, scoped_token
from tests.support.http import http_client
from tests.support.plugin_files import locked

KV, SEMANTIC = "http.kv", "http.semantic"
SCOPES: Mapping[str, tuple[str, ...]] = {
    "trivia-writes": ("write:plugin/trivia",),
    "trivia-reads": ("read:plugin/trivia",),
    "acme-writes": ("write:tenant/acme",),
    "acme-reads": ("read:tenant/acme",),
    "tuples": ("write:kv",),
}
"""Tokens and their scopes."""


class ServedOverHttp:
    """What a test reaches."""

    def __init__(
        self, api: RunningApi, client: Nats, db: BotDatabase, plugins: DatabaseService, semantic: SemanticService
    ) -> None:
        self.api = api
        self.url = f"http://127.0.0.1:{api.port}"
        self.context = api.context
        self.client = client
        self.db = db
        self.plugins = plugins
        self.semantic = semantic
        api.context.plugins.current, api.context.semantic.current = plugins, semantic

    def http(self, token: str = ADMIN_TOKEN) -> httpx.AsyncClient:
        """A client with a token, and as many connections as it has requests."""
        headers = {"authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return http_client(self.url, headers=headers, timeout=LONGEST_SECONDS, limits=limits)

    async def over_nats(self, subject: str, payload: Any) -> Any:
        """The reply to a request; the subject is one of db.kv or db.semantic."""
        subject = subject.replace("db.kv", KV).replace("db.semantic", SEMANTIC)
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return json.loads((await self.client.request(subject, data, timeout=LONGEST_SECONDS)).data)

    def locked(self) -> AbstractAsyncContextManager[None]:
        """Another program holds the file: no write is made meanwhile."""
        return locked(self.db)


@asynccontextmanager
async def services(
    nats_url: str, path: Path, *, bounds: IntakeBounds | None = None, **options: Any
) -> AsyncIterator[ServedOverHttp]:
    """Both services on a new database file; the options are those of the service for plugins."""
    tokens = [scoped_token(name, *scopes) for name, scopes in SCOPES.items()]
    async with AsyncExitStack() as closing:
        client = await connect(nats_url, name="http")
        closing.push_async_callback(client.close)
        db = await closing.enter_async_context(BotDatabase(path))
        engine = await db.engine()
        store = await closing.enter_async_context(SemanticStore(Store(engine), sweep_every=None))
        service = DatabaseService(client, db, prefixes=[KV], bounds=bounds, **options)
        plugins = await closing.enter_async_context(service)
        semantic = await closing.enter_async_context(SemanticService(client, store, prefix=SEMANTIC, bounds=bounds))
        api = await closing.enter_async_context(running_api(*tokens, engine=engine))
        yield ServedOverHttp(api, client, db, plugins, semantic)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while not is_so():
            await asyncio.sleep(0.005)
