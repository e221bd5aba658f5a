"""The etcd engine keeps the rules, on a real node."""

from collections.abc import AsyncIterator

import pytest

from keyloft import ManualClock
from keyloft.core.engine import Engine
from keyloft.engines import open_engine
from tests.engines.contract import EngineContract


class TestEtcd(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, etcd_url: str) -> AsyncIterator[Engine]:
        engine = await open_engine(etcd_url, clock)
        yield engine
        await engine.aclose()
