"""Bodies of the wrong shape: the refusal names the field, what it takes, and what it got."""

from collections.abc import AsyncIterator

import pytest

from tests.http.api import RunningApi, running_api


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    async with running_api() as api:
        yield api


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("get", "3", "body: expected an object, got a whole number"),
        ("get", "{}", "Missing required field: keys"),
        ("get", '{"keys": 1}', "keys: expected an array, got a whole number"),
        ("get", '{"keys": ["a", null]}', "keys[1]: expected a text, got null"),
        ("get", '{"key": []}', "key: there is no such field; did you mean keys?"),
        ("get", '{"keys": [], "` - at `$.x\\n": 1}', "` - at `$.x\\n: there is no such field; the fields are keys"),
        ("atomic", '{"checks": [{"key": "a"}]}', "Missing required field: checks[0].versionstamp"),
        (
            "atomic",
            '{"checks": [{"key": "a", "versionstamp": 1}]}',
            "checks[0].versionstamp: expected a text or null, got a whole number",
        ),
        (
            "atomic",
            '{"mutations": [{"op": "frob", "key": "a"}]}',
            "mutations[0].op: expected one of add, append, delete, max, min, set, sum, touch",
        ),
        (
            "atomic",
            '{"mutations": [{"op": "set", "key": "a", "value": 1, "expire_in": "x"}]}',
            "mutations[0].expire_in: expected a number or null, got a text",
        ),
        (
            "atomic",
            '{"mutations": [{"op": "set", "key": "a", "v8": "AA=="}]}',
            "mutations[0].v8: there is no such field; the fields are value, bytes, u64, op, key, prefix, by, "
            "if_absent, keep_expiry, expire_in, expire_at",
        ),
        (
            "atomic",
            '{"mutations": [{"op": "set", "key": "a", "if_absent": 1}]}',
            "mutations[0].if_absent: expected true",
        ),
    ],
)
async def test_a_refused_body_names_its_field(api: RunningApi, path: str, body: str, detail: str) -> None:
    answer = await api.send("POST", f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert detail in answer.json()["detail"], answer.json()["detail"]


async def test_a_value_in_v8_format_is_refused_by_its_type(api: RunningApi) -> None:
    v8 = {"content-type": "application/x-v8-serialized"}
    answer = await api.send("PUT", "/v1/kv/a", content=b"\xff\x0fI\x02", headers=v8)
    assert answer.status_code == 415
    assert "expected application/json" in answer.json()["detail"]
    assert "v8" not in (await api.get("/openapi.json")).text
