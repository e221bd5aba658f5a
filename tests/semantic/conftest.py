"""A semantic store on every engine, with a clock that stands still; in some modules also over NATS."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import keyloft
from keyloft import ManualClock, Store
from keyloft.semantic import SemanticStore
from tests.semantic.over_nats import over_nats
from tests.support.postgres import database_url

DATABASES = ["memory", "sqlite file", "postgresql"]
OVER_NATS = "over nats"
ALSO_OVER_NATS = {"test_locks", "test_flags", "test_checkpoints", "test_index_versions", "test_retry"}
"""Modules whose store may also be a client of a service."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_chosen = any(mark.args[0] == "url" for mark in metafunc.definition.iter_markers("parametrize"))
    if {"url", "store"} <= set(metafunc.fixturenames) and not is_chosen:
        name = metafunc.module.__name__.rpartition(".")[2]
        if name in ALSO_OVER_NATS and "kv" not in metafunc.function.__code__.co_varnames:
            metafunc.parametrize("url", [*DATABASES, OVER_NATS], indirect=True)


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param == OVER_NATS:
        request.getfixturevalue("nats_url")  # here, since it starts a server
        return None
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def kv(url: str | None, clock: ManualClock) -> AsyncIterator[Store]:
    async with keyloft.open(url, clock=clock, sweep_every=None, durability="relaxed") as opened:
        yield opened


@pytest.fixture
async def store(kv: Store, request: pytest.FixtureRequest) -> AsyncIterator[SemanticStore]:
    async with SemanticStore(kv, sweep_every=None) as semantic:
        if request.node.callspec.params["url"] != OVER_NATS:
            yield semantic
            return
        async with over_nats(request.getfixturevalue("nats_url"), semantic) as remote:
            yield remote
