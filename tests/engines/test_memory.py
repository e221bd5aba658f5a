"""The memory engine keeps the rules."""

from collections.abc import AsyncIterator

import pytest

from keyloft import ManualClock
from keyloft.core.engine import Engine
from keyloft.engines.memory import MemoryEngine
from tests.engines.contract import EngineContract


class TestMemoryEngine(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        engine = MemoryEngine(clock)
        yield engine
        await engine.aclose()
