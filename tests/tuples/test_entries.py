"""Entries as other libraries take them: dataclasses, json, FastAPI; and what Store and Listing show of themselves."""

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import keyloft
from keyloft import U64, Entry

EXPIRY = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
ENTRY = Entry(("users", 1), {"name": "Alice"}, 7, EXPIRY)


def test_dataclasses_take_an_entry() -> None:
    assert dataclasses.asdict(ENTRY) == {
        "key": ("users", 1),
        "value": {"name": "Alice"},
        "versionstamp": 7,
        "expires_at": EXPIRY,
    }
    assert dataclasses.replace(ENTRY, value=1) == Entry(("users", 1), 1, 7, EXPIRY)


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (
            ENTRY,
            {"key": ["users", 1], "value": {"name": "Alice"}, "versionstamp": 7, "expires_at": "2030-01-02T03:04:05Z"},
        ),
        (Entry(("n",), U64(5), 1), {"key": ["n"], "value": 5, "versionstamp": 1, "expires_at": None}),
        (Entry(("b",), b"\x00", 1), {"key": ["b"], "value": "AA==", "versionstamp": 1, "expires_at": None}),
        (Entry(("absent",)), {"key": ["absent"], "value": None, "versionstamp": None, "expires_at": None}),
    ],
)
def test_json_takes_an_entry_as_a_dict(entry: Entry, shown: object) -> None:
    assert json.loads(json.dumps(entry.asdict())) == shown


async def test_fastapi_answers_with_entries() -> None:
    app = FastAPI()
    app.get("/one")(lambda: ENTRY)

    @app.get("/typed")
    def typed() -> list[Entry]:
        return [ENTRY]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        one, many = (await client.get("/one")).json(), (await client.get("/typed")).json()
    assert [one["key"], one["value"], one["versionstamp"]] == [["users", 1], {"name": "Alice"}, 7]
    assert datetime.fromisoformat(one["expires_at"]) == EXPIRY
    assert [many[0]["key"], many[0]["value"]] == [["users", 1], {"name": "Alice"}]


async def test_a_store_shows_where_it_points_and_whether_it_is_closed(tmp_path: Path) -> None:
    kv = await keyloft.open(tmp_path / "app.db")
    assert repr(kv) == f"<Store on {tmp_path / 'app.db'}, open>"
    assert repr(kv.keys()).startswith(f"<Listing of keys in {tmp_path / 'app.db'}: await it")
    await kv.aclose()
    assert repr(kv) == f"<Store on {tmp_path / 'app.db'}, closed>"
    async with keyloft.open() as memory:
        assert repr(memory) == "<Store on memory, open>"
