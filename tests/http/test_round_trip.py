"""Keys of all types and values of all kinds come back equal through URLs and JSON."""

import asyncio
import base64
import json
import math
import threading
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft.core import key_text
from keyloft.core.keys import TupleKey, encode
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, running_api
from tests.support.examples import examples

# What URLs and the text of keys treat in a way of their own must come up often.
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text("./%=?#&+ ;:@\\\x00é\u2028\U0001f600", max_size=6),
    st.sampled_from([".", "..", "=", "=42", "%2e%2e", "a/b", "", "//", "kv", "?a=b"]),
)
PARTS = st.one_of(
    TEXTS,
    st.binary(max_size=20),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.just(math.nan),
    st.booleans(),
)
KEYS = st.lists(PARTS, min_size=1, max_size=4).map(tuple)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé\x00", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A client of a server in another thread, so that hypothesis may call it."""
    ports: list[int] = []
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_api() as api:
            ports.append(api.port)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(LONGEST_SECONDS)
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{ports[0]}", headers=headers, timeout=LONGEST_SECONDS, verify=False
        ) as client:
            yield client
    finally:
        ended.set()
        thread.join()


def path_of(key: TupleKey) -> str:
    return "/v1/kv/" + quote(key_text.write(key), safe="/%=")


def same_key(text: str, key: TupleKey) -> bool:
    return encode(key_text.read(text)) == encode(key)


@examples(40, deadline=None)
@given(KEYS, JSON)
def test_a_key_and_a_json_value_come_back_equal(client: httpx.Client, key: TupleKey, value: object) -> None:
    sent = json.dumps(value).encode()
    stored = client.put(path_of(key), content=sent, headers={"content-type": "application/json"})
    assert stored.status_code in (200, 201), stored.text
    entry = json.loads(client.get(path_of(key)).content)
    assert same_key(entry["key"], key)
    assert entry["value"] == json.loads(sent)
    [listed] = client.get("/v1/kv", params={"start": entry["key"], "limit": "1"}).json()["entries"]
    assert listed == entry
    assert client.post("/v1/get", json={"keys": [entry["key"]]}).json()["entries"] == [entry]
    assert client.delete(path_of(key)).json() == {"found": True}


@examples(20, deadline=None)
@given(KEYS, st.binary(max_size=40), st.integers(0, 2**64 - 1))
def test_bytes_and_counters_come_back_equal(client: httpx.Client, key: TupleKey, data: bytes, number: int) -> None:
    octets = "application/octet-stream"
    client.put(path_of(key), content=data, headers={"content-type": octets})
    assert client.get(path_of(key), headers={"accept": octets}).content == data
    assert base64.b64decode(client.get(path_of(key)).json()["bytes"]) == data
    text = key_text.write(key)
    mutation = {"op": "set", "key": text, "u64": str(number)}
    assert client.post("/v1/atomic", json={"mutations": [mutation]}).json()["ok"] is True
    assert client.get(path_of(key)).json()["u64"] == str(number)
