"""A database that an earlier version made is refused as it is, and migrated with all that it holds."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import keyloft
from keyloft import DatabaseError, SchemaTooOld, migrations
from keyloft.plugins import BotDatabase
from keyloft.semantic import SemanticStore
from tests.migrations.earlier import DATABASES, LONG_TEXT
from tests.migrations.test_migrations import alembic, carry_out, rows_at, tables, whole
from tools.postgres import fresh_database


@pytest.fixture(params=DATABASES)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database of an earlier version."""
    if request.param.startswith("sqlite"):
        url = f"sqlite:///{tmp_path}/earlier.db"
    else:
        url = request.getfixturevalue("postgres_url")
    for statement in DATABASES[request.param]:
        rows_at(url, statement)
    return url


@pytest.fixture
def fresh(earlier: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of the same kind."""
    if earlier.startswith("sqlite"):
        yield f"sqlite:///{tmp_path}/fresh.db"
    else:
        with fresh_database(request.getfixturevalue("postgres_server")) as url:
            yield url


def schema_of(url: str) -> object:
    """Without the rows of the version counter."""
    rows_at(url, "UPDATE keyloft_version_counter SET version = 0")
    return whole(url)


def has_plugins(url: str) -> bool:
    return "plugin_kv_storage" in tables(url)


async def stored(url: str, *, plugins: bool) -> None:
    async with keyloft.open(url) as kv:
        entries = [entry async for entry in kv.list()]
        assert [(entry.key, entry.value, entry.versionstamp) for entry in entries] == [
            (("long",), LONG_TEXT, 3),
            (("users", "alice"), {"name": "Alice"}, 1),
            (("users", "bob"), {"name": "Bob"}, 2),
        ]
        assert [entry.expires_at is None for entry in entries] == [True, True, False]
        assert await kv.set(("long",), "short") > 9
        assert (await kv.get(("long",))).value == "short"
        async with SemanticStore(kv, sweep_every=None) as semantic:
            trail = await semantic.audit("tenant/acme/project/web/config/flags")
        # The conflict is found by a pointer of its own, which these databases lack.
        assert [(record.action, record.sequence) for record in trail] == [("put", 6), ("put", 7), ("put", 9)]
    database = BotDatabase(url)
    found = await database.kv_get("trivia", "score")
    await database.close()
    assert found == ({"exists": True, "value": 7} if plugins else {"exists": False})


def test_it_is_refused_with_what_to_run(earlier: str) -> None:
    async def open_it() -> None:
        await keyloft.open(earlier)

    before = whole_earlier(earlier)
    with pytest.raises(SchemaTooOld, match="keyloft migrate --database"):
        asyncio.run(open_it())
    assert whole_earlier(earlier) == before


def whole_earlier(url: str) -> object:
    return whole(url), rows_at(url, "SELECT * FROM keyloft_tuples ORDER BY key")


def test_it_is_migrated_with_all_that_it_holds(earlier: str, fresh: str) -> None:
    plugins = has_plugins(earlier)
    migrations.upgrade(earlier)
    assert migrations.current_revision(earlier) == "0007"
    asyncio.run(stored(earlier, plugins=plugins))
    migrations.upgrade(fresh)
    assert schema_of(earlier) == schema_of(fresh)


def test_its_plan_is_shown_and_can_be_carried_out(earlier: str, fresh: str) -> None:
    before, plugins = whole_earlier(earlier), has_plugins(earlier)
    stamp = migrations.current_revision(earlier)
    plan = migrations.plan(earlier)
    assert (plan.current, plan.target) == (stamp, "0007")
    assert [step.revision for step in plan.steps] == (["0007"] if plugins else ["0006", "0007"])
    assert f"earlier revision {stamp}" in plan.steps[0].name
    assert whole_earlier(earlier) == before
    carry_out(earlier, plan.sql)
    asyncio.run(stored(earlier, plugins=plugins))
    migrations.upgrade(fresh)
    assert schema_of(earlier) == schema_of(fresh)


def test_a_step_down_drops_its_plugin_table(earlier: str) -> None:
    if has_plugins(earlier):
        before = migrations.current_revision(earlier)
        with pytest.raises(DatabaseError, match="plugin_kv_storage has rows"):
            migrations.downgrade(earlier, "-1")
        assert migrations.current_revision(earlier) == before
        migrations.downgrade(earlier, "-1", drop=True)
        assert not has_plugins(earlier)
        assert migrations.current_revision(earlier) == "0006"


@pytest.mark.parametrize("earlier", ["sqlite, 0003", "postgresql, 0003"], indirect=True)
@pytest.mark.slow
def test_alembic_brings_it_along_too_but_not_when_it_only_reads(earlier: str) -> None:
    for reading in ("current", "check"):
        done = alembic(earlier, reading)
        assert done.returncode != 0
        assert "revision 0003 of an earlier version: run `alembic upgrade head`" in done.stderr + done.stdout
        assert migrations.current_revision(earlier) == "0003"
    done = alembic(earlier, "upgrade", "head")
    assert done.returncode == 0, done.stderr
    asyncio.run(stored(earlier, plugins=True))


@pytest.mark.parametrize("earlier", ["sqlite, 0001", "postgresql, 0001"], indirect=True)
def test_a_plugin_table_that_is_not_keylofts_is_not_taken_over(earlier: str) -> None:
    rows_at(earlier, "CREATE TABLE plugin_kv_storage (plugin_name TEXT, key TEXT)")
    before = whole_earlier(earlier)
    with pytest.raises(DatabaseError, match=r"plugin_kv_storage.*already exists"):
        migrations.upgrade(earlier)
    assert whole_earlier(earlier) == before
