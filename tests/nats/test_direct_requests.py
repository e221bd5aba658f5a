"""Requests that reach a service by another way than NATS: the same bounds, order and deadlines, and withdrawal."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import Busy, HistoryGone, InvalidPluginName, InvalidSubject, NoService, QuotaExceeded
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.connection import connect
from keyloft.nats.direct_requests import DirectRequest
from keyloft.nats.service_streams import ServiceStream, StreamedEvent
from keyloft.plugins import BotDatabase, DatabaseService
from tests.support.nats import private_server
from tests.support.plugin_files import locked, serving
from tools.postgres import TIMEOUT_SECONDS

PREFIX = "handed.kv"


def hand_in(
    service: DatabaseService, subject: str, /, *, stream: ServiceStream | None = None, **fields: Any
) -> tuple[DirectRequest, "asyncio.Future[bytes]"]:
    replied: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    plugin, operation = subject.split(".")
    data = json.dumps(fields).encode()
    return service.hand_in([plugin], operation, data, replied.set_result, stream), replied


async def ask(service: DatabaseService, subject: str, /, **fields: Any) -> Any:
    _, replied = hand_in(service, subject, **fields)
    return json.loads(await asyncio.wait_for(replied, TIMEOUT_SECONDS))


async def ask_over_nats(client: Nats, subject: str, **fields: Any) -> Any:
    reply = await client.request(f"{PREFIX}.{subject}", json.dumps(fields).encode(), timeout=TIMEOUT_SECONDS)
    return json.loads(reply.data)


async def test_it_has_its_place_among_the_requests_of_its_owner_over_nats(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX) as service:
        assert await ask(service, "trivia.set", key="k", value=1) == {"success": True}
        assert await ask_over_nats(client, "trivia.get", key="k") == {"success": True, "exists": True, "value": 1}
        async with locked(db):
            await client.publish(f"{PREFIX}.trivia.set", b'{"key":"k","value":2}')
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not service.unanswered:
                    await asyncio.sleep(0.005)
            _, get = hand_in(service, "trivia.get", key="k")
            _, incr = hand_in(service, "trivia.incr", key="k", by=5)
            late = asyncio.create_task(ask_over_nats(client, "trivia.get", key="k"))
            assert (await ask(service, "quotes.get", key="k"))["exists"] is False, "other plugins don't wait"
            assert not get.done()
        assert json.loads(await get)["value"] == 2
        assert json.loads(await incr)["value"] == 7
        assert (await late)["value"] == 7
        assert service.meters.owners["trivia"].durations["get"].count == 3


async def test_many_requests_are_answered_in_one_reply(client: Nats, db: BotDatabase) -> None:
    requests = [{"op": "set", "key": "k", "value": 1}, {"op": "get", "key": "k"}, {"op": "watch"}]
    async with serving(client, db, PREFIX) as service:
        for parts in (False, True):
            reply = await ask(service, "trivia.many", parts=parts, requests=requests)
            *done, refused = reply["replies"]
            assert done == [{"success": True}, {"success": True, "exists": True, "value": 1}]
            assert refused["error_code"] == "INVALID_SUBJECT"
        gets = [{"op": "get", "key": "k"}] * limits.MANY_REQUESTS
        reply = await ask(service, "trivia.many", parts=True, requests=gets)
        assert reply["replies"] == [{"success": True, "exists": True, "value": 1}] * limits.MANY_REQUESTS


async def test_beyond_the_bounds_of_its_owner_it_is_busy_and_nothing_is_sent_to_nats(
    client: Nats, db: BotDatabase
) -> None:
    heard = await client.subscribe(">")
    async with serving(client, db, PREFIX, bounds=IntakeBounds(owner_bytes=2_000)) as service:
        async with locked(db):
            taken = [hand_in(service, "trivia.set", key="k", value=number)[1] for number in range(3)]
            for _ in range(2):
                with pytest.raises(Busy, match="not carried out"):
                    hand_in(service, "trivia.set", key="k", value="x" * 2000)
            assert (await ask(service, "quotes.get", key="k"))["success"]
        assert [json.loads(await one) for one in taken] == [{"success": True}] * 3
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while service.meters.owners["trivia"].errors["BUSY"] < 2:
                await asyncio.sleep(0.005)
    subjects = {message.subject async for message in _pending(heard)}
    assert not [subject for subject in subjects if "handed" in subject]


async def _pending(subscription: Any) -> AsyncIterator[Any]:
    while subscription.pending_msgs:
        yield await subscription.next_msg()


async def test_one_whose_answer_fails_harms_no_other(
    client: Nats, db: BotDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(reply: bytes) -> None:
        raise ValueError("no longer there")

    async with serving(client, db, PREFIX, deadline=0.3) as service:
        service.hand_in(["trivia"], "get", b'{"key":"k"}', fail)
        async with locked(db):
            _, before = hand_in(service, "quotes.set", key="k", value=1)
            service.hand_in(["trivia"], "set", b'{"key":"k","value":1}', fail)
            _, after = hand_in(service, "cards.set", key="k", value=1)
            late = [json.loads(await one) for one in (before, after)]
            assert {one["error_code"] for one in late} == {"DATABASE_ERROR"}
        service.hand_in(["trivia"], "set", b'{"key":"k","value":2}', fail)
        assert await ask(service, "cards.set", key="k", value=2) == {"success": True}
        assert await ask(service, "trivia.get", key="k") == {"success": True, "exists": True, "value": 2}
    assert caplog.text.count("a function that was to take a reply failed") == 3


async def test_a_late_one_is_answered_and_says_whether_it_may_be_carried_out(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX, deadline=0.3) as service:
        async with locked(db):
            _, first = hand_in(service, "trivia.set", key="k", value=1)
            assert (await ask(service, "quotes.get", key="k"))["success"], "the database has the first one by now"
            late = [await ask(service, "trivia.set", key="k", value=2), json.loads(await first)]
        assert {one["error_code"] for one in late} == {"DATABASE_ERROR"}
        assert "was not carried out" in late[0]["message"]
        assert "may still be carried out" in late[1]["message"]


async def test_a_withdrawn_one_is_not_carried_out_and_leaves_nothing_behind(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX) as service:
        unread, first = hand_in(service, "trivia.set", key="unread", value=1)
        unread.withdraw()
        async with locked(db):
            hand_in(service, "trivia.set", key="kept", value=1)
            assert (await ask(service, "quotes.get", key="k"))["success"], "the database has this write by now"
            written, second = hand_in(service, "trivia.set", key="written", value=1)
            several, third = hand_in(service, "trivia.set_many", entries={"a": 1, "b": 2})
            waiting, fourth = hand_in(service, "trivia.list")
            held, fifth = hand_in(service, "trivia.get", key="written")
            many, sixth = hand_in(service, "trivia.many", requests=[{"op": "get", "key": "a"}])
            assert (await ask(service, "quotes.get", key="k"))["success"], "the others are read by now"
            for one in (written, several, waiting, held, many, many):
                one.withdraw()
        assert (await ask(service, "trivia.list"))["keys"] == ["a", "b", "kept"], (
            "a write of several keys is not stopped"
        )
        assert not any([replied.done() for replied in (first, second, third, fourth, fifth, sixth)])
        assert not service.meters.owners["trivia"].errors


async def test_of_writes_that_wait_together_each_is_withdrawn_by_itself(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX) as service:
        async with locked(db):
            hand_in(service, "trivia.set", key="first", value=1)
            assert (await ask(service, "quotes.get", key="k"))["success"], "the database has this write by now"
            handed = [
                hand_in(service, f"{plugin}.set", key="k", value=plugin) for plugin in ("trivia", "quotes", "cards")
            ]
            assert (await ask(service, "quotes.get", key="other"))["success"], "the database has these, too"
            handed[1][0].withdraw()
        for _, replied in handed[::2]:
            assert json.loads(await replied) == {"success": True}
        assert not handed[1][1].done()
        stored = [(await ask(service, f"{plugin}.get", key="k"))["exists"] for plugin in ("trivia", "quotes", "cards")]
        assert stored == [True, False, True]


async def test_writes_keep_their_order_however_the_database_gets_them(client: Nats, db: BotDatabase) -> None:
    small: dict[str, Any] = {"key": "k", "value": 1}
    large = {"key": "k", "value": "x" * 5000}
    together = {"parts": True, "requests": [{"op": "set", **small}]}
    writes: list[tuple[str, dict[str, Any]]]
    writes = [
        ("set", small),
        ("set", large),
        ("set_many", {"entries": {"k": 1}}),
        ("many", together),
        ("delete", small),
    ]
    async with serving(client, db, PREFIX) as service:
        for (last, fields), others in [(one, writes[:at] + writes[at + 1 :]) for at, one in enumerate(writes)]:
            for operation, asked in (*others, (last, fields)):
                hand_in(service, f"trivia.{operation}", **asked)
            expected = {"success": True, "exists": last != "delete"}
            if last != "delete":
                expected["value"] = fields.get("value", 1)
            assert await ask(service, "trivia.get", key="k") == expected, last


async def test_an_owner_or_operation_that_can_not_be_is_refused(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX) as service:
        for name in ("a.b", "trivia.events", "", "X", "*"):
            with pytest.raises(InvalidPluginName):
                service.hand_in([name], "get", b"{}", print)
        for operation in ("", "events", "get.get", "drop"):
            with pytest.raises(InvalidSubject, match="the operation is one of"):
                service.hand_in(["trivia"], operation, b"{}", print)
    with pytest.raises(NoService, match="closed"):
        service.hand_in(["trivia"], "get", b"{}", print)
    with pytest.raises(NoService):
        service.event_stream()


@pytest.mark.slow
async def test_it_is_carried_out_while_nats_is_away(db: BotDatabase) -> None:
    async with private_server() as server:
        client = await connect(server.url, name="handed in")
        try:
            async with serving(client, db, PREFIX) as service:
                await server.stop()
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    while client.is_connected:
                        await asyncio.sleep(0.005)
                assert await ask(service, "trivia.set", key="k", value=1) == {"success": True}
                assert (await ask(service, "trivia.get", key="k"))["value"] == 1
                await server.start()
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    while not client.is_connected:
                        await asyncio.sleep(0.005)
        finally:
            await client.close()


# Streams of events


async def begun(service: DatabaseService, **fields: Any) -> tuple[ServiceStream, int]:
    stream = service.event_stream()
    reply = await ask(service, "trivia.watch", stream=stream, **fields)
    assert reply["success"], reply
    return stream, reply["version"]


async def next_events(stream: ServiceStream) -> list[StreamedEvent]:
    return await asyncio.wait_for(stream.events(), TIMEOUT_SECONDS)


def shown(events: list[StreamedEvent]) -> list[tuple[str, bool, bool]]:
    return [(one.event.key, one.event.deleted, one.is_last) for one in events]


async def test_a_stream_reports_what_changes_after_its_owners_earlier_writes(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX) as service:
        async with locked(db):
            hand_in(service, "trivia.set", key="user:0", value=0)
            starting = asyncio.create_task(begun(service, prefix="user:"))
            assert (await ask(service, "quotes.get", key="k"))["success"]
            assert not starting.done()
        stream, since = await starting
        await db.kv_set_many("trivia", {"user:1": 1, "user:2": 2, "other": 3})
        await db.kv_delete("trivia", "user:0")
        events = await next_events(stream)
        if len(events) < 3:
            events += await next_events(stream)
        assert shown(events) == [("user:1", False, False), ("user:2", False, True), ("user:0", True, True)]
        assert since < events[0].event.version == events[1].event.version < events[2].event.version
        again, _ = await begun(service, keys=["user:2"], since=since)
        assert shown(await next_events(again)) == [("user:2", False, True)]
        await again.aclose()
        waiting = asyncio.create_task(next_events(stream))
    assert await waiting == [], "it ends with its service"
    await stream.aclose()


async def test_a_stream_that_can_not_be_is_refused(
    client: Nats, db: BotDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(client, db, PREFIX) as service:
        stream = service.event_stream()
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"subject": f"{PREFIX}.trivia.events.x"}, "leave it out"),
            ({"prefix": "a", "keys": ["a"]}, "got both"),
            ({"since": 2**50}, ""),
        ]
        for fields, rule in wrong:
            refused = await ask(service, "trivia.watch", stream=stream, **fields)
            assert not refused["success"]
            assert rule in refused["message"]
        monkeypatch.setattr(limits, "OWNER_STREAMS", 1)
        only, _ = await begun(service)
        refused = await ask(service, "trivia.watch", stream=service.event_stream())
        assert refused["error_code"] == QuotaExceeded.code
        await only.aclose()
        only, _ = await begun(service)
        await only.aclose()


async def test_streams_that_begin_at_the_same_time_are_bounded_too(
    client: Nats, db: BotDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OWNER_STREAMS", 2)
    async with serving(client, db, PREFIX) as service:
        streams = [service.event_stream() for _ in range(5)]
        replies = await asyncio.gather(*[ask(service, "trivia.watch", stream=stream) for stream in streams])
        assert [reply.get("error_code") for reply in replies].count(QuotaExceeded.code) == 3
        failed = await ask(service, "quotes.watch", stream=service.event_stream(), since=2**50)
        assert not failed["success"]
        for stream in streams:
            await stream.aclose()
        for _ in range(2):  # neither the ended nor the refused ones take room
            await begun(service)


async def test_a_stream_whose_history_is_gone_says_so(tmp_path: Path, client: Nats) -> None:
    async with BotDatabase(tmp_path / "short.db", history_seconds=0) as db, serving(client, db, PREFIX) as service:
        stream, since = await begun(service)
        await stream.aclose()
        for number in range(2000):
            await db.kv_set("trivia", "k", number)
        refused = await ask(service, "trivia.watch", stream=service.event_stream(), since=since)
        assert refused["error_code"] == HistoryGone.code
