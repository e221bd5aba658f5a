"""What is stored for a plugin, read and removed several entries at a time."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from keyloft.core import json_text
from keyloft.core.engine import Engine, Reader, catch_up, write
from keyloft.core.log_text import field
from keyloft.core.paging import Pages
from keyloft.core.records import NO_LIMIT, Now, Page, Record, Scan
from keyloft.plugins.rules import PrefixDelete, deletion

logger = logging.getLogger(__name__)

# How many bytes a reply has besides its entries, and each entry besides its key and value.
_AROUND_BYTES: Final = 128
_AROUND_ENTRY_BYTES: Final = len('{"key":,"value":},')

Remove: TypeAlias = Callable[[Page], Coroutine[Any, Any, int]]
"""Removes the entries of a page, and returns how many there were."""


def report_broken(record: Record) -> None:
    """Log a stored value that is not JSON: another program wrote to the table. To plugins it counts as absent."""
    plugin, key = record.key
    fields = {"operation": "kv_get", "plugin": plugin, "key": key, "size": len(record.value)}
    text = "[KV] the stored value is not JSON and counts as absent: plugin=%s key=%s size=%d"
    logger.error(text, field(plugin), field(key), len(record.value), extra=fields)


def is_readable(record: Record) -> bool:
    """Whether a stored value is JSON; if it is not, that is logged."""
    if json_text.is_json(record.value):
        return True
    report_broken(record)
    return False


def keys_of_page(page: Page, limit: int) -> tuple[list[str], bool]:
    """The keys that a scan of one more than the limit found, and whether there are more."""
    return [key for _, key in page.keys[:limit]], len(page) > limit


async def read_entry(engine: Reader, scan: Scan) -> tuple[Record | None, int]:
    """The entry that `rules.entry_scan` finds, and the time of the read."""
    page, now = await engine.read(scan, Now())
    return (page[0] if page else None), now


async def read_entries(engine: Reader, scan: Scan, most_bytes: int) -> tuple[list[tuple[str, bytes]], bool]:
    """One page of a list with values, and whether there are more entries.

    Args:
        engine: Where they are stored.
        scan: A scan of one entry more than wanted.
        most_bytes: How long the page may be as JSON; it has one entry at least.
    """
    entries: list[tuple[str, bytes]] = []
    wanted, rest, left = scan.limit - 1, scan, most_bytes - _AROUND_BYTES
    while True:
        asked = wanted - len(entries) + 1
        found = 0
        async for page in Pages(engine, replace(rest, limit=asked)):
            for record in page:
                if len(entries) == wanted:
                    return entries, True
                found += 1
                rest = replace(rest, start=record.key, after=True)
                if is_readable(record):
                    key = record.key[1]
                    left -= _AROUND_ENTRY_BYTES + len(msgspec.json.encode(key)) + len(record.value)
                    if left < 0 and entries:
                        return entries, True
                    entries.append((key, record.value))
        if found < asked:
            return entries, False


async def remove_prefix(engine: Reader, request: PrefixDelete, remove: Remove, rows: int) -> tuple[int, bool]:
    """Remove all keys with a prefix, this many at a time; returns how many there were, and whether there are more."""
    removed, rest = 0, request.scan
    left = NO_LIMIT if request.limit is None else request.limit
    await catch_up(engine)
    while True:
        wanted = min(rows, left)
        [page] = await engine.read(replace(rest, limit=wanted + 1))
        some = page if len(page) <= wanted else _first(page, wanted)
        if some:
            removed += await remove(some)
            rest = replace(rest, start=some.keys[-1], after=True)
        left -= len(some)
        if len(page) <= wanted or left < 1:
            return removed, len(page) > wanted


async def remove_keys(engine: Engine, page: Page) -> int:
    """Remove the entries of a page together; returns how many there were."""
    return sum((await write(engine, *deletion(page.keys).mutations)).found)


def _first(page: Page, rows: int) -> Page:
    return replace(page, keys=page.keys[:rows], values=page.values[:rows])
