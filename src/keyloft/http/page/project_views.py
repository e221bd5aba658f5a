"""The views of the semantic store: projects, and of one project its entries, flags, locks and dead letters."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Get, Scan, Space
from keyloft.core.values import JSON
from keyloft.errors import Unreachable
from keyloft.http.context import HttpContext
from keyloft.http.page.filtering import fitting
from keyloft.http.page.service import ServiceParts
from keyloft.http.page.values import show
from keyloft.http.page.views import PageRoute, PageView, Visit
from keyloft.http.problems import Problem
from keyloft.http.tokens import ANY
from keyloft.semantic import keys
from keyloft.semantic.envelope import Envelope, envelope_of, read_entry
from keyloft.semantic.keys import Project, rows_below
from keyloft.semantic.rules import PURPOSES
from keyloft.semantic.store import SemanticStore

_ENTRIES: Final = b"e/"
_RECORDS: Final = b"a/"
_TITLES: Final = {"checkpoint": "Checkpoints", "cursor": "Cursors", "index_version": "Index versions"}
FLAG_PREFIX: Final = "flags/"


class DeadLetterRow(Struct, frozen=True, kw_only=True):
    """A dead letter in the list, without values."""

    id: str
    at: datetime
    error_code: str
    error: str
    attempts: int
    writes: Sequence[tuple[str, str, str]]
    """Of each write: what it does, the path, and the writer."""


class FlagRow(Struct, frozen=True, kw_only=True):
    """A flag in the list. It shows whether a switch is on; any other value is hidden."""

    name: str
    is_on: bool | None
    entry: Envelope


class ProjectViews:
    """Handlers of these views."""

    def __init__(self, context: HttpContext, service: ServiceParts) -> None:
        self._context = context
        self._service = service

    def routes(self) -> Sequence[PageRoute]:
        handlers = {
            "/projects": self.projects,
            "/project": self.entries,
            "/project/flags": self.flags,
            "/project/locks": self.locks,
            "/project/dead-letters": self.dead_letters,
        }
        shown = [PageRoute(path=path, handlers={"GET": handler}) for path, handler in handlers.items()]
        return [*shown, PageRoute(path="/project/entry", handlers={"GET": self.entry, "POST": self.value})]

    async def projects(self, visit: Visit) -> PageView:
        """The projects of all tenants that the token may read."""
        tenant, after = visit.text("q").strip(), visit.text("after")
        engine = self._context.database()
        if visit.token.is_admin or visit.may("tenant", ANY, status=True):
            found = await stored_projects(engine, tenant, after, limits.PAGE_ROWS + 1)
        else:
            # In the order of the rows, where a-b/ comes before a/, because the next page continues in that order.
            own = sorted({f"{scope.name}/" for scope in visit.token.scopes if scope.area == "tenant"})
            each = [await stored_projects(engine, begins, after, limits.PAGE_ROWS + 1) for begins in own]
            found = [project for projects in each for project in projects if project.tenant.startswith(tenant)]
        more = found[limits.PAGE_ROWS - 1] if len(found) > limits.PAGE_ROWS else None
        values = {
            "title": "Projects",
            "q": tenant,
            "after": after,
            "projects": found[: limits.PAGE_ROWS],
            "next": None if more is None else f"{more.tenant}/{more.name}",
        }
        return PageView(template="projects.html", values=values, is_live=True)

    async def entries(self, visit: Visit) -> PageView:
        """The entries of a project, without their values; of one purpose, if one is chosen."""
        purpose, path, after = visit.text("purpose"), visit.text("q"), visit.optional("after")
        project, values = self._about(visit, _TITLES.get(purpose, "Entries"))
        listing = opened(self._service).list(
            project.prefix + path, after=None if after is None else project.prefix + after
        )
        rows, last = await fitting(aiter(listing), lambda entry: purpose in ("", entry.semantics.purpose))
        more = None if last is None else keys.path_of(last.key)
        purposes = sorted({*PURPOSES, *[row.semantics.purpose for row in rows], *([purpose] if purpose else [])})
        values |= {"q": path, "purpose": purpose, "purposes": purposes, "rows": rows, "next": more, "after": after}
        values["tab"] = purpose or "entries"
        return PageView(template="entries.html", values=values, is_live=True)

    async def entry(self, visit: Visit) -> PageView:
        """One entry, without its value."""
        return await self._entry(visit, with_value=False)

    async def value(self, visit: Visit) -> PageView:
        """One entry, with the value that was asked for."""
        return await self._entry(visit, with_value=True)

    async def _entry(self, visit: Visit, *, with_value: bool) -> PageView:
        project, values = self._about(visit, visit.needed("path"))
        key = keys.parse(project.prefix + visit.needed("path"), "path")
        [record] = await self._context.database().read(Get(Space.SEMANTIC, key.entry))
        values |= {"path": key.path, "tab": "entries", "entry": None, "value": None, "bytes": None}
        values["may_show"] = visit.may("tenant", project.tenant)
        if record is None:
            return PageView(template="entry.html", values=values, status=404, is_live=not with_value)
        stored = read_entry(record)
        values |= {"entry": envelope_of(record, key.key, stored=stored, value=False), "bytes": len(bytes(stored.value))}
        if with_value:
            visit.token.check_owner("tenant", project.tenant)
            visit.record("show value", key.key)
            values["value"] = show(bytes(stored.value), JSON)
        return PageView(template="entry.html", values=values, is_live=not with_value)

    async def flags(self, visit: Visit) -> PageView:
        """The flags of a project, with their switches."""
        project, values = self._about(visit, "Flags")
        after, more, may_show = visit.optional("after"), None, visit.may("tenant", project.tenant)
        rows: list[FlagRow] = []
        listing = opened(self._service).list(
            project.prefix + FLAG_PREFIX,
            values=True,
            limit=limits.PAGE_ROWS + 1,
            after=None if after is None else project.prefix + FLAG_PREFIX + after,
        )
        async for entry in listing:
            name = keys.path_of(entry.key).removeprefix(FLAG_PREFIX)
            is_switch = may_show and isinstance(entry.value, bool)
            rows.append(FlagRow(name=name, is_on=entry.value if is_switch else None, entry=entry))
        if len(rows) > limits.PAGE_ROWS:
            rows = rows[: limits.PAGE_ROWS]
            more = rows[-1].name
        values |= {"rows": rows, "tab": "flags", "next": more, "after": after}
        values["may_write"] = visit.may("tenant", project.tenant, write=True)
        return PageView(template="flags.html", values=values, is_live=True)

    async def locks(self, visit: Visit) -> PageView:
        """The locks of a project that are held."""
        project, values = self._about(visit, "Locks")
        after = visit.text("after")
        known = int(after) if after.isascii() and after.isdecimal() and len(after) < 19 else None
        rows = await opened(self._service).locks(project.prefix[:-1], limit=limits.PAGE_ROWS + 1, after=known)
        more = rows[limits.PAGE_ROWS - 1].fence if len(rows) > limits.PAGE_ROWS else None
        values |= {"rows": rows[: limits.PAGE_ROWS], "tab": "locks", "next": more, "after": after}
        values["may_write"] = visit.may("tenant", project.tenant, write=True)
        return PageView(template="locks.html", values=values, is_live=True)

    async def dead_letters(self, visit: Visit) -> PageView:
        """Writes of a project that were given up."""
        project, values = self._about(visit, "Dead letters")
        after = visit.optional("after")
        found = opened(self._service).dead_letters.list(project.prefix[:-1], limit=limits.PAGE_ROWS + 1, after=after)
        rows: list[DeadLetterRow] = []
        async for letter in found:
            rows.append(
                DeadLetterRow(
                    id=letter.id,
                    at=letter.at,
                    error_code=letter.error_code,
                    error=letter.error,
                    attempts=letter.attempts,
                    writes=[(one.action, keys.path_of(one.key), one.writer) for one in letter.intents],
                )
            )
        more = rows[limits.PAGE_ROWS - 1].id if len(rows) > limits.PAGE_ROWS else None
        values |= {"rows": rows[: limits.PAGE_ROWS], "tab": "dead-letters", "next": more, "after": after}
        values["may_write"] = visit.may("tenant", project.tenant, write=True)
        return PageView(template="dead_letters.html", values=values, is_live=True)

    def _about(self, visit: Visit, title: str) -> tuple[Project, dict[str, Any]]:
        return about_project(visit, title)


def about_project(visit: Visit, title: str, *, write: bool = False) -> tuple[Project, dict[str, Any]]:
    """The project that a visit is about, if the token may read or change it, and what every view of one shows.

    Raises:
        InvalidKey: No project can have this name.
        NotPermitted: The token may not.
    """
    project = keys.checked_project(visit.needed("tenant"), visit.needed("project"))
    visit.token.check_owner("tenant", project.tenant, write=write, status=not write)
    return project, {"title": title, "project": project}


def opened(service: ServiceParts) -> SemanticStore:
    """The semantic store.

    Raises:
        Problem: The database is not open yet.
    """
    if service.semantic is None:
        raise Problem(503, Unreachable.code, "the database is not open yet", headers=((b"retry-after", b"1"),))
    return service.semantic


async def stored_projects(engine: Engine, begins: str, after: str, limit: int) -> list[Project]:
    """The projects that have entries or audit records, in the order of their rows, found by seeking.

    Args:
        engine: The database.
        begins: Only projects whose tenant begins with this text.
        after: Only projects after this one, as in `acme/web`.
        limit: How many to return at most.
    """
    found: list[Project] = []
    # In the order of bytes, 0 comes after the slash: `acme/web0` sorts after all rows of the project acme/web.
    low = f"{after}0".encode() if after else b""
    low, high = max(low, begins.encode()), begins.encode() + b"\xff"
    while len(found) < limit and low < high:
        pages = await engine.read(
            *[Scan(Space.SEMANTIC, kind + low, kind + high, 1, keys_only=True) for kind in (_ENTRIES, _RECORDS)]
        )
        rows = [page.keys[0][len(_ENTRIES) :] for page in pages if page]
        if not rows:
            break
        tenant, name, _ = min(rows).split(b"/", 2)
        found.append(Project(tenant.decode(), name.decode()))
        _, low = rows_below(b"%b/%b/" % (tenant, name))
    return found
