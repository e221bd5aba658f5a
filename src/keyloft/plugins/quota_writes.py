"""The writes of a plugin that has a quota: each reserves room before it is committed."""

from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.engine import Engine, catch_up
from keyloft.core.records import Add, Batch, Committed, Conflict, FailedCheck, Get, Mutation, Page, Record, Set
from keyloft.core.values import decode_json
from keyloft.errors import KeyloftError, Undecodable
from keyloft.nats.requests import Call, EngineWrite, Operation
from keyloft.plugins import rules, wire
from keyloft.plugins.counting import KeyGrowth, growth
from keyloft.plugins.operations import (
    PluginConditionalSet,
    PluginDelete,
    PluginDeleteMany,
    PluginDeletePrefix,
    PluginIncrement,
    PluginSet,
    PluginSetMany,
)
from keyloft.plugins.rules import PrefixDelete
from keyloft.plugins.store import BotDatabase
from keyloft.plugins.usage import PluginUsage


class QuotaWrite(Call):
    """A batch of a plugin that has a quota."""

    def __init__(self, plain: EngineWrite, db: BotDatabase, usage: PluginUsage) -> None:
        self.name = plain.name
        self.reply_bytes = plain.reply_bytes
        self.most_bytes = plain.most_bytes
        self._plain = plain
        self._db = db
        self._usage = usage

    def read(self, about: str, data: bytes, /) -> Any:
        return self._plain.read(about, data)

    def too_large(self, size: int) -> KeyloftError:
        return self._plain.too_large(size)

    def written(self, content: Any) -> Collection[Hashable]:
        return [mutation.key for mutation in self._plain.batch(content).mutations]

    def key(self, content: Any) -> str:
        return self._plain.key(content)

    def details(self, content: Any, outcome: Committed) -> dict[str, int | None]:
        return self._plain.details(content, outcome)

    async def carry_out(self, content: Any) -> tuple[bytes, Committed]:
        done = await self._commit(await self._db.engine(), self._plain.batch(content))
        reply = self._plain.reply(content, done)
        assert isinstance(done, Committed), "a conflict has no reply, but an error"
        return reply, done

    async def _commit(self, engine: Engine, batch: Batch) -> Committed | Conflict:
        growths: list[KeyGrowth] = []
        for first in range(0, len(batch.mutations), limits.GETS_PER_READ):
            some = batch.mutations[first : first + limits.GETS_PER_READ]
            records = await engine.read(*[Get(one.space, one.key) for one in some])
            if batch.checks and _conflict(batch, records[0]) is not None:
                await catch_up(engine)  # perhaps a standby has answered that is behind
                records = await engine.read(*[Get(one.space, one.key) for one in some])
                if (conflict := _conflict(batch, records[0])) is not None:
                    return conflict  # this write needs no room
            growths += map(_growth, some, records)
        return await _commit_with_room(engine, batch, self._usage, growths)


class QuotaDeletePrefix(PluginDeletePrefix):
    """A delete_many by prefix of a plugin that has a quota: it reads the values, to count what it removes."""

    rows = limits.FIRST_PAGE_ROWS

    def __init__(self, db: BotDatabase, usage: PluginUsage) -> None:
        super().__init__(db)
        self._usage = usage

    async def carry_out(self, content: PrefixDelete) -> tuple[bytes, int]:
        return await super().carry_out(replace(content, scan=replace(content.scan, keys_only=False)))

    async def _remove(self, engine: Engine, page: Page) -> int:
        growths = [growth(record.key[1], record, None) for record in page]
        done = await _commit_with_room(engine, rules.deletion(page.keys), self._usage, growths)
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return sum(done.found)


async def _commit_with_room(
    engine: Engine, batch: Batch, usage: PluginUsage, growths: Sequence[KeyGrowth]
) -> Committed | Conflict:
    if not growths:
        return await engine.commit(batch)
    reservation = await usage.reserve(batch.mutations[0].key[0], growths)
    try:
        done = await engine.commit(batch)
    except BaseException:
        reservation.release()
        raise
    if isinstance(done, Committed):
        reservation.committed(done.version)
    else:
        reservation.release()
    return done


def _conflict(batch: Batch, stored: Record | None) -> Conflict | None:
    """Whether the condition of a set fails already by what was read."""
    [check] = batch.checks
    version = None if stored is None else stored.version
    return None if version == check.version else Conflict((FailedCheck(check, stored),))


def _growth(mutation: Mutation, old: Record | None) -> KeyGrowth:
    size: int | None = None
    if isinstance(mutation, Set):
        size = len(mutation.value)
    elif isinstance(mutation, Add):
        size = len(b"%d" % (_number(old) + mutation.operand))
    return growth(mutation.key[1], old, size)


def _number(record: Record | None) -> int:
    """The stored integer; 0 for anything else, since nothing will be added to it."""
    number: Any = 0
    if record is not None and len(record.value) <= limits.COUNTER_DIGITS:
        with suppress(Undecodable):
            number = decode_json(record.value)
    return number if type(number) is int else 0


def under_quotas(db: BotDatabase, usage: PluginUsage) -> dict[str, Operation]:
    """By name, the operations of a plugin that has a quota, in place of the usual ones that store or remove entries."""
    plain = (PluginSet(), PluginDelete(), PluginIncrement(), PluginSetMany(), PluginDeleteMany(db))
    found = {one.name: QuotaWrite(one, db, usage) for one in plain}
    found["set"].variants = {wire.CONDITIONAL: QuotaWrite(PluginConditionalSet(), db, usage)}
    found["delete_many"].variants = {wire.PREFIX: QuotaDeletePrefix(db, usage)}
    return {**found}
