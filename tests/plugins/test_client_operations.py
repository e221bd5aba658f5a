"""The calls of a plugin's client beyond set, get, delete and list: what they return, and what they raise."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

import keyloft
from keyloft import InvalidArgument, limits
from keyloft.plugins import BotDatabase, CurrentValue, DatabaseClient, DatabaseService, PluginEntry, UsedStorage
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.usage import PluginUsage
from tests.support.fork_server import run
from tests.support.nats import private_server, settled

PREFIX = "more.kv"

COUNTING = """
import asyncio, sys
from keyloft.plugins import DatabaseClient

async def main(url):
    async with await DatabaseClient.connect(url, plugin_name="counting", prefix="more.kv") as client:
        for _ in range(200):
            await client.kv.incr("incremented")
        for _ in range(40):
            await asyncio.gather(*[client.kv.update("updated", lambda n: n + 1, default=0) for _ in range(5)])

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
async def client(nats_url: str, tmp_path: Path) -> AsyncIterator[DatabaseClient]:
    connection = await nats.connect(nats_url)
    async with (
        BotDatabase(tmp_path / "bot.db") as db,
        PluginUsage(db, Quotas(named={"limited": Quota(keys=2)})) as usage,
        DatabaseService(connection, db, prefixes=[PREFIX], usage=usage),
        await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix=PREFIX) as client,
    ):
        yield client
    await connection.close()


async def test_a_set_with_a_condition_returns_a_version_or_raises_what_is_stored(client: DatabaseClient) -> None:
    kv = client.kv
    absent = await kv.get("k", default=7, meta=True)
    assert absent == PluginEntry(value=7, version=0)
    assert not absent.exists
    version = await kv.set("k", {"a": 1}, ttl=60, if_absent=True)
    found = await kv.get("k", meta=True)
    assert (found.exists, found.value, found.version) == (True, {"a": 1}, version)
    assert found.ttl is not None
    assert 0 < found.ttl <= 60
    assert found.created_at == found.updated_at is not None
    with pytest.raises(keyloft.VersionConflict, match="expected no entry") as raised:
        await kv.set("k", 2, if_absent=True)
    assert raised.value.current == CurrentValue({"a": 1}, version)
    newer = await kv.set("k", 2, expected_version=version, keep_ttl=True)
    assert newer > version
    assert (await kv.get("k", meta=True)).ttl is not None
    with pytest.raises(keyloft.VersionConflict) as raised:
        await kv.set("other", 2, expected_version=version)
    assert raised.value.current is None
    assert await kv.set("k", 3) is None  # type: ignore[func-returns-value]
    for wrong in ({"if_absent": True, "expected_version": 0}, {"expected_version": -1}, {"keep_ttl": True, "ttl": 5}):
        with pytest.raises(keyloft.InvalidArgument):
            await kv.set("k", 1, **wrong)  # type: ignore[call-overload]


async def test_increments_return_the_new_number(client: DatabaseClient) -> None:
    assert await client.kv.incr("n") == 1
    assert await client.kv.incr("n", -3, ttl=5) == -2
    assert (await client.kv.get("n", meta=True)).ttl is None
    assert await client.kv.incr("soon", 2, ttl_seconds=60) == 2
    assert (await client.kv.get("soon", meta=True)).ttl == 60
    await client.kv.set("text", "1")
    with pytest.raises(keyloft.NotACounter, match="the value at 'text'"):
        await client.kv.incr("text")
    with pytest.raises(keyloft.InvalidArgument, match="by must be"):
        await client.kv.incr("n", 1.5)  # type: ignore[arg-type]


async def test_any_number_of_values_is_read(client: DatabaseClient) -> None:
    kv = client.kv
    entries = {f"k{n:04}": n for n in range(2500)}
    for first in range(0, 2500, 1000):
        some = dict(list(entries.items())[first : first + 1000])
        assert await kv.set_many(some, ttl=600) == len(some)
    assert await kv.get_many([*entries, "none"]) == entries
    assert await kv.get_many(iter(["none", "k0001", "k0000"]), default=None) == {"none": None, "k0001": 1, "k0000": 0}
    assert await kv.get_many([]) == {}
    large = {f"large{n}": "x" * 60_000 + str(n) for n in range(40)}
    await asyncio.gather(*[kv.set(key, value) for key, value in large.items()])
    assert await kv.get_many(large) == large
    assert dict(await kv.list("large", values=True)) == large
    assert [pair async for pair in kv.list("k", values=True, limit=1200)] == list(entries.items())[:1200]
    assert await kv.count() == 2540
    assert await kv.count("k00") == 100
    assert await kv.delete_many(["k0000", "k0001", "none", "k0000"]) == 2
    assert await kv.delete_many(prefix="k") == 2498
    assert await kv.delete_many(prefix="") == 40
    assert await kv.delete_many([]) == 0
    wrong: list[Any] = [
        kv.get_many("text"),
        kv.get_many(["a", ""]),
        kv.set_many({"": 1}),
        kv.set_many([]),  # type: ignore[arg-type]
        kv.set_many(dict.fromkeys(map(str, range(1001)), 1)),
        kv.set_many(large),
        kv.delete_many(),
        kv.delete_many(["a"], prefix="a"),
        kv.delete_many(map(str, range(1001))),
    ]
    for call in wrong:
        with pytest.raises(keyloft.InvalidInput):
            await call


async def test_a_ttl_is_changed_and_removed(client: DatabaseClient) -> None:
    await client.kv.set("k", 1)
    assert await client.kv.touch("k", 60) is True
    assert (await client.kv.get("k", meta=True)).ttl == 60
    assert await client.kv.touch("k", None) is True
    assert (await client.kv.get("k", meta=True)).ttl is None
    assert await client.kv.touch("none", 60) is False


async def test_usage_and_quota_are_shown_and_a_write_over_it_is_refused(client: DatabaseClient) -> None:
    assert await client.kv.usage() == UsedStorage(0, 0)
    limited = DatabaseClient(client.nats, "limited", prefix=PREFIX)
    await limited.kv.set_many({"a": 1, "b": "xy"})
    assert await limited.kv.usage() == UsedStorage(2, 5, most_keys=2, most_bytes=None)
    for call in (limited.kv.incr("c"), limited.kv.set_many({"c": 1}), limited.kv.update("c", lambda _: 1)):
        with pytest.raises(keyloft.QuotaExceeded, match="at most 2 keys"):
            await call
    await limited.kv.delete_many(prefix="a")
    assert await limited.kv.incr("c") == 1


async def test_an_update_is_made_again_until_no_one_was_faster(client: DatabaseClient) -> None:
    async def append(names: list[str], name: str) -> list[str]:
        await asyncio.sleep(0)
        return [*names, name]

    def appending(name: str) -> Any:
        return client.kv.update("names", lambda names: append(names, name), default=[])

    stored = await asyncio.gather(*[appending(str(number)) for number in range(30)])
    assert sorted(await client.kv.get("names"), key=int) == [str(number) for number in range(30)]
    assert len({json.dumps(names) for names in stored}) == 30, "each returns what it has stored"

    default: list[int] = []

    def extend(numbers: list[int]) -> list[int]:
        numbers.append(1)
        return numbers

    assert await client.kv.update("new", extend, default=default, ttl=60) == [1]
    assert default == []
    assert await client.kv.update("new", extend) == [1, 1]
    assert (await client.kv.get("new", meta=True)).ttl is not None, "it keeps its TTL"
    with pytest.raises(TypeError):
        await client.kv.update("new", lambda _: object())
    with pytest.raises(ZeroDivisionError):
        await client.kv.update("new", lambda _: 1 / 0)
    with pytest.raises(TypeError) as raised:
        await client.kv.update("absent", lambda n: n + 1)
    assert "pass default=" in raised.value.__notes__[0]


async def test_an_update_that_changes_the_value_in_place_and_returns_none_is_refused(client: DatabaseClient) -> None:
    await client.kv.set_many({"list": [1], "dict": {"a": 1}, "deep": [[1]], "same": [1]})
    in_place: list[tuple[str, Callable[[Any], Any]]] = [
        ("list", lambda numbers: numbers.append(2)),
        ("dict", lambda names: names.update(b=2)),
        ("deep", lambda lists: lists[0].append(2)),
        ("absent", lambda numbers: numbers.append(2)),
    ]
    for key, change in in_place:
        with pytest.raises(InvalidArgument, match=r"^fn: .*in place and returned None"):
            await client.kv.update(key, change, default=[])
    stored = await client.kv.get_many([key for key, _ in in_place])
    assert stored == {"list": [1], "dict": {"a": 1}, "deep": [[1]]}
    assert await client.kv.update("same", lambda _: None) is None, "None is a value like any other"
    assert await client.kv.update("absent", lambda _: None, default=[]) is None
    assert await client.kv.get_many(["same", "absent"]) == {"same": None, "absent": None}


async def test_updates_of_one_key_by_tasks_of_a_client_take_turns(
    client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPDATE_WAIT_SECONDS", 60)  # on a busy machine, the last one waits for long
    calls = 0

    def add(number: int) -> int:
        nonlocal calls
        calls += 1
        return number + 1

    await asyncio.gather(*[client.kv.update("number", add, default=0) for _ in range(100)])
    assert (await client.kv.get("number"), calls) == (100, 100)


async def test_an_update_inside_the_function_of_another_one_of_the_key_is_refused(client: DatabaseClient) -> None:
    async def nested(value: int) -> int:
        await client.kv.update("other", lambda number: number + 1, default=0)
        [number] = await asyncio.gather(client.kv.update("number", lambda number: number + 1, default=0))
        return int(number)

    async with asyncio.timeout(20):
        with pytest.raises(InvalidArgument, match=r"^fn: .*already updates number .*return the new value"):
            await client.kv.update("number", nested, default=0)
        assert await client.kv.update("number", lambda number: number + 5, default=0) == 5
    assert await client.kv.get("other") == 1


async def test_a_function_may_wait_for_a_task_that_waits_for_the_same_key(
    client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, updated = asyncio.Event(), asyncio.Event()

    async def worker() -> None:
        await began.wait()
        await client.kv.update("number", lambda number: number + 1, default=0)
        updated.set()

    async def fn(number: int) -> int:
        began.set()
        await updated.wait()
        return number + 10

    monkeypatch.setattr(limits, "UPDATE_TURN_SECONDS", 0.01)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker())
        assert await client.kv.update("number", fn, default=0) == 11


async def test_updates_of_a_key_do_not_add_up_their_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPDATE_WAIT_SECONDS", 0.1)
    async with (
        private_server() as server,
        await nats.connect(server.url) as silent,
        await DatabaseClient.connect(server.url, plugin_name="trivia", prefix=PREFIX, timeout=0.5) as client,
    ):
        await silent.subscribe(f"{PREFIX}.trivia.get", cb=_answer_nothing)
        await settled(silent)
        updates = [client.kv.update("number", lambda number: number + 1, default=0) for _ in range(100)]
        async with asyncio.timeout(20):  # one after the other they would take 50 s
            done = await asyncio.gather(*updates, return_exceptions=True)
    assert {type(outcome) for outcome in done} == {keyloft.TimedOut}


async def _answer_nothing(_: Msg) -> None:
    pass


async def test_an_update_gives_up_after_so_many_conflicts(
    client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPDATE_ATTEMPTS", 3)
    calls = 0

    async def disturbed(value: int) -> int:
        nonlocal calls
        calls += 1
        await client.kv.set("k", -calls)
        return value + 1

    with pytest.raises(keyloft.VersionConflict):
        await client.kv.update("k", disturbed, default=0)
    assert calls == 3


@pytest.mark.slow
async def test_two_processes_that_count_lose_nothing(client: DatabaseClient, nats_url: str) -> None:
    counting = [asyncio.to_thread(run, ["-c", COUNTING, nats_url], timeout=120) for _ in range(2)]
    assert [process.returncode for process in await asyncio.gather(*counting)] == [0, 0]
    counted = DatabaseClient(client.nats, "counting", prefix=PREFIX)
    assert await counted.kv.get_many(["incremented", "updated"]) == {"incremented": 400, "updated": 400}
