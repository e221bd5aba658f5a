"""The views of the tuple store: keys as a tree with a search, and one entry."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from keyloft import limits
from keyloft.core import key_text, keys
from keyloft.core.engine import Engine
from keyloft.core.keys import TupleKey
from keyloft.core.records import Get, Page, Record, Scan, Space
from keyloft.errors import InvalidKey, NotPermitted
from keyloft.http.context import HttpContext
from keyloft.http.page.values import kind_of, show
from keyloft.http.page.views import PageRoute, PageView, Visit
from keyloft.http.tokens import ANY
from keyloft.http.wire import read_key
from keyloft.tuples.children import Children
from keyloft.tuples.selector import Selector


class TreeRow(Struct, frozen=True, kw_only=True):
    """A key one part below the prefix."""

    key: str
    name: str
    """Its last part."""
    has_more: bool
    """Whether there are keys below it."""
    record: Record | None
    """Its entry, without the value; None if there are only keys below it."""


class KeySearch(Struct, frozen=True):
    """Which keys a search shows: those below a prefix, perhaps only those whose next part begins with a text."""

    text: str
    prefix: TupleKey
    within: Selector

    @classmethod
    def read(cls, text: str, after: str) -> "KeySearch":
        """Read what was searched for: `users/` is all below users, `users/al` what begins with al there.

        Args:
            text: A key as text; its last part may be incomplete.
            after: The key after which the rows begin, and after all keys below it.

        Raises:
            InvalidKey: It is no key.
        """
        head, _, tail = text.rpartition("/")
        prefix = key_text.read(head) if head else ()
        before = keys.encode_prefix(prefix)
        start, end = keys.below(before)
        if tail:
            [part] = key_text.read(tail)
            start = keys.encode_prefix((*prefix, part))
            if isinstance(part, str):
                start = start[:-1]  # without the byte that ends a text
            end = start + keys.LAST
        if after:
            start = max(start, keys.encode_prefix(key_text.read(after)) + keys.LAST)
        return cls(text, prefix, Selector(start, max(start, end)))


class TupleViews:
    """Handlers of these views."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    def routes(self) -> Sequence[PageRoute]:
        return [
            PageRoute(path="/tuples", handlers={"GET": self.tree}),
            PageRoute(path="/tuples/entry", handlers={"GET": self.entry, "POST": self.value}),
        ]

    async def tree(self, visit: Visit) -> PageView:
        """The keys one part below a prefix."""
        store, text = visit.optional("store"), visit.text("q").lstrip("/")
        values: dict[str, Any] = {
            "title": "Tuples",
            "store": store,
            "stores": await self._stores(visit),
            "q": text,
            "path": [],
            "rows": [],
            "next": None,
            "exact": None,
            "starts": [],
            "error": "",
        }
        try:
            search = KeySearch.read(text, visit.text("after"))
        except InvalidKey as error:
            return PageView(template="tuples.html", values={**values, "error": f"q: {error}"}, status=422)
        values["path"] = _path(search.prefix)
        try:
            visit.token.check_range(store, search.within.start, search.within.end, status=True)
        except NotPermitted:
            values["starts"] = _starts(visit, store)
            if text or not values["starts"]:
                raise
            return PageView(template="tuples.html", values=values)
        engine = self._context.store(store).engine
        children = await Children(engine, search.prefix, limits.PAGE_ROWS + 1, within=search.within)
        if len(children) > limits.PAGE_ROWS:
            children = children[: limits.PAGE_ROWS]
            values["next"] = key_text.write(children[-1])
        values["rows"] = await _rows(engine, children)
        return PageView(template="tuples.html", values=values, is_live=True)

    async def entry(self, visit: Visit) -> PageView:
        """One entry, without its value."""
        return await self._entry(visit, with_value=False)

    async def value(self, visit: Visit) -> PageView:
        """One entry, with the value that was asked for."""
        return await self._entry(visit, with_value=True)

    async def _entry(self, visit: Visit, *, with_value: bool) -> PageView:
        store, text = visit.optional("store"), visit.needed("key")
        key = read_key(text)
        visit.token.check_key(store, key, status=not with_value)
        [record] = await self._context.store(store).engine.read(Get(Space.TUPLES, key))
        parts = keys.decode(key)
        values: dict[str, Any] = {
            "title": text,
            "store": store,
            "key": text,
            "path": _path(parts[:-1]),
            "parts": [(key_text.write((part,)), type(part).__name__) for part in parts],
            "record": record,
            "kind": None if record is None else kind_of(record.encoding),
            "bytes": None if record is None else len(record.value),
            "value": None,
            "may_show": _may_show(visit, store, key),
        }
        if with_value and record is not None:
            visit.record("show value", text, store)
            values["value"] = show(record.value, record.encoding)
        status = 200 if record is not None else 404
        return PageView(template="tuple.html", values=values, status=status, is_live=not with_value)

    async def _stores(self, visit: Visit) -> list[str]:
        """The names of the named stores that the token may read, found by seeking."""
        names: list[str] = []
        if not visit.token.is_admin:
            own = {scope.name for scope in visit.token.scopes if scope.area == "kv" and scope.name is not None}
            if ANY not in own:
                return sorted(own)
        engine, start = self._context.database(), keys.LAST
        while len(names) < limits.PAGE_ROWS:
            [page] = await engine.read(Scan(Space.TUPLES, start, keys.LAST + keys.LAST, 1, keys_only=True))
            if not page:
                break
            name, _ = keys.split_store(page.keys[0])
            assert name is not None, "only keys of named stores lie here"
            names.append(name)
            start = keys.store_prefix(name)[:-1] + b"\x01"
        return names


def _may_show(visit: Visit, store: str | None, key: bytes) -> bool:
    try:
        visit.token.check_key(store, key)
    except NotPermitted:
        return False
    return True


def _starts(visit: Visit, store: str | None) -> list[str]:
    """The prefixes that the token may read, if it may not read everything."""
    return [
        key_text.write(keys.decode(scope.start))
        for scope in visit.token.scopes
        if scope.area == "kv" and scope.start and scope.name in (store, ANY)
    ]


def _path(prefix: TupleKey) -> list[tuple[str, str]]:
    """Each part of a prefix, with the search that shows what is below it."""
    return [(key_text.write((part,)), key_text.write(prefix[: at + 1]) + "/") for at, part in enumerate(prefix)]


async def _rows(engine: Engine, children: Sequence[TupleKey]) -> list[TreeRow]:
    """What is stored at each of these keys, and whether there is more below."""
    encoded = [keys.encode(child) for child in children]
    asks = [Scan(Space.TUPLES, key, key + keys.LAST, 2, keys_only=True, times=True) for key in encoded]
    pages: list[Page] = await engine.read(*asks) if asks else []
    rows: list[TreeRow] = []
    for child, key, page in zip(children, encoded, pages, strict=True):
        own = page[0] if page and page.keys[0] == key else None
        name = key_text.write(child[-1:])
        rows.append(TreeRow(key=key_text.write(child), name=name, has_more=len(page) > (own is not None), record=own))
    return rows
