"""The routes for monitoring, which need no token: metrics, health and readiness."""

from collections.abc import Sequence

from keyloft.http.context import HttpContext
from keyloft.http.descriptions import text_operation
from keyloft.http.replies import TEXT_TYPE, HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute

CLOSE = ((b"connection", b"close"),)
"""Scrapers and health checks are rare, so that their connections need not stay open."""


def unavailable(reason: str) -> HttpReply:
    """The answer while the service can't do its work."""
    return HttpReply(f"{reason}\n".encode(), 503, TEXT_TYPE, CLOSE)


def routes(context: HttpContext) -> Sequence[ApiRoute]:
    """The routes for monitoring."""
    monitoring = context.monitoring

    async def metrics(request: HttpRequest) -> HttpReply:
        return await monitoring.metrics()

    async def health(request: HttpRequest) -> HttpReply:
        return await monitoring.health()

    async def readiness(request: HttpRequest) -> HttpReply:
        return await monitoring.readiness()

    pages = {
        "/metrics": (metrics, text_operation("getMetrics", "Metrics for Prometheus")),
        "/healthz": (
            health,
            text_operation("getHealth", "Whether the database can be read and written, and NATS is connected"),
        ),
        "/readyz": (readiness, text_operation("getReadiness", "Whether requests are served")),
    }
    return [
        ApiRoute(path=path, handlers={"GET": handler}, is_public=True, described=described)
        for path, (handler, described) in pages.items()
    ]
