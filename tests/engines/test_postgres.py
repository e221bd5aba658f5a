"""The PostgreSQL engine keeps the rules, on a real server."""

from collections.abc import AsyncIterator

import pytest

from keyloft import ManualClock
from keyloft.engine import Engine
from keyloft.engines.postgres import PostgresEngine
from tests.engines.contract import EngineContract


class TestPostgres(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, postgres_url: str) -> AsyncIterator[Engine]:
        engine = await PostgresEngine.open(postgres_url, clock)
        yield engine
        await engine.aclose()
