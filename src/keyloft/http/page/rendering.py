"""Makes HTML of views, with the headers that keep other sites and scripts out."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import keyloft
from keyloft.http.page import formatting
from keyloft.http.page.charts import chart
from keyloft.http.page.views import PageView, Visit, url
from keyloft.http.problems import no_such_path
from keyloft.http.replies import AsgiSend, Headers, HttpReply

_FOLDER: Final = Path(__file__).parent
_HTML: Final = b"text/html; charset=utf-8"
_TYPES: Final = {".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8", ".svg": b"image/svg+xml"}

SAFE_HEADERS: Final[Headers] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
    # Not no-referrer: browsers then send forms with an Origin of null.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
"""Headers of every answer of the page."""


class StaticFile(HttpReply, frozen=True):
    """A style sheet or script. Its address has a hash of it, so that browsers may keep it."""

    async def send(self, send: AsgiSend, more: Headers = ()) -> None:
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            (b"cache-control", b"public, max-age=31536000, immutable"),
            (b"x-content-type-options", b"nosniff"),
            *more,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@cache
def _files() -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in (_FOLDER / "static").iterdir()}


@cache
def _static_url(name: str) -> str:
    return url(f"/static/{name}", v=hashlib.sha256(_files()[name]).hexdigest()[:12])


@cache
def _templates() -> Environment:
    """The templates, all of them compiled now: compiling takes milliseconds, for which no request should wait."""
    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        count=formatting.count,
        size=formatting.size,
        rate=formatting.rate,
        duration=formatting.duration,
        when=formatting.when,
    )
    made.globals.update(url=url, chart=chart, static=_static_url, version=keyloft.__version__)
    for name in made.list_templates():
        made.get_template(name)
    return made


class PageRenderer:
    """The templates and the static files."""

    def __init__(self, *, is_read_only: bool) -> None:
        self._is_read_only = is_read_only
        self.templates = _templates()

    def static(self, name: str) -> HttpReply:
        """A static file.

        Raises:
            Problem: No file has this name.
        """
        body = _files().get(name)
        if body is None:
            raise no_such_path()
        return StaticFile(body, content_type=_TYPES[Path(name).suffix])

    def page(self, view: PageView, visit: Visit | None, headers: Headers = ()) -> HttpReply:
        """A whole page; without a visit, for a person who is not logged in."""
        around: dict[str, Any] = {
            "layout": "base.html",
            "visit": visit,
            "is_read_only": self._is_read_only,
            "is_live": view.is_live,
            "notice": "" if visit is None else visit.session.take_notice(),
        }
        body = self._rendered(view.template, {**around, **view.values})
        return HttpReply(body, view.status, _HTML, headers)

    def live_part(self, view: PageView, visit: Visit) -> bytes:
        """The part of a view that open pages replace: without forms, so that all who see the view share it."""
        return self._rendered(view.template, {"layout": "live.html", "visit": visit, **view.values})

    def _rendered(self, template: str, values: Mapping[str, Any]) -> bytes:
        return self.templates.get_template(template).render(values).encode("utf-8", "backslashreplace")
