"""The SQLite engine keeps the rules, on a file and in memory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from keyloft import ManualClock
from keyloft.engine import Engine
from keyloft.engines.sqlite import SqliteEngine
from tests.engines.contract import EngineContract


class TestSqliteFile(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
        engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
        yield engine
        await engine.aclose()


class TestSqliteInMemory(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        engine = await SqliteEngine.open(":memory:", clock)
        yield engine
        await engine.aclose()
