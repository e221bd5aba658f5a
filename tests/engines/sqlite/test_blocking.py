"""The SQLite engine for threads keeps the rules, each call made by a thread of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from keyloft import ManualClock
from keyloft.core.engine import Engine
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from tests.engines.contract import EngineContract
from tests.support.threads import EngineInThreads


class TestBlockingSqliteFile(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
        engine = EngineInThreads(BlockingSqliteEngine(SqliteFile(str(tmp_path / "app.db")), clock))
        yield engine
        await engine.aclose()


class TestBlockingSqliteInMemory(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        engine = EngineInThreads(BlockingSqliteEngine(SqliteFile(":memory:"), clock))
        yield engine
        await engine.aclose()
