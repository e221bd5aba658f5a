"""Errors as they travel over NATS."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import keyloft
from keyloft.nats.connection import connect
from keyloft.nats.errors import WIRE_ERRORS, is_unexpected, refusal, refused, wire_code
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from tests.support.nats import private_server


@pytest.mark.parametrize("code", WIRE_ERRORS)
def test_a_code_goes_there_and_back(code: str) -> None:
    kind = WIRE_ERRORS[code]
    made = {keyloft.ValueTooLarge: keyloft.ValueTooLarge(7, 5), keyloft.HistoryGone: keyloft.HistoryGone(3, 7, 9)}
    error = made.get(kind) or kind("because")
    back = refused(json.loads(refusal(error)))
    assert type(back) is kind
    assert kind.code in ("BUSY", "DATABASE_ERROR", "INTERNAL_ERROR") or str(back) == str(error)
    assert back.code == code


def test_other_errors_travel_as_the_nearest_kind() -> None:
    assert wire_code(keyloft.DiskFull("full")) == "DATABASE_ERROR"
    assert wire_code(keyloft.Stalled("slow")) == "DATABASE_ERROR"
    assert wire_code(keyloft.InvalidKey("empty")) == "VALIDATION_ERROR"
    assert wire_code(keyloft.InvalidValueType("a set")) == "VALIDATION_ERROR"
    assert wire_code(keyloft.Closed()) == "INTERNAL_ERROR"
    assert wire_code(ZeroDivisionError()) == "INTERNAL_ERROR"


def test_messages_of_a_database_or_a_bug_are_not_sent() -> None:
    for error in (keyloft.DiskFull("/secret/path"), keyloft.Busy("/secret/path"), ZeroDivisionError("/secret/path")):
        assert b"secret" not in refusal(error)
    assert b"may still be" in refusal(keyloft.Stalled("it may still be carried out"))


async def test_a_reply_that_is_too_large_for_nats_is_replaced_by_an_error(tmp_path: Path) -> None:
    (tmp_path / "nats.conf").write_text("max_payload: 20000\n")
    async with (
        private_server(tmp_path / "nats.conf") as server,
        await connect(server.url, name="service") as connection,
        BotDatabase() as db,
        DatabaseService(connection, db),
        await DatabaseClient.connect(server.url, plugin_name="trivia") as client,
    ):
        await db.kv_set("trivia", "large", "x" * 30_000)
        await db.kv_set("trivia", "small", 1)
        with pytest.raises(keyloft.ReplyTooLarge, match="20,000 bytes, the max_payload"):
            await client.kv.get("large", meta=True)
        calls: list[Any] = [client.kv.get("large"), client.kv.get("small")]
        large, small = await asyncio.gather(*calls, return_exceptions=True)
        assert (type(large), small) == (keyloft.ReplyTooLarge, 1)


def test_an_unknown_code_is_an_error_all_the_same() -> None:
    assert type(refused({"error_code": "LATER", "message": "x"})) is keyloft.KeyloftError
    assert isinstance(refused({}), keyloft.KeyloftError)


def test_a_traceback_is_logged_for_bugs_and_for_failures_that_have_no_class_of_their_own() -> None:
    assert is_unexpected(KeyError("a bug"))
    assert is_unexpected(keyloft.DatabaseError("a write failed unexpectedly: KeyError"))
    for error in (keyloft.Busy("locked"), keyloft.DiskFull("full"), keyloft.InvalidArgument("key: wrong")):
        assert not is_unexpected(error)
