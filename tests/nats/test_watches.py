"""Watches over NATS: every change arrives at least once and in order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from nats.errors import NoRespondersError

import keyloft
from keyloft import admin, limits
from keyloft.core.engine import write
from keyloft.core.records import Committed, Latest, Scan
from keyloft.errors import HistoryGone, InvalidArgument, NotPermitted, QuotaExceeded, WatchExpired
from keyloft.nats import watch_operation
from keyloft.nats.connection import Login, connect
from keyloft.nats.events import EventMessage, decode, encode
from keyloft.nats.leases import SPACE, LeaseRows, PublishedProgress, new_id, stored
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService, Event
from keyloft.semantic import SemanticClient, Semantics, SemanticService, SemanticStore
from keyloft.server.isolation import isolate
from tests.support.nats import private_server, settled

_SECONDS = 30


async def next_of(watch: RemoteWatch) -> Event:
    async with asyncio.timeout(_SECONDS):
        return await anext(watch)


async def some_of(watch: RemoteWatch, number: int) -> list[Event]:
    return [await next_of(watch) for _ in range(number)]


def watching() -> list[str]:
    """The names of the tasks that renew watches of clients."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("keyloft watch ")]


class Watched:
    """A NATS server, a database, and services on both."""

    def __init__(self, url: str, database: Path) -> None:
        self.url = url
        self.database = database
        self.prefix = f"w{uuid4().hex[:12]}"

    @asynccontextmanager
    async def service(self, login: Login | None = None, **options: Any) -> AsyncIterator[DatabaseService]:
        nats = await connect(self.url, name="service", login=login, reconnect_time_wait=0.02)
        try:
            async with (
                BotDatabase(self.database, durability="relaxed") as db,
                DatabaseService(nats, db, prefixes=[self.prefix], **options) as service,
            ):
                yield service
        finally:
            await nats.close()

    async def client(self, plugin: str = "trivia") -> DatabaseClient:
        return await DatabaseClient.connect(
            self.url, plugin_name=plugin, prefix=self.prefix, timeout=_SECONDS, reconnect_time_wait=0.02
        )


@pytest.fixture
def world(nats_url: str, tmp_path: Path) -> Watched:
    return Watched(nats_url, tmp_path / "bot.db")


@pytest.fixture
async def client(world: Watched) -> AsyncIterator[DatabaseClient]:
    async with world.service(), await world.client() as client:
        yield client


@pytest.mark.slow
async def test_a_watch_reports_puts_deletes_and_expiries_of_a_prefix_in_order(client: DatabaseClient) -> None:
    kv = client.kv
    await kv.set("user:before", 1)
    async with kv.watch(prefix="user:") as watch:
        await kv.set("user:a", 1)
        await kv.set("other", 1)
        await kv.set("user:a", 2)
        await kv.delete("user:a")
        await kv.set("user:b", 1, ttl=1)
        events = await some_of(watch, 5)
    assert [(event.key, event.deleted) for event in events] == [
        ("user:a", False),
        ("user:a", False),
        ("user:a", True),
        ("user:b", False),
        ("user:b", True),
    ]
    versions = [event.version for event in events]
    assert versions == sorted(versions)
    assert len(set(versions[:4])) == 4, "nothing is joined"


async def test_a_watch_of_keys_reports_no_others(client: DatabaseClient) -> None:
    async with client.kv.watch("a", "c") as watch:
        for key in "abcab":
            await client.kv.set(key, 1)
        assert [event.key for event in await some_of(watch, 3)] == ["a", "c", "a"]


async def test_a_watch_goes_on_where_an_earlier_one_ended(client: DatabaseClient) -> None:
    async with client.kv.watch() as watch:
        await client.kv.set("a", 1)
        await next_of(watch)
    for key in "bc":
        await client.kv.set(key, 1)
    async with client.kv.watch(since=watch.reported_to) as later:
        await client.kv.set("d", 1)
        assert [event.key for event in await some_of(later, 3)] == ["b", "c", "d"]


async def test_a_version_that_was_never_given_is_refused(client: DatabaseClient) -> None:
    with pytest.raises(HistoryGone, match="list the entries, then watch again"):
        await next_of(client.kv.watch(since=10**9))


async def test_plugins_see_nothing_of_each_other(world: Watched, client: DatabaseClient) -> None:
    async with await world.client("quotes") as other, client.kv.watch() as mine, other.kv.watch() as other_one:
        await other.kv.set("a", 1)
        await client.kv.set("b", 1)
        assert (await next_of(other_one)).key == "a"
        assert (await next_of(mine)).key == "b"


@pytest.mark.slow
async def test_the_semantic_store_is_watched_by_paths_within_the_project(nats_url: str) -> None:
    nats, prefix = await connect(nats_url, name="service"), f"w{uuid4().hex[:12]}"
    flag = Semantics("feature_flag", ttl_seconds=1)
    async with (
        keyloft.open() as kv,
        SemanticStore(kv) as store,
        SemanticService(nats, store, prefix=prefix),
        await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix=prefix) as client,
        client.events(prefix="flags/") as below,
        client.events("docs/delta") as one,
    ):
        await client.put("docs/delta", 1, expected_version=0, writer="a:b", semantics=Semantics("cursor"))
        entry = await client.put("flags/new-ui", True, expected_version=0, writer="a:b", semantics=flag)
        assert await next_of(below) == Event("flags/new-ui", entry.version, False)
        expired = await next_of(below)
        assert (expired.key, expired.deleted) == ("flags/new-ui", True)
        assert (await next_of(one)).key == "docs/delta"
    await nats.close()


# Requests


async def asked(client: DatabaseClient, **fields: Any) -> dict[str, Any]:
    return await client.request("watch", fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix": 5}, "prefix must be a string"),
        ({"keys": []}, "keys: expected an array of 1 to 1000 keys"),
        ({"keys": ["a", ""]}, r"keys\[1\] must be a non-empty string"),
        ({"keys": ["a"], "prefix": "a"}, "prefix, keys: expected one of them, got both"),
        ({"since": -1}, "since: expected a version"),
        ({"since": "4"}, "since: expected a version"),
        ({"prefx": "a"}, "prefx: there is no such field; did you mean prefix"),
        ({"end": True}, "end: expected together with the subject"),
        ({"subject": 5}, "subject: expected the subject that the service has answered"),
        ({"subject": "db.kv.quotes.events.abc"}, "subject: expected one below"),
        ({"subject": "{own}", "prefix": "a"}, "prefix: a watch keeps what it watches"),
        ({"subject": "{own}", "end": 1}, "end: expected true or false"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_name(
    world: Watched, client: DatabaseClient, fields: dict[str, Any], message: str
) -> None:
    if fields.get("subject") == "{own}":
        fields = fields | {"subject": f"{world.prefix}.trivia.events.abc"}
    with pytest.raises(InvalidArgument, match=message):
        await asked(client, **fields)


async def test_a_lease_is_renewed_and_ended_by_its_owner_alone(world: Watched, client: DatabaseClient) -> None:
    lease = await asked(client, prefix="a")
    assert lease["subject"].startswith(f"{world.prefix}.trivia.events.")
    assert (lease["run"], lease["expires_in"]) == (0, limits.LEASE_SECONDS)
    other_one = lease["subject"].replace(".trivia.", ".quotes.")
    async with await world.client("quotes") as other:
        with pytest.raises(InvalidArgument, match="expected one below"):
            await asked(other, subject=lease["subject"])
        with pytest.raises(WatchExpired, match="ask for a new one"):
            await asked(other, subject=other_one)
    assert (await asked(client, subject=lease["subject"]))["run"] == 1
    assert (await asked(client, subject=lease["subject"]))["run"] == 1
    assert (await asked(client, subject=lease["subject"], end=True))["existed"]
    with pytest.raises(WatchExpired):
        await asked(client, subject=lease["subject"])


async def test_an_owner_has_a_bounded_number_of_watches(
    world: Watched, client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OWNER_LEASES", 2)
    monkeypatch.setattr(limits, "OWNER_LEASE_BYTES", 1000)
    first = await asked(client)
    with pytest.raises(QuotaExceeded, match="may take 1,000 bytes in all: watch a prefix"):
        await asked(client, keys=["k" * 200 + str(number) for number in range(6)])
    await asked(client)
    with pytest.raises(QuotaExceeded, match="trivia has 2 watches already: end some of them"):
        await asked(client)
    async with await world.client("quotes") as other:
        await asked(other)
    await asked(client, subject=first["subject"], end=True)
    await asked(client)


async def test_watches_that_begin_at_the_same_time_are_bounded_too(
    client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OWNER_LEASES", 2)
    monkeypatch.setattr(limits, "OWNER_LEASE_BYTES", 3000)
    keys = ["k" * 200 + str(number) for number in range(5)]  # 2,285 bytes
    wide = await asyncio.gather(*[asked(client, keys=keys) for _ in range(5)], return_exceptions=True)
    assert [type(one) for one in wide].count(QuotaExceeded) == 4
    more = await asyncio.gather(*[asked(client) for _ in range(5)], return_exceptions=True)
    assert [type(one) for one in more].count(QuotaExceeded) == 4
    [begun] = [one for one in more if isinstance(one, dict)]
    await asked(client, subject=begun["subject"], end=True)
    await asked(client)  # the refused ones take no room


async def test_a_watch_counts_while_it_is_being_stored(client: DatabaseClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OWNER_LEASES", 1)
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow_write(*arguments: Any) -> Committed:
        reached.set()
        await may_go_on.wait()
        return await write(*arguments)

    monkeypatch.setattr(watch_operation, "write", slow_write)
    first = asyncio.create_task(asked(client))
    async with asyncio.timeout(_SECONDS):
        await reached.wait()
        for _ in range(3):  # with no lease stored, the publisher would stop to follow leases, and forget this one
            with pytest.raises(QuotaExceeded, match="trivia has 1 watches already"):
                await asked(client)
        may_go_on.set()
        assert (await first)["run"] == 0


async def test_watches_of_very_many_short_keys_are_refused(client: DatabaseClient) -> None:
    keys = [str(number) for number in range(limits.LEASE_KEYS)]
    for _ in range(4):
        await asked(client, keys=keys)
    with pytest.raises(QuotaExceeded, match="watch a prefix"):  # 250,000 short keys once took 65 MB
        await asked(client, keys=keys)


# Interruptions


async def leases(world: Watched) -> int:
    """How many leases are stored."""
    async with BotDatabase(world.database) as db:
        engine, rows = await db.engine(), LeaseRows(DatabaseService.name)
        [page] = await engine.read(Scan(SPACE, *rows.all, 1000, keys_only=True))
        return sum(map(rows.is_lease, page.keys))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_watch_ends_with_its_client(world: Watched) -> None:
    async def is_over() -> bool:
        return await leases(world) == 0

    async with world.service(lease_seconds=1.0):
        async with await world.client() as client:
            watch = client.kv.watch()
            await watch.__aenter__()
            assert await leases(world) == 1
        await until(is_over)
        with pytest.raises(StopAsyncIteration):
            await next_of(watch)
        # One that is killed says nothing; its lease expires.
        client = await world.client()
        await client.kv.watch().__aenter__()
        assert await leases(world) == 1
        for task in asyncio.all_tasks():
            if task.get_name().startswith("keyloft watch "):
                task.cancel()
        await until(is_over)
        await client.nats.close()


@pytest.mark.slow
async def test_a_watch_outlives_its_lease_by_renewing_it(world: Watched) -> None:
    async with world.service(lease_seconds=0.6), await world.client() as client, client.kv.watch() as watch:
        for number in range(3):
            await asyncio.sleep(0.5)
            await client.kv.set(f"k{number}", 1)
            assert (await next_of(watch)).key == f"k{number}"


async def test_another_service_goes_on_when_one_stops(world: Watched) -> None:
    async with AsyncExitStack() as stack:
        services = [await stack.enter_async_context(world.service()) for _ in range(2)]
        client = await stack.enter_async_context(await world.client())
        watch = await stack.enter_async_context(client.kv.watch())
        for number in range(30):
            if number in (10, 20):
                await services.pop().aclose()
                services.insert(0, await stack.enter_async_context(world.service()))
            await client.kv.set(f"k{number}", 1)
        assert [event.key for event in await some_of(watch, 30)] == [f"k{number}" for number in range(30)]


async def test_a_service_goes_on_for_the_watches_of_its_predecessor(world: Watched) -> None:
    client = await world.client()
    async with world.service():
        watch = await client.kv.watch().__aenter__()
        await client.kv.set("a", 1)
        assert (await next_of(watch)).key == "a"
    async with BotDatabase(world.database) as db:
        await db.kv_set("trivia", "b", 1)
    async with world.service(), client:
        assert (await next_of(watch)).key == "b"


async def test_what_a_dead_service_left_behind_costs_few_commits_once_there_are_no_watches(
    world: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE_CHECK_SECONDS", 0.1)
    async with world.service() as service, await world.client() as client, BotDatabase(world.database) as db:
        publisher, engine = service.publisher, await db.engine()
        assert publisher is not None
        async with client.kv.watch() as watch:
            heartbeat, progress = publisher.rows.heartbeat(dead := new_id()), publisher.rows.progress(dead)
            nothing = PublishedProgress()
            await write(engine, stored(heartbeat, nothing, expire_in=500), stored(progress, nothing))
            await client.kv.set("a", 1)
            ended_at = (await next_of(watch)).version

        async def is_tidy() -> bool:
            [page] = await engine.read(Scan(SPACE, *publisher.rows.all, 1, keys_only=True))
            return not page

        await until(is_tidy)
        [now] = await engine.read(Latest())
        # Each check whether there are watches takes a few, ten times a second.
        assert now - ended_at < 100


async def test_what_was_missed_is_asked_for_again(world: Watched, client: DatabaseClient) -> None:
    async with client.kv.watch() as watch:
        await client.kv.set("a", 1)
        assert (await next_of(watch)).key == "a"
        # As if a message had been lost on the way: the next one has a sequence too far ahead.
        lost = EventMessage(key="x", version=10**6, deleted=False, run=1, sequence=10**6)
        [subject] = client.watches.values()
        await client.nats.publish(subject, encode(lost))
        await client.kv.set("b", 1)
        await client.kv.set("c", 1)
        assert [event.key for event in await some_of(watch, 2)] == ["b", "c"]


async def test_a_client_that_reads_nothing_holds_a_bounded_number_of_events(
    client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNREAD_EVENTS", 5)
    async with client.kv.watch() as watch:
        for number in range(40):
            await client.kv.set(f"k{number:02}", 1)
        await until(lambda: _is_full(watch))
        assert [event.key for event in await some_of(watch, 40)] == [f"k{number:02}" for number in range(40)]


async def test_an_expiry_of_a_service_that_goes_on_has_no_lower_version_than_what_was_reported(
    client: DatabaseClient,
) -> None:
    async with client.kv.watch() as watch:
        for number in range(3):
            await client.kv.set("x", number)
        before = (await some_of(watch, 3))[-1]
        # The next service goes on behind the last version that arrived as a whole.
        run, earlier = 10**6, before.version - 1
        expiry = EventMessage(key="expired", version=earlier, deleted=True, run=run, sequence=2)
        put = EventMessage(key="expired", version=before.version, deleted=False, run=run, sequence=3)
        [subject] = client.watches.values()
        for message in (EventMessage(version=earlier, run=run, sequence=1), expiry, put):
            await client.nats.publish(subject, encode(message))
        assert await some_of(watch, 2) == [
            Event("expired", before.version, deleted=True),
            Event("expired", before.version),
        ]


async def _is_full(watch: RemoteWatch) -> bool:
    return len(watch.unread) == 5


async def test_a_watch_whose_history_is_gone_says_so(world: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.service() as service, await world.client() as client:
        lease = await asked(client, prefix="")
        [row] = list(service.publisher.leases)  # type: ignore[union-attr]
        known = service.publisher.leases[row].lease  # type: ignore[union-attr]
        engine = await service.db.engine()
        # As if the log had been trimmed: what is to be published begins with a version that it does not have.
        await write(engine, stored(row, replace(known, since=10**9), expire_in=60_000))
        inbox = await client.nats.subscribe(lease["subject"])
        await asked(client, subject=lease["subject"])
        messages = [decode((await inbox.next_msg(_SECONDS)).data) for _ in range(2)]
        assert messages[1].error_code == "HISTORY_GONE"

        async def is_refused() -> bool:
            try:
                await asked(client, subject=lease["subject"])
            except HistoryGone:
                return True
            return False

        await until(is_refused)


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30])
async def test_a_watch_that_is_closed_while_it_begins_leaves_nothing_behind(client: DatabaseClient, turns: int) -> None:
    watch = client.kv.watch()
    waiting = asyncio.ensure_future(anext(watch, None))
    async with asyncio.timeout(_SECONDS):
        while watch not in client.watches:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await watch.aclose()
        assert await waiting is None
    assert not client.watches
    assert not watching()


async def test_two_tasks_may_ask_a_watch_for_its_first_event(client: DatabaseClient) -> None:
    watch = client.kv.watch()
    async with asyncio.timeout(_SECONDS):
        waiting = [asyncio.ensure_future(anext(watch)) for _ in range(2)]
        while repr(watch).endswith("not begun>"):
            await asyncio.sleep(0.001)
        for key in "ab":
            await client.kv.set(key, 1)
        assert sorted([event.key for event in await asyncio.gather(*waiting)]) == ["a", "b"]
        assert len(watching()) == 1, "it has begun once"
        await watch.aclose()
    assert not watching()


async def test_a_failure_is_reported_to_all_tasks_that_wait_for_events(client: DatabaseClient) -> None:
    watch = client.kv.watch()
    async with watch, asyncio.timeout(_SECONDS):
        waiting = [asyncio.ensure_future(anext(watch)) for _ in range(2)]
        await asyncio.sleep(0)
        watch.fail(NotPermitted("gone"))
        assert [str(one) for one in await asyncio.gather(*waiting, return_exceptions=True)] == ["gone", "gone"]
        with pytest.raises(StopAsyncIteration):
            await anext(watch)


async def test_a_failure_is_reported_even_if_a_caller_gives_up_while_the_watch_ends(client: DatabaseClient) -> None:
    watch = client.kv.watch()
    async with watch, asyncio.timeout(_SECONDS):
        watch.fail(NotPermitted("gone"))
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)  # it ends the watch now
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not client.watches
        with pytest.raises(NotPermitted, match="gone"):
            await anext(watch)
        with pytest.raises(StopAsyncIteration):
            await anext(watch)


async def test_a_watch_that_is_closed_during_an_outage_does_not_come_back(tmp_path: Path) -> None:
    async with private_server() as server, asyncio.timeout(_SECONDS):
        world = Watched(server.url, tmp_path / "bot.db")
        async with await world.client() as client:
            async with world.service():
                watch = client.kv.watch()
                await watch.__aenter__()
                [events] = client.watches.values()
            await server.stop()
            while client.nats.is_connected:
                await asyncio.sleep(0.001)
            await watch.aclose()
            await server.start()
            while not client.nats.is_connected:
                await asyncio.sleep(0.001)
            await settled(client.nats)
            with pytest.raises(NoRespondersError):
                await client.nats.request(events, b"", timeout=_SECONDS)


@pytest.mark.slow
async def test_nats_is_restarted_and_nothing_is_missed(world: Watched) -> None:
    async with private_server() as server:
        world.url = server.url
        async with world.service() as service, await world.client() as client, client.kv.watch() as watch:
            for number in range(2):
                await service.db.kv_set("trivia", f"before{number}", 1)
                assert (await next_of(watch)).key == f"before{number}"
                await server.stop()
                await service.db.kv_set("trivia", f"while{number}", 1)
                await server.start()
                assert (await next_of(watch)).key == f"while{number}"


async def test_under_an_older_configuration_a_watch_is_refused_by_name(world: Watched, tmp_path: Path) -> None:
    isolation = isolate(["trivia"], prefixes=[world.prefix])
    for forbidden, message in (
        (f'"{world.prefix}.trivia.watch"', r"user trivia may not publish to .*\.trivia\.watch.*nats-config --replace"),
        (f'"{world.prefix}.trivia.events.*"', r"user trivia may not subscribe to .*\.events\..*nats-config --replace"),
        (f'"{world.prefix}.*.events.*"', r"NATS does not let the service publish to .*\.events\.\*.*nats-config"),
    ):
        assert forbidden in isolation.text
        config = tmp_path / "nats.conf"
        config.write_text(isolation.text.replace(forbidden, '"unused"'))
        async with private_server(config) as server:
            world.url = server.url
            service, plugin = isolation.service, isolation.plugins["trivia"]
            async with world.service(login=Login(user=service.name, password=service.password)):
                login = Login(user=plugin.name, password=plugin.password)
                async with await DatabaseClient.connect(
                    server.url, plugin_name="trivia", prefix=world.prefix, login=login
                ) as client:
                    await client.kv.set("a", 1)
                    with pytest.raises(NotPermitted, match=message):
                        await next_of(client.kv.watch())


async def test_operators_tools_pass_over_the_rows_of_services(world: Watched, tmp_path: Path) -> None:
    file, copy = str(world.database), tmp_path / "export"
    async with world.service(), await world.client() as client, client.kv.watch():
        await client.kv.set("a", 1)
        assert await leases(world) == 1
        assert (await admin.check(file)).findings == ()
        assert (await admin.stats(file)).projects == {}
        await admin.export(file, copy)
        exported = copy.read_text()
        assert '"a"' in exported
        assert "keyloft-plugins" not in exported
