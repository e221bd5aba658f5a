"""Several requests in one message: each is carried out and answered as if sent alone."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client as Nats

from keyloft import KeyloftError, limits
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.errors import WIRE_ERRORS, wire_code
from keyloft.nats.many import Many
from keyloft.nats.requests import Operation
from keyloft.plugins import BotDatabase
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.rules import PARTS_OF_MANY
from keyloft.plugins.usage import PluginUsage
from tests.support.examples import examples
from tests.support.plugin_files import locked, serving

PREFIX = "many.kv"
SECONDS = 30


async def ask(client: Nats, subject: str, payload: Any) -> Any:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return json.loads((await client.request(f"{PREFIX}.{subject}", data, timeout=SECONDS)).data)


async def many(client: Nats, *requests: Any, plugin: str = "trivia") -> Any:
    reply = await ask(client, f"{plugin}.many", {"requests": requests})
    assert reply.keys() == {"success", "replies"}, reply
    return reply["replies"]


async def raw_parts(client: Nats, requests: list[Any], *, short: bool = False) -> AsyncIterator[dict[str, Any]]:
    """The parts of a reply, as the service has sent them."""
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in requests]
    begin = b'{"parts":true,"short":true,"requests":[' if short else b'{"parts":true,"requests":['
    data = begin + b",".join(texts) + b"]}"  # with `short`, as Keyloft's client writes it
    await client.publish(f"{PREFIX}.trivia.many", data, reply=inbox)
    left = len(requests)
    while left:
        message = await replies.next_msg(SECONDS)
        assert len(message.data) <= client.max_payload
        part = json.loads(message.data)
        assert part["success"] is True
        left = part["left"]
        yield part
    await replies.unsubscribe()


async def in_parts(
    client: Nats, requests: list[Any], *, short: bool = False
) -> AsyncIterator[tuple[dict[int, Any], int]]:
    """The parts of a reply: what was answered, by position, and how many are left."""
    async for part in raw_parts(client, requests, short=short):
        if "values" in part:
            replies = {at: {"success": True, "exists": True, "value": one} for at, one in enumerate(part["values"])}
        elif "reply" in part:
            replies = dict.fromkeys(range(part["count"]), part["reply"])
        else:
            replies = dict(part["replies"])
        yield replies, part["left"]


ALONE: list[tuple[str, bytes]] = [
    ("set", b'{"key":"a","value":{"op":"list"},"ttl":60}'),
    ("get", b'{"key":"a"}'),
    ("set", b'{"key":"a","value":1e400}'),
    ("set", b'{"key":"b","value":[1,2.50,"\\u00e9 \\"op\\""],"unknown":1}'),
    ("get", b'{ "key" : "b" }'),
    ("get", b'{"key":"b","key":"a"}'),
    ("get", b'{"Key":"b"}'),
    ("get", b"{}"),
    ("get", b'{"key":""}'),
    ("set", b'{"key":"c","value":%d}' % 10**300),
    ("get", b'{"key":"c"}'),
    ("set", b'{"key":"d","value":%b}' % (b"[" * 901 + b"]" * 901)),
    ("set", b'{"key":"e","value":"%b"}' % (b"x" * 70_000)),
    ("list", b"{}"),
    ("list", b'{"limit":0}'),
    ("delete", b'{"key":"absent"}'),
    ("set", b'{"key":"gone","value":1}'),
    ("delete", b'{"key":"gone"}'),
    ("get", b'{"key":"gone"}'),
]


@pytest.mark.parametrize(
    "form", ['{"op":"%s"%s', '{ "op" : "%s"%s', "last"], ids=["as the client", "spaces", "op last"]
)
async def test_each_request_is_answered_as_if_sent_alone(client: Nats, db: BotDatabase, form: str) -> None:
    def with_op(name: str, data: bytes) -> bytes:
        fields = data.decode().strip("{} ")
        if form == "last":
            return ("{" + fields + ("," if fields else "") + f'"op":"{name}"' + "}").encode()
        return (form % (name, f",{fields}" if fields else "") + "}").encode()

    async with serving(client, db, PREFIX):
        alone = [await ask(client, f"alone.{name}", data) for name, data in ALONE]
        requests = b",".join([with_op(name, data) for name, data in ALONE])
        together = await ask(client, "trivia.many", b'{"requests":[%b]}' % requests)
        assert together == {"success": True, "replies": alone}
        assert {reply.get("error_code") for reply in alone} == {
            *(None, "VALIDATION_ERROR", "INVALID_JSON", "MISSING_FIELD", "VALUE_TOO_LARGE")
        }


GETS: list[bytes] = [
    b'{"op":"get","key":"a"}',
    b'{"op":"get","key":"absent"}',
    b'{"op":"get","key":"a","key":"b"}',
    b'{"op":"get","key":""}',
    b'{"op":"get","key":"%b"}' % (b"x" * 255),
    b'{"op":"get","key":"%b"}' % (b"x" * 256),
    b'{"op":"get","key":7}',
    b'{"op":"get","key":"\\u0061"}',
    b'{"op":"get","key":"\\u0000"}',
    '{"op":"get","key":"\u00e9"}'.encode(),
    b'{"op":"get","key":"a","meta":true}',
    b'{"op":"get","key":"a","other":1}',
    b'{"op":"get","Key":"a"}',
    b'{"op":"get"}',
    b'{"op":"get","op":"get","key":"a"}',
    b'{"op":"delete","key":"absent"}',
]


@pytest.mark.parametrize("short", [False, True])
async def test_gets_that_travel_together_are_answered_as_if_sent_alone(
    client: Nats, db: BotDatabase, short: bool
) -> None:
    async with serving(client, db, PREFIX):
        await db.kv_set("trivia", "a", 1)
        plain = GETS[0]
        for text in GETS:
            replies = dict[int, Any]()
            async for part, _ in in_parts(client, [plain, text, plain], short=short):
                replies |= part
            first, found, last = [replies[position] for position in range(3)]
            [expected] = (await ask(client, "trivia.many", b'{"requests":[%b]}' % text))["replies"]
            expected.pop("updated_at", None)
            found.pop("updated_at", None)
            assert (first, found, last) == ({"success": True, "exists": True, "value": 1}, expected, first), text
        for text in (b'{"parts":true,"requests":[%b],"more":1}', b'{"parts":true,"requests":[%b],"parts":true}'):
            assert (await ask(client, "trivia.many", text % plain))["success"] is False
        most = b'{"parts":true,"requests":[%b]}' % b",".join([plain] * (limits.MANY_REQUESTS + 1))
        assert (await ask(client, "trivia.many", most))["error_code"] == "VALIDATION_ERROR"


async def collected(client: Nats, requests: list[Any], *, short: bool = False) -> list[Any]:
    """The replies to requests in the form that Keyloft's client gives them, in their order."""
    found = dict[int, Any]()
    async for part, _ in in_parts(client, requests, short=short):
        found |= part
    return [found[position] for position in range(len(requests))]


def put(key: str, value: Any) -> bytes:
    return json.dumps({"op": "set", "key": key, "value": value}, separators=(",", ":")).encode()


@pytest.mark.parametrize("short", [False, True])
async def test_sets_that_travel_together_are_answered_and_counted_as_if_sent_alone(
    client: Nats, db: BotDatabase, short: bool
) -> None:
    async with serving(client, db, PREFIX) as service:
        puts = [put(f"k{number % 30}", number) for number in range(40)]
        assert await collected(client, puts, short=short) == [{"success": True}] * 40
        assert [await db.kv_get("trivia", f"k{number}") for number in range(30)] == [
            {"exists": True, "value": number + 30 if number < 10 else number} for number in range(30)
        ]
        durations = service.meters.of("trivia").durations
        assert {name: durations[name].count for name in ("set", "many")} == {"set": 40, "many": 1}


async def test_a_get_sees_the_sets_that_travelled_together_before_it(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX):
        for turn in range(20):
            putting = asyncio.ensure_future(collected(client, [put(f"k{number}", turn) for number in range(20)]))
            await asyncio.sleep(0)
            replies = await collected(client, [put("k3", -turn), b'{"op":"get","key":"k3"}'])
            assert replies[1]["value"] == -turn
            assert (await ask(client, "trivia.get", {"key": "k19"}))["value"] == turn
            await putting


async def test_sets_that_travelled_together_have_a_deadline_each(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX, deadline=0.4) as service:
        async with locked(db):
            # The first are being written; the next ones wait, and can be withdrawn.
            first = asyncio.ensure_future(collected(client, [put(f"a{number}", 1) for number in range(3)]))
            await asyncio.sleep(0.1)
            later = [
                asyncio.ensure_future(collected(client, [put(f"{name}{number}", 2) for number in range(3)]))
                for name in "ab"
            ]
            for replies in (await first, await later[0]):
                assert [reply["error_code"] for reply in replies] == ["DATABASE_ERROR"] * 3
                assert all("may still be carried out" in reply["message"] for reply in replies)
            assert all("was not carried out" in reply["message"] for reply in await later[1])
            assert service.meters.of("trivia").errors["DATABASE_ERROR"] == 9
        assert await collected(client, [put("c", 3), put("d", 3)]) == [{"success": True}] * 2
        stored = {key: (await ask(client, "trivia.get", {"key": key})).get("value") for key in ("a0", "a2", "b0", "c")}
        assert stored == {"a0": 2, "a2": 2, "b0": None, "c": 3}


async def test_what_it_can_not_hold_fails_alone(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX):
        stored = {"op": "set", "key": "k", "value": 1}
        replies = await many(
            client, {"op": "many", "requests": [stored]}, {"op": "watch"}, {"op": "x.set"}, 7, [], stored
        )
        assert [reply.get("error_code") for reply in replies] == [
            *("INVALID_SUBJECT", "INVALID_SUBJECT", "INVALID_SUBJECT", "VALIDATION_ERROR", "VALIDATION_ERROR", None)
        ]
        messages = {reply["message"] for reply in replies if reply.get("error_code") == "INVALID_SUBJECT"}
        names = "set, get, delete, list, incr, get_many, set_many, delete_many, count, touch, usage"
        assert messages == {f"op: expected one of {names}; send any other alone"}
        assert await many(client, {"key": "k"}, {"op": 7, "key": "k"}, {"op": "get", "key": "k"}) == [
            {"success": False, "error_code": "MISSING_FIELD", "message": "Missing required field: op"},
            {"success": False, "error_code": "VALIDATION_ERROR", "message": "op: expected the name of an operation"},
            {"success": True, "exists": True, "value": 1},
        ]


async def test_an_operation_that_is_named_twice_is_refused_however_it_is_written(client: Nats, db: BotDatabase) -> None:
    texts = [rb'{"op":"get","key":"k","%b":"set"}' % name for name in (b"op", rb"\u006fp", rb"o\u0070")]
    data = b'{"requests":[%b]}' % b",".join([*texts, rb'{"op":"get","key":"\u006b"}'])
    async with serving(client, db, PREFIX):
        replies = json.loads((await client.request(f"{PREFIX}.trivia.many", data, timeout=SECONDS)).data)["replies"]
        assert [one.get("error_code") for one in replies] == ["INVALID_JSON"] * 3 + [None]


async def test_a_message_that_is_no_many_is_refused_by_name(client: Nats, db: BotDatabase) -> None:
    get = {"op": "get", "key": "k"}
    refused: list[tuple[Any, str, str]] = [
        ({}, "MISSING_FIELD", "requests"),
        ({"requests": {}}, "VALIDATION_ERROR", "requests: expected an array"),
        ({"request": []}, "VALIDATION_ERROR", "did you mean requests?"),
        ({"requests": [get], "parts": 1}, "VALIDATION_ERROR", "parts: expected true or false"),
        ({"requests": [get], "short": "yes"}, "VALIDATION_ERROR", "short: expected true or false"),
        (b'{"parts":true,"short":true,"requests":[],"short":true}', "INVALID_JSON", "twice"),
        ({"requests": [get], "more": 1}, "VALIDATION_ERROR", "more: there is no such field"),
        (b'{"requests":[],"requests":[]}', "INVALID_JSON", "twice"),
        (b'{"parts":true,"requests":[],"parts":true}', "INVALID_JSON", "twice"),
        (b"[]", "VALIDATION_ERROR", "JSON object"),
        (b'{"request\xe6":[{"op":"get","key":"k"}]}', "INVALID_JSON", "UTF-8"),
        (b'{"requests":[', "INVALID_JSON", "ends too early"),
        (b"", "INVALID_JSON", ""),
        (b'{"requests":[' + b"[" * 100_000, "VALIDATION_ERROR", "nested too deeply"),
        ({"requests": [get] * (limits.MANY_REQUESTS + 1)}, "VALIDATION_ERROR", "at most 1,000"),
        ({"requests": [1] * 100_000}, "VALIDATION_ERROR", "at most 1,000"),
    ]
    async with serving(client, db, PREFIX):
        for payload, code, text in refused:
            reply = await ask(client, "trivia.many", payload)
            assert (reply["error_code"], text in reply["message"]) == (code, True), reply
        assert await ask(client, "trivia.many", {"requests": []}) == {"success": True, "replies": []}
        assert len(await many(client, *[get] * limits.MANY_REQUESTS)) == limits.MANY_REQUESTS


async def test_each_request_counts_and_is_logged_as_its_own_operation(
    client: Nats, db: BotDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "keyloft.plugins.service")
    async with serving(client, db, PREFIX) as service:
        put, get = {"op": "set", "key": "k", "value": 1}, {"op": "get", "key": "k"}
        await many(client, put, get, get, {"op": "get", "key": ""})
        durations = service.meters.of("trivia").durations
        assert {name: durations[name].count for name in ("set", "get", "many")} == {"set": 1, "get": 2, "many": 1}
        assert dict(service.meters.of("trivia").errors) == {"VALIDATION_ERROR": 1}
        logged = [
            record.message.partition(" latency")[0] for record in caplog.records if "plugin=trivia" in record.message
        ]
        assert logged[:4] == [
            "[KV] get failed: plugin=trivia error=VALIDATION_ERROR key must be a non-empty string",
            "[KV] set: plugin=trivia key=k size=1 ttl=null",
            "[KV] get: plugin=trivia key=k hit=true",
            "[KV] get: plugin=trivia key=k hit=true",
        ]


async def test_each_request_is_held_to_the_quota(client: Nats, db: BotDatabase) -> None:
    async with PluginUsage(db, Quotas(default=Quota(keys=2))) as usage, serving(client, db, PREFIX, usage=usage):
        puts = [{"op": "set", "key": f"k{number}", "value": 1} for number in range(3)]
        replies = await many(client, *puts, {"op": "delete", "key": "k0"}, puts[2], {"op": "list"})
        assert [reply.get("error_code") for reply in replies] == [None, None, "QUOTA_EXCEEDED", None, None, None]
        assert replies[-1]["keys"] == ["k1", "k2"]


async def test_each_request_counts_towards_the_limit_of_the_rate(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX, bounds=IntakeBounds(requests_per_second=10)):
        replies = await many(client, *[{"op": "get", "key": "k"}] * 100)
        refused = [reply for reply in replies if reply.get("error_code") == "BUSY"]
        assert 80 <= len(refused) <= 90


async def test_replies_that_do_not_fit_are_named_and_can_be_asked_for_alone(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX):
        for number in range(20):
            await db.kv_set("trivia", f"k{number}", "x" * 65_000)
        gets = [{"op": "get", "key": f"k{number}"} for number in range(20)]
        replies = await many(client, *gets, {"op": "set", "key": "k", "value": 1}, {"op": "get", "key": "k"})
        assert replies[-2:] == [{"success": True}, {"success": True, "exists": True, "value": 1}]
        fitting = [reply for reply in replies[:20] if reply["success"]]
        assert len(fitting) == 15
        for reply in replies[15:20]:
            assert (reply["error_code"], reply["carried_out"]) == ("REPLY_TOO_LARGE", False)
            assert "send this request alone" in reply["message"]
        assert await ask(client, "trivia.get", {"key": "k19"}) == replies[0]


async def test_published_requests_are_carried_out(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX):
        put = {"op": "set", "key": "k", "value": 1}
        await client.publish(f"{PREFIX}.trivia.many", json.dumps({"requests": [put, {"op": "get"}, put]}).encode())
        assert await ask(client, "trivia.get", {"key": "k"}) == {"success": True, "exists": True, "value": 1}


async def test_a_reply_subject_of_the_service_is_refused(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX):
        put = {"op": "set", "key": "k", "value": 1}
        await client.publish(
            f"{PREFIX}.rogue.many", json.dumps({"requests": [put]}).encode(), reply=f"{PREFIX}.victim.set"
        )
        assert (await ask(client, "rogue.list", {}))["keys"] == []
        assert (await ask(client, "victim.list", {}))["keys"] == []


class TestParts:
    async def test_no_reply_waits_for_another_requests_write(self, client: Nats, db: BotDatabase) -> None:
        async with serving(client, db, PREFIX):
            await db.kv_set("trivia", "k", 0)
            requests = [
                {"op": "get", "key": "k"},
                {"op": "set", "key": "k", "value": 1},
                {"op": "get", "key": "k"},
                {"op": "get", "key": "other"},
                {"op": "get"},
            ]
            lock, found = locked(db), dict[int, Any]()
            await lock.__aenter__()
            async for part, left in in_parts(client, requests):
                if not found:
                    await lock.__aexit__(None, None, None)
                found |= part
                if left == 2:
                    assert set(found) == {0, 3, 4}
            assert [found[0]["value"], found[1], found[2]["value"]] == [0, {"success": True}, 1]
            assert (found[3]["exists"], found[4]["error_code"]) == (False, "MISSING_FIELD")

    async def test_all_replies_arrive_however_large_they_are(self, client: Nats, db: BotDatabase) -> None:
        async with serving(client, db, PREFIX):
            for number in range(20):
                await db.kv_set("trivia", f"k{number}", f"{number}" * 30_000)
            found = dict[int, Any]()
            gets = [{"op": "get", "key": f"k{number}"} for number in range(20)]
            async for part, left in in_parts(client, gets * 2):
                found |= part
                assert len(found) == 40 - left
            assert all(found[position]["value"] == f"{position % 20}" * 30_000 for position in range(40))


async def test_each_request_has_its_own_deadline(client: Nats, db: BotDatabase) -> None:
    async with serving(client, db, PREFIX, deadline=0.4):
        await db.kv_set("trivia", "k", 0)
        async with locked(db):
            get, put = {"op": "get", "key": "k"}, {"op": "set", "key": "k", "value": 1}
            replies = await many(client, get, put, get, {"op": "list"}, {"op": "get", "key": "other"})
        assert [reply.get("error_code") for reply in replies] == [None, *["DATABASE_ERROR"] * 3, None]
        assert "not carried out" in replies[2]["message"]


async def test_a_flood_of_them_stays_within_the_bounds(client: Nats, db: BotDatabase) -> None:
    # On a busy machine 100,000 gets take longer than requests usually may.
    bounds = IntakeBounds(owner_bytes=2_000_000)
    async with serving(client, db, PREFIX, bounds=bounds, deadline=SECONDS) as service:
        gets = json.dumps({"requests": [{"op": "get", "key": "k"}] * 1000}, separators=(",", ":")).encode()
        asking = [asyncio.ensure_future(ask(client, "trivia.many", gets)) for _ in range(100)]
        other = await ask(client, "other.get", {"key": "k"})
        replies = await asyncio.gather(*asking)
        assert other["success"]
        done = [reply for reply in replies if reply["success"]]
        assert {reply["error_code"] for reply in replies if not reply["success"]} <= {"BUSY"}
        assert all(len(reply["replies"]) == 1000 for reply in done)
        assert 1 <= len(done) < 100
        assert service.meters.of("trivia").durations["get"].count == 1000 * len(done)


async def test_short_parts_leave_out_what_the_replies_have_in_common(
    client: Nats, db: BotDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOW_SECONDS", 60.0)  # slow writes are answered, and logged, one by one

    def get(key: str) -> bytes:
        return b'{"op":"get","key":"%b"}' % key.encode()

    async def short(*requests: bytes) -> list[dict[str, Any]]:
        return [part async for part in raw_parts(client, list(requests), short=True)]

    async with serving(client, db, PREFIX):
        stored = {"success": True}
        assert await short(put("a", 1), put("b", [2])) == [{"success": True, "reply": stored, "count": 2, "left": 0}]
        assert await short(get("a"), get("b")) == [{"success": True, "values": [1, [2]], "left": 0}]
        absent, found = {"success": True, "exists": False}, {"success": True, "exists": True, "value": 1}
        [part] = await short(get("a"), get("absent"))
        assert part == {"success": True, "replies": [[0, found], [1, absent]], "left": 0}
        assert await collected(client, [put("c", 1), get("c")], short=True) == [stored, found]
        # Without `parts`, and where all values are too large for one message, the replies are whole.
        asked = await ask(client, "trivia.many", {"short": True, "requests": [{"op": "get", "key": "a"}]})
        assert asked == {"success": True, "replies": [found]}
        for number in range(20):
            await db.kv_set("trivia", f"large{number}", "x" * 60_000)
        parts = await short(*[get(f"large{number}") for number in range(20)])
        assert sum(len(part["replies"]) for part in parts) == 20


class FoundOperation(Operation):
    name = "get"


@given(
    st.lists(
        st.sampled_from(
            [
                b'{"requests":[',
                b'{"op":"get"',
                b'"key":"k"',
                b",",
                b"]",
                b"}",
                b'"parts":true',
                b'"short":true',
                b'"op"',
                b"\\",
            ]
        )
        | st.binary(max_size=3),
        max_size=12,
    )
)
@examples(300)
def test_any_message_is_read_or_refused_with_a_code(parts: list[bytes]) -> None:
    operation = Many(Nats(), lambda about, name: FoundOperation(), PARTS_OF_MANY)
    code = ""
    try:
        operation.read("trivia", b"".join(parts))
    except KeyloftError as error:
        code = wire_code(error)
    assert code in {"", *WIRE_ERRORS} - {"INTERNAL_ERROR"}
