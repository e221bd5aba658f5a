"""The views of plugins: all of them, one with its keys, and one entry."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Usage, Used
from keyloft.core.values import JSON
from keyloft.http.context import HttpContext
from keyloft.http.page.sampling import RateSampler, requests_of
from keyloft.http.page.service import ServiceParts
from keyloft.http.page.values import show
from keyloft.http.page.views import PageRoute, PageView, Visit
from keyloft.http.tokens import ANY
from keyloft.nats.meters import OTHER
from keyloft.plugins import rules
from keyloft.plugins.quotas import Quota
from keyloft.plugins.stored import keys_of_page, read_entry


class PluginRow(Struct, frozen=True, kw_only=True):
    """A plugin in the list."""

    name: str
    used: Used | None
    """None while it is being counted."""
    quota: Quota | None
    requests: int
    rate: float | None
    seconds: float | None
    """How long its requests took, on average."""
    errors: int


class PluginViews:
    """Handlers of these views."""

    def __init__(self, context: HttpContext, service: ServiceParts, sampler: RateSampler) -> None:
        self._context = context
        self._service = service
        self._sampler = sampler

    def routes(self) -> Sequence[PageRoute]:
        return [
            PageRoute(path="/plugins", handlers={"GET": self.plugins}),
            PageRoute(path="/plugin", handlers={"GET": self.plugin}),
            PageRoute(path="/plugin/entry", handlers={"GET": self.entry, "POST": self.value}),
        ]

    async def plugins(self, visit: Visit) -> PageView:
        """The plugins whose names begin with a text."""
        begins, after = visit.text("q").strip(), visit.text("after")
        names = await self._names(visit, begins, after)
        more = names[limits.PAGE_ROWS - 1] if len(names) > limits.PAGE_ROWS else None
        known = self._service.usage.known(names)
        rows = [self._row(name, known.get(name)) for name in names[: limits.PAGE_ROWS]]
        values = {"title": "Plugins", "q": begins, "after": after, "rows": rows, "next": more}
        return PageView(template="plugins.html", values=values, is_live=True)

    async def plugin(self, visit: Visit) -> PageView:
        """One plugin: what it uses, its requests and errors, and its keys."""
        name = visit.needed("name")
        visit.token.check_owner("plugin", name, status=True)
        prefix, after = visit.text("q"), visit.optional("after")
        scan = rules.listing(name, prefix, limits.PAGE_ROWS, after)
        [page] = await self._context.database().read(scan)
        keys, has_more = keys_of_page(page, limits.PAGE_ROWS)
        rows = [(key, expiry) for key, expiry in zip(keys, page.expiries, strict=False)]
        meter = self._service.meters.owners.get(name)
        operations = [] if meter is None else sorted(meter.durations.items())
        values = {
            "title": name,
            "name": name,
            "q": prefix,
            "after": after,
            "row": self._row(name, await self._service.usage.of(name)),
            "operations": [
                (operation, each.count, each.seconds / each.count) for operation, each in operations if each.count
            ],
            "errors": [] if meter is None else meter.errors.most_common(),
            "keys": rows,
            "next": keys[-1] if has_more else None,
        }
        return PageView(template="plugin.html", values=values, is_live=True)

    async def entry(self, visit: Visit) -> PageView:
        """One entry, without its value."""
        return await self._entry(visit, with_value=False)

    async def value(self, visit: Visit) -> PageView:
        """One entry, with the value that was asked for."""
        return await self._entry(visit, with_value=True)

    async def _entry(self, visit: Visit, *, with_value: bool) -> PageView:
        name, key = visit.needed("name"), visit.needed("key")
        visit.token.check_owner("plugin", name, status=not with_value)
        record, _ = await read_entry(self._context.database(), rules.entry_scan((name, rules.key(key))))
        values: dict[str, Any] = {"title": key, "name": name, "key": key, "record": record, "value": None}
        values |= {"bytes": None if record is None else len(record.value), "may_show": visit.may("plugin", name)}
        if with_value and record is not None:
            visit.record("show value", f"plugin {name} {key}")
            values["value"] = show(record.value, JSON)
        status = 200 if record is not None else 404
        return PageView(template="plugin_entry.html", values=values, status=status, is_live=not with_value)

    async def _names(self, visit: Visit, begins: str, after: str) -> list[str]:
        """The names of plugins that store something, or sent a request; for one page, and one more."""
        if not visit.token.is_admin:
            own = {str(scope.name) for scope in visit.token.scopes if scope.area == "plugin"}
            if ANY not in own:
                return sorted([name for name in own if name > after and name.startswith(begins)])
        wanted = limits.PAGE_ROWS + 1
        stored = await stored_plugins(self._context.database(), begins, after, wanted)
        seen = [name for name in self._service.meters.owners if name.startswith(begins) and name > after]
        return sorted({*stored, *seen} - {OTHER})[:wanted]

    def _row(self, name: str, used: Used | None) -> PluginRow:
        meter = self._service.meters.owners.get(name)
        timings = [] if meter is None else list(meter.durations.values())
        requests = requests_of(self._service.meters, name)
        return PluginRow(
            name=name,
            used=used,
            quota=self._service.usage.quotas.of(name),
            requests=requests,
            rate=self._sampler.plugin_rate(name),
            seconds=sum([timing.seconds for timing in timings]) / requests if requests else None,
            errors=0 if meter is None else meter.errors.total(),
        )


async def stored_plugins(engine: Engine, begins: str, after: str, limit: int) -> list[str]:
    """The plugins that store something, by name, found by seeking: their other keys are skipped.

    Args:
        engine: The database.
        begins: Only names that begin with this text.
        after: Only names after this one.
        limit: How many to return at most.
    """
    names: list[str] = []
    # No name has a character as low as \x01: a name with it sorts after all keys of a plugin, and before the next one.
    place, rows = ((f"{after}\x01", "") if after >= begins and after else (begins, "")), 1
    while len(names) < limit:
        [found] = await engine.read(Usage(place, rows))
        met = [str(used.plugin) for used in found.used if str(used.plugin).startswith(begins)]
        names += met
        if found.end is None or len(met) < len(found.used):
            break
        # More rows at a time while most are of different plugins, fewer where one plugin has many.
        rows = min(limits.USAGE_ROWS, 2 * rows) if 2 * len(met) >= rows else max(1, rows // 8)
        place = (f"{found.end[0]}\x01", "")
    return names[:limit]
