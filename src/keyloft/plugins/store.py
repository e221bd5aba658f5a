"""Storage for plugins, called directly: by the service on NATS, and by a bot's code."""

import asyncio
import os
from functools import partial
from typing import Any, Literal, Self, overload

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine, write
from keyloft.core.records import Add, Committed, Delete, Get, Record, Set, Space, Touch
from keyloft.core.sweeper import sweep
from keyloft.core.urls import shown_url
from keyloft.core.values import Encoding, decode_json
from keyloft.engines import KeptHistory, open_engine
from keyloft.errors import Closed, NotACounter, Undecodable
from keyloft.plugins import rules
from keyloft.plugins.bulk import BulkMethods
from keyloft.plugins.entries import CurrentValue, condition_failed, entry_fields
from keyloft.plugins.listing import PluginEntries, PluginKeys
from keyloft.plugins.rules import ConditionalSet
from keyloft.plugins.stored import read_entry, report_broken


class BotDatabase(BulkMethods, AsyncClosing):
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
                    raise Closed("this database is closed: make a new BotDatabase to continue")
                if self._engine is None:
                    self._engine = await self._open()
        return self._engine

    @overload
    async def kv_set(
        self,
        plugin_name: str,
        key: str,
        value: Any,
        ttl_seconds: int | None = None,
        *,
        ttl: int | None = None,
        keep_ttl: bool = False,
    ) -> None: ...
    @overload
    async def kv_set(
        self,
        plugin_name: str,
        key: str,
        value: Any,
        ttl_seconds: int | None = None,
        *,
        ttl: int | None = None,
        keep_ttl: bool = False,
        if_absent: bool = False,
        expected_version: int | None = None,
    ) -> int | None: ...
    async def kv_set(
        self,
        plugin_name: str,
        key: str,
        value: Any,
        ttl_seconds: int | None = None,
        *,
        ttl: int | None = None,
        keep_ttl: bool = False,
        if_absent: bool = False,
        expected_version: int | None = None,
    ) -> int | None:
        """Store a value under a plugin's key; it replaces an earlier one, and its TTL.

        Args:
            plugin_name: Lowercase letters, digits, hyphens and underscores, at most 100.
            key: Any text of up to 255 characters.
            value: Anything that JSON can hold, up to 64 KB as JSON.
            ttl_seconds: The entry expires after this many seconds; None keeps it.
            ttl: The same as `ttl_seconds`.
            keep_ttl: An entry that is there keeps its TTL.
            if_absent: Store it only if there is no entry.
            expected_version: Store it only if the entry has this version; 0 if there must be none.

        Returns:
            The new version, of a set with a condition; else None.

        Raises:
            ValueError: A name, key, TTL or version is out of range, or the value exceeds 64KB.
            TypeError: The value is not JSON-serializable.
            VersionConflict: The condition does not hold; `current` has the stored value and version, or is None.
            DatabaseError: The database failed; the message says whether the value may be stored.

        Example:
            await db.kv_set("trivia", "question_count", 42)
            await db.kv_set("trivia", "session", {"user": "alice"}, ttl=1800)
        """
        at = rules.plugin_name(plugin_name), rules.key(key)
        expire_in = rules.ttl_under_either_name(ttl_seconds, ttl)
        expected = rules.expected_version(if_absent, expected_version)
        keeps = rules.keep_ttl(keep_ttl, expire_in)
        content = Set(Space.PLUGINS, at, rules.value(value), Encoding.JSON, expire_in, keep_expiry=keeps)
        done = await (await self.engine()).commit(ConditionalSet(content, expected).batch)
        if isinstance(done, Committed):
            return None if expected is None else done.version
        raise condition_failed(done, _current(done.failed[0].current))

    async def kv_get(self, plugin_name: str, key: str, *, meta: bool = False) -> dict[str, Any]:
        """Read the value at a plugin's key.

        Args:
            plugin_name: The plugin that the key belongs to.
            key: The name of the key.
            meta: Whether the version and the times of the entry are returned, too.

        Returns:
            `{'exists': True, 'value': …}`, or `{'exists': False}` if there is no such entry, or it has expired. With
            `meta`, an entry also has its `version`, its `ttl` in seconds, rounded up (None if it never expires),
            `created_at` and `updated_at`.

        Raises:
            ValueError: No plugin or key can have this name.
            DatabaseError: The database failed.

        Example:
            found = await db.kv_get("trivia", "question_count")
            count = found["value"] if found["exists"] else 0
        """
        engine, at = await self.engine(), (rules.plugin_name(plugin_name), rules.key(key))
        more: dict[str, Any] = {}
        if meta:
            record, now = await read_entry(engine, rules.entry_scan(at))
            more = {} if record is None else entry_fields(record, now)
        else:
            [record] = await engine.read(Get(Space.PLUGINS, at))
        if record is not None:
            try:
                return {"exists": True, "value": decode_json(record.value), **more}
            except Undecodable:
                report_broken(record)
        return {"exists": False}

    async def kv_delete(self, plugin_name: str, key: str) -> bool:
        """Remove an entry. It is no error if there is none.

        Args:
            plugin_name: The plugin that the key belongs to.
            key: The name of the key.

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

    @overload
    def kv_list(
        self,
        plugin_name: str,
        prefix: str = "",
        limit: int | None = None,
        *,
        after: str | None = None,
        values: Literal[False] = False,
    ) -> PluginKeys: ...
    @overload
    def kv_list(
        self,
        plugin_name: str,
        prefix: str = "",
        limit: int | None = None,
        *,
        after: str | None = None,
        values: Literal[True],
    ) -> PluginEntries: ...
    def kv_list(
        self,
        plugin_name: str,
        prefix: str = "",
        limit: int | None = None,
        *,
        after: str | None = None,
        values: bool = False,
    ) -> PluginKeys | PluginEntries:
        """List a plugin's keys in their order, or its entries.

        Args:
            plugin_name: The plugin that the keys belong to.
            prefix: Only keys that begin with exactly this text.
            limit: How many at most, 1 to 10,000; `truncated` is true if there are more. Without it, an awaited list
                has up to 1,000 keys, and `async for` goes through all.
            after: Only keys behind this one: the last key of a truncated list continues it.
            values: List entries, each a key with its value.

        Returns:
            Awaited, `{'keys': […], 'count': …, 'truncated': …}`; `async for` gives the keys themselves. With `values`,
            there are `entries` instead of `keys`, each a tuple `(key, value)`.

        Raises:
            ValueError: A name, prefix or limit is out of range.
            DatabaseError: The database failed.

        Example:
            page = await db.kv_list("trivia", "score:", 10)
            async for key in db.kv_list("trivia", "score:"):
                ...
        """
        kind = PluginEntries if rules.switch(values, "values") else PluginKeys
        return kind(self, self.engine, rules.plugin_name(plugin_name), prefix, limit, after)

    async def kv_incr(
        self,
        plugin_name: str,
        key: str,
        by: int = 1,
        *,
        ttl_seconds: int | None = None,
        ttl: int | None = None,
    ) -> int:
        """Add to an integer; no addition of concurrent callers is lost. An absent integer counts as 0.

        Args:
            plugin_name: The plugin that the key belongs to.
            key: The name of the key.
            by: What to add; may be negative.
            ttl_seconds: A new entry expires after this many seconds; one that is there keeps its TTL.
            ttl: The same as `ttl_seconds`.

        Returns:
            The new number.

        Raises:
            NotACounter: Something else than an integer is stored.
            ValueError: A name, key, number or TTL is out of range.
            DatabaseError: The database failed; the message says whether it may have been added.

        Example:
            games = await db.kv_incr("trivia", "games")
        """
        at = rules.plugin_name(plugin_name), rules.key(key)
        expire_in = rules.ttl_under_either_name(ttl_seconds, ttl)
        add = Add(Space.PLUGINS, at, rules.increment(by), expire_in)
        try:
            return (await write(await self.engine(), add)).values[0]
        except NotACounter as error:
            raise error.at(key) from None

    async def kv_touch(self, plugin_name: str, key: str, ttl_seconds: int | None) -> bool:
        """Give an entry another TTL; its value and version stay.

        Args:
            plugin_name: The plugin that the key belongs to.
            key: The name of the key.
            ttl_seconds: The entry expires after this many seconds; None keeps it.

        Returns:
            Whether there is such an entry.

        Raises:
            ValueError: A name, key or TTL is out of range.
            DatabaseError: The database failed; the message says whether the TTL may have changed.

        Example:
            await db.kv_touch("trivia", "session", 1800)
        """
        at = rules.plugin_name(plugin_name), rules.key(key)
        touch = Touch(Space.PLUGINS, at, rules.ttl(ttl_seconds, "ttl_seconds"))
        return (await write(await self.engine(), touch)).found[0]

    async def kv_cleanup_expired(self) -> int:
        """Remove the expired entries of all plugins. No read shows them before that either.

        Returns:
            How many were removed.

        Raises:
            DatabaseError: The database failed.
        """
        return await sweep(await self.engine(), Space.PLUGINS)


def _current(record: Record | None) -> CurrentValue | None:
    """What is stored where the condition of a set failed."""
    if record is None:
        return None
    try:
        return CurrentValue(decode_json(record.value), record.version)
    except Undecodable:
        report_broken(record)
        return CurrentValue(None, record.version)
