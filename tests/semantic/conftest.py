"""A semantic store on every engine, with a clock that stands still."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import keyloft
from keyloft import ManualClock, Store
from keyloft.semantic import SemanticStore
from tests.support.postgres import database_url


@pytest.fixture(params=["memory", "sqlite file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def kv(url: str | None, clock: ManualClock) -> AsyncIterator[Store]:
    async with keyloft.open(url, clock=clock, sweep_every=None, durability="relaxed") as opened:
        yield opened


@pytest.fixture
async def store(kv: Store) -> AsyncIterator[SemanticStore]:
    async with SemanticStore(kv, sweep_every=None) as semantic:
        yield semantic
