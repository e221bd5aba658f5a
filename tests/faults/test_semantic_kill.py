"""After a kill at any point, the audit trail and what is stored agree, and nothing acknowledged is missing."""

import random
from pathlib import Path

import pytest

import keyloft
from keyloft.semantic import AuditRecord, SemanticStore
from tests.semantic.entries import PROJECT, agreeing_trail, trail
from tests.support.etcd import and_etcd
from tests.support.postgres import database_url

from .children import child
from .children.semantic import HurriedClock

pytestmark = pytest.mark.slow

_WRITERS = 8
_KILLS = 3
_KEYS = [f"{PROJECT}/{name}/{writer}" for name in ("single", "pair") for writer in range(_WRITERS)]


def shown(record: AuditRecord) -> str:
    """What a writer says once it hears that this was made."""
    match record.action:
        case "put" | "restore":
            return f"{record.action} {record.key} {record.version_after}"
        case "delete":
            return f"delete {record.key} {record.version_before}"
        case "conflict":
            return f"conflict {record.key} {record.correlation_id}"
    return ""


@pytest.fixture(params=and_etcd("sqlite file", "postgresql"))
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = database_url(request.param, request, tmp_path)
    assert url is not None
    return url


async def test_the_trail_and_the_store_agree_after_a_kill(database: str, rng: random.Random) -> None:
    acknowledged: set[str] = set()
    for _ in range(_KILLS):
        count = len(acknowledged) + rng.randrange(100, 500)
        async with child("semantic", database, str(_WRITERS)) as process:
            async for line in process.lines():
                acknowledged.add(line)
                if len(acknowledged) == count:
                    process.kill()
            assert await process.ended() == (-9, "")

        async with keyloft.open(database, clock=HurriedClock()) as kv, SemanticStore(kv, sweep_every=None) as store:
            everything = await trail(store, PROJECT)
            for key in _KEYS:
                own = [record for record in everything if record.key == key]
                assert await agreeing_trail(kv, store, key) == own
            missing = acknowledged - {shown(record) for record in everything}
            assert not missing
    assert {record.action for record in everything} >= {"put", "delete", "restore", "conflict", "expire"}
