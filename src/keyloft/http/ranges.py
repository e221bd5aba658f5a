"""The routes of ranges: list entries, keys or children, count them, and delete a range."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from keyloft import limits
from keyloft.core import keys
from keyloft.core.engine import Engine
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import Count, Page, Record, Space
from keyloft.errors import InvalidArgument
from keyloft.http import audit_log
from keyloft.http.context import HttpContext
from keyloft.http.descriptions import RANGE
from keyloft.http.kv import BASES
from keyloft.http.replies import HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.wire import WireEntry, read_parts, read_prefix, shown_key, to_json, wire_entry
from keyloft.tuples.children import Children
from keyloft.tuples.selector import Selector

_SELECTORS = ("prefix", "start", "end")
_BEGINNINGS = ("start", "after", "past")


class KeyRanges:
    """Handlers of the routes of ranges."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        # A page may hold large values: only this many are made at a time.
        self._pages = asyncio.Semaphore(limits.HTTP_LISTS)

    async def list(self, request: HttpRequest) -> HttpReply:
        """Entries, keys, children or their number."""
        request.expect_query(*_SELECTORS, "after", "past", "limit", "reverse", "cursor", "keys", "children", "count")
        store = request.parameter("store")
        engine = self._context.store(store).engine
        reverse, cursor = request.flag("reverse"), request.one("cursor")
        selector = _begun(request, selected(request, reverse=reverse, cursor=cursor))
        request.token.check_range(store, selector.start, selector.end)
        limit = request.number("limit", limits.HTTP_LIST_ENTRIES, limits.HTTP_LONGEST_LIST)
        forms = [name for name in ("keys", "children", "count") if request.flag(name)]
        if len(forms) > 1:
            raise InvalidArgument(f"{', '.join(forms)}: expected one of them")
        if forms == ["count"]:
            [found] = await engine.read(Count(Space.TUPLES, selector.start, selector.end))
            return HttpReply(to_json({"count": found}))
        if forms == ["children"]:
            return await _children(request, engine, selector, limit)
        if forms == ["keys"]:
            entries, more, _ = await _page(engine, selector, limit, with_values=False)
            return HttpReply(to_json({"entries": entries, "cursor": more}))
        async with self._pages:
            await request.room()
            entries, more, weight = await _page(engine, selector, limit, with_values=True)
            if weight > limits.HTTP_LARGE_VALUE_BYTES:
                await self._context.large_parts.turn()
            body = to_json({"entries": entries, "cursor": more})
        audit_log.read(request.token, "list", store, (_shown_range(request),))
        return HttpReply(body)

    async def delete(self, request: HttpRequest) -> HttpReply:
        """Remove all entries of a range."""
        request.expect_query(*_SELECTORS)
        store = request.parameter("store")
        if not any([name in request.query for name in _SELECTORS]):
            raise InvalidArgument("prefix: a range delete needs prefix, start or end; an empty prefix is everything")
        selector = selected(request)
        request.token.check_range(store, selector.start, selector.end, write=True)
        prefix, start, end = [request.one(name) for name in _SELECTORS]
        entries = self._context.store(store)
        audit_log.wrote(request.token, "delete range", store, (_shown_range(request),))  # it is made in many commits
        deleted = await entries.delete_range(
            None if prefix is None else read_prefix(prefix),
            start=None if start is None else read_parts(start, "start"),
            end=None if end is None else read_parts(end, "end"),
        )
        return HttpReply(to_json({"deleted": deleted}))


def selected(request: HttpRequest, *, reverse: bool = False, cursor: str | None = None) -> Selector:
    """The range that the parameters `prefix`, `start` and `end` name.

    Raises:
        InvalidInput: One can't be read, or they contradict each other.
    """
    prefix, start, end = [request.one(name) for name in _SELECTORS]
    return Selector.of(
        None if prefix is None else read_prefix(prefix),
        None if start is None else read_parts(start, "start"),
        None if end is None else read_parts(end, "end"),
        reverse=reverse,
        cursor=cursor,
    )


def _begun(request: HttpRequest, selector: Selector) -> Selector:
    """The range that begins after the key `after`, or after the key `past` and all keys below it.

    Raises:
        InvalidInput: One can't be read, or there is more than one beginning.
    """
    after, past = request.one("after"), request.one("past")
    if after is None and past is None:
        return selector
    if sum([request.one(name) is not None for name in (*_BEGINNINGS, "cursor")]) > 1:
        raise InvalidArgument("start, after, past, cursor: expected one of them")
    if past is not None:
        begin = keys.encode(read_parts(past, "past"), "past") + keys.LAST
    else:
        begin = keys.encode(read_parts(after or "", "after"), "after") + keys.FIRST
    return replace(selector, start=min(max(begin, selector.start), selector.end))


def _shown_range(request: HttpRequest) -> str:
    given = [(name, request.one(name)) for name in (*_SELECTORS, "after", "past")]
    return " ".join([f"{name}={text}" for name, text in given if text is not None]) or "prefix="


async def _page(
    engine: Engine, selector: Selector, limit: int, *, with_values: bool
) -> tuple[list[WireEntry], str | None, int]:
    """Entries up to the limit, or up to the size of a page, the cursor for what follows them, and their bytes."""
    # One more than wanted, to know whether there are further ones.
    scan = replace(selector.scan(limit + 1, keys_only=not with_values), times=True)
    # Few rows at first: how large the values are is not known before they are read.
    size = PageSize(limits.HTTP_FIRST_ROWS, limits.HTTP_PAGE_ROWS) if with_values else PageSize()
    entries: list[WireEntry] = []
    last, weight = b"", 0
    page: Page
    async for page in Pages(engine, scan, size):
        record: Record
        for record in page:
            if len(entries) == limit or (entries and weight > limits.HTTP_PAGE_BYTES):
                return entries, selector.cursor_after(last), weight
            entries.append(wire_entry(shown_key(record.key), record, with_value=with_values))
            last = record.key
            weight += len(record.key) + len(record.value) + limits.HTTP_ENTRY_BYTES
    return entries, None, weight


async def _children(request: HttpRequest, engine: Engine, selector: Selector, limit: int) -> HttpReply:
    """The keys one part below a prefix, and the cursor for those that follow them."""
    for name in (*_BEGINNINGS, "end"):
        if request.one(name) is not None:
            raise InvalidArgument(f"{name}: children are listed below a prefix; cursor continues the list")
    within, last = selector, selector.last_key
    if last is not None:  # continue after a child and all keys below it
        rest = {"end": last} if selector.reverse else {"start": last + keys.LAST}
        within = replace(selector, last_key=None, **rest)
    # One more than wanted, to know whether there are further ones.
    children = await Children(engine, read_prefix(request.one("prefix") or ""), limit + 1, within=within)
    encoded = [keys.encode(child) for child in children[:limit]]
    more = selector.cursor_after(encoded[-1]) if len(children) > limit else None
    return HttpReply(to_json({"children": list(map(shown_key, encoded)), "cursor": more}))


def routes(context: HttpContext) -> Sequence[ApiRoute]:
    """The routes of ranges."""
    ranges = KeyRanges(context)
    handlers = {"GET": ranges.list, "DELETE": ranges.delete}
    return [ApiRoute(path=f"{base}/kv", handlers=handlers, described=RANGE) for base in BASES]
