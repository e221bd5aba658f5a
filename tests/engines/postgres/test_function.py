"""The function that commits on PostgreSQL: where it is made, who may call it, and servers that lack something."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keyloft import DatabaseError, admin
from keyloft.core import keys
from keyloft.core.records import Batch, Committed, Get, Set, Space, Sum
from keyloft.core.values import Encoding, unpack_counter
from keyloft.engines import open_engine
from keyloft.engines.postgres.engine import PostgresEngine
from tests.support.postgres_commits import A, opened, put, stored
from tests.support.postgres_proxy import ENDLESS_SECONDS, pooler
from tools.postgres import name_of, query

P = Space.PLUGINS


_ROLE = "keyloft_writer"


@contextmanager
def role_that_may_write(url: str) -> Iterator[str]:
    """The URL of a role that may use Keyloft's tables, and may create nothing."""
    query(url, f"CREATE ROLE {_ROLE} LOGIN")
    query(url, f"GRANT USAGE ON SCHEMA public TO {_ROLE}")
    query(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {_ROLE}")
    try:
        yield url.replace("postgres@", f"{_ROLE}@", 1)
    finally:
        query(url, f"DROP OWNED BY {_ROLE}")
        query(url, f"DROP ROLE {_ROLE}")


def drop(url: str, engine: PostgresEngine) -> None:
    """Drop the functions that commit."""
    query(url, f"DROP FUNCTION {', '.join(engine.server.functions.names)}")


async def test_a_user_who_may_not_make_functions_commits_without_one(postgres_url: str) -> None:
    async with opened(postgres_url) as owners:
        drop(postgres_url, owners)
    with role_that_may_write(postgres_url) as url:
        engine = await open_engine(url)
        assert isinstance(engine, PostgresEngine)
        assert not engine.server.has_function
        await engine.commit(Batch((put(b"k"), Sum(A, b"n", 2))))
        done = await engine.commit(Batch((Sum(A, b"n", 2),)))
        assert isinstance(done, Committed)
        assert done.values == (4,)
        await engine.aclose()


@pytest.mark.parametrize("when", ["before", "while it is open"])
async def test_a_user_who_may_not_call_the_function_commits_without_it(postgres_url: str, when: str) -> None:
    async with opened(postgres_url) as owners:
        revoke = f"REVOKE EXECUTE ON FUNCTION {', '.join(owners.server.functions.names)} FROM public"
    if when == "before":
        query(postgres_url, revoke)
    with role_that_may_write(postgres_url) as url:
        engine = await open_engine(url)
        assert isinstance(engine, PostgresEngine)
        assert engine.server.has_function == (when != "before")
        await engine.commit(Batch((put(b"k"), Sum(A, b"n", 2))))
        if when != "before":
            query(postgres_url, revoke)
        done = await engine.commit(Batch((Sum(A, b"n", 2),)))
        assert isinstance(done, Committed)
        assert done.values == (4,)
        assert not engine.server.has_function
        await engine.aclose()


async def test_a_user_who_may_not_write_to_a_table_gets_an_error_and_keeps_the_function(postgres_url: str) -> None:
    async with opened(postgres_url):
        pass
    with role_that_may_write(postgres_url) as url:
        query(postgres_url, f"REVOKE INSERT ON keyloft_tuples FROM {_ROLE}")
        engine = await open_engine(url)
        assert isinstance(engine, PostgresEngine)
        with pytest.raises(DatabaseError, match=r"permission denied.*GRANT"):
            await engine.commit(Batch((put(b"k"),)))
        assert engine.server.has_function
        await engine.aclose()


async def test_a_function_that_is_dropped_is_made_again(postgres_url: str) -> None:
    async with opened(postgres_url) as engine:
        await engine.commit(Batch((put(b"k"),)))
        drop(postgres_url, engine)
        await engine.commit(Batch((put(b"k"),)))
        await engine.commit(Batch((Sum(A, b"n", 1),)))
        assert query(postgres_url, engine.server.functions.may_call) == [(True,)]


@pytest.mark.parametrize("missing", range(4))
async def test_a_single_function_that_is_dropped_is_made_again(postgres_url: str, missing: int) -> None:
    async with opened(postgres_url) as engine:
        query(postgres_url, f"DROP FUNCTION {engine.server.functions.names[missing]}")
        assert query(postgres_url, engine.server.functions.may_call) == [(False,)]
    async with opened(postgres_url) as engine:
        assert engine.server.has_function
        assert query(postgres_url, engine.server.functions.may_call) == [(True,)]


# Where the function is


def functions(url: str) -> list[str]:
    return [row[0] for row in query(url, "SELECT oid::regproc::text FROM pg_proc WHERE proname ~ '^keyloft_commit_'")]


def search(url: str, path: str) -> None:
    [[name]] = query(url, "SELECT current_database()")
    query(url, f"ALTER DATABASE {name} SET search_path = {path}")


@pytest.mark.parametrize("name", ["MyApp", 'my "own" schema', "a.b", "50%", "$keyloft$"])
async def test_the_schema_of_the_tables_may_have_any_name(postgres_url: str, name: str) -> None:
    quoted = '"{}"'.format(name.replace('"', '""'))
    query(postgres_url, f"CREATE SCHEMA {quoted}")
    search(postgres_url, quoted)
    for _ in range(2):
        async with opened(postgres_url) as engine:
            await engine.commit(Batch((put(keys.encode(("k",))),)))
            assert query(postgres_url, engine.server.functions.may_call) == [(True,)]
    report = await admin.check(postgres_url)
    assert (report.rows, report.findings) == (1, ())


@pytest.mark.parametrize("behind", ["nothing", "a pooler"])
async def test_the_function_belongs_to_the_tables_whatever_the_search_path_is(postgres_url: str, behind: str) -> None:
    """Another schema comes first, with a function of the same name."""
    for name in ("first", '"it\'s"'):
        query(postgres_url, f"CREATE SCHEMA {name}")
    search(postgres_url, '"it\'s"')
    async with opened(postgres_url) as owner:
        await owner.commit(Batch((Sum(A, b"n", 1),)))
        home, _, name = owner.server.functions.name.partition(".")
    assert home == '"it\'s"'
    query(postgres_url, f"CREATE FUNCTION first.{name}() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    search(postgres_url, 'first, "it\'s"')
    async with pooler(postgres_url) as (_, pooled), opened(postgres_url if behind == "nothing" else pooled) as engine:
        assert engine.server.has_function
        done = await engine.commit(Batch((Sum(A, b"n", 1),)))
        assert isinstance(done, Committed)
        assert done.values == (2,)
    assert len(functions(postgres_url)) == 5, "others were made"


async def test_a_schema_of_ones_own_that_comes_first_does_not_get_the_function(postgres_url: str) -> None:
    """Such as the one that has the user's name, where others would not find it."""
    async with opened(postgres_url) as owner:
        names = owner.server.functions.names
        drop(postgres_url, owner)
    query(postgres_url, "CREATE SCHEMA postgres")
    async with opened(postgres_url) as engine:
        await engine.commit(Batch((Sum(A, b"n", 1),)))
        assert engine.server.has_function
    assert set(functions(postgres_url)) == {name.removeprefix("public.") for name in names}


async def test_functions_of_earlier_revisions_are_dropped_and_those_of_this_one_are_kept(postgres_url: str) -> None:
    async with opened(postgres_url) as engine:
        names = engine.server.functions.names
        drop(postgres_url, engine)
    revision = names[0].split("_")[2]
    others = ("keyloft_commit_0001_aaaaaaaa", f"keyloft_commit_{revision}_bbbbbbbb", "keyloft_commit_of_mine")
    for other in others:
        query(postgres_url, f"CREATE FUNCTION {other}() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    async with opened(postgres_url) as engine:
        assert engine.server.has_function
    assert set(functions(postgres_url)) == {*[name.partition(".")[2] for name in names], *others[1:]}


async def test_a_database_without_notifications_is_written_and_watched(postgres_url: str) -> None:
    query(postgres_url, "ALTER FUNCTION pg_notify(text, text) RENAME TO no_longer_notify")
    async with opened(postgres_url) as engine, opened(postgres_url, by="locking") as other:
        assert not engine.server.has_notifications
        watch = engine.watch(Get(A, b"k"))
        await anext(aiter(watch))
        for writer in (other, engine, other):
            await writer.commit(Batch((Sum(A, b"k", 1),)))
            async with asyncio.timeout(60):
                [change] = await anext(aiter(watch))
            assert change.record is not None


async def test_a_refusal_for_something_that_the_server_lacks_is_reported_at_once(postgres_url: str) -> None:
    async with opened(postgres_url) as engine:
        query(
            postgres_url,
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN RAISE feature_not_supported USING MESSAGE = 'no such thing here'; END$$",
        )
        query(
            postgres_url, "CREATE TRIGGER refuse BEFORE INSERT ON keyloft_tuples FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        began = time.monotonic()
        with pytest.raises(DatabaseError, match="no such thing here"):
            await engine.commit(Batch((put(b"k"),)))
        assert time.monotonic() - began < ENDLESS_SECONDS


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_behind_a_pooler_another_isolation_level_is_overruled(postgres_url: str, isolation: str) -> None:
    name = postgres_url.split("/")[3].partition("?")[0]
    query(postgres_url, f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    async with pooler(postgres_url) as (_, url), opened(url) as one, opened(url) as other:
        for engine in (one, other):
            await engine.commit(Batch((put(b"k"),)))
        await asyncio.gather(*[engine.commit(Batch((Sum(A, b"n", 1),))) for engine in (one, other) for _ in range(20)])
        assert unpack_counter((await stored(one, b"n")).value) == 40


@pytest.mark.parametrize("conforming", ["on", "off"])
async def test_a_pooler_gets_every_value_as_it_is(postgres_url: str, conforming: str) -> None:
    """Behind a pooler, values are written as literals, in which a backslash may have a meaning."""
    [[name]] = query(postgres_url, "SELECT current_database()")
    query(postgres_url, f"ALTER DATABASE {name} SET standard_conforming_strings = {conforming}")
    async with pooler(postgres_url) as (_, url), opened(url) as engine:
        await engine.commit(Batch((put(b"first"),)))
        assert engine.server.is_pooled
        assert engine.server.has_function
        values = [bytes(range(256)), b"'", b"''", b"\\", b"\\'", b'"{},', b"NULL", b"$keyloft$", b""]
        await engine.commit(Batch(tuple([Set(A, b"k" + value, value, Encoding.BYTES) for value in values])))
        for value in values:
            assert (await stored(engine, b"k" + value)).value == value
        texts = ['"é"', '"\'"', r'"\\"', r'"\""', '"{NULL}"', '"$keyloft$"', '"\U0010ffff"']
        await engine.commit(Batch(tuple([Set(P, ("p", text), text.encode(), Encoding.JSON) for text in texts])))
        for text in texts:
            [record] = await engine.read(Get(P, ("p", text)))
            assert record is not None
            assert record.value == text.encode()


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
async def test_a_database_in_which_arrays_hold_no_nulls_is_written(postgres_url: str, *, is_pooled: bool) -> None:
    query(postgres_url, f"ALTER DATABASE {name_of(postgres_url)} SET array_nulls = off")
    async with pooler(postgres_url) as (_, pooled_url), opened(pooled_url if is_pooled else postgres_url) as engine:
        await engine.commit(Batch((put(b"first"),)))
        assert engine.server.is_pooled == is_pooled
        done = await engine.commit(Batch((put(b"for a while", expire_in=60_000), put(b"for ever"))))
        assert isinstance(done, Committed)
        assert (await stored(engine, b"for a while")).expires_at is not None
        assert (await stored(engine, b"for ever")).expires_at is None
