"""Watches over HTTP: events, resuming, many listeners, and listeners that don't read."""

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from keyloft import ManualClock, limits
from keyloft.core import keys
from keyloft.core.records import Batch, Committed, Set, Space, Touch
from keyloft.core.values import JSON
from keyloft.engines import open_engine
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import admin_token
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, RunningApi, running_api, scoped_token
from tests.http.test_kv import problem


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    async with running_api() as api:
        yield api


async def test_a_prefix_is_watched_from_now_on(api: RunningApi) -> None:
    await api.put("/v1/kv/users/old", 1)
    async with api.watch("prefix=users") as events:
        name, start, _ = await events.next()
        assert name == "ready"
        await api.put("/v1/kv/other", 1)
        version = int((await api.put("/v1/kv/users/alice", {"x": 1})).json()["versionstamp"])
        name, reached, data = await events.next()
        assert (name, reached) == ("change", version)
        assert start is not None
        assert start < version
        [entry] = data["entries"]
        assert (entry["key"], entry["value"], entry["versionstamp"]) == ("users/alice", {"x": 1}, str(version))
        await api.send("DELETE", "/v1/kv/users/alice")
        assert (await events.next())[2] == {"entries": [{"key": "users/alice", "versionstamp": None}]}


async def test_touches_of_a_long_commit_are_reported_also_in_its_midst(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A touch keeps its version. The first parts of a long commit are reported with the version before it."""
    monkeypatch.setattr(limits, "MEMORY_SLICE_CHANGES", 100)
    engine = api.context.store(None).engine
    wanted = [("k", number) for number in range(1500)]
    sets = [Set(Space.TUPLES, keys.encode(key), b"1", JSON, expire_in=10**6) for key in wanted]
    done = await engine.commit(Batch(tuple(sets)))
    assert isinstance(done, Committed)
    async with api.watch("prefix=k") as events, api.watch("key=k/=3") as of_a_key:
        for each in (events, of_a_key):
            assert (await each.next())[0] == "ready"
        before = (await of_a_key.next())[2]["entries"][0]["expires_at"]
        await engine.commit(Batch(tuple([Touch(Space.TUPLES, one.key, 2 * 10**6) for one in sets])))
        seen: set[str] = set()
        first = None
        while len(seen) < 1500:
            _, reached, data = await events.next()
            seen |= {entry["key"] for entry in data["entries"]}
            first = first or reached
        assert (await of_a_key.next())[2]["entries"][0]["expires_at"] > before
    assert first == done.version
    # Who has seen the first part alone gets the others.
    async with api.watch("prefix=k", **{"Last-Event-ID": str(first)}) as events:
        seen = set()
        while len(seen) < 1500:
            seen |= {entry["key"] for entry in (await events.next())[2].get("entries", ())}


async def test_keys_are_reported_whole_at_first_and_whenever_one_changed(api: RunningApi) -> None:
    await api.put("/v1/kv/a", 1)
    async with api.watch("key=a&key=b") as events, api.watch("key=a&key=b") as others:
        for each in (events, others):
            assert (await each.next())[0] == "ready"
            states = (await each.next())[2]["entries"]
            assert [entry.get("value") for entry in states] == [1, None]
        await api.put("/v1/kv/b", 2)
        for each in (events, others):
            assert [entry["value"] for entry in (await each.next())[2]["entries"]] == [1, 2]


async def test_a_key_that_is_named_several_times_is_reported_once(api: RunningApi) -> None:
    await api.put("/v1/kv/a", 1)
    async with api.watch("&".join(["key=b", *["key=a"] * 900])) as events:
        await events.next()
        assert [entry["key"] for entry in (await events.next())[2]["entries"]] == ["b", "a"]


async def test_a_client_of_keys_that_is_cut_off_before_the_first_state_has_no_id_to_continue_from(
    api: RunningApi,
) -> None:
    await api.put("/v1/kv/a", 1)
    async with api.watch("key=a") as events:
        assert (await events.next())[:2] == ("ready", None)
        name, version, _ = await events.next()
        assert name == "change"
        assert version is not None


@pytest.mark.parametrize("number", [3, limits.HTTP_PAGE_ROWS + 1])
async def test_keys_whose_values_are_too_large_for_one_event_are_refused(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(limits, "HTTP_REPLY_BYTES", 1000 * (number - 1) + 100)
    query = "&".join([f"key=n/={each}" for each in range(number)])
    for each in range(number - 1):
        await api.put(f"/v1/kv/n/={each}", "x" * 998)
    async with api.watch(query) as events:
        assert [(await events.next())[0] for _ in range(2)] == ["ready", "change"]
        await api.put(f"/v1/kv/n/={number - 1}", "x" * 998)
        name, _, data = await events.next()
        assert (name, data["code"]) == ("error", "REPLY_TOO_LARGE")
        assert (await events.next())[0] == "end"
    refused = await api.get(f"/v1/watch?{query}")
    assert problem(refused) == (413, "REPLY_TOO_LARGE")
    assert "watch fewer keys" in refused.json()["detail"]


async def test_a_watch_resumes_where_it_was_without_what_it_knows(api: RunningApi) -> None:
    first = (await api.put("/v1/kv/users/a", 1)).json()["versionstamp"]
    async with AsyncExitStack() as stack:
        # One listener stays, so that the channel keeps its events; the others resume from it, or from the change log.
        stays = await stack.enter_async_context(api.watch("prefix=users"))
        await stays.next()
        second = (await api.put("/v1/kv/users/b", 2)).json()["versionstamp"]
        await stays.next()
        third = (await api.put("/v1/kv/users/c", 3)).json()["versionstamp"]
        await stays.next()
        for since, wanted in ((first, ["users/b", "users/c"]), (second, ["users/c"])):
            resumed = [await stack.enter_async_context(api.watch(f"prefix=users&since={since}"))]
            header = {"last-event-id": since}
            resumed.append(await stack.enter_async_context(api.watch("prefix=users&since=1", **header)))
            for events in resumed:
                assert (await events.next())[:2] == ("ready", int(since))
                found: list[str] = []
                while len(found) < len(wanted):
                    found += [entry["key"] for entry in (await events.next())[2]["entries"]]
                assert found == wanted
        last = await stack.enter_async_context(api.watch(f"prefix=users&since={third}"))
        keys = await stack.enter_async_context(api.watch(f"key=users/a&since={third}"))
        assert (await last.next())[0] == (await keys.next())[0] == "ready"
        await api.put("/v1/kv/users/a", 4)
        assert [entry["value"] for entry in (await last.next())[2]["entries"]] == [4]
        assert [entry["value"] for entry in (await keys.next())[2]["entries"]] == [4]


async def test_a_client_that_comes_back_for_many_kept_events_is_not_cut_off(api: RunningApi) -> None:
    octets = {"content-type": "application/octet-stream"}
    async with api.watch("prefix=big") as stays:
        await stays.next()
        first = (await api.put("/v1/kv/big/a", 1)).json()["versionstamp"]
        await stays.next()
        for number in range(6):
            await api.send("PUT", f"/v1/kv/big/={number}", content=bytes(120_000), headers=octets)
            await stays.next()
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        rest = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n\r\n"
        writer.write(f"HEAD /v1/info {rest}".encode())
        await reader.readuntil(b"\r\n\r\n")
        for connection in api.listener.table.connections:
            # So that the events, 960 kB, are far more than it takes at once.
            sending = connection.transport.get_extra_info("socket")
            sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        writer.write(f"GET /v1/watch?prefix=big&since={first} {rest}".encode())
        async with asyncio.timeout(LONGEST_SECONDS):
            found = b""
            while found.count(b"event: change") < 6:
                piece = await reader.read(65_536)
                assert piece, "the server has ended the connection"
                found = found[-2_000_000:] + piece
        writer.transport.abort()


async def test_an_expiry_is_an_event_also_for_a_client_that_was_away() -> None:
    clock = ManualClock()
    engine = await open_engine(":memory:", clock=clock)
    async with running_api(engine=engine) as api:
        version = (await api.put("/v1/kv/s/a?expire_in=10", 1)).json()["versionstamp"]
        async with api.watch("prefix=s") as events:
            await events.next()
            clock.advance(11)
            gone = {"entries": [{"key": "s/a", "versionstamp": None}]}
            assert (await events.next())[2] == gone
            async with api.watch("prefix=s", **{"last-event-id": version}) as again:
                await again.next()
                assert (await again.next())[2] == gone
    await engine.aclose()


async def test_an_expiry_that_is_reported_with_a_put_is_not_withheld_from_who_knows_the_put() -> None:
    clock = ManualClock()
    engine = await open_engine(":memory:", clock=clock)
    async with running_api(engine=engine) as api:
        await api.put("/v1/kv/s/a?expire_in=10", 1)
        async with api.watch("prefix=s") as events:
            await events.next()
            clock.advance(11)
            done = await engine.commit(Batch((Set(Space.TUPLES, keys.encode(("s", "b")), b"1", JSON),)))
            assert isinstance(done, Committed)
            version = done.version
            reported: list[tuple[str, str | None]] = []  # in one event, as a rule
            while len(reported) < 2:
                reported += [(entry["key"], entry["versionstamp"]) for entry in (await events.next())[2]["entries"]]
            assert sorted(reported) == [("s/a", None), ("s/b", str(version))]
            async with api.watch(f"prefix=s&since={version}") as again:
                await again.next()
                found = (await again.next())[2]["entries"]
                assert ("s/a", None) in [(entry["key"], entry["versionstamp"]) for entry in found]


async def test_who_resumes_before_a_long_commit_gets_all_of_it(api: RunningApi) -> None:
    known = [(await api.put(f"/v1/kv/n/{number}", 1)).json()["versionstamp"] for number in range(3)]
    sets = [{"op": "set", "key": f"n/={number}", "value": 1} for number in range(2500)]  # several slices of the log
    version = int((await api.post("/v1/atomic", {"mutations": sets})).json()["versionstamp"])
    async with AsyncExitStack() as stack:
        for since, expected in ((known[0], 2502), (known[2], 2500), (known[1], 2501)):
            events = await stack.enter_async_context(api.watch(f"prefix=n&since={since}"))  # all on one channel
            found: set[str] = set()
            reached = (await events.next())[1]
            while reached != version:
                _, last, data = await events.next()
                reached = last or reached
                found |= {entry["key"] for entry in data["entries"]}
            assert len(found) >= expected


async def test_a_key_that_was_absent_before_is_no_news_to_who_resumes(api: RunningApi) -> None:
    async with api.watch("key=a&key=absent") as stays:
        assert [(await stays.next())[0] for _ in range(2)] == ["ready", "change"]
        version = (await api.put("/v1/kv/a", 1)).json()["versionstamp"]
        await stays.next()
        async with api.watch(f"key=a&key=absent&since={version}") as resumed:
            await resumed.next()
            await api.put("/v1/kv/a", 2)
            assert (await resumed.next())[2]["entries"][0]["value"] == 2


async def test_an_old_absence_is_not_reported_to_who_knows_a_later_version() -> None:
    clock = ManualClock()
    engine = await open_engine(":memory:", clock=clock)
    async with running_api(engine=engine) as api:
        await api.put("/v1/kv/s/a?expire_in=10", 1)
        async with api.watch("prefix=s") as events:
            await events.next()
            clock.advance(11)
            await events.next()
            version = (await api.put("/v1/kv/s/a", 2)).json()["versionstamp"]
            await events.next()
            async with api.watch(f"prefix=s&since={version}") as again:
                await again.next()
                await api.put("/v1/kv/s/b", 3)
                assert [entry["key"] for entry in (await again.next())[2]["entries"]] == ["s/b"]


async def test_what_is_no_longer_in_the_change_log_is_a_410(api: RunningApi) -> None:
    assert problem(await api.get("/v1/watch?prefix=a&since=999999")) == (410, "HISTORY_GONE")
    for query in ("", "prefix=a&key=b", "prefix=a&since=x", "key=", "prefix=a&from=1"):
        assert (await api.get(f"/v1/watch?{query}")).status_code == 422
    head = await api.send("HEAD", "/v1/watch?prefix=a")
    assert head.headers["content-type"] == "text/event-stream"


async def test_watches_that_are_refused_leave_nothing_in_memory(api: RunningApi) -> None:
    names = [f"key={number}" for number in range(limits.HTTP_WATCHED_KEYS)]

    async def refused(number: int) -> None:
        query = "&".join([*names[number:], *names[:number]])  # the same keys in another order
        assert problem(await api.get(f"/v1/db/a%20b/watch?{query}")) == (422, "VALIDATION_ERROR")

    await refused(0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, 51):
            await refused(number)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 1_000_000  # the keys of one take 60 kB
    finally:
        tracemalloc.stop()


async def test_many_listeners_share_one_watch_of_the_database(api: RunningApi) -> None:
    async with AsyncExitStack() as stack:
        watches = [stack.enter_async_context(api.watch("prefix=shared")) for _ in range(50)]
        listeners = await asyncio.gather(*watches)
        await asyncio.gather(*[events.next() for events in listeners])
        watching = [task for task in asyncio.all_tasks() if task.get_name() == "keyloft http watch"]
        assert len(watching) == 1
        await api.put("/v1/kv/shared/a", 1)
        found = await asyncio.gather(*[events.next() for events in listeners])
        assert {data["entries"][0]["value"] for _, _, data in found} == {1}
    async with asyncio.timeout(LONGEST_SECONDS):
        while any(task.get_name() == "keyloft http watch" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)


async def test_a_listener_that_does_not_read_is_cut_off_and_others_go_on(api: RunningApi) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1024)
    head = f"GET /v1/watch?prefix=big HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n\r\n"
    writer.write(head.encode())
    await reader.readuntil(b"event: ready\n")
    async with api.watch("prefix=big") as events:
        await events.next()
        octets = {"content-type": "application/octet-stream"}
        async with asyncio.timeout(LONGEST_SECONDS):
            while api.listener.connections > 2:
                await api.send("PUT", "/v1/kv/big/a", content=b"x" * 500_000, headers=octets)
                assert (await events.next())[0] == "change"
    writer.transport.abort()


class Revocable(ValidTokens):
    is_revoked = False

    def is_valid(self, token: object) -> bool:
        return not self.is_revoked


async def test_an_event_source_that_comes_before_the_database_is_open_connects_again() -> None:
    """At a status like 503 it would give up for good; others get one."""
    async with running_api(is_open=False) as api:
        with pytest.raises(httpx.TransportError):
            await api.get("/v1/watch?prefix=a", headers={"accept": "text/event-stream"})
        assert problem(await api.get("/v1/watch?prefix=a")) == (503, "UNREACHABLE")


async def test_nothing_is_sent_after_a_token_was_revoked() -> None:
    """Its stream ends with the next event, before the next heartbeat."""
    valid = Revocable((admin_token(ADMIN_TOKEN),))
    async with running_api(valid=valid) as api, api.watch("prefix=a") as events, api.watch("key=a/b") as of_a_key:
        assert (await events.next())[0] == "ready"
        assert [(await of_a_key.next())[0] for _ in range(2)] == ["ready", "change"]
        valid.is_revoked = True
        await api.put("/v1/kv/a/b", 1)
        assert [(await each.next())[0] for each in (events, of_a_key)] == ["end", "end"]


async def test_a_stream_ends_when_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_HEARTBEAT_SECONDS", 0.01)
    valid = Revocable((admin_token(ADMIN_TOKEN),))
    async with running_api(valid=valid) as api, api.watch("prefix=a") as events:
        assert (await events.next())[0] == "ready"
        valid.is_revoked = True
        assert (await events.next())[0] == "end"


async def test_streams_end_when_the_server_does_and_there_are_not_too_many() -> None:
    async with running_api(scoped_token("kl-other", "read:kv/b"), connections=4) as api, AsyncExitStack() as stack:
        listeners = [await stack.enter_async_context(api.watch("prefix=a")) for _ in range(3)]
        for events in listeners:
            await events.next()
        assert problem(await api.get("/v1/watch?prefix=a")) == (429, "BUSY")
        api.listener.stop_accepting()
        api.context.end_streams()
        assert {(await events.next())[0] for events in listeners} == {"end"}


async def test_head_of_a_watch_names_no_length_since_its_stream_has_none(api: RunningApi) -> None:
    got = await api.send("HEAD", "/v1/watch?prefix=k")
    assert (got.status_code, got.headers["content-type"]) == (200, "text/event-stream")
    assert "content-length" not in got.headers
