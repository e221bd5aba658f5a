"""A plugin service for tests, whose requests have all given back what they counted as in the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import apsw
from nats.aio.client import Client as Nats

from keyloft.plugins import BotDatabase, DatabaseService
from tools.postgres import TIMEOUT_SECONDS


@asynccontextmanager
async def serving_all(client: Nats, db: BotDatabase, prefix: str, **options: Any) -> AsyncIterator[DatabaseService]:
    """A service that has answered everything before it ends, and then counts nothing as waiting."""
    async with DatabaseService(client, db, prefixes=[prefix], **options) as service:
        yield service
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while service.unanswered:
                await asyncio.sleep(0.005)
        assert service._intake is not None
        for owner in service._intake.owners:
            assert (owner.request_bytes, owner.reply_bytes, owner.under_way, owner.under_way_bytes) == (0, 0, 0, 0)


@asynccontextmanager
async def locked(db: BotDatabase) -> AsyncIterator[None]:
    """Another program holds the file: no write is made meanwhile."""
    other = apsw.Connection((await db.engine()).location)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()
