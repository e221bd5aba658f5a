"""PostgreSQL for tests: a test asks for what it needs, and nothing is started in a run without such a test.

`postgres_url` is a database of its own, empty, on the server that KEYLOFT_TEST_POSTGRES names, or on one that ends with
the run; `emptied_postgres_url` has Keyloft's tables, and is made in a fraction of the time; `mortal_postgres` is a
server that a test may kill, and that wants a password.
PYTEST_DONT_REWRITE: modules may import from here, too.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft.core.schema import REVISION
from tests.support.temporary_files import MEMORY
from tests.support.threads import SYNCHRONOUS
from tools.postgres import (
    TIMEOUT_SECONDS,
    NoFolder,
    Server,
    fresh_database,
    initdb,
    name_of,
    named_server,
    own_folder,
    own_server,
)
from tools.process_family import kill_family

T = TypeVar("T")

PASSWORD = "open-sesame"
"""Of the server that wants one."""


_LARGE_BYTES: Final = 1 << 20
_END_SESSIONS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
# Each change of a definition makes a row of the catalogue by a later transaction, or removes one.
_DEFINITIONS: Final = """
SELECT (SELECT (count(*), max(xmin::text::bigint)) FROM pg_class WHERE relnamespace = 'public'::regnamespace)::text,
       (SELECT (count(*), max(a.xmin::text::bigint)) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = 'public'::regnamespace)::text,
       (SELECT (count(*), max(xmin::text::bigint)) FROM pg_proc WHERE pronamespace = 'public'::regnamespace)::text,
       (SELECT (count(*), max(xmin::text::bigint)) FROM pg_namespace)::text,
       (SELECT d.xmin::text || (SELECT count(*) FROM pg_db_role_setting WHERE setdatabase = d.oid)
        FROM pg_database d WHERE datname = current_database())
"""
_SIZE: Final = """
SELECT sum(pg_table_size(oid))::bigint FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
"""
_EMPTY: Final = """
DELETE FROM keyloft_tuples;
DELETE FROM keyloft_semantic;
DELETE FROM plugin_kv_storage;
DELETE FROM keyloft_changes;
INSERT INTO keyloft_changes (version, part, base, at, size, changes) VALUES (1, 0, -1, 0, 0, decode('90', 'hex'));
DELETE FROM keyloft_version_counter;
INSERT INTO keyloft_version_counter (id, version, at) VALUES (1, 1, 0);
DELETE FROM keyloft_version;
INSERT INTO keyloft_version VALUES ('{revision}');
DELETE FROM keyloft_store;
INSERT INTO keyloft_store (id, store_id) VALUES (1, '{store_id}');
"""


class ReusedDatabase:
    """A database with Keyloft's tables that tests use one after the other, as if each had got a new one.

    To make a database with its tables takes 56 ms of the processors; to empty one takes 2,
    over a connection that lasts.
    """

    def __init__(self, server: str, template: str) -> None:
        self._server, self._template = server, template
        self._url: str | None = None
        self._made = ExitStack()
        self._definitions: Any = None
        self._connection: Any = None
        # A test's event loop ends with the test, and may be running now.
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1)

    def emptied(self) -> str:
        """The URL, once nothing of an earlier test is left: a new database if it changed more than some rows."""
        if self._url is None or not self._run(self._is_emptied()):
            self._drop()
            self._url = self._made.enter_context(fresh_database(self._server, template=self._template))
            self._run(self._connect(self._url))
            assert self._run(self._is_emptied())
        return self._url

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.submit(self._loop.run_until_complete, work).result(TIMEOUT_SECONDS)

    async def _connect(self, url: str) -> None:
        self._connection = await asyncpg.connect(url)
        self._definitions = await self._connection.fetchrow(_DEFINITIONS)

    async def _is_emptied(self) -> bool:
        try:
            await self._connection.fetch(_END_SESSIONS)
            if await self._connection.fetchrow(_DEFINITIONS) != self._definitions:
                return False
            if await self._connection.fetchval(_SIZE) > _LARGE_BYTES:
                return False
            await self._connection.execute(_EMPTY.format(revision=REVISION, store_id=uuid4().hex))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return False
        return True

    async def _disconnect(self) -> None:
        self._connection.terminate()
        await asyncio.sleep(0)  # the loop lets go of the socket
        self._connection = None

    def _drop(self) -> None:
        self._url = None
        if self._connection is not None:
            self._run(self._disconnect())
        self._made.close()

    def close(self) -> None:
        """Drop the database."""
        self._drop()
        self._thread.shutdown()
        self._loop.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server on which databases can be made."""
    if given := named_server():
        yield given
        return
    try:
        with own_server(within=MEMORY) as url:
            yield url
    except NoFolder as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mortal_postgres() -> Iterator["MortalServer"]:
    """A server that tests may kill, as long as it runs in the end; it waits for the disk, and wants a password."""
    with own_folder(MEMORY) as (folder, programs, options):
        secret = folder / "secret"
        secret.write_text(f"{PASSWORD}\n")
        secret.chmod(0o644)
        initdb(programs, folder, options, "--auth=scram-sha-256", f"--pwfile={secret}")
        settings = ("-c", "deadlock_timeout=100ms")
        with MortalServer(programs, folder, options, *settings, password=PASSWORD) as server:
            yield server


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of a fresh, empty database, which is dropped after the test."""
    with fresh_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_database(postgres_server: str) -> Iterator[ReusedDatabase]:
    async def make_tables(url: str) -> None:
        await (await keyloft.open(url)).aclose()

    with fresh_database(postgres_server) as template:
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
            thread.submit(asyncio.run, make_tables(template)).result(TIMEOUT_SECONDS)
        database = ReusedDatabase(postgres_server, name_of(template))
        yield database
        database.close()


@pytest.fixture
def emptied_postgres_url(postgres_database: ReusedDatabase) -> str:
    """The URL of a database with Keyloft's tables, and without entries."""
    return postgres_database.emptied()


def database_url(name: str, request: pytest.FixtureRequest, tmp_path: Path, *, tables: bool = True) -> str | None:
    """The URL of a database without entries, by the name of what it is to be kept in.

    Args:
        name: As in the parameters of a test.
        request: The test's.
        tmp_path: Where a file is kept; it is not made.
        tables: Whether the database on PostgreSQL may have Keyloft's tables, which takes less time.
    """
    if name == "postgresql":
        url: str = request.getfixturevalue("emptied_postgres_url" if tables else "postgres_url")
        return url
    if name == "etcd":
        return str(request.getfixturevalue("etcd_url"))
    kind = name.removesuffix(SYNCHRONOUS)
    return {"memory": None, "sqlite file": str(tmp_path / "app.db"), "sqlite in memory": "sqlite://"}[kind]


IN_MEMORY: Final = pytest.mark.parametrize("url", ["memory"], indirect=True)
"""For what is refused before a database hears of it: the same on each."""


class MortalServer(Server):
    """A server that can be killed, and started again."""

    def kill(self) -> None:
        """SIGKILL, for the server and each of its processes: not one more instruction. Returns when all have ended."""
        kill_family(int((self.data / "postmaster.pid").read_text().split()[0]))
