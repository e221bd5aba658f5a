"""Updates open pages when what they show has changed; pages that show the same view share one rendering."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final, TypeAlias

import msgspec

from keyloft import limits
from keyloft.core.records import Latest
from keyloft.errors import KeyloftError
from keyloft.http.context import HttpContext
from keyloft.http.page.sessions import PageSession
from keyloft.http.problems import Problem
from keyloft.http.requests import HttpRequest
from keyloft.http.sse import HEARTBEAT, as_chunk
from keyloft.http.watch import EventStream
from keyloft.nats.errors import overloaded

logger = logging.getLogger(__name__)

Rendering: TypeAlias = Callable[[str, PageSession], Awaitable[bytes]]
"""Makes the live part of the view at an address, as a session may see it."""

_TIMES: Final = re.compile(rb"(<time [^>]*>)[^<]*")
"""Relative times, which the script of each page keeps current."""

ENDED: Final = as_chunk(b"event: ended\ndata: {}\n\n")
"""The session has ended: the page says so, and does not reconnect."""


class _OpenPage:
    """One open page: its stream, and whether it has got the view since it was opened."""

    def __init__(self, stream: EventStream, cookie: str) -> None:
        self.stream = stream
        self.cookie = cookie
        self.is_new = True


class LiveView:
    """One view, and the pages that show it."""

    def __init__(self, address: str, session: PageSession) -> None:
        self.address = address
        self.session = session
        self.pages: dict[_OpenPage, None] = {}
        self.last = b""
        self.state: object = None

    def send(self, body: bytes) -> None:
        """Send the view to the pages that don't have it yet."""
        known = _TIMES.sub(rb"\1", body)
        has_changed = known != self.last
        self.last = known
        event: bytes | None = None
        for page in self.pages:
            if has_changed or page.is_new:
                page.is_new = False
                event = event or as_chunk(b"event: view\ndata: %b\n\n" % msgspec.json.encode(body.decode()))
                page.stream.write(event)


class LiveViews:
    """All open pages. One task renders their views in turn, within a share of a core."""

    def __init__(
        self,
        context: HttpContext,
        render: Rendering,
        find_session: Callable[[str], PageSession | None],
        readings: Callable[[], int],
    ) -> None:
        """Args:
        context: The database, and when the service ends.
        render: Makes the live part of a view.
        find_session: The session of a cookie.
        readings: How often the counters were read: what no commit changes, such as rates, changes with them.
        """
        self._context = context
        self._render = render
        self._find_session = find_session
        self._readings = readings
        self._views: dict[tuple[bytes, str], LiveView] = {}
        self._open = 0
        self._task: asyncio.Task[None] | None = None
        context.when_ending(self._end)

    async def serve(self, request: HttpRequest, address: str, cookie: str) -> None:
        """Send a view whenever it changes, until the page is closed.

        Raises:
            Busy: Too many pages are open.
        """
        session = self._find_session(cookie)
        stream = EventStream(request)
        if session is None:
            async with stream.connected():
                await stream.begin()
                stream.write(ENDED)
            return
        if self._open >= limits.PAGE_STREAMS:
            raise overloaded("too many pages are updated live; this one shows what was stored when it was loaded")
        self._context.check_listeners()
        key = (session.token.digest, address)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = LiveView(address, session)
        page = _OpenPage(stream, cookie)
        self._open += 1
        self._context.meters.watches += 1
        try:
            async with stream.connected():
                await stream.begin()
                view.pages[page] = None
                view.state = None
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._run(), name="keyloft live pages")
                await stream.until_end()
        finally:
            self._open -= 1
            self._context.meters.watches -= 1
            view.pages.pop(page, None)
            if not view.pages and self._views.get(key) is view:
                del self._views[key]

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for view in self._views.values():
            for page in view.pages:
                page.stream.end()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + limits.HTTP_HEARTBEAT_SECONDS
        while self._views:
            began = loop.time()
            self._check_sessions()
            state = await self._state()
            for view in list(self._views.values()):
                if view.pages and view.state != state:
                    view.state = state
                    taken = await self._refresh(view)
                    await asyncio.sleep(taken * (1 / limits.PAGE_LIVE_SHARE - 1))
            if loop.time() > beat_at:
                beat_at = loop.time() + limits.HTTP_HEARTBEAT_SECONDS
                for view in self._views.values():
                    for page in view.pages:
                        page.stream.write(HEARTBEAT)
            await asyncio.sleep(max(0.0, began + limits.PAGE_LIVE_SECONDS - loop.time()))

    async def _state(self) -> object:
        """A value that changes whenever a view may have changed: the version counter, or the number of readings."""
        version = None
        if self._context.engine is not None:
            try:
                [version] = await self._context.engine.read(Latest())
            except KeyloftError:
                version = None
        return version, self._readings()

    async def _refresh(self, view: LiveView) -> float:
        """Render a view and send it; returns how many seconds that took."""
        began = perf_counter()
        try:
            view.send(await self._render(view.address, view.session))
        except (Problem, KeyloftError) as error:
            logger.debug("an open page can't be updated: %s", error)
        except Exception:
            logger.exception("an open page can't be updated")
        return perf_counter() - began

    def _check_sessions(self) -> None:
        """End the streams of sessions that have ended, also because their tokens are no longer valid."""
        for view in self._views.values():
            for page in list(view.pages):
                session = self._find_session(page.cookie)
                if session is None:
                    page.stream.write(ENDED)
                    page.stream.end()
                else:
                    view.session = session
