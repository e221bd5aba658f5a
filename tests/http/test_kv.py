"""Single keys over HTTP: every method, header and status."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.http.api import RunningApi, running_api, scoped_token


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    async with running_api(scoped_token("reader-of-users", "read:kv/users")) as api:
        yield api


def problem(response: Any) -> tuple[int, str]:
    """The status and the code of a refusal."""
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == response.status_code
    assert body["title"]
    assert body["detail"]
    return response.status_code, body["code"]


async def test_an_entry_is_stored_read_and_deleted(api: RunningApi) -> None:
    assert problem(await api.get("/v1/kv/users/alice")) == (404, "NOT_FOUND")
    made = await api.put("/v1/kv/users/alice", {"name": "Alice"})
    version = made.json()["versionstamp"]
    assert (made.status_code, made.headers["etag"]) == (201, f'"{version}"')
    assert (await api.put("/v1/kv/users/alice", {"name": "A"})).status_code == 200
    read = await api.get("/v1/kv/users/alice")
    entry = read.json()
    assert entry.keys() == {"key", "value", "versionstamp", "created_at", "updated_at"}
    assert (entry["key"], entry["value"]) == ("users/alice", {"name": "A"})
    assert int(entry["versionstamp"]) > int(version)
    assert entry["created_at"].endswith("Z")
    assert read.headers["cache-control"] == "no-store"
    head = await api.send("HEAD", "/v1/kv/users/alice")
    assert (head.content, head.headers["etag"]) == (b"", read.headers["etag"])
    assert (await api.send("DELETE", "/v1/kv/users/alice")).json() == {"found": True}
    assert (await api.send("DELETE", "/v1/kv/users/alice")).json() == {"found": False}


async def test_a_client_that_has_the_entry_gets_no_body(api: RunningApi) -> None:
    tag = (await api.put("/v1/kv/a", 1)).headers["etag"]
    for known in (tag, f'"1", W/{tag}', "*", "*, *", '"1", *'):
        answer = await api.get("/v1/kv/a", headers={"if-none-match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert (await api.get("/v1/kv/a", headers={"if-none-match": '"1"'})).status_code == 200
    for foreign in ("seven", '"seven"', tag.strip('"'), f'"0{tag[1:]}', '""', '"', "W/", f'{tag[:-1]}0"', '"1,*,2"'):
        assert (await api.get("/v1/kv/a", headers={"if-none-match": foreign})).status_code == 200, foreign
    assert (await api.get("/v1/kv/a", headers={"if-match": tag})).status_code == 200
    assert problem(await api.get("/v1/kv/a", headers={"if-match": '"1"'})) == (412, "VERSION_CONFLICT")
    assert problem(await api.get("/v1/kv/absent", headers={"if-match": '"1"'})) == (404, "NOT_FOUND")


async def test_writes_are_made_only_if_their_condition_holds(api: RunningApi) -> None:
    absent = await api.put("/v1/kv/a", 1, headers={"if-match": "*"})
    assert problem(absent) == (412, "VERSION_CONFLICT")
    assert absent.json()["current"] == {"key": "a", "versionstamp": None}
    first = (await api.put("/v1/kv/a", 1, headers={"if-none-match": "*"})).headers["etag"]
    taken = await api.put("/v1/kv/a", 2, headers={"if-none-match": "*"})
    assert problem(taken) == (412, "VERSION_CONFLICT")
    assert taken.json()["current"]["value"] == 1
    assert taken.headers["etag"] == first
    second = await api.put("/v1/kv/a", 2, headers={"if-match": first})
    assert second.status_code == 200
    for old in (first, f'{first}, "1"'):
        assert problem(await api.put("/v1/kv/a", 3, headers={"if-match": old})) == (412, "VERSION_CONFLICT")
        assert problem(await api.send("DELETE", "/v1/kv/a", headers={"if-match": old})) == (412, "VERSION_CONFLICT")
    several = f"{first}, {second.headers['etag']}"
    assert (await api.put("/v1/kv/a", 4, headers={"if-match": several})).status_code == 200
    assert (await api.put("/v1/kv/a", 5, headers={"if-match": "*"})).status_code == 200
    assert (await api.get("/v1/kv/a")).json()["value"] == 5


async def test_an_etag_of_something_else_matches_no_entry(api: RunningApi) -> None:
    tag = (await api.put("/v1/kv/a", 1)).headers["etag"]
    for foreign in ("seven", '"abc"', '"a,b"', tag.strip('"'), f'"0{tag[1:]}', f"W/{tag}", "", '"', f"*, {tag[:-1]}"):
        for method in ("PUT", "DELETE", "PATCH"):
            body = {"expire_in": 60}
            refused = await api.send(method, "/v1/kv/a", json=body, headers={"if-match": foreign})
            assert problem(refused) == (412, "VERSION_CONFLICT"), (method, foreign)
            assert refused.headers["etag"] == tag
    for foreign in ("seven", '"abc"', tag.strip('"')):
        stored = await api.put("/v1/kv/a", 2, headers={"if-none-match": foreign})
        assert stored.status_code == 200
    tag = stored.headers["etag"]
    for known in (tag, f"W/{tag}", f'"abc", {tag}'):
        assert problem(await api.put("/v1/kv/a", 3, headers={"if-none-match": known})) == (412, "VERSION_CONFLICT")
    assert (await api.put("/v1/kv/new", 3, headers={"if-none-match": tag})).status_code == 201


async def test_conditions_may_be_divided_among_several_headers(api: RunningApi) -> None:
    tag = (await api.put("/v1/kv/a", 1)).headers["etag"]

    async def put(*headers: tuple[str, str]) -> int:
        sent = [("content-type", "application/json"), *headers]
        return (await api.client.put("/v1/kv/a", content=b"1", headers=sent)).status_code

    assert await put(("if-match", '"998"'), ("if-match", '"999"')) == 412
    assert await put(("if-match", "*"), ("if-none-match", "*")) == 412
    for others in ("*", '"5"', "", "seven"):
        assert await put(("if-none-match", "*"), ("if-none-match", others)) == 412
        assert await put(("if-none-match", f"{others}, *")) == 412
    assert await put(("if-match", "*"), ("if-match", "*")) == 412
    assert await put(("if-match", tag), ("if-none-match", tag)) == 412
    assert await put(("if-match", "*"), ("if-none-match", '"999"')) == 200
    tag = (await api.get("/v1/kv/a")).headers["etag"]
    assert await put(("if-match", '"999"'), ("if-match", tag)) == 200


async def test_bytes_and_counters_have_types_of_their_own(api: RunningApi) -> None:
    octets = {"content-type": "application/octet-stream"}
    assert (await api.send("PUT", "/v1/kv/b", content=b"\x00\xff", headers=octets)).status_code == 201
    assert (await api.get("/v1/kv/b")).json()["bytes"] == "AP8="
    raw = await api.get("/v1/kv/b", headers={"accept": "application/octet-stream"})
    assert (raw.content, raw.headers["content-type"]) == (b"\x00\xff", "application/octet-stream")
    counter = {"content-type": "application/vnd.keyloft.u64"}
    assert (await api.send("PUT", "/v1/kv/u", content=b"18446744073709551615", headers=counter)).status_code == 201
    assert (await api.get("/v1/kv/u")).json()["u64"] == "18446744073709551615"
    wanted = await api.get("/v1/kv/u", headers={"accept": "application/octet-stream"})
    assert problem(wanted) == (406, "NOT_ACCEPTABLE")
    for accepted in ("application/json, */*", "application/octet-stream;q=0, */*", "application/octet-stream ; Q=0.00"):
        assert (await api.get("/v1/kv/b", headers={"accept": accepted})).json()["key"] == "b"
    either = {"accept": "application/octet-stream, */*;q=0.1"}
    assert (await api.get("/v1/kv/u", headers=either)).json()["key"] == "u"
    assert (await api.get("/v1/kv/b", headers=either)).content == b"\x00\xff"
    for wrong in (b"18446744073709551616", b"-1", b"1.5", b""):
        answer = await api.send("PUT", "/v1/kv/u", content=wrong, headers=counter)
        assert problem(answer) == (422, "VALIDATION_ERROR")
    plain = await api.send("PUT", "/v1/kv/u", content=b"x", headers={"content-type": "text/plain"})
    assert problem(plain) == (415, "UNSUPPORTED_MEDIA_TYPE")


async def test_entries_expire_and_their_expiry_can_be_changed(api: RunningApi) -> None:
    await api.put("/v1/kv/a?expire_in=1000.5", 1)
    entry = (await api.get("/v1/kv/a")).json()
    version = entry["versionstamp"]
    assert entry["expires_at"] > entry["created_at"]
    touched = await api.send("PATCH", "/v1/kv/a", json={"expire_at": "2099-01-01T00:00:00+01:00"})
    assert touched.json() == {"found": True}
    entry = (await api.get("/v1/kv/a")).json()
    assert (entry["expires_at"], entry["versionstamp"]) == ("2098-12-31T23:00:00.000Z", version)
    await api.send("PATCH", "/v1/kv/a", json={"expire_in": None})
    assert "expires_at" not in (await api.get("/v1/kv/a")).json()
    await api.put("/v1/kv/a?expire_at=2001-01-01T00:00:00Z", 1)
    assert problem(await api.get("/v1/kv/a")) == (404, "NOT_FOUND")
    assert problem(await api.send("PATCH", "/v1/kv/a", json={"expire_in": 1})) == (404, "NOT_FOUND")
    set_a = {"op": "set", "key": "a", "value": 1, "expire_in": -1}
    touch_a = {"op": "touch", "key": "a", "expire_in": -1}
    for refused, never in (
        (await api.send("PATCH", "/v1/kv/a", json={"expire_in": -1}), "null"),
        (await api.post("/v1/atomic", {"mutations": [set_a]}), "null"),
        (await api.post("/v1/atomic", {"mutations": [touch_a]}), "null"),
        (await api.put("/v1/kv/a?expire_in=0", 1), "no expire_in"),
    ):
        assert refused.json()["detail"].endswith(f" seconds; {never} is for an entry that never expires")
    for query in ("expire_in=0", "expire_in=x", "expire_in=1&expire_in=2", "expire_at=2030-01-01", "expire=1"):
        assert problem(await api.put(f"/v1/kv/a?{query}", 1)) == (422, "VALIDATION_ERROR")
    both = "expire_in=1&expire_at=2030-01-01T00:00:00Z"
    assert problem(await api.put(f"/v1/kv/a?{both}", 1)) == (422, "VALIDATION_ERROR")
    for body in ({}, {"expire_in": 1, "expire_at": "2030-01-01T00:00:00Z"}, {"expire_in": "soon"}, {"ttl": 1}):
        assert problem(await api.send("PATCH", "/v1/kv/a", json=body)) == (422, "VALIDATION_ERROR")


async def test_what_could_not_be_read_back_equal_is_refused(api: RunningApi) -> None:
    json_type = {"content-type": "application/json"}

    async def refused(body: bytes) -> tuple[int, str]:
        return problem(await api.send("PUT", "/v1/kv/a", content=body, headers=json_type))

    for broken in (b"", b"{", b"NaN", b"\xff", b'{"a":1,"a":2}', b"01"):
        assert await refused(broken) == (400, "INVALID_JSON")
    for unfit in (b"1e999", rb'"\ud800"', b"[" * 200 + b"]" * 200):
        assert await refused(unfit) == (422, "VALIDATION_ERROR")
    assert await refused(b'"' + b"x" * 1_048_576 + b'"') == (413, "VALUE_TOO_LARGE")
    long = b"9" * 3000
    assert (await api.send("PUT", "/v1/kv/a", content=b"[ %b ]" % long, headers=json_type)).status_code == 201
    assert b'"value":[%b]' % long in (await api.get("/v1/kv/a")).content


async def test_named_stores_are_apart(api: RunningApi) -> None:
    await api.put("/v1/db/shop/kv/a", 1)
    assert (await api.get("/v1/kv/a")).status_code == 404
    assert (await api.get("/v1/db/shop/kv/a")).json()["value"] == 1
    assert (await api.get("/v1/db/other/kv/a")).status_code == 404
    assert problem(await api.get("/v1/db/sh%20op/kv/a")) == (422, "VALIDATION_ERROR")


async def test_other_methods_and_paths_are_refused(api: RunningApi) -> None:
    wrong = await api.post("/v1/kv/a", 1)
    assert problem(wrong) == (405, "METHOD_NOT_ALLOWED")
    assert wrong.headers["allow"] == "GET, PUT, DELETE, PATCH, HEAD"
    for path in ("/", "/v1", "/v1/nothing", "/v2/kv/a", "/v1/kv%2Fa", "/V1/kv/a"):
        assert problem(await api.get(path)) == (404, "NOT_FOUND")


async def test_before_the_database_is_open_health_answers_and_the_api_says_why_it_does_not() -> None:
    async with running_api(is_open=False) as api:
        assert (await api.get("/healthz")).text == "ok\n"
        assert problem(await api.get("/v1/kv/a")) == (503, "UNREACHABLE")
        assert problem(await api.get("/v1/info")) == (503, "UNREACHABLE")
