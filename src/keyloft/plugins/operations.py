"""The operations of the plugins' storage: what each message asks of the engine, and the reply to it."""

from collections.abc import Collection, Hashable
from typing import Any

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import write
from keyloft.core.records import Batch, Committed, Conflict, Delete, Get, Record, Scan, Set
from keyloft.nats.requests import Call, EngineWrite, Operation, PointRead
from keyloft.plugins import wire
from keyloft.plugins.counting import growth
from keyloft.plugins.store import BotDatabase, listed
from keyloft.plugins.usage import PluginUsage


class PluginGet(PointRead):
    name = "get"
    reply_bytes = limits.VALUE_REPLY_BYTES
    read = staticmethod(wire.getting)
    reply = staticmethod(wire.got)

    def key(self, content: Get) -> str:
        return str(content.key[1])

    def details(self, content: Get, outcome: Record | None) -> dict[str, int | None]:
        return {"hit": outcome is not None}


class PluginWrite(EngineWrite):
    """Writes one entry of a plugin."""

    def batch(self, content: Set | Delete) -> Batch:
        return Batch((content,))

    def key(self, content: Set | Delete) -> str:
        return str(content.key[1])


class PluginSet(PluginWrite):
    name = "set"
    read = staticmethod(wire.setting)

    def reply(self, content: Set, outcome: Committed | Conflict, /) -> bytes:
        return wire.STORED

    def details(self, content: Set, outcome: Committed) -> dict[str, int | None]:
        ttl = content.expire_in
        return {"size": len(content.value), "ttl": ttl and ttl // 1000}


class PluginDelete(PluginWrite):
    name = "delete"
    read = staticmethod(wire.deleting)

    def reply(self, content: Delete, outcome: Committed | Conflict, /) -> bytes:
        assert isinstance(outcome, Committed)
        return wire.DELETED if outcome.found[0] else wire.NOT_DELETED

    def details(self, content: Delete, outcome: Committed) -> dict[str, int | None]:
        return {"deleted": outcome.found[0]}


class PluginList(Call):
    name = "list"
    reply_bytes = limits.PAGE_REPLY_BYTES
    read = staticmethod(wire.listing)

    def __init__(self, nats: Nats, db: BotDatabase) -> None:
        self._nats = nats
        self._db = db

    async def carry_out(self, content: Scan) -> tuple[bytes, int]:
        [page] = await (await self._db.engine()).read(content)
        keys, truncated = listed(page, content.limit - 1)
        return wire.listed(keys, truncated, self._nats.max_payload), len(keys)

    def details(self, content: Scan, outcome: int) -> dict[str, int | None]:
        return {"count": outcome}


class QuotaWrite(Call):
    """A set or delete of a plugin that has a quota: it makes room for what it stores first."""

    def __init__(self, plain: PluginSet | PluginDelete, db: BotDatabase, usage: PluginUsage) -> None:
        self.name = plain.name
        self._plain: Any = plain
        self._db = db
        self._usage = usage

    def read(self, about: str, data: bytes, /) -> Set | Delete:
        content: Set | Delete = self._plain.read(about, data)
        return content

    def written(self, content: Set | Delete) -> Collection[Hashable]:
        return (content.key,)

    def key(self, content: Set | Delete) -> str:
        return str(content.key[1])

    def details(self, content: Set | Delete, outcome: Committed) -> dict[str, int | None]:
        details: dict[str, int | None] = self._plain.details(content, outcome)
        return details

    async def carry_out(self, content: Set | Delete) -> tuple[bytes, Committed]:
        engine = await self._db.engine()
        [old] = await engine.read(Get(content.space, content.key))
        plugin, key = content.key
        size = len(content.value) if isinstance(content, Set) else None
        reservation = await self._usage.reserve(plugin, [growth(key, old, size)])
        try:
            done = await write(engine, content)
        except BaseException:
            reservation.release()
            raise
        reservation.committed(done.version)
        return self._plain.reply(content, done), done


def operations(nats: Nats, db: BotDatabase) -> list[Operation]:
    """The operations of a service."""
    return [PluginSet(), PluginGet(), PluginDelete(), PluginList(nats, db)]


def under_quotas(db: BotDatabase, usage: PluginUsage) -> dict[str, Operation]:
    """What takes the place of these operations for a plugin that has a quota, by name."""
    return {plain.name: QuotaWrite(plain, db, usage) for plain in (PluginSet(), PluginDelete())}
