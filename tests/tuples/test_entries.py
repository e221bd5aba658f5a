"""Entries as other libraries take them: json, pydantic, FastAPI; and what Store and Listing show of themselves."""

import copy
import json
import math
import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import keyloft
from keyloft import U64, Entry
from keyloft.core.records import Record
from keyloft.tuples.entries import entry_of
from tests.support.http import http_client

EXPIRY = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
ENTRY: Entry = Entry(("users", 1), {"name": "Alice"}, 7, EXPIRY)


KINDS: list[tuple[Entry, object, object]] = [
    (ENTRY, ["users", 1], {"name": "Alice"}),
    (Entry(("n",), U64(5), 1), ["n"], 5),
    (Entry(("b",), b"\x00\xff", 1), ["b"], {"bytes": "AP8="}),
    (Entry((b"\xff", 1.5, True, math.inf), None, 1), [{"bytes": "/w=="}, 1.5, True, {"float": "inf"}], None),
    (Entry(("absent",)), ["absent"], None),
]
"""An entry of each kind, with its key and its value in JSON."""


def shown(entry: Entry, key: object, value: object) -> dict[str, object]:
    expires_at = "2030-01-02T03:04:05Z" if entry.expires_at else None
    return {"key": key, "value": value, "versionstamp": entry.versionstamp, "expires_at": expires_at}


@pytest.mark.parametrize(("entry", "key", "value"), KINDS)
async def test_every_entry_has_one_form_in_json(entry: Entry, key: object, value: object) -> None:
    expected = shown(entry, key, value)
    assert json.loads(json.dumps(entry.asdict(), allow_nan=False)) == expected
    assert json.loads(json.dumps([entry], default=Entry.asdict, allow_nan=False)) == [expected]
    assert msgspec.json.decode(msgspec.json.encode(entry.asdict())) == expected
    assert json.loads(TypeAdapter(Entry).dump_json(entry)) == expected
    assert json.loads(TypeAdapter(list[Entry]).dump_json([entry])) == [expected]


@pytest.mark.parametrize("separate", [True, False])
async def test_fastapi_answers_with_entries_of_every_kind(separate: bool) -> None:
    from fastapi import FastAPI  # here, because every worker of a run imports this module

    app = FastAPI(separate_input_output_schemas=separate)
    app.get("/bare", response_model=None)(lambda at: KINDS[int(at)][0])
    app.get("/bare-list")(lambda: [entry for entry, _, _ in KINDS])

    @app.get("/typed")
    def typed(at: int) -> Entry:
        return KINDS[at][0]

    @app.get("/typed-list", response_model=list[Entry])
    def typed_list() -> list[Entry]:
        return [entry for entry, _, _ in KINDS]

    @app.get("/any")
    def anything(at: int) -> Any:
        return KINDS[at][0]

    @app.get("/any-list")
    def any_list() -> Any:
        return [entry for entry, _, _ in KINDS]

    expected = [shown(*kind) for kind in KINDS]
    async with http_client("http://localhost", transport=httpx.ASGITransport(app)) as client:
        for path in ("/bare", "/typed", "/any"):
            assert [(await client.get(path, params={"at": at})).json() for at in range(len(KINDS))] == expected
        for path in ("/bare-list", "/typed-list", "/any-list"):
            assert (await client.get(path)).json() == expected
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"]["Entry"]
    assert list(schema["properties"]) == ["key", "value", "versionstamp", "expires_at"]


def test_an_entry_can_be_copied_pickled_and_changed() -> None:
    assert copy.deepcopy(ENTRY) == pickle.loads(pickle.dumps(ENTRY)) == ENTRY
    assert msgspec.structs.replace(ENTRY, value=1) == Entry(("users", 1), 1, 7, EXPIRY)


async def test_a_store_shows_where_it_points_and_whether_it_is_closed(tmp_path: Path) -> None:
    kv = await keyloft.open(tmp_path / "app.db")
    assert repr(kv) == f"<Store on {tmp_path / 'app.db'}, open>"
    await kv.aclose()
    assert repr(kv) == f"<Store on {tmp_path / 'app.db'}, closed>"
    async with keyloft.open() as memory:
        assert repr(memory) == "<Store on memory, open>"


@given(st.one_of(st.integers(0, 2**33 * 1000 + 10**6), st.integers(0, 1000 * 366 * 86_400_000 + 1_700_000_000_000)))
def test_an_expiry_is_exact_to_the_millisecond(moment: int) -> None:
    entry = entry_of(("k",), Record(b"", b"1", 0, 1, moment))
    assert entry.expires_at == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=moment)
