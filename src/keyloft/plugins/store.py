"""Storage for plugins, called directly: what the service over NATS stands on, and what a bot's own code can use."""

import asyncio
import logging
import os
from typing import Any

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Committed, Delete, Get, Mutation, Page, Record, Space
from keyloft.core.sweeper import sweep
from keyloft.core.values import decode_json
from keyloft.engines import open_engine
from keyloft.errors import Closed, Undecodable
from keyloft.plugins import rules

logger = logging.getLogger(__name__)


class BotDatabase:
    """The plugins' entries in a database: JSON under a plugin's name and a key, with an optional time to live.

    The database is opened by `create_tables`, or by the first call of another method.

    Example:
        db = BotDatabase("sqlite:///bot.db")
        await db.kv_set("trivia", "score", 100)
        await db.kv_get("trivia", "score")     # {'exists': True, 'value': 100}
        await db.close()
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        clock: Clock | None = None,
        durability: str = "full",
        patience: float = limits.SERVER_SECONDS,
    ) -> None:
        """Args:
        url: `sqlite:///bot.db`, `sqlite:////var/lib/bot.db`, `sqlite:///:memory:`, a path, or
            `postgresql://user:password@host/database`; a `+driver` is accepted.
        clock: Another clock than the database's own, for tests.
        durability: "full": what is acknowledged survives a power cut. "relaxed": the last of it may not.
        patience: How many seconds a call waits for a database server that is away or silent.
        """
        self._url = url
        self._clock = clock
        self._durability = durability
        self._patience = patience
        self._engine: Engine | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def create_tables(self) -> None:
        """Open the database, and make its tables if it is a fresh one.

        Raises:
            DatabaseError: It can't be opened; the message says why.
        """
        await self.engine()

    async def close(self) -> None:
        """Finish the writes under way and let go of the database. A second call does nothing."""
        async with self._opening:
            self._closed = True
            if self._engine is not None:
                await self._engine.aclose()

    async def engine(self) -> Engine:
        """The engine below, opened."""
        if self._engine is None or self._closed:
            async with self._opening:
                if self._closed:
                    raise Closed("this database is closed: make a new BotDatabase to go on")
                if self._engine is None:
                    self._engine = await open_engine(
                        self._url,
                        self._clock,
                        durability=self._durability,
                        cache_mib=limits.PLUGIN_CACHE_MIB,
                        patience=self._patience,
                    )
        return self._engine

    async def kv_set(self, plugin_name: str, key: str, value: Any, ttl_seconds: int | None = None) -> None:
        """Store a value under a plugin's key, in the place of what was there.

        Args:
            plugin_name: Lowercase letters, digits, hyphens and underscores.
            key: Any text of up to 255 characters.
            value: Whatever JSON can hold, up to 64 KB of it.
            ttl_seconds: After so many seconds the entry is gone; None keeps it.

        Raises:
            ValueError: A name, key or TTL is out of range, or the value exceeds 64KB.
            TypeError: The value is not JSON-serializable.
        """
        await self._commit(rules.setting(rules.plugin_name(plugin_name), key, value, ttl_seconds))

    async def kv_get(self, plugin_name: str, key: str) -> dict[str, Any]:
        """The value at a plugin's key: `{'exists': True, 'value': …}`, or `{'exists': False}`."""
        engine = await self.engine()
        [record] = await engine.read(Get(Space.PLUGINS, (rules.plugin_name(plugin_name), rules.key(key))))
        if record is None:
            return {"exists": False}
        try:
            return {"exists": True, "value": decode_json(record.value)}
        except Undecodable:
            report_broken(record)
            return {"exists": False}

    async def kv_delete(self, plugin_name: str, key: str) -> bool:
        """Remove an entry; returns whether there was one."""
        done = await self._commit(Delete(Space.PLUGINS, (rules.plugin_name(plugin_name), rules.key(key))))
        return done.found[0]

    async def kv_list(
        self, plugin_name: str, prefix: str = "", limit: int = 1000, *, after: str | None = None
    ) -> dict[str, Any]:
        """A plugin's keys in their order: `{'keys': […], 'count': …, 'truncated': …}`.

        Args:
            plugin_name: Whose keys.
            prefix: Only keys that begin with exactly this text.
            limit: At most so many, from 1 to 10,000; `truncated` tells whether there are more.
            after: Only keys behind this one: the last key of a truncated list continues it.
        """
        engine = await self.engine()
        scan = rules.listing(rules.plugin_name(plugin_name), prefix, limit, after)
        [page] = await engine.read(scan)
        keys, truncated = listed(page, scan.limit - 1)
        return {"keys": keys, "count": len(keys), "truncated": truncated}

    async def kv_cleanup_expired(self) -> int:
        """Remove the expired entries of all plugins; returns how many. Nobody sees them either way."""
        return await sweep(await self.engine(), Space.PLUGINS)

    async def _commit(self, mutation: Mutation) -> Committed:
        engine = await self.engine()
        done = await engine.commit(Batch((mutation,)))
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return done


def listed(page: Page, limit: int) -> tuple[list[str], bool]:
    """The keys that a scan of one more than the limit found, and whether there are more."""
    return [key for _, key in page.keys[:limit]], len(page) > limit


def report_broken(record: Record) -> None:
    """Somebody wrote to the table by hand: to a plugin, what is no JSON does not exist."""
    plugin, key = record.key
    logger.error(
        "[KV] the stored value is not JSON and counts as absent: plugin=%s key=%r size=%d",
        plugin,
        key,
        len(record.value),
        extra={"operation": "kv_get", "plugin": plugin, "key": key, "size": len(record.value)},
    )
