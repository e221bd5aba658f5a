"""A PostgreSQL that can't be used: the error says why, and what to do. What can be tried again is, without one."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft.cli.doctor.database import examine
from tests.support.postgres import PASSWORD, MortalServer
from tests.support.postgres_proxy import ENDLESS_SECONDS, pooler, proxy, silent_port
from tools.postgres import query

_ROLE = "keyloft_visitor"
_WRONG = "wrong-sesame"


async def refusal(url: str, *secrets: str, patience: float = 5) -> keyloft.KeyloftError:
    """The error of opening a database; neither it nor its causes show the password."""
    with pytest.raises(keyloft.KeyloftError) as caught:
        await keyloft.open(url, patience=patience)
    error: BaseException | None = caught.value
    while error is not None:
        for secret in (PASSWORD, _WRONG, *secrets):
            assert secret not in f"{error!s} {error!r}"
        error = error.__cause__ or error.__context__
    return caught.value


def name_of(url: str) -> str:
    return url.split("/")[3].partition("?")[0]


@contextmanager
def role_without_rights(url: str) -> Iterator[str]:
    """The URL of a role that may connect and nothing else."""
    query(url, f"CREATE ROLE {_ROLE} LOGIN")
    query(url, "REVOKE ALL ON SCHEMA public FROM public")
    query(url, f"GRANT USAGE ON SCHEMA public TO {_ROLE}")
    try:
        yield url.replace("postgres@", f"{_ROLE}@", 1)
    finally:
        query(url, f"DROP OWNED BY {_ROLE}")
        query(url, f"DROP ROLE {_ROLE}")


async def test_wrong_password(mortal_postgres: MortalServer) -> None:
    began = time.monotonic()
    error = await refusal(mortal_postgres.url.replace(PASSWORD, _WRONG))
    assert type(error) is keyloft.CannotOpen
    assert "password" in str(error)
    assert "postgres" in str(error)
    assert time.monotonic() - began < ENDLESS_SECONDS, "waiting does not cure it"


async def test_unknown_user(mortal_postgres: MortalServer) -> None:
    error = await refusal(mortal_postgres.url.replace("//postgres:", "//unknown-user:"))
    assert type(error) is keyloft.CannotOpen
    assert "unknown-user" in str(error)


async def test_password_changed_while_the_store_is_open(mortal_postgres: MortalServer) -> None:
    query(mortal_postgres.url, f"CREATE ROLE changing LOGIN SUPERUSER PASSWORD '{_WRONG}'")
    try:
        url = mortal_postgres.url.replace(f"postgres:{PASSWORD}", f"changing:{_WRONG}")
        kv = await keyloft.open(url, patience=5)
        await kv.set(("k",), 1)
        query(mortal_postgres.url, f"ALTER ROLE changing PASSWORD '{PASSWORD}'")
        query(mortal_postgres.url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'changing'")
        for call in (kv.set(("k",), 2), kv.get(("k",)), kv.count(())):
            with pytest.raises(keyloft.DatabaseError, match=r"password|lost during a commit") as caught:
                await call
            assert _WRONG not in str(caught.value)
        await kv.aclose()
    finally:
        query(mortal_postgres.url, "DROP OWNED BY changing")
        query(mortal_postgres.url, "DROP ROLE changing")


async def test_unknown_database(postgres_url: str) -> None:
    error = await refusal(postgres_url.replace(name_of(postgres_url), "no_such_database"))
    assert type(error) is keyloft.CannotOpen
    assert '"no_such_database" does not exist' in str(error)
    assert "CREATE DATABASE" in str(error)


async def test_pooler_that_allows_no_transactions(postgres_url: str) -> None:
    async with pooler(postgres_url, allows_transactions=False) as (_, url):
        began = time.monotonic()
        error = await refusal(url)
    assert type(error) is keyloft.CannotOpen
    assert "pool_mode = transaction" in str(error)
    assert time.monotonic() - began < ENDLESS_SECONDS, "waiting does not cure it"


async def test_role_that_may_not_make_tables(postgres_url: str) -> None:
    with role_without_rights(postgres_url) as url:
        error = await refusal(url)
    assert type(error) is keyloft.CannotOpen
    assert "permission denied for schema public" in str(error)
    assert "GRANT" in str(error)
    assert "CREATE" in str(error)
    assert query(postgres_url, "SELECT count(*) FROM pg_class WHERE relname LIKE 'keyloft%'") == [(0,)]


async def test_role_without_rights_on_the_tables(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv:
        await kv.set(("k",), 1)
    with role_without_rights(postgres_url) as url:
        error = await refusal(url)
        assert type(error) is keyloft.CannotOpen
        assert "permission denied for table keyloft_version" in str(error)
        assert "GRANT SELECT, INSERT, UPDATE, DELETE" in str(error)
        query(postgres_url, f"GRANT SELECT ON keyloft_version TO {_ROLE}")
        assert "permission denied for table keyloft_version_counter" in str(await refusal(url))


async def test_role_that_may_read_but_not_write(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv:
        await kv.set(("k",), 1)
    with role_without_rights(postgres_url) as url:
        query(postgres_url, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {_ROLE}")
        async with keyloft.open(url) as kv, asyncio.timeout(60):
            assert (await kv.get(("k",))).value == 1
            for write in (kv.set(("k",), 2), kv.delete(("k",))):
                with pytest.raises(keyloft.DatabaseError, match=r"permission denied.*GRANT"):
                    await write
            assert (await kv.get(("k",))).value == 1


async def test_role_that_may_not_ask_for_timelines_uses_the_server_as_it_is(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv:
        await kv.set(("k",), 1)
    query(postgres_url, "REVOKE EXECUTE ON FUNCTION pg_walfile_name FROM public")
    with role_without_rights(postgres_url) as url:
        query(postgres_url, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {_ROLE}")
        query(postgres_url, f"GRANT CREATE ON SCHEMA public TO {_ROLE}")
        async with keyloft.open(url) as kv, asyncio.timeout(60):
            assert await kv.set(("k",), 2) == 3
            health = kv.engine.health()
            assert health is not None
            assert health.timeline is None
    assert query(postgres_url, "SELECT version, timeline FROM keyloft_version_counter") == [(3, 1)]


async def test_another_store_than_the_one_that_was_opened_is_refused(postgres_url: str) -> None:
    async with keyloft.open(postgres_url, patience=5) as kv:
        await kv.set(("k",), 1)
        query(postgres_url, "UPDATE keyloft_store SET store_id = 'another'")
        query(postgres_url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'keyloft'")
        for call in (kv.get(("k",)), kv.set(("k",), 2)):
            with pytest.raises(keyloft.CannotOpen, match="holds the store another, and the one that was opened is"):
                await call
    async with keyloft.open(postgres_url) as kv:
        assert (await kv.get(("k",))).value == 1


async def test_old_and_new_schemas(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv:
        await kv.set(("k",), 1)
    query(postgres_url, "UPDATE keyloft_version SET version_num = '0001'")
    error = await refusal(postgres_url)
    assert type(error) is keyloft.SchemaTooOld
    assert "0001" in str(error)
    assert re.search(r"keyloft migrate --database '?postgresql://", str(error))
    query(postgres_url, "UPDATE keyloft_version SET version_num = '9999'")
    error = await refusal(postgres_url)
    assert type(error) is keyloft.SchemaTooNew
    assert "9999" in str(error)
    assert "upgrade keyloft" in str(error)
    assert query(postgres_url, "SELECT version_num FROM keyloft_version") == [("9999",)]


async def test_database_of_another_encoding(postgres_url: str) -> None:
    name = f"{name_of(postgres_url)}_ascii"
    query(postgres_url, f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    try:
        error = await refusal(postgres_url.replace(name_of(postgres_url), name))
        assert type(error) is keyloft.CannotOpen
        assert "SQL_ASCII" in str(error)
        assert "ENCODING 'UTF8'" in str(error)
    finally:
        query(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


async def test_read_only_server_is_named_as_such(postgres_url: str) -> None:
    query(postgres_url, f"ALTER DATABASE {name_of(postgres_url)} SET default_transaction_read_only = on")
    began = time.monotonic()
    error = await refusal(postgres_url, patience=0.5)
    assert isinstance(error, keyloft.DatabaseError)
    assert "read-only" in str(error)
    assert time.monotonic() - began < ENDLESS_SECONDS


async def test_server_that_becomes_read_only_refuses_writes_and_goes_on_later(postgres_url: str) -> None:
    read_only = f"ALTER DATABASE {name_of(postgres_url)} SET default_transaction_read_only = "
    async with keyloft.open(postgres_url, patience=1) as kv:
        await kv.set(("k",), 1)
        query(postgres_url, f"{read_only} on")
        query(
            postgres_url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        refusal = ""
        async with asyncio.timeout(60):
            while "read-only" not in refusal:
                with pytest.raises(keyloft.DatabaseError, match=r"read-only|lost during a commit") as caught:
                    await kv.set(("k",), 2)
                refusal = str(caught.value)
        administrator = await asyncpg.connect(postgres_url)
        await administrator.execute("SET default_transaction_read_only = off")
        await administrator.execute(f"{read_only} off")
        await administrator.close()
        await kv.set(("k",), 4)
        assert (await kv.get(("k",))).value == 4


@pytest.mark.parametrize(("durability", "wanted"), [("full", "on"), ("relaxed", "off")])
async def test_durability_of_a_store_overrides_the_setting_of_the_database(
    durability: Literal["full", "relaxed"], wanted: str, postgres_url: str
) -> None:
    other = {"on": "off", "off": "on"}[wanted]
    query(postgres_url, f"ALTER DATABASE {name_of(postgres_url)} SET synchronous_commit = {other}")
    async with keyloft.open(postgres_url, durability=durability) as kv:
        # A trigger sees what is in force while something is written.
        query(postgres_url, "CREATE TABLE seen (mode TEXT)")
        query(
            postgres_url,
            "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NEW; END$$",
        )
        query(
            postgres_url,
            "CREATE TRIGGER look AFTER INSERT OR UPDATE ON keyloft_tuples FOR EACH ROW EXECUTE FUNCTION look()",
        )
        await kv.set(("k",), 1)
        await kv.atomic().sum(("n",), 1).commit()
    assert query(postgres_url, "SELECT mode FROM seen") == [(wanted,), (wanted,)]


async def test_first_of_several_hosts_is_dead(postgres_url: str) -> None:
    async with silent_port() as dead:
        pass
    async with proxy(postgres_url) as (_, url):
        several = url.replace("@127.0.0.1", f"@127.0.0.1:{dead},127.0.0.1")
        began = time.monotonic()
        async with keyloft.open(several) as kv:
            await kv.set(("k",), 1)
            assert (await kv.get(("k",))).value == 1
            assert await kv.count(()) == 1
        assert time.monotonic() - began < ENDLESS_SECONDS


async def test_two_proxies_before_one_server_are_no_two_primaries(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy(postgres_url) as (_, one), proxy(postgres_url) as (_, other):
        host, second = [url.partition("@")[2].partition("/")[0] for url in (one, other)]
        both = one.replace(f"@{host}", f"@{host},{second}")
        async with keyloft.open(both) as kv:
            await kv.set(("k",), 1)
        [found] = [finding for finding in await examine(both) if finding.code == "servers"]
    assert "two hosts can be written" not in found.what + caplog.text
    assert f"alias {second}" in found.what


async def test_all_of_several_hosts_are_dead() -> None:
    async with silent_port() as one, silent_port() as other:
        pass
    error = await refusal(f"postgresql://me:{_WRONG}@127.0.0.1:{one},127.0.0.1:{other}/app", patience=0.5)
    assert type(error) is keyloft.Unreachable
    assert f"no host of PostgreSQL at 127.0.0.1:{one},127.0.0.1:{other}/app is its primary" in str(error)
    for host in (one, other):
        assert f"PostgreSQL at 127.0.0.1:{host} can't be reached: " in str(error)
    assert "Keyloft waited for 0." in str(error)


# What can be tried again


async def writes_for_a_while(kv: keyloft.Store, count: int) -> None:
    """All kinds of calls, again and again; none may fail."""
    for number in range(count):
        await asyncio.gather(
            kv.set(("set", number % 3), number),
            kv.set_many({("many", part): number for part in range(3)}),
            kv.atomic().sum(("sum",), 1).commit(),
            kv.delete(("set", (number + 1) % 3)),
            kv.get(("sum",)),
            kv.count(()),
        )


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_serialization_failures_are_retried(isolation: str, postgres_url: str) -> None:
    query(
        postgres_url,
        f"ALTER DATABASE {name_of(postgres_url)} SET default_transaction_isolation = '{isolation}'",
    )
    async with (
        keyloft.open(postgres_url) as one,
        keyloft.open(postgres_url) as another,
        keyloft.open(postgres_url) as third,
    ):
        await asyncio.gather(*[writes_for_a_while(kv, 20) for kv in (one, another, third)])
        assert (await one.get(("sum",))).value == 60


async def test_a_client_that_locks_a_table_and_then_the_counter_meets_no_deadlock(postgres_url: str) -> None:
    """A commit waits for the table before it locks the version counter."""
    query(postgres_url, f"ALTER DATABASE {name_of(postgres_url)} SET deadlock_timeout = '10ms'")
    async with keyloft.open(postgres_url) as kv:
        await writes_for_a_while(kv, 1)
        rival = await asyncpg.connect(postgres_url)
        for _ in range(3):
            await rival.execute("BEGIN; LOCK TABLE keyloft_tuples IN SHARE MODE")
            writing = asyncio.create_task(writes_for_a_while(kv, 1))
            while not await rival.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await asyncio.sleep(0.005)
            await rival.execute("SELECT * FROM keyloft_version_counter FOR UPDATE")
            await rival.execute("ROLLBACK")
            async with asyncio.timeout(60):
                await writing
        await rival.close()
        assert (await kv.get(("sum",))).value == 4


async def test_locked_tables_are_waited_for(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv:
        await writes_for_a_while(kv, 1)
        rival = await asyncpg.connect(postgres_url)
        await rival.execute("BEGIN; LOCK TABLE keyloft_tuples, keyloft_version_counter IN ACCESS EXCLUSIVE MODE")
        writing = asyncio.create_task(writes_for_a_while(kv, 3))
        while await rival.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") < 3:
            await asyncio.sleep(0.005)
        assert not writing.done()
        await rival.execute("COMMIT")
        await rival.close()
        async with asyncio.timeout(60):
            await writing


async def test_lock_and_statement_timeouts_of_the_database_are_retried(postgres_url: str) -> None:
    name = name_of(postgres_url)
    query(postgres_url, f"ALTER DATABASE {name} SET lock_timeout = '30ms'")
    query(postgres_url, f"ALTER DATABASE {name} SET statement_timeout = '60ms'")
    async with keyloft.open(postgres_url) as kv:
        await writes_for_a_while(kv, 1)
        rival = await asyncpg.connect(postgres_url, server_settings={"statement_timeout": "0", "lock_timeout": "0"})
        await rival.execute("BEGIN; LOCK TABLE keyloft_tuples IN ACCESS EXCLUSIVE MODE")
        writing = asyncio.create_task(writes_for_a_while(kv, 2))
        await asyncio.sleep(0.3)
        assert not writing.done()
        await rival.execute("COMMIT")
        await rival.close()
        async with asyncio.timeout(60):
            await writing
        assert (await kv.get(("sum",))).value == 3
