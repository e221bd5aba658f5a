"""Storage for plugins, called directly: by the service on NATS, and by a bot's code."""

import asyncio
import logging
import os
from collections.abc import Generator
from functools import partial
from typing import Any, Self

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine, write
from keyloft.core.lazy import PagedList
from keyloft.core.log_text import field
from keyloft.core.records import Delete, Get, Page, Record, Set, Space
from keyloft.core.sweeper import sweep
from keyloft.core.urls import shown_url
from keyloft.core.values import Encoding, decode_json
from keyloft.engines import KeptHistory, open_engine
from keyloft.errors import Closed, Undecodable
from keyloft.plugins import rules

logger = logging.getLogger(__name__)


class BotDatabase(AsyncClosing):
    """The plugins' entries in a database: JSON under a plugin's name and a key, with an optional time to live.

    The database is opened by `create_tables`, or by the first call of another method.

    Example:
        async with BotDatabase("sqlite:///bot.db") as db:
            await db.kv_set("trivia", "score", 100)
            await db.kv_get("trivia", "score")     # {'exists': True, 'value': 100}
            async for key in db.kv_list("trivia"):
                ...
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        clock: Clock | None = None,
        durability: str = "full",
        patience: float = limits.SERVER_SECONDS,
        history_seconds: float = limits.HISTORY_SECONDS,
        history_mib: float = limits.HISTORY_MIB,
    ) -> None:
        """Args:
        url: `sqlite:///bot.db`, `sqlite:////var/lib/bot.db`, `sqlite:///:memory:`, a path, or
            `postgresql://user:password@host/database`, `etcd://host,host,host/prefix`; a `+driver` is accepted.
        clock: Used instead of the database's clock, for tests.
        durability: "full": what is acknowledged survives a power cut. "relaxed": the last of it may not.
        patience: How many seconds a call waits for a database server that does not answer.
        history_seconds: How long the change log keeps what changed.
        history_mib: How large the change log may grow, in MiB; the oldest changes go first.
        """
        self._url = url
        self._open = partial(
            open_engine,
            url,
            clock,
            durability=durability,
            sync="thread",
            cache_mib=limits.PLUGIN_CACHE_MIB,
            patience=patience,
            history=KeptHistory.of(history_seconds, history_mib),
        )
        self._engine: Engine | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not open yet" if self._engine is None else "open"
        return f"<BotDatabase at {shown_url(self._url)}, {state}>"

    async def __aenter__(self) -> Self:
        await self.create_tables()
        return self

    async def create_tables(self) -> None:
        """Open the database, and create its tables if it is empty.

        Raises:
            DatabaseError: It can't be opened; the message has the reason.
        """
        await self.engine()

    async def aclose(self) -> None:
        """Finish the pending writes and close the database. A second call does nothing."""
        async with self._opening:
            self._closed = True
            if self._engine is not None:
                await self._engine.aclose()

    close = aclose

    async def engine(self) -> Engine:
        """The engine, opened."""
        if self._engine is None or self._closed:
            async with self._opening:
                if self._closed:
                    raise Closed("this database is closed: make a new BotDatabase to go on")
                if self._engine is None:
                    self._engine = await self._open()
        return self._engine

    async def kv_set(
        self, plugin_name: str, key: str, value: Any, ttl_seconds: int | None = None, *, ttl: int | None = None
    ) -> None:
        """Store a value under a plugin's key; it replaces an earlier one, and its TTL.

        Args:
            plugin_name: Lowercase letters, digits, hyphens and underscores, at most 100.
            key: Any text of up to 255 characters.
            value: Anything that JSON can hold, up to 64 KB as JSON.
            ttl_seconds: After so many seconds the entry is gone; None keeps it.
            ttl: The same as `ttl_seconds`.

        Raises:
            ValueError: A name, key or TTL is out of range, or the value exceeds 64KB.
            TypeError: The value is not JSON-serializable.
            DatabaseError: The database failed; the message says whether the value may be stored.

        Example:
            await db.kv_set("trivia", "question_count", 42)
            await db.kv_set("trivia", "session", {"user": "alice"}, ttl=1800)
        """
        at = rules.plugin_name(plugin_name), rules.key(key)
        expire_in = rules.ttl_under_either_name(ttl_seconds, ttl)
        await write(await self.engine(), Set(Space.PLUGINS, at, rules.value(value), Encoding.JSON, expire_in))

    async def kv_get(self, plugin_name: str, key: str) -> dict[str, Any]:
        """Read the value at a plugin's key.

        Args:
            plugin_name: Whose key.
            key: Its name.

        Returns:
            `{'exists': True, 'value': …}`, or `{'exists': False}` if there is no such entry, or it has expired.

        Raises:
            ValueError: No plugin or key can have this name.
            DatabaseError: The database failed.

        Example:
            found = await db.kv_get("trivia", "question_count")
            count = found["value"] if found["exists"] else 0
        """
        engine = await self.engine()
        [record] = await engine.read(Get(Space.PLUGINS, (rules.plugin_name(plugin_name), rules.key(key))))
        if record is not None:
            try:
                return {"exists": True, "value": decode_json(record.value)}
            except Undecodable:
                report_broken(record)
        return {"exists": False}

    async def kv_delete(self, plugin_name: str, key: str) -> bool:
        """Remove an entry. To remove what is absent is no error.

        Args:
            plugin_name: Whose key.
            key: Its name.

        Returns:
            Whether there was an entry that had not expired.

        Raises:
            ValueError: No plugin or key can have this name.
            DatabaseError: The database failed; the message says whether the entry may be removed.

        Example:
            was_open = await db.kv_delete("trivia", "session")
        """
        delete = Delete(Space.PLUGINS, (rules.plugin_name(plugin_name), rules.key(key)))
        return (await write(await self.engine(), delete)).found[0]

    def kv_list(
        self, plugin_name: str, prefix: str = "", limit: int | None = None, *, after: str | None = None
    ) -> "PluginKeys":
        """List a plugin's keys in their order.

        Args:
            plugin_name: Whose keys.
            prefix: Only keys that begin with exactly this text.
            limit: At most so many, from 1 to 10,000; `truncated` is true if there are more. Without it, an awaited list
                has up to 1,000 keys, and `async for` goes through all.
            after: Only keys behind this one: the last key of a truncated list continues it.

        Returns:
            Awaited, `{'keys': […], 'count': …, 'truncated': …}`; `async for` gives the keys themselves.

        Raises:
            ValueError: A name, prefix or limit is out of range.
            DatabaseError: The database failed.

        Example:
            page = await db.kv_list("trivia", "score:", 10)
            async for key in db.kv_list("trivia", "score:"):
                ...
        """
        return PluginKeys(self, rules.plugin_name(plugin_name), prefix, limit, after)

    async def kv_cleanup_expired(self) -> int:
        """Remove the expired entries of all plugins. No read shows them before that either.

        Returns:
            How many were removed.

        Raises:
            DatabaseError: The database failed.
        """
        return await sweep(await self.engine(), Space.PLUGINS)


class PluginKeys(PagedList[str]):
    """A plugin's keys on request: `await` reads one page of them, `async for` goes through all."""

    what = "keys"

    def __init__(self, db: BotDatabase, plugin: str, prefix: str, limit: int | None, after: str | None) -> None:
        self._scan = partial(rules.listing, plugin, prefix)
        self._scan(limit, after)  # refuses wrong arguments at once
        super().__init__(db, limit)
        self._db = db
        self._after = after

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:  # type: ignore[override]
        return self._first().__await__()

    async def _first(self) -> dict[str, Any]:
        keys, after = await self._page(rules.limit(self._limit), self._after)
        return {"keys": keys, "count": len(keys), "truncated": after is not None}

    async def _page(self, limit: int, after: str | None) -> tuple[list[str], str | None]:
        engine = await self._db.engine()
        [page] = await engine.read(self._scan(limit, after or self._after))
        keys, truncated = listed(page, limit)
        return keys, keys[-1] if truncated else None


def listed(page: Page, limit: int) -> tuple[list[str], bool]:
    """The keys that a scan of one more than the limit found, and whether there are more."""
    return [key for _, key in page.keys[:limit]], len(page) > limit


def report_broken(record: Record) -> None:
    """Log a stored value that is not JSON: another program wrote to the table. To plugins it counts as absent."""
    plugin, key = record.key
    fields = {"operation": "kv_get", "plugin": plugin, "key": key, "size": len(record.value)}
    text = "[KV] the stored value is not JSON and counts as absent: plugin=%s key=%s size=%d"
    logger.error(text, field(plugin), field(key), len(record.value), extra=fields)
