"""The views of the service as a whole: overview, health, settings."""

from collections.abc import Sequence
from typing import Any

from keyloft import limits
from keyloft.core.health import ServerHealth
from keyloft.core.records import Latest, StoreId
from keyloft.http.context import HttpContext
from keyloft.http.page.sampling import InterfaceSample, RateSampler, ServiceSample, recent
from keyloft.http.page.service import ServiceParts
from keyloft.http.page.views import PageRoute, PageView, Visit


class OverviewViews:
    """Handlers of these views."""

    def __init__(self, context: HttpContext, service: ServiceParts, sampler: RateSampler) -> None:
        self._context = context
        self._service = service
        self._sampler = sampler

    def routes(self) -> Sequence[PageRoute]:
        handlers = {"": self.overview, "/health": self.health, "/settings": self.settings}
        return [PageRoute(path=path, handlers={"GET": handler}) for path, handler in handlers.items()]

    async def overview(self, visit: Visit) -> PageView:
        """Database, NATS, replicas, rates, latencies."""
        service, sampler = self._service, self._sampler
        engine = self._context.engine
        values: dict[str, Any] = {
            "title": "Overview",
            "nats": service.nats(),
            "alerts": list(service.signals.alerts.values()),
            "started": service.started,
            "store": None,
            "version_counter": None,
            "location": None,
            "database_bytes": self._database_bytes(),
            "servers": None if engine is None else engine.health(),
            "used": None,
            "has_others": False,
            "span": self._span(),
            "commits": sampler.commits(),
            "commit_rate": recent(sampler.commits()),
            "interfaces": [self._interface("Plugins", _plugins), self._interface("Workflows", _semantic)],
        }
        if engine is not None:
            values["store"], values["version_counter"] = await engine.read(StoreId(), Latest())
            values["location"] = engine.location if visit.token.is_admin else None
            values["used"] = await service.usage.all(patience=0)
            values["has_others"] = service.usage.has_others
        return PageView(template="overview.html", values=values, is_live=True)

    async def health(self, visit: Visit) -> PageView:
        """What /healthz and /readyz say, the servers of the database, and alerts."""
        visit.token.check_admin()
        ready, well = await self._context.monitoring.readiness(), await self._context.monitoring.health()
        engine = self._context.engine
        servers: ServerHealth | None = None if engine is None else engine.health()
        values = {
            "title": "Health",
            "is_ready": ready.status == 200,
            "is_well": well.status == 200,
            "ready": ready.body.decode().splitlines(),
            "well": well.body.decode().splitlines(),
            "servers": servers,
            "nats": self._service.nats(),
            "alerts": list(self._service.signals.alerts.values()),
        }
        return PageView(template="health.html", values=values, is_live=True)

    async def settings(self, visit: Visit) -> PageView:
        """What the service was started with."""
        visit.token.check_admin()
        values = {"title": "Settings", "settings": self._service.settings}
        return PageView(template="settings.html", values=values)

    def _interface(self, name: str, of: Any) -> dict[str, Any]:
        sampler = self._sampler
        requests, errors = sampler.requests(of), sampler.errors(of)
        return {
            "name": name,
            "requests": requests,
            "request_rate": recent(requests),
            "errors": errors,
            "error_rate": recent(errors),
            "latencies": [sampler.latencies(of, 0.99), sampler.latencies(of, 0.5)],
            "half": sampler.latency(of, 0.5),
            "most": sampler.latency(of, 0.99),
        }

    def _span(self) -> str:
        """How long the charts reach back."""
        seconds = limits.PAGE_SAMPLE_SECONDS * (len(self._sampler.samples) - 1)
        minutes = max(1, round(seconds / 60))
        return "half hour" if minutes >= 30 else "minute" if minutes == 1 else f"{minutes} minutes"

    def _database_bytes(self) -> int | None:
        file = self._service.database_file
        if file is None:
            return None
        sizes = []
        for name in (file.name, f"{file.name}-wal"):
            try:
                sizes.append(file.with_name(name).stat().st_size)
            except OSError:
                continue
        return sum(sizes)


def _plugins(sample: ServiceSample) -> InterfaceSample:
    return sample.plugins


def _semantic(sample: ServiceSample) -> InterfaceSample:
    return sample.semantic
