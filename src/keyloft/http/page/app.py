"""The admin page as a whole: its routes, and the checks before all of its views."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

from starlette.routing import Route

from keyloft.errors import KeyloftError, NotPermitted
from keyloft.http.context import HttpContext
from keyloft.http.page.audit_view import AuditViews
from keyloft.http.page.live import LiveViews
from keyloft.http.page.login import PageLogin, cookie_of, login_address
from keyloft.http.page.overview import OverviewViews
from keyloft.http.page.plugin_views import PluginViews
from keyloft.http.page.project_views import ProjectViews
from keyloft.http.page.rendering import SAFE_HEADERS, PageRenderer
from keyloft.http.page.sampling import RateSampler
from keyloft.http.page.service import ServiceParts
from keyloft.http.page.sessions import PageSession, SessionTable
from keyloft.http.page.tuple_views import TupleViews
from keyloft.http.page.views import HOME, PageRoute, PageView, Visit, redirect
from keyloft.http.page.workflow_actions import WorkflowActions
from keyloft.http.problems import Problem, is_unexpected, no_such_path, problem_of
from keyloft.http.replies import EVENTS_TYPE, AsgiReceive, AsgiScope, AsgiSend, HttpReply
from keyloft.http.requests import ClientGone, HttpRequest
from keyloft.http.routing import ApiRoute, HttpEndpoint
from keyloft.http.tokens import PUBLIC

logger = logging.getLogger(__name__)

Answering: TypeAlias = Callable[[HttpRequest], Awaitable[HttpReply | None]]


class AdminPage:
    """The admin page of a service."""

    def __init__(self, context: HttpContext, service: ServiceParts) -> None:
        self._context = context
        self.meter = context.meters.of(HOME)
        self._is_read_only = service.is_read_only
        self.sessions = SessionTable(context.tokens)
        self.sampler = RateSampler(service, lambda: context.engine)
        self._renderer = PageRenderer(is_read_only=service.is_read_only)
        self._login = PageLogin(context, self.sessions, self._renderer)
        self._live = LiveViews(context, self._live_part, self.sessions.find, lambda: self.sampler.readings)
        views = (
            OverviewViews(context, service, self.sampler),
            TupleViews(context),
            PluginViews(context, service, self.sampler),
            ProjectViews(context, service),
            AuditViews(service),
            WorkflowActions(service),
        )
        self._routes = {route.path: route for each in views for route in each.routes()}
        self._routes["/logout"] = PageRoute(path="/logout", handlers={"POST": self._login.log_out})
        context.when_opened(self.sampler.start)
        context.when_ending(self.sampler.stop)

    def routes(self) -> Sequence[Route]:
        """The routes for Starlette."""
        login: Mapping[str, Answering] = {"GET": self._login.form, "POST": self._login.submit}
        open_to_all: dict[str, Mapping[str, Answering]] = {
            "/": {"GET": self._login.start},
            f"{HOME}/login": login,
            f"{HOME}/static/{{name}}": {"GET": self._static},
            f"{HOME}/events": {"GET": self._events},
        }
        found = [Route(path, PageEndpoint(self, handlers)) for path, handlers in open_to_all.items()]
        for path, route in self._routes.items():
            handlers = {method: self._behind_login(route) for method in route.handlers}
            found.append(Route(HOME + path, PageEndpoint(self, handlers)))
        code = ApiRoute(path=f"{HOME}/code", handlers={"POST": self._login.new_code})
        found.append(Route(code.path, HttpEndpoint(self._context, code)))
        return [*found, Route(f"{HOME}/{{rest:path}}", PageEndpoint(self, {"GET": self._nothing}))]

    # Requests

    def check(self, request: HttpRequest) -> None:
        """Refuse a request to another host name, or from a page of another site.

        Raises:
            Problem: The request is refused.
        """
        self._context.origins.check(request.scope)
        sender = request.header(b"sec-fetch-site")
        if request.method == "POST" and sender not in (None, "same-origin", "none"):
            raise Problem(403, NotPermitted.code, "Origin: pages of other sites may not send forms to this one")

    def error(self, problem: Problem, request: HttpRequest) -> HttpReply:
        """A page that says what was wrong, in the words of the API."""
        session = self.sessions.find(cookie_of(request, "session"))
        visit = None if session is None else self._visit(request, session)
        values = {"title": "Error", "code": problem.code, "detail": str(problem), "status": problem.status}
        view = PageView(template="error.html", values=values, status=problem.status)
        return self._renderer.page(view, visit, problem.headers)

    def _behind_login(self, route: PageRoute) -> Answering:
        async def answer(request: HttpRequest) -> HttpReply:
            session = self.sessions.find(cookie_of(request, "session"))
            if session is None:
                return redirect(login_address(request))
            visit = self._visit(request, session)
            if request.method == "POST":
                await visit.read_form()
                if route.is_change:
                    visit.check_changes()
            shown = await route.handlers["GET" if request.method == "HEAD" else request.method](visit)
            return self._renderer.page(shown, visit) if isinstance(shown, PageView) else shown

        return answer

    def _visit(self, request: HttpRequest, session: PageSession) -> Visit:
        return Visit(request, session, is_read_only=self._is_read_only)

    async def _nothing(self, request: HttpRequest) -> HttpReply:
        raise Problem(404, "NOT_FOUND", "there is no such page; the links above lead to all of them")

    async def _static(self, request: HttpRequest) -> HttpReply:
        return self._renderer.static(request.parameter("name") or "")

    # Open pages

    async def _events(self, request: HttpRequest) -> HttpReply | None:
        if request.method == "HEAD":
            return HttpReply(content_type=EVENTS_TYPE)
        await self._live.serve(request, request.one("view") or HOME, cookie_of(request, "session"))
        return None

    async def _live_part(self, address: str, session: PageSession) -> bytes:
        """The live part of the view at an address."""
        path, _, query = address.partition("?")
        route = self._routes.get(path.removeprefix(HOME))
        if route is None or "GET" not in route.handlers or not path.startswith(HOME):
            raise no_such_path()
        scope = {"method": "GET", "path": path, "headers": [], "query_string": query.encode("ascii", "replace")}
        visit = self._visit(HttpRequest(scope, _nothing_to_receive, _nothing_to_send, session.token), session)
        shown = await route.handlers["GET"](visit)
        if not isinstance(shown, PageView) or not shown.is_live:
            raise no_such_path()
        return self._renderer.live_part(shown, visit)


class PageEndpoint:
    """An ASGI application for one path of the page: calls the handler, and shows errors as pages."""

    def __init__(self, page: AdminPage, handlers: Mapping[str, Answering]) -> None:
        self._page = page
        self._handlers = dict(handlers)
        if "GET" in self._handlers:
            self._handlers.setdefault("HEAD", self._handlers["GET"])

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        began = perf_counter()
        request = HttpRequest(scope, receive, send, PUBLIC, SAFE_HEADERS)
        reply: HttpReply | None
        try:
            self._page.check(request)
            handler = self._handlers.get(request.method)
            if handler is None:
                allowed = ", ".join(self._handlers)
                headers = ((b"allow", allowed.encode()),)
                raise Problem(405, "METHOD_NOT_ALLOWED", f"this path takes {allowed}", headers=headers)
            reply = await handler(request)
            if reply is None:
                return self._page.meter.ended(200)
        except Problem as problem:
            reply = self._page.error(problem, request)
        except KeyloftError as error:
            if is_unexpected(error):
                logger.error("a request of the admin page failed: %s: %s", error.code, error)
            reply = self._page.error(problem_of(error), request)
        except ClientGone:
            return self._page.meter.ended(0)
        except Exception:
            logger.exception("a request of the admin page failed unexpectedly")
            reply = self._page.error(problem_of(KeyloftError()), request)
        self._page.meter.answered(reply.status, perf_counter() - began)
        return await reply.send(send, request.origin_headers)


async def _nothing_to_receive() -> dict[str, object]:
    return {"type": "http.disconnect"}


async def _nothing_to_send(message: object) -> None:
    await asyncio.sleep(0)
