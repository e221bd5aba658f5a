"""The view of a project's audit trail, newest first, with filters."""

from collections.abc import Sequence
from typing import Any, Final

from keyloft import limits
from keyloft.errors import InvalidArgument
from keyloft.http.page.filtering import fitting
from keyloft.http.page.project_views import about_project, opened
from keyloft.http.page.service import ServiceParts
from keyloft.http.page.views import PageRoute, PageView, Visit
from keyloft.semantic.audit import POSITION_BYTES, AuditRecord
from keyloft.semantic.keys import path_of

ACTIONS: Final = ("put", "delete", "restore", "expire", "conflict")


class AuditViews:
    """The handler of this view."""

    def __init__(self, service: ServiceParts) -> None:
        self._service = service

    def routes(self) -> Sequence[PageRoute]:
        return [PageRoute(path="/project/audit", handlers={"GET": self.trail})]

    async def trail(self, visit: Visit) -> PageView:
        """Who did what to which entry, and when; hashes stand for values."""
        project, values = about_project(visit, "Audit trail")
        wanted = {name: visit.text(name).strip() for name in ("action", "writer", "path")}
        position = _position(visit.text("before"))
        trail = opened(self._service).audit(project.prefix[:-1], reverse=True, limit=limits.PAGE_SCANNED_ROWS + 1)
        found, last = await fitting(trail.located(position), lambda located: _fits(located[1], wanted))
        rows = [(path_of(record.key), record) for _, record in found]
        more = None if last is None else last[0].hex()
        shown: dict[str, Any] = {"rows": rows, "next": more, "actions": ACTIONS, "tab": "audit", **wanted}
        values |= {**shown, "before": visit.text("before")}
        return PageView(template="audit.html", values=values, is_live=position is None)


def _position(text: str) -> bytes | None:
    if not text:
        return None
    try:
        position = bytes.fromhex(text)
    except ValueError:
        position = b""
    if len(position) != POSITION_BYTES:
        raise InvalidArgument("before: expected a position, as the links of this page have it")
    return position


def _fits(record: AuditRecord, wanted: dict[str, str]) -> bool:
    return (
        wanted["action"] in ("", record.action)
        and record.writer.startswith(wanted["writer"])
        and path_of(record.key).startswith(wanted["path"])
    )
