"""The operations of the semantic store over NATS: what each message asks of the store, and the reply to it."""

from collections.abc import Collection, Hashable
from typing import Any

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.nats.events import WATCH
from keyloft.nats.requests import Call, Operation
from keyloft.semantic import keys, wire
from keyloft.semantic.intents import WriteRequest
from keyloft.semantic.keys import Project
from keyloft.semantic.store import SemanticStore
from keyloft.semantic.wire import ListRequest


class SemanticOperation(Call):
    """An operation on a semantic store."""

    reply_bytes = limits.VALUE_REPLY_BYTES

    def __init__(self, name: str, nats: Nats, store: SemanticStore) -> None:
        self.name = name
        self._nats = nats
        self._store = store

    def read(self, about: Project, data: bytes, /) -> Any:
        return wire.read(self.name, about, data)


class SemanticGet(SemanticOperation):
    def keys_read(self, content: str) -> Collection[Hashable]:
        return (content,)

    def key(self, content: str) -> str:
        return content

    async def carry_out(self, content: str) -> tuple[bytes, None]:
        return wire.entry(await self._store.get(content)), None


class SemanticWrite(SemanticOperation):
    def written(self, content: WriteRequest) -> Collection[Hashable]:
        return {intent.key for intent in content.intents}

    async def carry_out(self, content: WriteRequest) -> tuple[bytes, None]:
        [written] = await self._store.write(content)
        return wire.entry(written), None


class SemanticBatch(SemanticWrite):
    reply_bytes = limits.PAGE_REPLY_BYTES

    async def carry_out(self, content: WriteRequest) -> tuple[bytes, None]:
        written = await self._store.batch(content.intents, request_id=content.request_id)
        return wire.entries(written, self._nats.max_payload), None


class SemanticList(SemanticOperation):
    reply_bytes = limits.PAGE_REPLY_BYTES

    async def carry_out(self, content: ListRequest) -> tuple[bytes, None]:
        found = self._store.list(content.prefix, values=content.values, limit=content.limit + 1, after=content.after)
        return await wire.listed(found, content, self._nats.max_payload), None


_KINDS = {"get": SemanticGet, "list": SemanticList, "batch": SemanticBatch}


def operations(nats: Nats, store: SemanticStore) -> list[Operation]:
    """The operations of a service."""
    return [_KINDS.get(name, SemanticWrite)(name, nats, store) for name in keys.OPERATIONS if name != WATCH]
