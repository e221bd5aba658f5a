"""A connection to NATS and a plugin database, for the tests of what services share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client as Nats

from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Nats]:
    connection = await connect(nats_url, name="tests of keyloft.nats")
    yield connection
    await connection.close()


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[BotDatabase]:
    async with BotDatabase(tmp_path / "bot.db") as db:
        yield db
