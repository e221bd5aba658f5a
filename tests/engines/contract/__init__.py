"""The rules that every engine keeps. An engine's own test file is `EngineContract` and a fixture."""

from collections.abc import AsyncIterator

import pytest

from keyloft import Closed, ManualClock
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Get
from tests.engines.contract.batches import BatchContract
from tests.engines.contract.calls import A, put
from tests.engines.contract.change_log import ChangeLogContract
from tests.engines.contract.expiry import ExpiryContract
from tests.engines.contract.late_touches import LateTouchContract
from tests.engines.contract.reads import ReadContract
from tests.engines.contract.watches import WatchContract


class EngineContract(ReadContract, BatchContract, ExpiryContract, WatchContract, ChangeLogContract, LateTouchContract):
    """Subclass it and give it an `engine` fixture that uses the `clock`."""

    @pytest.fixture
    def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        raise NotImplementedError

    async def test_a_closed_engine_says_so(self, engine: Engine) -> None:
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(Closed, match="closed"):
            await engine.read(Get(A, b"k"))
        with pytest.raises(Closed, match="closed"):
            await engine.commit(Batch((put(b"k"),)))
        with pytest.raises(Closed, match="closed"):
            engine.watch(Get(A, b"k"))
        with pytest.raises(Closed, match="closed"):
            engine.submit(Batch((put(b"k"),)), print)
