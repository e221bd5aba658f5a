"""Lists entries of a view, counts them, and reads the index of expiries."""

from collections.abc import AsyncIterator, Sequence
from itertools import groupby

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import (
    Count,
    Due,
    DuePage,
    Expired,
    Key,
    Page,
    Record,
    Scan,
    Space,
    Usage,
    UsageSlice,
    Used,
)
from keyloft.engines.etcd import messages
from keyloft.engines.etcd.layout import KeyLayout, StoredRow, raw
from keyloft.engines.etcd.views import RevisionView


def bounds(keys: KeyLayout, ask: Scan | Count) -> tuple[bytes, bytes]:
    """The range of keys of etcd that a request is about."""
    start, end = keys.data(ask.space, ask.start), keys.data(ask.space, ask.end)
    return (start + b"\x00" if isinstance(ask, Scan) and ask.after else start), end


async def scan(view: RevisionView, ask: Scan) -> Page:
    """The live entries of a range."""
    found: list[Record] = []
    start, end = bounds(view.keys, ask)
    while start < end and len(found) < ask.limit:
        # Expired ones don't count: ask for some more than are missing.
        rows = min(ask.limit - len(found) + 1, limits.ETCD_PAGE_ROWS)
        first = await _last_part(view, start, end, rows) if ask.reverse else start
        order = messages.DESCENDING if ask.reverse else 0
        reply = await view.range(first, end, limit=rows, sort_order=order)
        stored = [view.keys.row(ask.space, kv.key, kv.value) for kv in reply.kvs]
        alive = [row for row in stored if row.record.is_alive(view.now)][: ask.limit - len(found)]
        if ask.keys_only:
            found += [replace(row.record, value=b"") for row in alive]
        else:
            found += await records_of(view, alive)
        if ask.reverse:
            end = reply.kvs[-1].key if len(reply.kvs) == rows else first
        elif not reply.more:
            break
        else:
            start = reply.kvs[-1].key + b"\x00"
    return page_of(found, times=ask.times)


async def _last_part(view: RevisionView, start: bytes, end: bytes, rows: int) -> bytes:
    """Where the last rows of a range begin, or earlier.

    etcd reads and sorts a whole range to answer with its last rows. To count a range takes it a tenth of that, so the
    range is halved as long as the upper half holds enough. The first key of what was counted is the next lower bound:
    keys lie close together, while the range that their first bytes allow is wide.
    """
    enough = rows + limits.ETCD_SORTED_ROWS
    reply = await view.range(start, end, limit=1, keys_only=True)
    if reply.count <= enough:
        return start
    low, high = bytes(reply.kvs[0].key), end
    for _ in range(limits.ETCD_PROBES):
        middle = _between(low, high)
        if middle <= low:
            break
        reply = await view.range(middle, end, limit=1, keys_only=True)
        if rows <= reply.count <= enough:
            return middle
        if reply.count > enough:
            low = bytes(reply.kvs[0].key)
        else:
            high = middle
    return low


def _between(low: bytes, high: bytes) -> bytes:
    """A key about in the middle of two."""
    width = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low)) + 8
    one, other = [int.from_bytes(key[:width].ljust(width, b"\x00")) for key in (low, high)]
    return ((one + other) // 2).to_bytes(width)


async def records_of(view: RevisionView, rows: Sequence[StoredRow]) -> list[Record]:
    """The entries with their values.

    Raises:
        Undecodable: A value is not whole.
    """
    values = iter(await view.values([row.chunks for row in rows if row.chunks is not None]))
    return [row.record if row.chunks is None else with_value(view, row.record, next(values)) for row in rows]


def with_value(view: RevisionView, head: Record, value: bytes | None) -> Record:
    """An entry whose value was in chunks.

    Raises:
        Undecodable: The value is not whole.
    """
    if value is None:
        raise view.damaged()
    return Record(head.key, value, head.encoding, head.version, head.expires_at, head.created_at, head.updated_at)


def page_of(found: list[Record], *, times: bool) -> Page:
    return Page(
        [record.key for record in found],
        [record.value for record in found],
        [record.encoding for record in found],
        [record.version for record in found],
        [record.expires_at for record in found],
        [record.created_at for record in found] if times else (),
        [record.updated_at for record in found] if times else (),
    )


async def count(view: RevisionView, ask: Count) -> int:
    """How many live entries a range has: all rows, without those that have expired and are not swept yet."""
    start, end = bounds(view.keys, ask)
    if start >= end:
        return 0
    rows = (await view.range(start, end, count_only=True)).count
    low, high = raw(ask.space, ask.start), raw(ask.space, ask.end)
    async for _, key in _expiring(view, ask.space, 0, view.now):
        rows -= low <= raw(ask.space, key) < high
    return int(rows)


async def expired(view: RevisionView, ask: Expired) -> list[Record]:
    """What has expired and is still stored."""
    due = [key async for _, key in _expiring(view, ask.space, 0, view.now, ask.limit)]
    stored = await view.gets([view.keys.data(ask.space, key) for key in due])
    rows = [view.keys.row(ask.space, kvs[0].key, kvs[0].value) for kvs in stored if kvs]
    return [replace(row.record, value=b"") for row in rows]


async def due(view: RevisionView, ask: Due) -> DuePage:
    """The keys that expired after a moment."""
    found = [one async for one in _expiring(view, ask.space, ask.after + 1, view.now, ask.limit + 1)]
    if len(found) > ask.limit:
        up_to = found[ask.limit - 1][0]
        whole = [one async for one in _expiring(view, ask.space, ask.after + 1, up_to)]
        return DuePage(*_columns(whole), up_to, view.counter.version, is_last=False, next_expiry=None)
    start, end = view.keys.index(ask.space, view.now + 1), view.keys.index_range(ask.space)[1]
    upcoming = (await view.range(start, end, limit=1)).kvs
    next_expiry = view.keys.expiry_of(ask.space, upcoming[0].key)[0] if upcoming else None
    return DuePage(*_columns(found), view.now, view.counter.version, is_last=True, next_expiry=next_expiry)


def _columns(found: Sequence[tuple[int, Key]]) -> tuple[list[Key], list[int]]:
    return [key for _, key in found], [moment for moment, _ in found]


async def _expiring(
    view: RevisionView, space: Space, first: int, last: int, limit: int | None = None
) -> AsyncIterator[tuple[int, Key]]:
    """The entries that expire from one moment to another, both included, in the order of their expiries."""
    start, end = view.keys.index(space, max(first, 0)), view.keys.index(space, max(last, 0) + 1)
    async for page in view.pages(start, end, limit):
        for kv in page:
            yield view.keys.expiry_of(space, kv.key)


async def usage(view: RevisionView, ask: Usage) -> UsageSlice:
    """What plugins store in a slice of their keys."""
    start = view.keys.data(Space.PLUGINS, ask.after) + b"\x00"
    end = view.keys.space_range(Space.PLUGINS)[1]
    rows = [
        view.keys.row(Space.PLUGINS, kv.key, kv.value)
        async for page in view.pages(start, end, ask.limit)
        for kv in page
    ]
    used: list[Used] = []
    for plugin, some in groupby(rows, lambda row: row.record.key[0]):
        sizes = [row.size for row in some if row.record.is_alive(view.now)]
        used.append(Used(plugin, len(sizes), sum(sizes)))
    last = rows[-1].record.key if len(rows) == ask.limit else None
    return UsageSlice(used, last, view.counter.version)
