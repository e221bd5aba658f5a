"""A semantic store on every engine, with a clock that stands still; in some modules also over NATS."""

import inspect
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import keyloft
from keyloft import ManualClock, Store
from keyloft.semantic import SemanticStore
from tests.semantic.over_nats import over_nats
from tests.support.etcd import and_etcd
from tests.support.postgres import database_url

DATABASES = and_etcd("memory", "sqlite file", "postgresql")
OVER_NATS = "over nats"
ALSO_OVER_NATS = {"test_locks", "test_flags", "test_checkpoints", "test_index_versions", "test_retry"}
"""Modules whose store may also be a client of a service."""

ON_DATABASES = pytest.mark.parametrize("url", DATABASES, indirect=True)
"""For tests of these modules that would take long over NATS, and show nothing more there."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose where the store is, unless the module or the test does so itself."""
    is_chosen = any(mark.args[0] == "url" for mark in metafunc.definition.iter_markers("parametrize"))
    if "url" not in metafunc.fixturenames or hasattr(metafunc.module, "url") or is_chosen:
        return
    names, module = inspect.signature(metafunc.function).parameters, metafunc.module.__name__.rpartition(".")[2]
    is_of_clients = module in ALSO_OVER_NATS and "store" in names and "kv" not in names
    metafunc.parametrize("url", [*DATABASES, OVER_NATS] if is_of_clients else DATABASES, indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param == OVER_NATS:
        request.getfixturevalue("nats_url")  # here, since it may start a server
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
