"""A `SemanticClient` that takes whole keys, so that tests of the embedded store run over NATS, too.

PYTEST_DONT_REWRITE: modules may import from here, too.
"""

import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import nats
from msgspec.structs import replace

from keyloft.semantic import (
    Checkpoint,
    Envelope,
    Flags,
    IndexVersion,
    Intent,
    Lock,
    Retry,
    SemanticClient,
    SemanticService,
    SemanticStore,
)

PREFIX = "tenant/acme/project/web/"
LEASE_SECONDS = 3600.0
"""Tests move the database's clock by up to an hour; what a lease does when it expires has tests of its own."""


def path(key: Any) -> Any:
    return key.removeprefix(PREFIX) if isinstance(key, str) else key


class WholeKeys:
    """The calls of `SemanticStore` on a client of the project acme/web."""

    def __init__(self, client: SemanticClient, store: SemanticStore | None = None) -> None:
        self.client = client
        self.signals = store and store.signals
        self.dead_letters = WholeDeadLetters(client)

    def __repr__(self) -> str:
        return repr(self.client)

    async def get(self, key: str) -> Envelope | None:
        return await self.client.get(path(key))

    async def put(self, key: str, value: Any, **options: Any) -> Envelope:
        return await self.client.put(path(key), value, **options)

    async def delete(self, key: str, **options: Any) -> Envelope | None:
        return await self.client.delete(path(key), **options)

    async def restore(self, key: str, **options: Any) -> Envelope:
        return await self.client.restore(path(key), **options)

    async def update(self, key: str, change: Any, **options: Any) -> Envelope:
        return await self.client.update(path(key), change, **options)

    async def batch(self, operations: Iterable[Intent], *, request_id: str | None = None) -> list[Envelope | None]:
        return await self.client.batch([replace(one, key=path(one.key)) for one in operations], request_id=request_id)

    def list(self, prefix: str, **options: Any) -> Any:
        return self.client.list(path(f"{prefix}/" if prefix == PREFIX[:-1] else prefix), **options)

    def audit(self, about: str, **options: Any) -> Any:
        return self.client.audit(None if about == PREFIX[:-1] else path(about), **options)

    def watch(self, key: str) -> Any:
        return self.client.watch(path(key))

    def lock(self, key: str, **options: Any) -> Lock:
        return self.client.lock(path(key), **options)

    def locks(self, project: str, **options: Any) -> Any:
        return self.client.locks(**options)

    def checkpoint(self, key: str, **options: Any) -> Checkpoint:
        return self.client.checkpoint(path(key), **options)

    def index_version(self, key: str, **options: Any) -> IndexVersion:
        return self.client.index_version(path(key), **options)

    def flags(self, tenant: str, project: str, defaults: Mapping[str, Any] | None = None) -> Flags:
        if (tenant, project) == ("acme", "web"):
            return self.client.flags(defaults)
        prefix = self.client.prefix
        return SemanticClient(self.client.nats, tenant, project, prefix=prefix).flags(defaults)

    def retrying(self, **options: Any) -> Retry:
        return self.client.retrying(**options)


class WholeDeadLetters:
    """The calls of `DeadLetters`."""

    def __init__(self, client: SemanticClient) -> None:
        self._client = client
        self.retry = client.dead_letters.retry
        self.drop = client.dead_letters.drop

    def list(self, project: str) -> Any:
        tenant, name = project.split("/")[1::2]
        client = SemanticClient(self._client.nats, tenant, name, prefix=self._client.prefix)
        return client.dead_letters.list()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client.dead_letters, name)


@asynccontextmanager
async def served(url: str, store: SemanticStore) -> AsyncIterator[SemanticClient]:
    """A client of the project acme/web, whose service has this store."""
    prefix = f"test{uuid.uuid4().hex}.semantic"
    connection = await nats.connect(url)
    async with (
        SemanticService(connection, store, prefix=prefix, lease_seconds=LEASE_SECONDS),
        await SemanticClient.connect(url, tenant="acme", project="web", prefix=prefix) as client,
    ):
        yield client
    await connection.close()


@asynccontextmanager
async def over_nats(url: str, store: SemanticStore) -> AsyncIterator[SemanticStore]:
    """The same with whole keys: in the place of a store."""
    async with served(url, store) as client:
        yield cast(SemanticStore, WholeKeys(client, store))
