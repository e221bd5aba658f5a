"""Lists, range deletes, several keys at once and atomics over HTTP."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from keyloft import limits
from keyloft.core.records import Ask, Page, Record
from tests.http.api import LONGEST_SECONDS, RunningApi, running_api
from tests.http.test_kv import problem


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    async with running_api() as api:
        yield api


async def filled(api: RunningApi, number: int, base: str = "/v1") -> None:
    sets = [{"op": "set", "key": f"n/={each}", "value": each} for each in range(number)]
    assert (await api.post(f"{base}/atomic", {"mutations": sets})).status_code == 200


async def test_a_list_is_read_page_by_page_in_both_directions(api: RunningApi) -> None:
    await filled(api, 25)
    for extra, wanted in (("", list(range(25))), ("&reverse=true", list(range(24, -1, -1)))):
        found, cursor, pages = [], "", 0
        while cursor is not None:
            page = (await api.get(f"/v1/kv?prefix=n&limit=10{extra}{cursor and f'&cursor={cursor}'}")).json()
            found += [entry["value"] for entry in page["entries"]]
            cursor, pages = page["cursor"], pages + 1
        assert (found, pages) == (wanted, 3)
    exact = (await api.get("/v1/kv?prefix=n&limit=25")).json()
    assert (len(exact["entries"]), exact["cursor"]) == (25, None)
    entry = exact["entries"][3]
    assert (entry["key"], entry["value"]) == ("n/=3", 3)
    assert entry.keys() >= {"versionstamp", "created_at", "updated_at"}
    between = (await api.get("/v1/kv?start=n/=5&end=n/=8")).json()
    assert [entry["value"] for entry in between["entries"]] == [5, 6, 7]


async def test_keys_children_and_counts_read_no_values(api: RunningApi) -> None:
    await filled(api, 5)
    await api.put("/v1/kv/a/b/c", "secret")
    listed = (await api.get("/v1/kv?prefix=a&keys=true")).json()
    assert [sorted(entry) for entry in listed["entries"]] == [["created_at", "key", "updated_at", "versionstamp"]]
    assert (await api.get("/v1/kv?prefix=&children=true")).json() == {"children": ["a", "n"], "cursor": None}
    assert (await api.get("/v1/kv?prefix=n&children=1&limit=2&reverse=1")).json()["children"] == ["n/=4", "n/=3"]
    assert (await api.get("/v1/kv?prefix=n&count=true")).json() == {"count": 5}
    assert (await api.get("/v1/kv?count=true")).json() == {"count": 6}


async def test_children_are_listed_page_by_page_in_both_directions(api: RunningApi) -> None:
    sets = [{"op": "set", "key": f"n/={each}{below}", "value": 1} for each in range(2500) for below in ("", "/x")]
    assert (await api.post("/v1/atomic", {"mutations": sets})).status_code == 200
    wanted = [f"n/={each}" for each in range(2500)]
    for extra, expected in (("", wanted), ("&reverse=true", wanted[::-1])):
        found, cursor, pages = [], "", 0
        while cursor is not None:
            path = f"/v1/kv?prefix=n&children=true&limit=1000{extra}{cursor and f'&cursor={cursor}'}"
            page = (await api.get(path)).json()
            found += page["children"]
            cursor, pages = page["cursor"], pages + 1
        assert (found, pages) == (expected, 3)
    exact = (await api.get("/v1/kv?prefix=n/=7&children=true&limit=1")).json()
    assert exact == {"children": ["n/=7/x"], "cursor": None}


async def test_a_page_of_large_values_ends_early_with_a_cursor(api: RunningApi) -> None:
    octets = {"content-type": "application/octet-stream"}
    for number in range(5):
        await api.send("PUT", f"/v1/kv/large/={number}", content=b"x" * 600_000, headers=octets)
    sizes, cursor = [], ""
    while cursor is not None:
        page = (await api.get(f"/v1/kv?prefix=large{cursor and f'&cursor={cursor}'}")).json()
        sizes.append(len(page["entries"]))
        cursor = page["cursor"]
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "VALIDATION_ERROR"),
        ("limit=1001", "VALIDATION_ERROR"),
        ("limit=ten", "VALIDATION_ERROR"),
        ("reverse=maybe", "VALIDATION_ERROR"),
        ("keys=true&count=true", "VALIDATION_ERROR"),
        ("prefix=a&prefix=b", "VALIDATION_ERROR"),
        ("prefx=a", "VALIDATION_ERROR"),
        ("prefix=%ff", "VALIDATION_ERROR"),
        ("cursor=nonsense", "INVALID_CURSOR"),
        ("prefix=a//b", "INVALID_KEY"),
        ("start=a&end=A", "VALIDATION_ERROR"),
        ("prefix=a&start=b", "VALIDATION_ERROR"),
        ("children=true&start=a", "VALIDATION_ERROR"),
        ("children=true&cursor=nonsense", "INVALID_CURSOR"),
    ],
)
async def test_a_list_says_what_is_wrong_with_its_parameters(api: RunningApi, query: str, code: str) -> None:
    assert problem(await api.get(f"/v1/kv?{query}")) == (422, code)


async def test_a_range_is_deleted_and_everything_only_by_name(api: RunningApi) -> None:
    await filled(api, 10)
    await filled(api, 3, "/v1/db/shop")
    assert problem(await api.send("DELETE", "/v1/kv")) == (422, "VALIDATION_ERROR")
    assert (await api.send("DELETE", "/v1/kv?start=n/=7")).json() == {"deleted": 3}
    assert (await api.send("DELETE", "/v1/kv?prefix=n&end=n/=2")).json() == {"deleted": 2}
    assert (await api.send("DELETE", "/v1/kv?prefix=")).json() == {"deleted": 5}
    assert (await api.get("/v1/db/shop/kv?count=true")).json() == {"count": 3}


async def test_several_keys_are_read_in_order_as_of_one_moment(api: RunningApi) -> None:
    await filled(api, 2)
    entries = (await api.post("/v1/get", {"keys": ["n/=1", "nothing", "n/=0", "n/=1"]})).json()["entries"]
    assert [entry.get("value") for entry in entries] == [1, None, 0, 1]
    assert entries[1] == {"key": "nothing", "versionstamp": None}
    assert (await api.post("/v1/get", {"keys": []})).json() == {"entries": []}
    assert problem(await api.post("/v1/get", {"keys": ["a"] * 1001})) == (422, "VALIDATION_ERROR")
    assert problem(await api.post("/v1/get", {"keys": ["a", ""]})) == (422, "INVALID_KEY")
    assert problem(await api.post("/v1/get", {})) == (422, "MISSING_FIELD")
    assert problem(await api.post("/v1/get", {"keys": 1})) == (422, "VALIDATION_ERROR")
    assert problem(await api.post("/v1/get", {"keys": [], "key": 1})) == (422, "VALIDATION_ERROR")
    broken = await api.send("POST", "/v1/get", content=b"{", headers={"content-type": "application/json"})
    assert problem(broken) == (400, "INVALID_JSON")
    form = await api.send("POST", "/v1/get", data={"keys": "a"})
    assert problem(form) == (415, "UNSUPPORTED_MEDIA_TYPE")
    assert "curl -d" in form.json()["detail"]


async def test_an_atomic_writes_all_of_its_mutations_and_reports_on_each(api: RunningApi) -> None:
    await api.put("/v1/kv/there", 1)
    mutations = [
        {"op": "set", "key": "a", "value": {"x": [1, None]}, "expire_in": 60},
        {"op": "set", "key": "b", "bytes": base64.b64encode(b"\x00\x01").decode()},
        {"op": "set", "key": "c", "u64": "5", "expire_at": "2099-01-01T00:00:00Z"},
        {"op": "sum", "key": "c", "u64": "18446744073709551615"},
        {"op": "min", "key": "d", "u64": "7"},
        {"op": "max", "key": "d", "u64": "9"},
        {"op": "add", "key": "there", "by": -3},
        {"op": "delete", "key": "nothing"},
        {"op": "touch", "key": "there", "expire_in": None},
        {"op": "touch", "key": "there", "expire_at": None},
        {"op": "set", "key": "there", "value": 9, "if_absent": True},
        {"op": "set", "key": "new", "value": None, "if_absent": True},
        {"op": "append", "prefix": "log", "value": "first"},
        {"op": "append", "prefix": "log", "value": "second"},
    ]
    done = (
        await api.post("/v1/atomic", {"checks": [{"key": "a", "versionstamp": None}], "mutations": mutations})
    ).json()
    version = done["versionstamp"]
    assert done["ok"] is True
    assert done["values"] == [None, None, None, "4", "7", "9", -2, False, True, True, False, True, None, None]
    entries = (
        await api.post("/v1/get", {"keys": ["a", "b", "c", "there", "new", f"log/={version}", f"log/={version}/=1"]})
    ).json()
    kinds = [{name: entry[name] for name in entry if name in ("value", "bytes", "u64")} for entry in entries["entries"]]
    assert kinds == [
        {"value": {"x": [1, None]}},
        {"bytes": "AAE="},
        {"u64": "4"},
        {"value": -2},
        {"value": None},
        {"value": "first"},
        {"value": "second"},
    ]
    assert {entry["versionstamp"] for entry in entries["entries"]} == {version}


async def test_an_atomic_whose_check_fails_writes_nothing_and_names_every_conflict(api: RunningApi) -> None:
    await api.put("/v1/kv/a", 1)
    checks = [{"key": "a", "versionstamp": "1"}, {"key": "b", "versionstamp": None}, {"key": "c", "versionstamp": "3"}]
    refused = await api.post("/v1/atomic", {"checks": checks, "mutations": [{"op": "set", "key": "b", "value": 1}]})
    assert problem(refused) == (412, "VERSION_CONFLICT")
    body = refused.json()
    assert body["ok"] is False
    assert [entry["key"] for entry in body["conflicts"]] == ["a", "c"]
    assert body["conflicts"][0]["value"] == 1
    assert body["conflicts"][1] == {"key": "c", "versionstamp": None}
    assert (await api.get("/v1/kv/b")).status_code == 404


@pytest.mark.parametrize(
    ("mutation", "code"),
    [
        ({"op": "set", "key": "a"}, "VALIDATION_ERROR"),
        ({"op": "set", "key": "a", "value": 1, "u64": "1"}, "VALIDATION_ERROR"),
        ({"op": "set", "value": 1}, "VALIDATION_ERROR"),
        ({"op": "set", "key": "a", "bytes": "?"}, "VALIDATION_ERROR"),
        ({"op": "set", "key": "a", "value": 1, "expire_in": -1}, "VALIDATION_ERROR"),
        ({"op": "set", "key": "a", "value": 1, "prefix": "b"}, "VALIDATION_ERROR"),
        ({"op": "set", "key": "/", "value": 1}, "INVALID_KEY"),
        ({"op": "set", "key": "x" * 3000, "value": 1}, "KEY_TOO_LARGE"),
        ({"op": "delete", "key": "a", "value": 1}, "VALIDATION_ERROR"),
        ({"op": "delete", "key": "a", "expire_in": 1}, "VALIDATION_ERROR"),
        ({"op": "delete", "key": "a", "if_absent": True}, "VALIDATION_ERROR"),
        ({"op": "sum", "key": "a", "u64": "-1"}, "VALIDATION_ERROR"),
        ({"op": "sum", "key": "a", "value": 1}, "VALIDATION_ERROR"),
        ({"op": "sum", "key": "text", "u64": "1"}, "NOT_A_COUNTER"),
        ({"op": "add", "key": "u", "by": -10}, "COUNTER_OUT_OF_RANGE"),
        ({"op": "add", "key": "a"}, "VALIDATION_ERROR"),
        ({"op": "touch", "key": "a"}, "VALIDATION_ERROR"),
        ({"op": "append", "key": "a", "value": 1}, "VALIDATION_ERROR"),
        ({"op": "append", "prefix": "x" * 2045, "value": 1}, "KEY_TOO_LARGE"),
        ({"op": "rename", "key": "a"}, "VALIDATION_ERROR"),
        ({"op": "delete", "key": "a", "kee": "b"}, "VALIDATION_ERROR"),
    ],
)
async def test_an_atomic_with_a_mutation_that_cannot_be_used_writes_nothing(
    api: RunningApi, mutation: dict[str, object], code: str
) -> None:
    first = [{"op": "set", "key": "text", "value": "x"}, {"op": "set", "key": "u", "u64": "5"}]
    await api.post("/v1/atomic", {"mutations": first})
    batch = {"mutations": [{"op": "set", "key": "first", "value": 1}, mutation]}
    assert problem(await api.post("/v1/atomic", batch)) == (422, code)
    assert (await api.get("/v1/kv/first")).status_code == 404


async def test_a_body_or_a_batch_that_is_too_large_is_refused(api: RunningApi) -> None:
    many = {"mutations": [{"op": "delete", "key": "a"}] * 10_001}
    assert problem(await api.post("/v1/atomic", many)) == (422, "VALIDATION_ERROR")
    value = {"mutations": [{"op": "set", "key": "a", "value": "x" * 1_100_000}]}
    assert problem(await api.post("/v1/atomic", value)) == (413, "VALUE_TOO_LARGE")
    json_type = {"content-type": "application/json"}
    body = b" " * (8 * 2**20 + 1)
    assert problem(await api.send("POST", "/v1/atomic", content=body, headers=json_type)) == (413, "VALUE_TOO_LARGE")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 2**20

    streamed = await api.send("POST", "/v1/atomic", content=chunks(), headers=json_type)
    assert problem(streamed) == (413, "VALUE_TOO_LARGE")
    assert (await api.get("/v1/info")).json()["max_value_bytes"] == 2**20


async def test_few_large_values_are_in_memory_at_a_time(api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = api.context.engine
    assert engine is not None
    read, most = engine.read, 0

    async def weighed(*asks: Ask) -> list[Any]:
        nonlocal most
        found = await read(*asks)
        values = [
            each.values if isinstance(each, Page) else [each.value] for each in found if isinstance(each, Page | Record)
        ]
        most = max(most, sum([len(value) for part in values for value in part]))
        return found

    monkeypatch.setattr(engine, "read", weighed)
    monkeypatch.setattr(limits, "HTTP_REPLY_BYTES", 1_000_000)
    large: dict[str, Any] = {"content": bytes(100_000), "headers": {"content-type": "application/octet-stream"}}
    await filled(api, 100)
    for number in range(100, 150):
        await api.send("PUT", f"/v1/kv/n/={number}", **large)
    assert len((await api.get("/v1/kv?prefix=n&limit=1000")).json()["entries"]) > 100
    for keys in ([f"n/={each}" for each in range(100, 150)], ["n/=100"] * 1000):
        assert problem(await api.post("/v1/get", {"keys": keys})) == (413, "REPLY_TOO_LARGE")
    assert 0 < most <= limits.HTTP_PAGE_ROWS * 100_000


async def test_more_keys_than_are_read_at_a_time_are_read_as_of_one_moment(api: RunningApi) -> None:
    names = [f"n/={number}" for number in range(200)]
    done = False

    async def write() -> None:
        for value in range(30):
            sets = [{"op": "set", "key": name, "value": value} for name in names]
            assert (await api.post("/v1/atomic", {"mutations": sets})).status_code == 200
        nonlocal done
        done = True

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        while not done:
            entries = (await api.post("/v1/get", {"keys": names})).json()["entries"]
            assert len({entry["versionstamp"] for entry in entries}) == 1


async def test_clients_that_read_large_answers_at_the_same_time_get_all_of_them(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_UNSENT_BYTES", 1_000_000)
    monkeypatch.setattr(limits, "HTTP_UNSENT_SECONDS", LONGEST_SECONDS)  # a busy machine may take more than 2 s
    large: dict[str, Any] = {"content": bytes(1_000_000), "headers": {"content-type": "application/octet-stream"}}
    for number in range(10):
        await api.send("PUT", f"/v1/kv/n/={number}", **large)
    keys = {"keys": [f"n/={number}" for number in range(10)]}
    answers = await asyncio.gather(*[api.post("/v1/get", keys) for _ in range(6)])
    assert {len(answer.json()["entries"]) for answer in answers} == {10}
