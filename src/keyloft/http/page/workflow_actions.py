"""What a person can change on the admin page: flags, locks and dead letters; a page asks for confirmation first."""

import re
import uuid
from collections.abc import Sequence
from typing import Any, Final

from keyloft.errors import InvalidArgument, StaleFence
from keyloft.http.page.project_views import FLAG_PREFIX, about_project, opened
from keyloft.http.page.service import ServiceParts
from keyloft.http.page.views import PageRoute, PageView, Visit, redirect, url
from keyloft.http.problems import Problem
from keyloft.http.replies import HttpReply
from keyloft.semantic import keys
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.keys import Project
from keyloft.semantic.rules import ANY, LOCK

_ID: Final = re.compile(r"[0-9a-f]{1,64}", re.ASCII)


class WorkflowActions:
    """Handlers of these changes: GET asks, POST does."""

    def __init__(self, service: ServiceParts) -> None:
        self._service = service

    def routes(self) -> Sequence[PageRoute]:
        handlers: dict[str, Any] = {
            "/project/flag": (self.ask_switch, self.switch),
            "/project/lock": (self.ask_release, self.release),
            "/project/dead-letter": (self.ask_dead_letter, self.dead_letter),
        }
        return [
            PageRoute(path=path, handlers={"GET": ask, "POST": do}, is_change=True)
            for path, (ask, do) in handlers.items()
        ]

    # Flags

    async def ask_switch(self, visit: Visit) -> PageView:
        """Whether to switch a flag."""
        project, entry, turn_on = await self._flag(visit)
        name = visit.needed("name")
        state = "on" if turn_on else "off"
        notes = [f"All who read this flag get {'true' if turn_on else 'false'} from then on."]
        if entry.semantics.ttl_seconds is not None:
            notes.append(f"It expires {entry.semantics.ttl_seconds:,} seconds after that.")
        return _question(
            visit,
            project,
            title=f"Switch the flag {name} {state}?",
            notes=notes,
            facts=[("Flag", name), ("Last writer", entry.last_writer), ("Version", f"{entry.version}")],
            button=f"Switch {state}",
            fields={"name": name, "to": state, "version": entry.version},
            back="/project/flags",
            tab="flags",
        )

    async def switch(self, visit: Visit) -> HttpReply:
        """Switch a flag, if no one has changed it meanwhile."""
        project, entry, turn_on = await self._flag(visit)
        name = visit.needed("name")
        await opened(self._service).put(
            entry.key,
            turn_on,
            expected_version=_number(visit, "version"),
            writer=visit.writer,
            semantics=entry.semantics,
            spec_ref=entry.spec_ref,
        )
        visit.record(f"switch flag {'on' if turn_on else 'off'}", entry.key)
        return _done(visit, project, "/project/flags", f"The flag {name} is {'on' if turn_on else 'off'}.")

    async def _flag(self, visit: Visit) -> tuple[Project, Envelope, bool]:
        project, _ = about_project(visit, "", write=True)
        key = project.prefix + FLAG_PREFIX + visit.needed("name")
        to = visit.text("to")
        if to not in ("on", "off"):
            raise InvalidArgument("to: expected on or off")
        entry = await opened(self._service).get(key)
        if entry is None:
            raise Problem(404, "NOT_FOUND", f"nothing is stored at {key}")
        if not isinstance(entry.value, bool):
            raise InvalidArgument(
                "name: the value of this flag is neither true nor false, so it can't be switched here"
            )
        return project, entry, to == "on"

    # Locks

    async def ask_release(self, visit: Visit) -> PageView:
        """Whether to release a lock."""
        project, _ = about_project(visit, "", write=True)
        path = visit.needed("path")
        entry = await opened(self._service).get(keys.parse(project.prefix + path, "path").key)
        if entry is None or entry.semantics.purpose != LOCK:
            raise Problem(404, "NOT_FOUND", f"no lock is held at {path}")
        return _question(
            visit,
            project,
            title=f"Release the lock {path}?",
            notes=["Its holder may still be at work. Writes with its fencing token are refused from then on."],
            facts=[("Lock", path), ("Holder", entry.last_writer), ("Fence", f"{entry.fence}")],
            button="Release",
            fields={"path": path, "fence": entry.fence},
            back="/project/locks",
            tab="locks",
        )

    async def release(self, visit: Visit) -> HttpReply:
        """Release a lock, if it is still held under the token that was shown."""
        project, _ = about_project(visit, "", write=True)
        path, fence = visit.needed("path"), _number(visit, "fence")
        key = keys.parse(project.prefix + path, "path").key
        keeper = opened(self._service).lock_keeper
        try:
            await keeper.release(key, fence, writer=visit.writer, request_id=uuid.uuid4().hex)
        except StaleFence:
            raise Problem(412, StaleFence.code, f"{path} is no longer held with the fence {fence}") from None
        visit.record(f"release lock with fence {fence}", key)
        return _done(visit, project, "/project/locks", f"The lock {path} is free.")

    # Dead letters

    async def ask_dead_letter(self, visit: Visit) -> PageView:
        """Whether to retry or drop a dead letter."""
        project, _ = about_project(visit, "", write=True)
        name, action = _dead_letter(visit)
        if action == "drop":
            title, button = "Drop this dead letter?", "Drop"
            notes = ["Its writes are never made, and can't be brought back."]
        else:
            title, button = "Retry this dead letter?", "Retry"
            notes = ["Its writes are made now, if what is stored is still what they expect."]
        return _question(
            visit,
            project,
            title=title,
            notes=notes,
            facts=[("Dead letter", name)],
            button=button,
            fields={"id": name, "do": action},
            back="/project/dead-letters",
            tab="dead-letters",
            may_force=action == "retry",
        )

    async def dead_letter(self, visit: Visit) -> HttpReply:
        """Retry or drop a dead letter."""
        project, _ = about_project(visit, "", write=True)
        name, action = _dead_letter(visit)
        kept = opened(self._service).dead_letters
        row, shown = project.dead_letter(name), f"{project.prefix}dead-letter/{name}"
        if action == "retry":
            is_forced = visit.text("force") == "yes"
            await kept.retry_row(row, ANY if is_forced else None)
            visit.record("retry dead letter" + (" over any version" if is_forced else ""), shown)
            return _done(visit, project, "/project/dead-letters", "The writes of the dead letter are made.")
        if not await kept.drop_row(row):
            raise Problem(404, "NOT_FOUND", "this dead letter was retried or dropped meanwhile")
        visit.record("drop dead letter", shown)
        return _done(visit, project, "/project/dead-letters", "The dead letter is dropped.")


def _dead_letter(visit: Visit) -> tuple[str, str]:
    name, action = visit.needed("id"), visit.text("do")
    if not _ID.fullmatch(name):
        raise InvalidArgument("id: expected the id of a dead letter, in hex digits")
    if action not in ("retry", "drop"):
        raise InvalidArgument("do: expected retry or drop")
    return name, action


def _number(visit: Visit, name: str) -> int:
    text = visit.needed(name)
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidArgument(f"{name}: expected a number, as the form of this page has it")
    return int(text)


def _question(visit: Visit, project: Project, **asked: Any) -> PageView:
    visit.check_changes()
    values = {"project": project, "may_force": False, **asked}
    return PageView(template="confirm.html", values=values)


def _done(visit: Visit, project: Project, path: str, message: str) -> HttpReply:
    """Go back to the list, which says what was done."""
    visit.session.notice = message
    return redirect(url(path, tenant=project.tenant, project=project.name))
