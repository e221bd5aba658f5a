"""Lists of what a plugin stores, of keys, or of keys with their values: called directly, and over NATS."""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar

from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine
from keyloft.core.lazy import PagedList
from keyloft.core.records import NO_LIMIT, Scan
from keyloft.core.values import decode_json
from keyloft.plugins import rules
from keyloft.plugins.stored import keys_of_page, read_entries

T = TypeVar("T")
SendRequest: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a request with an operation and its fields; returns the reply."""


class PluginListing(PagedList[T]):
    """Entries of a plugin, read as needed: `await` reads one page of them, `async for` goes through all."""

    values: bool

    def __init__(
        self,
        db: AsyncClosing,
        engine: Callable[[], Awaitable[Engine]],
        plugin: str,
        prefix: str,
        limit: int | None,
        after: str | None,
    ) -> None:
        self._scan = partial(rules.listing, plugin, prefix, values=self.values)
        self._scan(limit, after)  # refuses wrong arguments at once
        super().__init__(db, limit)
        self._open = engine
        self._after = after

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:  # type: ignore[override]
        return self._first().__await__()

    async def _first(self) -> dict[str, Any]:
        items, after = await self._page(rules.limit(self._limit), self._after)
        return {self.what: items, "count": len(items), "truncated": after is not None}

    async def _page(self, limit: int, after: str | None) -> tuple[list[T], str | None]:
        items, last, truncated = await self._read(await self._open(), self._scan(limit, after or self._after))
        return items, last if truncated else None

    async def _read(self, engine: Engine, scan: Scan) -> tuple[list[T], str | None, bool]:
        """The items of a page, the last key of it, and whether there are more."""
        raise NotImplementedError


class PluginKeys(PluginListing[str]):
    """A plugin's keys."""

    what = "keys"
    values = False

    async def _read(self, engine: Engine, scan: Scan) -> tuple[list[str], str | None, bool]:
        [page] = await engine.read(scan)
        keys, truncated = keys_of_page(page, scan.limit - 1)
        return keys, keys[-1] if keys else None, truncated


class PluginEntries(PluginListing[tuple[str, Any]]):
    """A plugin's keys and values."""

    what = "entries"
    values = True

    async def _read(self, engine: Engine, scan: Scan) -> tuple[list[tuple[str, Any]], str | None, bool]:
        found, truncated = await read_entries(engine, scan, NO_LIMIT)
        return [(key, decode_json(value)) for key, value in found], found[-1][0] if found else None, truncated


class RequestedList(PagedList[T]):
    """A list over NATS, read as needed: iterate it with `async for`, or `await` all of it."""

    def __init__(self, client: AsyncClosing, request: SendRequest, prefix: str, limit: int | None) -> None:
        super().__init__(client, limit)
        self._request = request
        self._prefix = prefix

    async def _reply(self, limit: int, after: str | None, **more: bool) -> dict[str, Any]:
        return await self._request("list", {"prefix": self._prefix, "limit": limit, "after": after, **more})


class Keys(RequestedList[str]):
    """Keys, read as needed: iterate them with `async for`, or `await` them all."""

    what = "keys"

    async def _page(self, limit: int, after: str | None) -> tuple[list[str], str | None]:
        reply = await self._reply(limit, after)
        return reply["keys"], reply["keys"][-1] if reply["truncated"] else None


class KeysWithValues(RequestedList[tuple[str, Any]]):
    """Keys and their values, read as needed: iterate the tuples with `async for`, or `await` them all."""

    what = "keys and values"

    async def _page(self, limit: int, after: str | None) -> tuple[list[tuple[str, Any]], str | None]:
        reply = await self._reply(limit, after, values=True)
        entries = [(entry["key"], entry["value"]) for entry in reply["entries"]]
        return entries, entries[-1][0] if reply["truncated"] else None
