"""Watches of large values over HTTP: memory is bounded, also beside clients that do not read; nothing is missing."""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from keyloft import limits
from keyloft.core.records import Ask, Record
from keyloft.http.wire import WireEntry, wire_entry
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, Events, RunningApi, running_api
from tests.http.test_crowds import TOKEN, service
from tests.http.test_kv import problem

VALUE = b"x" * 100_000
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    async with running_api() as api:
        yield api


async def put(api: RunningApi, path: str, value: bytes = VALUE) -> int:
    return int((await api.send("PUT", f"/v1/kv/{path}", content=value, headers=OCTETS)).json()["versionstamp"])


def deaf(closing: ExitStack, port: int, path: str, token: str = ADMIN_TOKEN) -> None:
    """A client that asks for something and reads nothing."""
    client = closing.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        while not is_so():
            await asyncio.sleep(0.01)


def unread_bytes(api: RunningApi) -> int:
    return sum([each.transport.get_write_buffer_size() for each in api.listener.table.connections])


async def keys_until(events: Events, number: int) -> list[str]:
    """The keys that events report, in their order, until there are so many different ones."""
    found: list[str] = []
    while len(set(found)) < number:
        name, _, data = await events.next()
        assert name == "change"
        found += [entry["key"] for entry in data["entries"]]
    return found


async def test_a_backlog_of_large_values_is_sent_in_parts_as_its_client_reads(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_REPORT_BYTES", 300_000)
    first = await put(api, "w/first", b"")
    for number in range(60):
        await put(api, f"w/={number}")
    with ExitStack() as closing:
        deaf(closing, api.port, f"/v1/watch?prefix=w&since={first}")
        await until(lambda: unread_bytes(api) > 0)
        async with api.watch(f"prefix=w&since={first + 1}") as events:
            await events.next()
            assert await keys_until(events, 59) == [f"w/={number}" for number in range(1, 60)]
        assert unread_bytes(api) < 1_000_000


async def test_a_client_that_is_cut_off_in_a_backlog_resumes_with_what_it_does_not_know(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_REPORT_BYTES", 150_000)
    first = await put(api, "w/first", b"")
    sets = [{"op": "set", "key": f"w/=0/={number}", "value": "y" * 60_000} for number in range(20)]
    await api.post("/v1/atomic", {"mutations": sets})  # one version in many parts
    for number in range(20):
        await put(api, f"w/={number}")
    found: set[str] = set()
    last, rounds = first, 0
    while len(found) < 40:
        rounds += 1
        async with api.watch("prefix=w", **{"last-event-id": str(last)}) as events:
            await events.next()
            for _ in range(12):
                _, version, data = await events.next()
                found |= {entry["key"] for entry in data["entries"]}
                last = version or last
                if len(found) == 40:
                    break
    assert rounds > 1


async def test_large_states_of_keys_are_sent_in_parts_and_each_change_whole(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_KEPT_EVENT_BYTES", 250_000)
    for number in range(5):
        await put(api, f"k/={number}")
    query = "&".join([f"key=k/={number}" for number in range(5)])
    async with api.watch(query) as events, api.watch(query) as others:
        for each in (events, others):
            assert (await each.next())[0] == "ready"
            assert await keys_until(each, 5) == [f"k/={number}" for number in range(5)]
        version = await put(api, "k/=3", b"y" * 100_000)
        for each in (events, others):
            reached = None
            found: list[str] = []
            while reached is None:
                _, reached, data = await each.next()
                found += [entry["key"] for entry in data["entries"] if entry["versionstamp"] == str(version)]
            assert found == ["k/=3"]
            assert reached == version
        # Now they are small, and their events are shared and kept.
        for number in range(5):
            await put(api, f"k/={number}", b"")
        for each in (events, others):
            sizes = [1]
            while any(sizes):
                _, reached, data = await each.next()
                sizes = [len(entry["bytes"]) for entry in data["entries"]] if len(data["entries"]) == 5 else [1]
    async with api.watch(f"{query}&since={version}") as again:
        assert (await again.next())[1] == version
        assert len((await again.next())[2]["entries"]) == 5


async def test_large_states_that_are_not_read_are_bounded_and_more_of_them_refused(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_KEPT_EVENT_BYTES", 250_000)
    monkeypatch.setattr(limits, "HTTP_WAITING_STATES", 2)
    monkeypatch.setattr(limits, "HTTP_UNSENT_SECONDS", LONGEST_SECONDS)
    for number in range(30):
        await put(api, f"k/={number}", b"x" * 1_000_000)
    query = "&".join([f"key=k/={number}" for number in range(30)])
    with ExitStack() as closing:
        for number in range(limits.HTTP_LARGE_STATES + limits.HTTP_WAITING_STATES):
            deaf(closing, api.port, f"/v1/watch?{query}&key=own/={number}")
        await until(lambda: api.context.meters.watches == limits.HTTP_LARGE_STATES + limits.HTTP_WAITING_STATES)
        more: list[asyncio.Task[httpx.Response]] = []
        most = 0
        async with asyncio.timeout(LONGEST_SECONDS):
            while not (refused := [each for each in more if each.done()]):
                # If it came before one of those above, that one is refused, and the next of these.
                more.append(asyncio.create_task(api.get(f"/v1/watch?{query}&key=own/more&key=own/={len(more)}")))
                for _ in range(200):
                    most = max(most, unread_bytes(api))
                    await asyncio.wait(more, timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
        assert problem(refused[0].result())[1] == "BUSY"
        assert most < (limits.HTTP_LARGE_STATES + 1) * 2_000_000
        for each in more:
            each.cancel()
        monkeypatch.setattr(limits, "HTTP_UNSENT_SECONDS", 1.0)
        await until(lambda: api.context.meters.watches <= limits.HTTP_LARGE_STATES)  # the others were cut off
        async with api.watch(query) as events:
            await events.next()
            assert len(await keys_until(events, 30)) == 30


def peak_mb(pid: int) -> float:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


@pytest.mark.slow
async def test_a_service_that_is_asked_for_many_large_values_stays_small(tmp_path: Path) -> None:
    async with service(tmp_path) as (served, client, _):
        version = (await client.put("/v1/kv/w/first", json=1)).json()["versionstamp"]
        for number in range(100):
            data = os.urandom(1000) * 1000
            assert (await client.put(f"/v1/kv/w/={number}", content=data, headers=OCTETS)).status_code == 201
        before = peak_mb(served.process.pid)
        with ExitStack() as closing:
            keys = "&".join([f"key=w/={number}" for number in range(30)])
            for number in range(30):
                deaf(closing, client.base_url.port or 0, f"/v1/watch?prefix=w&since={int(version) + number}", TOKEN)
            for number in range(10):
                deaf(closing, client.base_url.port or 0, f"/v1/watch?{keys}&key=own/={number}", TOKEN)
            async with client.stream("GET", f"/v1/watch?prefix=w&since={version}") as stream:
                events = Events(stream)
                assert (await events.next())[0] == "ready"
                assert await keys_until(events, 100) == [f"w/={number}" for number in range(100)]
        grown = peak_mb(served.process.pid) - before
        assert grown < 250, f"{grown:.0f} MB more"


@pytest.mark.slow
async def test_a_backlog_that_a_killed_service_did_not_finish_is_resumed(tmp_path: Path) -> None:
    found: set[str] = set()
    last = ""
    for is_last in (False, True):
        async with service(tmp_path) as (served, client, _):
            if not last:
                last = str((await client.put("/v1/kv/w/first", json=1)).json()["versionstamp"])
                for number in range(40):
                    await client.put(f"/v1/kv/w/={number}", content=VALUE * 9, headers=OCTETS)
            async with client.stream("GET", "/v1/watch?prefix=w", headers={"last-event-id": last}) as stream:
                events = Events(stream)
                await events.next()
                while len(found) < (40 if is_last else 15):
                    _, version, data = await events.next()
                    found |= {entry["key"] for entry in data["entries"]}
                    last = str(version or last)
                if not is_last:
                    served.process.kill()
    assert found == {f"w/={number}" for number in range(40)}


async def test_listeners_that_do_not_read_do_not_hold_up_the_others(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_UNSENT_SECONDS", LONGEST_SECONDS)  # they are not cut off
    first = await put(api, "w/first", b"")
    for number in range(12):
        await put(api, f"w/={number}", b"x" * 1_000_000)
    with ExitStack() as closing:
        for number in range(6):  # each begins with a later event than the one before it
            deaf(closing, api.port, f"/v1/watch?prefix=w&since={first + number}")
        async with asyncio.timeout(LONGEST_SECONDS / 2), api.watch(f"prefix=w&since={first}") as events:
            assert (await events.next())[0] == "ready"
            await keys_until(events, 12)
            for number in range(12, 16):
                await put(api, f"w/={number}", b"x" * 1_000_000)
                assert f"w/={number}" in await keys_until(events, 1)
        await until(lambda: api.context.meters.watches == 6)


async def test_a_listener_that_reads_late_misses_nothing_and_stays_connected(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_UNSENT_SECONDS", LONGEST_SECONDS)
    async with api.watch("prefix=w") as events, api.watch("prefix=w") as late:
        assert (await events.next())[0] == (await late.next())[0] == "ready"
        for number in range(16):  # more than the buffers of the operating system hold
            await put(api, f"w/={number}", b"x" * 1_000_000)
            assert f"w/={number}" in await keys_until(events, 1)
        assert len(await keys_until(late, 16)) >= 16
        await put(api, "w/last", b"")
        for each in (events, late):
            assert await keys_until(each, 1) == ["w/last"]


@pytest.mark.slow
async def test_a_large_event_is_written_to_many_listeners_only_as_there_is_room(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_FULL_BYTES", 4_000_000)
    listeners = 40
    with ExitStack() as closing:
        for _ in range(listeners):
            deaf(closing, api.port, "/v1/watch?prefix=w")
        await until(lambda: api.context.meters.watches == listeners)
        most = 0
        async with asyncio.timeout(LONGEST_SECONDS):
            # The first ones fit the buffers of the operating system.
            while api.context.meters.watches > listeners // 2:
                await put(api, "w/large", b"x" * 1_000_000)
                most = max(most, unread_bytes(api))
    assert most < 4_000_000 + 2 * 1_400_000


async def test_watches_that_were_small_and_grow_are_read_within_the_bound(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = api.context.database()
    reading = most = 0
    read = engine.read

    async def slow_read(*asks: Ask) -> list[Any]:
        nonlocal reading, most
        if len(asks) < 31:
            return await read(*asks)
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return await read(*asks)

    monkeypatch.setattr(engine, "read", slow_read)
    keys = "&".join([f"key=k/={number}" for number in range(30)])
    async with AsyncExitStack() as closing:
        watches = [
            await closing.enter_async_context(api.watch(f"{keys}&key=own/={number}", base="/v1")) for number in range(8)
        ]
        for events in watches:
            assert [(await events.next())[0] for _ in range(2)] == ["ready", "change"]
        most = 0
        await put(api, "k/=1")
        for events in watches:
            assert (await events.next())[0] == "change"
    assert most == limits.HTTP_WATCH_READ_BYTES // limits.HTTP_REPLY_BYTES


async def test_other_requests_are_answered_between_the_parts_of_large_answers(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_UNSENT_SECONDS", LONGEST_SECONDS)  # the clients share this event loop
    for number in range(20):
        await put(api, f"k/={number}", b"x" * 900_000)
    iteration = 0
    made: list[int] = []

    def count() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(count)

    def encoded(key: str, record: Record | None, *, with_value: bool = True) -> WireEntry:
        if record is not None:
            made.append(iteration)
        return wire_entry(key, record, with_value=with_value)

    count()
    monkeypatch.setattr("keyloft.http.sse.wire_entry", encoded)
    monkeypatch.setattr("keyloft.http.batches.wire_entry", encoded)
    names = [f"k/={number}" for number in range(20)]

    async def watch(number: int) -> None:
        async with api.watch("&".join([f"key={name}" for name in (*names, f"own/={number}")])) as events:
            assert (await events.next())[0] == "ready"
            await keys_until(events, 21)

    await asyncio.gather(*map(watch, range(3)), *[api.post("/v1/get", {"keys": names}) for _ in range(3)])
    assert len(made) == 6 * 20
    assert len(set(made)) == len(made)  # at most one in an iteration of the event loop
