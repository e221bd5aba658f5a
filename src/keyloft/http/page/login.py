"""Logging in to the admin page with a token, and out; and the cookie of a session."""

import hmac
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlencode

from keyloft.errors import NotPermitted
from keyloft.http.context import HttpContext
from keyloft.http.page.rendering import PageRenderer
from keyloft.http.page.sessions import SessionTable
from keyloft.http.page.views import HOME, PageView, Visit, read_fields, redirect, url
from keyloft.http.problems import Problem
from keyloft.http.replies import HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.tokens import AccessToken
from keyloft.http.wire import to_json

_WRONG: Final = (
    "token: this token is not valid; `keyloft token new` makes one, and the service prints its own at the start"
)

_FORM_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)
_PATH: Final = re.compile(rf"{HOME}(/[a-z-]+)*", re.ASCII)
"""A path of a view. It has no dots or percent signs, with which a browser could leave the page."""


class PageLogin:
    """Handlers of the paths that need no session."""

    def __init__(self, context: HttpContext, sessions: SessionTable, renderer: PageRenderer) -> None:
        self._context = context
        self._sessions = sessions
        self._renderer = renderer

    async def start(self, request: HttpRequest) -> HttpReply:
        """The address that a service prints: logs in with its token, then redirects to an address without the token."""
        token, code = request.one("token"), request.one("code")
        is_foreign = request.header(b"sec-fetch-site") not in (None, "same-origin", "none")
        if is_foreign or request.method == "HEAD":
            return redirect(HOME)  # a link on another site or port, or a preview of a link, must not log anyone in
        if code is not None and (found := self._sessions.take_code(code)) is not None:
            return self._logged_in(request, found, HOME)
        if token is None:
            return redirect(HOME)
        if (known := await self._known(request, token)) is None:
            return redirect(url("/login", wrong="token"))  # no address may keep a token, even a wrong one
        return self._logged_in(request, known, HOME)

    async def new_code(self, request: HttpRequest) -> HttpReply:
        """An address that logs in once, for a client that has a token."""
        return HttpReply(to_json({"path": f"/?code={self._sessions.new_code(request.token)}"}))

    async def form(self, request: HttpRequest) -> HttpReply:
        """The page with the form for a token."""
        return self._shown(request, _within(request.one("next") or HOME), _WRONG if request.one("wrong") else "")

    async def submit(self, request: HttpRequest) -> HttpReply:
        """The form with a token."""
        fields = await read_fields(request)
        expected = cookie_of(request, "login")
        given = fields.get("form_token", "").encode("utf-8", "replace")
        if not expected or not hmac.compare_digest(expected.encode("utf-8", "replace"), given):
            raise Problem(
                403, NotPermitted.code, "form_token: this form was not made for this browser; load the page again"
            )
        to = _within(fields.get("next", HOME))
        known = await self._known(request, fields.get("token", "").strip())
        return self._shown(request, to, _WRONG) if known is None else self._logged_in(request, known, to)

    async def log_out(self, visit: Visit) -> HttpReply:
        """End the session."""
        self._sessions.end(cookie_of(visit.request, "session"))
        visit.record("log out", "-")
        return redirect(url("/login"), _cookie(visit.request, "session", "", 0))

    async def _known(self, request: HttpRequest, token: str) -> AccessToken | None:
        """The token, if it is valid; else None, after the pause that slows guessing down."""
        found = self._context.tokens.find(token)
        if found is None:
            client = request.scope["client"]
            await self._context.failed_logins.slow_down(client[0] if client else "")
        return found

    def _logged_in(self, request: HttpRequest, token: AccessToken, to: str) -> HttpReply:
        name, session = self._sessions.begin(token)
        Visit(request, session, is_read_only=True).record("log in", "-")
        return redirect(to, _cookie(request, "session", name), _cookie(request, "login", "", 0))

    def _shown(self, request: HttpRequest, to: str, error: str = "") -> HttpReply:
        known = cookie_of(request, "login")  # other ports of this host can set it, too
        form_token = known if _FORM_TOKEN.fullmatch(known) else secrets.token_urlsafe(32)
        values = {"title": "Log in", "next": to, "error": error, "form_token": form_token}
        view = PageView(template="login.html", values=values, status=401 if error else 200)
        return self._renderer.page(view, None, (_cookie(request, "login", form_token),))


def login_address(request: HttpRequest) -> str:
    """The address of the log-in form, which then leads back to the page that was asked for."""
    query = request.scope["query_string"].decode("ascii")
    path = request.scope["path"]
    return url("/login", next=f"{path}?{query}" if query else path) if request.method != "POST" else url("/login")


def cookie_of(request: HttpRequest, name: str) -> str:
    """A cookie of the page; empty if it is missing, or if the cookies can't be read or are in several headers."""
    try:
        given = SimpleCookie(request.header(b"cookie") or "").get(_cookie_name(request, name))
    except (CookieError, Problem):
        return ""
    return "" if given is None else given.value


def _cookie(request: HttpRequest, name: str, value: str, seconds: int | None = None) -> tuple[bytes, bytes]:
    # Its path is the page's, so that requests to the API never carry it.
    parts = [f"{_cookie_name(request, name)}={value}", f"Path={HOME}", "HttpOnly", "SameSite=Strict"]
    if request.scope["scheme"] == "https":
        parts.append("Secure")
    if seconds is not None:
        parts.append(f"Max-Age={seconds}")
    return b"set-cookie", "; ".join(parts).encode("ascii")


def _cookie_name(request: HttpRequest, name: str) -> str:
    # Browsers share cookies between the ports of a host: two services on one machine need two names.
    server = request.scope["server"]
    return f"keyloft-{name}-{server[1] if server else 0}"


def _within(address: str) -> str:
    """An address of the page, so that a link can't lead elsewhere after a log-in."""
    path, mark, query = address.partition("?")
    if not _PATH.fullmatch(path):
        return HOME
    if not (query.isascii() and query.isprintable()):
        query = urlencode({"q": ""})
    return f"{path}{mark}{query}"
