"""The operations of the plugins' storage: what each message asks of the engine, and the reply to it."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from msgspec import Raw
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import (
    Add,
    Batch,
    Committed,
    Conflict,
    Count,
    Delete,
    Get,
    Page,
    Record,
    Scan,
    Set,
    Space,
    Touch,
)
from keyloft.errors import DatabaseError, ValueTooLarge
from keyloft.nats.events import WATCH
from keyloft.nats.many import Many
from keyloft.nats.requests import Call, EngineWrite, Operation, PointRead
from keyloft.plugins import replies, rules, wire
from keyloft.plugins.entries import CurrentValue, UsedStorage, condition_failed
from keyloft.plugins.rules import ConditionalSet, ManyKeys, ManyValues, PrefixDelete
from keyloft.plugins.store import BotDatabase
from keyloft.plugins.stored import is_readable, keys_of_page, read_entries, read_entry, remove_keys, remove_prefix
from keyloft.plugins.usage import PluginUsage


class PluginPointRead(PointRead):
    """Reads the value of one entry."""

    name = "get"
    reply_bytes = limits.VALUE_REPLY_BYTES
    reply = staticmethod(replies.got)
    reply_each = staticmethod(replies.got_each)
    values = staticmethod(replies.values_found)

    def key(self, content: Get) -> str:
        return str(content.key[1])

    def details(self, content: Get, outcome: Record | None) -> dict[str, int | None]:
        return {"hit": outcome is not None}


class PluginParsedGet(PluginPointRead):
    """A get whose message is read."""

    def read(self, about: str, data: Get, /) -> Get:  # type: ignore[override]
        return data


class PluginGet(PluginPointRead):
    read = staticmethod(wire.getting)
    most_bytes = limits.PLUGIN_REQUEST_BYTES

    def __init__(self, db: BotDatabase) -> None:
        self.variants = {wire.META: PluginGetMeta(db)}
        self.parsed = PluginParsedGet()

    def read_all(self, about: str, data: bytes, /) -> list[Get] | None:
        return wire.getting_each(about, data)


class PluginCall(Call):
    """An operation that is more than one read or one batch."""

    def __init__(self, db: BotDatabase) -> None:
        self._db = db


class PluginGetMeta(PluginCall):
    """A get that asks for the version and the times, too."""

    name = "get"
    reply_bytes = limits.VALUE_REPLY_BYTES

    def keys_read(self, content: Scan) -> Collection[Hashable]:
        return (content.start,)

    def key(self, content: Scan) -> str:
        return str(content.start[1])

    async def carry_out(self, content: Scan) -> tuple[bytes, bool]:
        record, now = await read_entry(await self._db.engine(), content)
        return replies.entry(record, now), record is not None

    def details(self, content: Scan, outcome: bool) -> dict[str, int | None]:
        return {"hit": outcome}


# Writes of one entry


class PluginWrite(EngineWrite):
    """Writes one entry of a plugin."""

    def batch(self, content: Set | Delete | Add | Touch) -> Batch:
        return Batch((content,))

    def key(self, content: Set | Delete | Add | Touch) -> str:
        return str(content.key[1])


class PluginPlainSet(PluginWrite):
    """Stores a value, whatever is stored."""

    name = "set"

    def reply(self, content: Set, outcome: Committed | Conflict, /) -> bytes:
        return replies.STORED

    def reply_each(self, outcomes: Sequence[Committed], /) -> list[bytes]:
        return [replies.STORED] * len(outcomes)

    def details(self, content: Set, outcome: Committed) -> dict[str, int | None]:
        ttl = content.expire_in
        return {"size": len(content.value), "ttl": ttl and ttl // 1000}


class PluginParsedSet(PluginPlainSet):
    """A set whose message is read."""

    def read(self, about: str, data: Set, /) -> Set:  # type: ignore[override]
        return data


class PluginSet(PluginPlainSet):
    read = staticmethod(wire.setting)
    most_bytes = wire.LARGEST_SET

    def __init__(self) -> None:
        self.variants: Mapping[str, Operation] = {wire.CONDITIONAL: PluginConditionalSet()}
        self.parsed = PluginParsedSet()

    def read_all(self, about: str, data: bytes, /) -> list[Set] | None:
        return wire.setting_each(about, data)

    def too_large(self, size: int) -> ValueTooLarge:
        return wire.set_too_large(size)


class PluginConditionalSet(EngineWrite):
    name = "set"
    reply_bytes = limits.VALUE_REPLY_BYTES  # a conflict shows the stored value

    def batch(self, content: ConditionalSet) -> Batch:
        return content.batch

    def key(self, content: ConditionalSet) -> str:
        return str(content.set.key[1])

    def reply(self, content: ConditionalSet, outcome: Committed | Conflict, /) -> bytes:
        if isinstance(outcome, Committed):
            return replies.STORED if content.expected_version is None else replies.stored_as(outcome.version)
        current = outcome.failed[0].current
        # A value that is not JSON is shown as null: with its version, it can be replaced.
        value = Raw(current.value if current is not None and is_readable(current) else b"null")
        raise condition_failed(outcome, None if current is None else CurrentValue(value, current.version))

    def details(self, content: ConditionalSet, outcome: Committed) -> dict[str, int | None]:
        return {"size": len(content.set.value)}


class PluginDelete(PluginWrite):
    name = "delete"
    most_bytes = limits.PLUGIN_REQUEST_BYTES
    read = staticmethod(wire.deleting)

    def reply(self, content: Delete, outcome: Committed | Conflict, /) -> bytes:
        assert isinstance(outcome, Committed)
        return replies.DELETED if outcome.found[0] else replies.NOT_DELETED

    def details(self, content: Delete, outcome: Committed) -> dict[str, int | None]:
        return {"deleted": outcome.found[0]}


class PluginIncrement(PluginWrite):
    name = "incr"
    most_bytes = limits.PLUGIN_REQUEST_BYTES
    read = staticmethod(wire.incrementing)

    def reply(self, content: Add, outcome: Committed | Conflict, /) -> bytes:
        assert isinstance(outcome, Committed)
        return replies.incremented(outcome.values[0])


class PluginTouch(PluginWrite):
    name = "touch"
    most_bytes = limits.PLUGIN_REQUEST_BYTES
    read = staticmethod(wire.touching)

    def reply(self, content: Touch, outcome: Committed | Conflict, /) -> bytes:
        assert isinstance(outcome, Committed)
        return replies.TOUCHED if outcome.found[0] else replies.ABSENT

    def details(self, content: Touch, outcome: Committed) -> dict[str, int | None]:
        return {"hit": outcome.found[0]}


# Several entries


class PluginSetMany(EngineWrite):
    name = "set_many"
    read = staticmethod(wire.setting_many)

    def batch(self, content: ManyValues) -> Batch:
        return content.batch

    def reply(self, content: ManyValues, outcome: Committed | Conflict, /) -> bytes:
        return replies.counted(len(content.values))

    def details(self, content: ManyValues, outcome: Committed) -> dict[str, int | None]:
        return {"count": len(content.values)}


class PluginDeleteMany(EngineWrite):
    name = "delete_many"
    most_bytes = limits.KEYS_REQUEST_BYTES
    read = staticmethod(wire.deleting_many)

    def __init__(self, db: BotDatabase) -> None:
        self.variants: Mapping[str, Operation] = {wire.PREFIX: PluginDeletePrefix(db)}

    def batch(self, content: ManyKeys) -> Batch:
        return content.deletion

    def reply(self, content: ManyKeys, outcome: Committed | Conflict, /) -> bytes:
        assert isinstance(outcome, Committed)
        return replies.counted(sum(outcome.found))

    def details(self, content: ManyKeys, outcome: Committed) -> dict[str, int | None]:
        return {"count": sum(outcome.found)}


class PluginDeletePrefix(PluginCall):
    """A delete_many by prefix: one slice after the other."""

    name = "delete_many"
    rows = limits.SLICE_ITEMS

    def written(self, content: PrefixDelete) -> None:
        return None

    async def carry_out(self, content: PrefixDelete) -> tuple[bytes, int]:
        engine, removed = await self._db.engine(), 0

        async def remove(page: Page) -> int:
            nonlocal removed
            count = await self._remove(engine, page)
            removed += count
            return count

        try:
            _, truncated = await remove_prefix(engine, content, remove, self.rows)
        except DatabaseError as error:
            if not removed:
                raise
            partly = DatabaseError(f"the database failed after {removed:,} entries were removed: repeat the request")
            partly.is_for_callers = True
            raise partly from error
        return replies.counted(removed, None if content.limit is None else truncated), removed

    async def _remove(self, engine: Engine, page: Page) -> int:
        return await remove_keys(engine, page)

    def details(self, content: PrefixDelete, outcome: int) -> dict[str, int | None]:
        return {"count": outcome}


class PluginGetMany(PluginCall):
    name = "get_many"
    most_bytes = limits.KEYS_REQUEST_BYTES
    reply_bytes = limits.PAGE_REPLY_BYTES
    read = staticmethod(wire.getting_many)

    def __init__(self, nats: Nats, db: BotDatabase) -> None:
        super().__init__(db)
        self._nats = nats

    def keys_read(self, content: ManyKeys) -> Collection[Hashable]:
        return content.keys

    async def carry_out(self, content: ManyKeys) -> tuple[bytes, int]:
        engine, keys = await self._db.engine(), content.keys
        reply = replies.ValuesReply(content.names, _most_bytes(self._nats))
        for first in range(0, len(keys), limits.GETS_PER_READ):
            some = keys[first : first + limits.GETS_PER_READ]
            if not reply.add(await engine.read(*[Get(Space.PLUGINS, at) for at in some])):
                break
        return reply.text(), reply.found

    def details(self, content: ManyKeys, outcome: int) -> dict[str, int | None]:
        return {"count": outcome}


class PluginList(PluginCall):
    name = "list"
    most_bytes = limits.PLUGIN_REQUEST_BYTES
    reply_bytes = limits.PAGE_REPLY_BYTES
    read = staticmethod(wire.listing)

    def __init__(self, nats: Nats, db: BotDatabase) -> None:
        super().__init__(db)
        self._nats = nats

    async def carry_out(self, content: Scan) -> tuple[bytes, int]:
        engine = await self._db.engine()
        if not content.keys_only:
            entries, truncated = await read_entries(engine, content, _most_bytes(self._nats))
            return replies.listed_entries(entries, truncated), len(entries)
        [page] = await engine.read(content)
        keys, truncated = keys_of_page(page, content.limit - 1)
        return replies.listed(keys, truncated, self._nats.max_payload), len(keys)

    def details(self, content: Scan, outcome: int) -> dict[str, int | None]:
        return {"count": outcome}


class PluginCounting(PluginCall):
    name = "count"
    most_bytes = limits.PLUGIN_REQUEST_BYTES
    # As with lists, one count of a plugin at a time, since it may pass very many keys.
    reply_bytes = limits.PAGE_REPLY_BYTES
    read = staticmethod(wire.counting)

    async def carry_out(self, content: Count) -> tuple[bytes, int]:
        [count] = await (await self._db.engine()).read(content)
        return replies.counted(count), count

    def details(self, content: Count, outcome: int) -> dict[str, int | None]:
        return {"count": outcome}


class PluginUsing(Call):
    name = "usage"
    most_bytes = limits.PLUGIN_REQUEST_BYTES
    shows_entries = False  # the count may be a minute old
    read = staticmethod(wire.using)

    def __init__(self, usage: PluginUsage) -> None:
        self._usage = usage

    async def carry_out(self, content: str) -> tuple[bytes, None]:
        used, quota = await self._usage.of(content), self._usage.quotas.of(content)
        most = (None, None) if quota is None else (quota.keys, quota.bytes)
        return replies.used(UsedStorage(used.entries, used.value_bytes, *most)), None


def _most_bytes(nats: Nats) -> int:
    """How many bytes a reply with several values may have."""
    return min(nats.max_payload, limits.SCAN_BYTES)


def operations(
    nats: Nats, db: BotDatabase, usage: PluginUsage, find: Callable[[str, str], Operation]
) -> list[Operation]:
    """The operations of a service; `find` returns the one that carries out a part of `many`, by plugin and name."""
    found: list[Operation] = [
        PluginSet(),
        PluginGet(db),
        PluginDelete(),
        PluginList(nats, db),
        PluginIncrement(),
        PluginGetMany(nats, db),
        PluginSetMany(),
        PluginDeleteMany(db),
        PluginCounting(db),
        PluginTouch(),
        PluginUsing(usage),
        Many(nats, find, rules.PARTS_OF_MANY),
    ]
    assert {WATCH, *[operation.name for operation in found]} == set(rules.OPERATIONS), "the service adds watch"
    return found
