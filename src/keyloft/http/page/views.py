"""What all views of the admin page share: the visit that they get, the page view that they return, their routes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

from msgspec import Struct

from keyloft import limits
from keyloft.errors import InvalidArgument, NotPermitted
from keyloft.http import audit_log
from keyloft.http.page.sessions import PageSession
from keyloft.http.problems import Problem
from keyloft.http.replies import HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.tokens import AccessToken

HOME = "/page"


class PageView(Struct, frozen=True, kw_only=True):
    """What a view shows: a template and what fills it in."""

    template: str
    values: Mapping[str, Any]
    status: int = 200
    is_live: bool = False
    """Whether the open page is updated. Updates have neither forms nor values that were asked for."""


class Visit:
    """One HTTP request for a view: with the session that it belongs to, and the fields of its form."""

    def __init__(self, request: HttpRequest, session: PageSession, *, is_read_only: bool) -> None:
        self.request = request
        self.session = session
        self.form: dict[str, str] = {}
        self._is_read_only = is_read_only

    @property
    def token(self) -> AccessToken:
        return self.session.token

    @property
    def path(self) -> str:
        path: str = self.request.scope["path"]
        return path

    @property
    def may_change(self) -> bool:
        """Whether this token may change something, somewhere, and the page lets it."""
        return not self._is_read_only and (self.token.is_admin or any([scope.may_write for scope in self.token.scopes]))

    def text(self, name: str) -> str:
        """A parameter of the form or of the query; empty if it is left out."""
        if self.request.method == "POST":
            return self.form.get(name, "")
        return self.request.one(name) or ""

    def needed(self, name: str) -> str:
        """A parameter that the view needs.

        Raises:
            InvalidArgument: The parameter is missing.
        """
        if not (text := self.text(name)):
            raise InvalidArgument(f"{name}: this parameter is missing; follow a link of the page instead")
        return text

    def optional(self, name: str) -> str | None:
        """A parameter, or None."""
        return self.text(name) or None

    def check_changes(self) -> None:
        """Refuse a change where the page is read-only.

        Raises:
            NotPermitted: The page is read-only.
        """
        if self._is_read_only:
            raise NotPermitted("this page is read-only: the service was started with --http-page read-only")

    def may(self, area: Literal["plugin", "tenant"], name: str, *, write: bool = False, status: bool = False) -> bool:
        """Whether the token may read, change, or see without values, what belongs to a plugin or tenant."""
        if write and self._is_read_only:
            return False
        try:
            self.token.check_owner(area, name, write=write, status=status)
        except NotPermitted:
            return False
        return True

    @property
    def writer(self) -> str:
        """Who writes, as the audit trail of the semantic store names it."""
        return f"{self.token.name}:admin-page"

    def record(self, action: str, key: str, store: str | None = None) -> None:
        """Leave a line in the audit log: who did what to which key."""
        audit_log.wrote(self.token, f"admin page: {action}", store, (key,))

    async def read_form(self) -> None:
        """Read the fields of a form, and refuse one that another site has made.

        Raises:
            Problem: It lacks the token of this session.
            InvalidArgument: It can't be read.
        """
        self.form = await read_fields(self.request)
        if not self.session.is_form_token(self.form.get("form_token", "")):
            raise Problem(
                403, NotPermitted.code, "form_token: this form belongs to another session; load the page again"
            )


async def read_fields(request: HttpRequest) -> dict[str, str]:
    """The fields of a form.

    Raises:
        InvalidArgument: It can't be read.
        ValueTooLarge: It is too long.
    """
    if request.content_type() != "application/x-www-form-urlencoded":
        raise Problem(415, "UNSUPPORTED_MEDIA_TYPE", "Content-Type: expected a form")
    body = await request.body(limits.PAGE_FORM_BYTES)
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=32))
    except ValueError:
        raise InvalidArgument("body: expected the fields of a form, in UTF-8 with percent signs") from None


PageHandler: TypeAlias = Callable[[Visit], Awaitable[PageView | HttpReply]]


class PageRoute(Struct, frozen=True, kw_only=True):
    """A path of the page, and its methods."""

    path: str
    handlers: Mapping[str, PageHandler]
    is_change: bool = False
    """Whether its POST changes something, which a read-only page refuses. Showing a value is not a change."""


def url(view: str, /, **parameters: object) -> str:
    """An address of the page; parameters that are None or empty are left out."""
    given = {name: text for name, text in parameters.items() if text is not None and text != ""}
    return f"{HOME}{view}?{urlencode(given, safe='/', quote_via=quote)}" if given else f"{HOME}{view}"


def redirect(to: str, *headers: tuple[bytes, bytes]) -> HttpReply:
    """Let the browser go elsewhere, by GET."""
    return HttpReply(status=303, headers=((b"location", to.encode("ascii")), *headers))
