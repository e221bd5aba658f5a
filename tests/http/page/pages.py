"""The admin page of a service in the test's own event loop, and a client that logs in to it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from typing import Any

import httpx

from keyloft.http.app import HttpApp
from keyloft.http.context import HttpContext
from keyloft.http.listener import HttpListener
from keyloft.http.origins import Origins
from keyloft.http.page.service import NatsState, ServiceParts
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import AccessToken, admin_token
from keyloft.nats.meters import ServiceMeters
from keyloft.plugins import BotDatabase
from keyloft.plugins.meters import Meters
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic import SemanticStore
from keyloft.semantic.monitoring import Signals
from keyloft.tuples.store import Store
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, StillPages
from tests.support.http import http_client


class RunningPage:
    """A page that runs, what it shows, and a client."""

    def __init__(self, context: HttpContext, db: BotDatabase, store: SemanticStore, url: str) -> None:
        self.context = context
        self.db = db
        self.store = store
        self.kv = Store(context.database())
        self.url = url

    @asynccontextmanager
    async def client(self, token: str | None = ADMIN_TOKEN) -> AsyncIterator[httpx.AsyncClient]:
        """A browser's worth of cookies; logged in with a token, unless it is None."""
        async with http_client(self.url, timeout=LONGEST_SECONDS) as client:
            if token is not None:
                answer = await client.get("/", params={"token": token})
                assert (answer.status_code, answer.headers["location"]) == (303, "/page")
            yield client


def form_token(html: str) -> str:
    """The token that the forms of a page carry."""
    return str(re.findall(r'name="form_token" value="([^"]+)"', html)[0])


def links(html: str) -> list[str]:
    return [unescape(address) for address in re.findall(r'href="([^"]+)"', html)]


def rows(html: str) -> list[str]:
    """The text of the first cell of each row of a table."""
    cells = re.findall(r'<th scope="row"[^>]*>(.*?)</th>', html, re.DOTALL)
    return [unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in cells]


@asynccontextmanager
async def running_page(
    *tokens: AccessToken, is_read_only: bool = False, url: str = ":memory:", **more: Any
) -> AsyncIterator[RunningPage]:
    """Run a page on a database, one in memory if no other is given."""
    async with BotDatabase(url) as db:
        await db.create_tables()
        engine = await db.engine()
        async with PluginUsage(db) as usage, SemanticStore(Store(engine), sweep_every=None) as store:
            service = ServiceParts(
                meters=Meters(),
                tenants=ServiceMeters(),
                usage=usage,
                signals=Signals(),
                nats=lambda: NatsState(is_connected=True, addresses=["nats://127.0.0.1:4222"], is_own=True),
                is_read_only=is_read_only,
                **more,
            )
            service.semantic = store
            context = HttpContext(StillPages(), ValidTokens((admin_token(ADMIN_TOKEN), *tokens)), Origins())
            context.service = service
            listener = HttpListener(HttpApp(context))
            context.opened(engine)
            _, port = await listener.start("127.0.0.1", 0)
            try:
                yield RunningPage(context, db, store, f"http://127.0.0.1:{port}")
            finally:
                listener.stop_accepting()
                context.end_streams()
                await listener.aclose()
