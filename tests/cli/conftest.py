"""What tests of commands share: a database on each engine, and a way to run commands on it."""

from functools import partial
from pathlib import Path

import pytest

from tests.cli.commands import SURROUNDINGS, Keyloft, run_command
from tests.support.etcd import and_etcd
from tests.support.postgres import database_url


@pytest.fixture
def has_tables() -> bool:
    """Whether a database on PostgreSQL has Keyloft's tables before the first command; `WITHOUT_TABLES` says no."""
    return True


@pytest.fixture(params=and_etcd("sqlite file", "postgresql"))
def environment(request: pytest.FixtureRequest, tmp_path: Path, has_tables: bool) -> dict[str, str]:
    """The environment variables of a command, which name an empty database."""
    url = database_url(request.param, request, tmp_path, tables=has_tables)
    assert url is not None
    return {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": url}


@pytest.fixture
def run(environment: dict[str, str]) -> Keyloft:
    """Runs a command on that database, in this process."""
    return partial(run_command, environment)
