"""The ASGI application: all routes, on Starlette."""

from collections.abc import Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.routing import Route

from keyloft.http import batches, info, kv, monitoring, ofrep, operations, ranges, service_watches, watch
from keyloft.http.context import HttpContext
from keyloft.http.meters import UNKNOWN, RouteMeter
from keyloft.http.openapi import document, routes_with_document
from keyloft.http.origins import Origins
from keyloft.http.problems import no_such_path
from keyloft.http.replies import AsgiReceive, AsgiScope, AsgiSend
from keyloft.http.routing import ApiRoute, HttpEndpoint, RouteModule
from keyloft.http.token_file import ValidTokens

PUBLIC_MODULES: Final[tuple[RouteModule, ...]] = (monitoring.routes,)
API_MODULES: Final[tuple[RouteModule, ...]] = (
    kv.routes,
    ranges.routes,
    batches.routes,
    watch.routes,
    info.routes,
    service_watches.routes,
    ofrep.routes,
    operations.routes,
)
"""The modules of the API, which is served only if tokens are configured. A new module is listed here."""


_BEFORE_KEY: Final = "/v1/kv/"
_ENTRY: Final = f"{_BEFORE_KEY}{{key:path}}"


class HttpApp:
    """The ASGI application of one server. It routes by the path as it was sent, not percent-decoded."""

    def __init__(self, context: HttpContext) -> None:
        self.routes = routes_of(context) if context.tokens.are_configured else _routes_of(context, PUBLIC_MODULES)
        self._nothing = _Nothing(context.meters.of(UNKNOWN))
        self._starlette = Starlette(
            routes=[
                *_page_routes(context),
                *[Route(route.path, HttpEndpoint(context, route)) for route in self.routes],
                Route("/{rest:path}", self._nothing),
            ]
        )

        # Paths of single keys bypass Starlette: its search through the routes, and its handling of exceptions, take as
        # long as reading the entry (`scripts/bench http`, row «requests»).
        self._entries = next((HttpEndpoint(context, route) for route in self.routes if route.path == _ENTRY), None)

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        path: str = scope["raw_path"].decode("ascii")
        if self._entries is not None and path.startswith(_BEFORE_KEY):
            scope["path_params"] = {"key": path[len(_BEFORE_KEY) :]}
            return await self._entries(scope, receive, send)
        if not path.startswith("/"):  # `*`, or a host: Starlette would answer such a request itself
            return await self._nothing(scope, receive, send)
        scope["path"] = path
        return await self._starlette(scope, receive, send)


def routes_of(context: HttpContext) -> Sequence[ApiRoute]:
    """All routes, and the one for the document that describes them."""
    return routes_with_document(_routes_of(context, (*API_MODULES, *PUBLIC_MODULES)))


def whole_document() -> dict[str, Any]:
    """The OpenAPI document of all routes, for the reference."""
    unused: Any = None
    return document(routes_of(HttpContext(unused, ValidTokens(), Origins())))


def _routes_of(context: HttpContext, modules: Sequence[RouteModule]) -> Sequence[ApiRoute]:
    return [route for routes in modules for route in routes(context)]


def _page_routes(context: HttpContext) -> Sequence[Route]:
    """The routes of the admin page, if the service has one."""
    if context.service is None or not context.tokens.are_configured:
        return ()
    from keyloft.http.page.app import AdminPage  # here, since templates take time and memory

    return AdminPage(context, context.service).routes()


class _Nothing:
    """Answers requests for a path that has no route."""

    def __init__(self, meter: RouteMeter) -> None:
        self._meter = meter

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        self._meter.answered(404, 0.0)
        await no_such_path().reply().send(send)
