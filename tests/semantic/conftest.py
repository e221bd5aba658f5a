"""A semantic store on every engine, with a clock that stands still."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import keyloft
from keyloft import ManualClock, Store
from keyloft.semantic import SemanticStore
from tests.support.postgres import database_url
from tools.postgres import fresh_database, query


@pytest.fixture(scope="session")
def semantic_database(postgres_server: str) -> Iterator[str]:
    """A database for all tests of the semantic store: to empty one takes a fraction of the time to make one."""

    async def make_tables(url: str) -> None:
        await (await keyloft.open(url)).aclose()

    with fresh_database(postgres_server) as url:
        asyncio.run(make_tables(url))
        yield url


@pytest.fixture(params=["memory", "sqlite file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param != "postgresql":
        return database_url(request.param, request, tmp_path)
    database: str = request.getfixturevalue("semantic_database")
    query(database, "TRUNCATE keyloft_semantic, keyloft_tuples")
    return database


@pytest.fixture
async def kv(url: str | None, clock: ManualClock) -> AsyncIterator[Store]:
    async with keyloft.open(url, clock=clock, sweep_every=None, durability="relaxed") as opened:
        yield opened


@pytest.fixture
async def store(kv: Store) -> AsyncIterator[SemanticStore]:
    async with SemanticStore(kv, sweep_every=None) as semantic:
        yield semantic
