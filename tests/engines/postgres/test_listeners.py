"""Commits on PostgreSQL notify other processes while one of them listens, and only then."""

import asyncio
import itertools
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

from keyloft import DatabaseError, limits
from keyloft.core.engine import write
from keyloft.core.records import Batch, Get, Sum
from keyloft.engines.postgres import listeners
from keyloft.engines.postgres.engine import PostgresEngine
from keyloft.engines.postgres.log import CHANNEL
from keyloft.engines.postgres.tables import LAYOUTS
from tests.engines.postgres.test_function import role_that_may_write
from tests.support.postgres_commits import A, opened, put
from tests.support.postgres_proxy import ENDLESS_SECONDS, pooler
from tests.support.temporary_files import MEMORY
from tools.postgres import NoFolder, Server, fresh_database, initdb, own_folder, query

_ONE_MORE = Batch((Sum(A, b"k", 1),))


class HeardNotifications:
    """The notifications of a database, as a program hears them that is no process of Keyloft."""

    def __init__(self, session: asyncpg.Connection) -> None:
        self._session = session
        self._payloads: list[str] = []
        self._arrived = asyncio.Event()

    def note(self, connection: object, process: int, channel: str, payload: str) -> None:
        self._payloads.append(payload)
        self._arrived.set()

    async def of(self, engine: PostgresEngine) -> list[str]:
        """The versions that a process has announced until now."""
        self._arrived.clear()
        # Notifications arrive in the order of their commits, so this one arrives after all earlier ones.
        await self._session.execute(f"NOTIFY {CHANNEL}, 'end'")
        async with asyncio.timeout(ENDLESS_SECONDS):
            while "end" not in self._payloads:
                self._arrived.clear()
                await self._arrived.wait()
        before, self._payloads = self._payloads[: self._payloads.index("end")], []
        found = [payload.split() for payload in before]
        return [version for name, version in found if name == engine.server.process and version != "0"]


@asynccontextmanager
async def heard(url: str) -> AsyncIterator[HeardNotifications]:
    session = await asyncpg.connect(url)
    try:
        notifications = HeardNotifications(session)
        await session.add_listener(CHANNEL, notifications.note)
        yield notifications
    finally:
        await session.close()


async def count(engine: PostgresEngine) -> str:
    """The version of one more commit."""
    done = await engine.commit(_ONE_MORE)
    return str(getattr(done, "version", None))


def look_before_each_commit(monkeypatch: pytest.MonkeyPatch, *, again_after: float = 0.0) -> None:
    monkeypatch.setattr(limits, "POSTGRES_LISTENERS_COMMITS", 1)
    monkeypatch.setattr(limits, "POSTGRES_LISTENERS_SECONDS", again_after)


@pytest.mark.parametrize("by", ["function", "locking"])
async def test_commits_notify_while_a_process_listens(
    postgres_url: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_before_each_commit(monkeypatch)
    async with opened(postgres_url, by=by) as writer, heard(postgres_url) as notifications:
        await count(writer)
        assert await notifications.of(writer) == []
        async with opened(postgres_url) as other:
            watch = other.watch(Get(A, b"k"))
            await anext(aiter(watch))
            while not writer.server.has_listeners:
                await count(writer)  # the watch has started; its process begins to listen
            await notifications.of(writer)
            version = await count(writer)
            assert await notifications.of(writer) == [version]
        while writer.server.has_listeners:
            await count(writer)  # the server ends the sessions of a closed engine
        await notifications.of(writer)
        await count(writer)
        assert await notifications.of(writer) == []


async def test_a_watch_hears_of_a_process_that_does_not_yet_know_of_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_before_each_commit(monkeypatch, again_after=ENDLESS_SECONDS)
    monkeypatch.setattr(limits, "WATCH_CHECK_SECONDS", 2 * ENDLESS_SECONDS)
    async with opened(postgres_url) as writer, opened(postgres_url) as other, heard(postgres_url) as notifications:
        await count(writer)
        assert not writer.server.has_listeners
        async with aclosing(aiter(other.watch(Get(A, b"k")))) as changes:  # type: ignore[type-var]
            await anext(changes)
            for _ in range(5):
                version = await count(writer)
                async with asyncio.timeout(ENDLESS_SECONDS):
                    [change] = await anext(changes)
                assert str(change.record and change.record.version) == version
        assert await notifications.of(writer) == []


async def test_each_user_of_the_database_sees_who_listens(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look_before_each_commit(monkeypatch)
    async with opened(postgres_url) as other:
        watch = other.watch(Get(A, b"k"))
        await anext(aiter(watch))
        with role_that_may_write(postgres_url) as url:
            async with opened(url) as writer:
                async with asyncio.timeout(ENDLESS_SECONDS):
                    await count(writer)
                    while not writer.server.has_listeners:
                        await count(writer)


async def test_a_commit_that_comes_alone_does_not_wait_for_a_look_at_the_listeners(postgres_url: str) -> None:
    async with opened(postgres_url) as writer, heard(postgres_url) as notifications:
        versions = [await count(writer) for _ in range(limits.POSTGRES_LISTENERS_COMMITS - 1)]
        assert await notifications.of(writer) == versions  # so it has not looked: no session shows that it listens
        assert await count(writer)
        assert await notifications.of(writer) == []


async def test_a_server_that_does_not_say_who_listens_is_asked_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_before_each_commit(monkeypatch)
    query(postgres_url, "CREATE SEQUENCE looks")  # a sequence also counts what fails
    monkeypatch.setattr(listeners, "FIND_LISTENERS", "SELECT nextval('looks') / 0")
    async with opened(postgres_url) as writer, heard(postgres_url) as notifications:
        versions = [await count(writer) for _ in range(3)]
        assert await notifications.of(writer) == versions
    assert query(postgres_url, "SELECT last_value FROM looks") == [(1,)]


def major_version(programs: Path) -> int:
    shown = subprocess.check_output([programs / "postgres", "--version"], text=True)
    return int(re.findall(r"\d+", shown)[0])


@pytest.fixture(scope="module")
def short_queue_url() -> Iterator[str]:
    """A server with the shortest queue of notifications that there is."""
    try:
        with own_folder(MEMORY) as (folder, programs, options):
            if major_version(programs) < 17:
                pytest.skip("PostgreSQL before version 17 has no setting for the length of the queue")
            initdb(programs, folder, options, "--auth=trust")
            with Server(programs, folder, options, "-F", "-c", "max_notify_queue_pages=64") as server:
                yield server.url
    except NoFolder as error:
        pytest.skip(str(error))


def notify_for_ever(url: str) -> None:
    query(url, "SELECT pg_notification_queue_usage()")  # lets the server forget what earlier tests have sent
    for number in itertools.count():
        query(url, f"SELECT pg_notify('another_program', repeat('x', 7000) || {number})")


@asynccontextmanager
async def full_queue(url: str) -> AsyncIterator[None]:
    """A program listens, and stays in a transaction: so the server can't forget what it was to hear."""
    session = await asyncpg.connect(url)
    try:
        await session.execute("LISTEN another_program")
        await session.execute("BEGIN")
        await session.fetch("SELECT pg_current_xact_id()")
        with pytest.raises(asyncpg.ProgramLimitExceededError):
            await asyncio.to_thread(notify_for_ever, url)
        yield
    finally:
        await session.close()


@pytest.mark.parametrize("by", ["function", "locking", "pooler"])
async def test_writes_go_on_and_are_watched_while_the_queue_of_notifications_is_full(
    short_queue_url: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_before_each_commit(monkeypatch)
    is_pooled = by == "pooler"
    with fresh_database(short_queue_url) as url:
        async with (
            pooler(url) as (_, pooled_url),
            opened(pooled_url if is_pooled else url, by="function" if is_pooled else by) as writer,
            opened(url) as other,
            aclosing(aiter(other.watch(Get(A, b"k")))) as changes,  # type: ignore[type-var]
        ):
            await anext(changes)
            async with full_queue(url), asyncio.timeout(ENDLESS_SECONDS):
                for each in (writer, writer, other):
                    version = await count(each)
                    [change] = await anext(changes)
                    assert str(change.record and change.record.version) == version
                async with opened(url) as opened_meanwhile:
                    await count(opened_meanwhile)
                    await anext(changes)


async def test_commits_notify_again_after_the_queue_of_notifications_was_full(
    short_queue_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POSTGRES_NOTIFY_PAUSE_SECONDS", 0.5)
    with fresh_database(short_queue_url) as url:
        async with opened(url) as writer, heard(url) as notifications:
            async with full_queue(url):
                await count(writer)
            assert writer.server.announcer is None
            version = ""
            async with asyncio.timeout(ENDLESS_SECONDS):
                while writer.server.announcer is None:
                    version = await count(writer)
            assert await notifications.of(writer) == [version]


async def test_commits_go_on_to_notify_after_the_server_has_refused_one_for_another_limit(
    postgres_url: str,
) -> None:
    async with opened(postgres_url) as writer, heard(postgres_url) as notifications:
        query(postgres_url, f"CREATE INDEX ON {LAYOUTS[A].table} (value)")
        with pytest.raises(DatabaseError, match="index row"):
            await write(writer, put(b"long", os.urandom(5000)))
        version = await count(writer)
        assert await notifications.of(writer) == [version]
