"""Clients that mean harm: none of them crashes the server, fills its memory, or keeps others from being served."""

import asyncio
import gc
import re
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
import trustme

from keyloft import limits
from keyloft.http.origins import Origins
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, RunningApi, running_api
from tests.http.test_kv import problem

HEAD = f"Host: localhost\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n".encode()


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    async with running_api() as api:
        yield api


async def cut_off(writer: asyncio.StreamWriter) -> None:
    """Send without end, until the server ends the connection."""
    with suppress(ConnectionError):
        while True:
            writer.write(b"x" * 100_000)
            await writer.drain()
            await asyncio.sleep(0)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: 6\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/kv/smuggled HTTP/1.1\r\n\r\n",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Length: 1\r\nContent-Length: 2\r\n\r\n11",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Length: +1\r\n\r\n1",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Length: -1\r\n\r\n1",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bTransfer-Encoding: chunked, identity\r\n\r\n1\r\n1\r\n0\r\n\r\n",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\nzz\r\n1\r\n0\r\n\r\n",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bTransfer-Encoding : chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n",
        b"PUT /v1/kv/a HTTP/1.1\r\n%bX: a\rb\r\n\r\n",
        b"GET /v1/kv/a\x00b HTTP/1.1\r\n%b\r\n",
        b"GET /v1/kv/\xff HTTP/1.1\r\n%b\r\n",
        b"GET /v1/kv/a b HTTP/1.1\r\n%b\r\n",
        b"GET v1/kv/a HTTP/1.1\r\n%b\r\n",
        b"GET /v1/kv/a HTTP/9.9\r\n%b\r\n",
        b"GET /v1/kv/a\r\n%b\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03%b\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n%b",
    ],
)
async def test_requests_that_two_servers_could_read_differently_end_the_connection(
    api: RunningApi, request_bytes: bytes
) -> None:
    assert status_of(await api.raw(request_bytes % HEAD)) in (400, 0)
    assert (await api.get("/v1/kv/a")).status_code == 404
    assert (await api.get("/v1/info")).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"/v1/kv/a/../b", 422),
        (b"/v1/db/../kv/a", 422),
        (b"/v1/kv/..", 422),
        (b"/v1/kv/.", 422),
        (b"/v1/kv/%2e%2e/metrics", 422),
        (b"/v1/kv/%2E/a", 422),
        (b"/v1/kv/.%2e", 422),
        (b"/v1/kv//a", 422),
        (b"/v1/kv/a/", 422),
        (b"/v1/kv/", 422),
        (b"/v1/kv/%zz", 422),
        (b"/v1/kv/%ff", 422),
        (b"/v1/kv/=nonsense", 422),
        (b"/v1/kv/" + b"a" * 3000, 422),
        (b"/v1/kv/a%00b", 404),
        (b"/v1/kv/a%2Fb", 404),
        (b"/v1/kv/a%2F..%2Fb", 404),
        (b"/v1/kv/=..", 404),
        (b"//v1/kv/a", 404),
        (b"/v1//kv/a", 404),
        (b"/v1/../metrics", 404),
        (b"/v1/kv%2Fa", 404),
        (b"/v1/db/%2e%2e/kv/a", 422),
        (b"/v1/db/a%2Fkv/kv/a", 422),
        (b"/v1/db//kv/a", 404),
        (b"/v1/kv/a?" + b"&".join([b"x=1"] * 2000), 422),
    ],
)
async def test_tricks_with_paths_reach_no_other_key_and_no_other_route(
    api: RunningApi, path: bytes, status: int
) -> None:
    answer = await api.raw(b"GET %b HTTP/1.1\r\n%bConnection: close\r\n\r\n" % (path, HEAD))
    assert status_of(answer) == status


async def test_an_absolute_target_is_the_path_alone(api: RunningApi) -> None:
    await api.put("/v1/kv/a", 1)
    answer = await api.raw(b"GET http://evil.example/v1/kv/a HTTP/1.1\r\n%bConnection: close\r\n\r\n" % HEAD)
    assert status_of(answer) == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000,
        b"GET / HTTP/1.1\r\n" + b"".join([b"X%d: y\r\n" % number for number in range(101)]) + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 40_000 + b"\r\n\r\n",
    ],
    ids=["endless header", "many headers", "long path", "long header"],
)
async def test_a_head_that_is_too_large_is_refused(api: RunningApi, request_bytes: bytes) -> None:
    assert status_of(await api.raw(request_bytes)) in (431, 0)
    assert (await api.get("/v1/info")).status_code == 200


async def test_a_head_that_arrives_during_a_stream_is_bounded_too(api: RunningApi) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(b"GET /v1/watch?prefix=a HTTP/1.1\r\n%b\r\n" % HEAD)
    await reader.readuntil(b"event: ready\n")
    async with asyncio.timeout(LONGEST_SECONDS):
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        await cut_off(writer)


CHUNKED = (
    b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n"
)


async def test_trailers_are_no_headers(api: RunningApi) -> None:
    await api.put("/v1/kv/a", 1)
    token = HEAD.splitlines(keepends=True)[1]
    assert status_of(await api.raw(CHUNKED % b"Host: localhost\r\n" + token + b"\r\n", until_end=False)) == 401
    assert status_of(await api.raw(CHUNKED % HEAD + b"If-None-Match: *\r\n\r\n", until_end=False)) == 200


@pytest.mark.parametrize("sent", [b"X: ", b"X: y\r\n" * 1000], ids=["one", "many"])
async def test_endless_trailers_are_cut_off(api: RunningApi, sent: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    async with asyncio.timeout(LONGEST_SECONDS):
        writer.write(CHUNKED % HEAD + sent)
        await cut_off(writer)


@pytest.mark.parametrize("header", [b"Content-Encoding: gzip", b"Transfer-Encoding: gzip, chunked"])
async def test_a_compressed_body_is_not_stored_as_it_was_sent(api: RunningApi, header: bytes) -> None:
    head = (CHUNKED % HEAD).replace(b"Transfer-Encoding: chunked", header)
    if b"Content" in header:
        head = head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert status_of(await api.raw(head + b"\r\n", until_end=False)) == 415
    assert (await api.get("/v1/kv/a")).status_code == 404


async def test_a_body_that_is_nested_too_deeply_is_refused(api: RunningApi) -> None:
    deep = b'{"mutations":[{"op":"set","key":"a","value":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    for path in ("/v1/atomic", "/v1/get"):
        assert problem(await api.send("POST", path, content=deep)) == (422, "VALIDATION_ERROR")
    for levels, status in ((limits.VALUE_DEPTH, 201), (limits.VALUE_DEPTH + 1, 422)):
        value = b"[" * levels + b"]" * levels
        answer = await api.send("PUT", "/v1/kv/a", content=value, headers={"content-type": "application/json"})
        assert answer.status_code == status
    assert f"may have {limits.VALUE_DEPTH} levels" in answer.text


async def test_more_pipelined_requests_than_are_kept_end_the_connection(api: RunningApi) -> None:
    one = b"GET /v1/info HTTP/1.1\r\n%b\r\n" % HEAD
    answer = await api.raw(one * 20 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200 OK") == 21
    assert (await api.raw(one * 1000)).count(b"HTTP/1.1 200 OK") < 1000
    assert (await api.get("/v1/info")).status_code == 200


async def test_a_body_is_refused_before_it_was_sent(api: RunningApi) -> None:
    head = b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Type: application/octet-stream\r\nContent-Length: 99999999999\r\n\r\n"
    assert status_of(await api.raw(head % HEAD, until_end=False)) == 413
    waiting = head.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    assert status_of(await api.raw(waiting % HEAD, until_end=False)) == 413
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(head % HEAD)
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(LONGEST_SECONDS):
        await cut_off(writer)  # what is sent all the same is dropped, up to a bound


async def test_bodies_that_arrive_are_bounded_together(api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_ARRIVING_BYTES", 2_500_000)
    octets = b"%bContent-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\nx" % HEAD
    unfinished = []
    for _ in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(b"PUT /v1/kv/a HTTP/1.1\r\n" + octets)
        unfinished.append(writer)

    async def large() -> httpx.Response:
        headers = {"content-type": "application/octet-stream"}
        return await api.send("PUT", "/v1/kv/large", content=bytes(1_000_000), headers=headers)

    async with asyncio.timeout(LONGEST_SECONDS):
        while (answer := await large()).status_code != 429:
            assert answer.status_code in (200, 201)  # the others have not begun to arrive
        assert problem(answer) == (429, "BUSY")
        assert answer.headers["retry-after"] == "1"
        assert (await api.put("/v1/kv/small", 1)).status_code == 201
        for writer in unfinished:
            writer.transport.abort()
        while (await large()).status_code == 429:
            await asyncio.sleep(0.01)


async def test_slow_and_idle_clients_are_cut_off(api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"mutations": [{"op": "set", "key": f"large/={number}", "value": "x" * 1_000_000} for number in range(7)]}
    await api.post("/v1/atomic", large)
    monkeypatch.setattr(limits, "HTTP_REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(limits, "HTTP_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(limits, "HTTP_ANSWER_SECONDS", 0.5)

    async def dripping() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        try:
            writer.write(b"GET / HTTP/1.1\r\n")
            while not reader.at_eof():
                writer.write(b"X")
                await asyncio.sleep(0.05)
                if writer.transport.is_closing():
                    break
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
        return b""

    async def not_reading() -> bytes:
        keys = b",".join([b'"large/=%d"' % number for number in range(7)] * 4)
        body = b'{"keys":[%b]}' % keys
        head = b"POST /v1/get HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEAD, len(body))
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1024)
        writer.write(head + body)
        await asyncio.sleep(0.1)
        while api.listener.connections > 1:
            await asyncio.sleep(0.05)
        writer.transport.abort()
        return await reader.read(0)

    begun = b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{" % HEAD
    async with asyncio.timeout(LONGEST_SECONDS):
        slow = [api.raw(b""), api.raw(b"GET / HT"), api.raw(begun), dripping()]
        assert {status_of(answer) for answer in await asyncio.gather(*slow)} == {0}
        assert await not_reading() == b""
    assert (await api.get("/v1/info")).status_code == 200


async def test_a_client_that_does_not_finish_the_handshake_of_tls_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_HANDSHAKE_SECONDS", 0.1)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    async with running_api(tls=tls) as api:
        assert await api.raw(b"\x16\x03\x01") == b""


async def test_idle_connections_beyond_the_bound_give_way_to_new_ones() -> None:
    async with running_api(connections=100) as api:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        idle = []
        for _ in range(6):
            idle += [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(100)]
            assert (await api.get("/v1/info")).status_code == 200
            assert api.listener.connections <= 101
        gc.collect()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
        for _, writer in idle:
            writer.transport.abort()


async def test_clients_that_hang_up_do_no_harm(api: RunningApi, caplog: pytest.LogCaptureFixture) -> None:
    for begun in (
        b"",
        b"GET /v1/in",
        b"GET /v1/info HTTP/1.1\r\n%b\r\n" % HEAD,
        b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: 9\r\n\r\n1" % HEAD,
        b"GET /v1/watch?prefix=a HTTP/1.1\r\n%b\r\n" % HEAD,
        b"GET /v1/info HTTP/1.1\r\n%bUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" % HEAD,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(begun)
        await writer.drain()
        writer.transport.abort()
    async with asyncio.timeout(LONGEST_SECONDS):
        while api.listener.connections:
            await asyncio.sleep(0.01)
    assert (await api.get("/v1/kv/a")).status_code == 404
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream"])
async def test_a_body_behind_an_upgrade_is_refused_and_not_stored_as_an_empty_one(api: RunningApi, kind: str) -> None:
    head = f"Content-Type: {kind}\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\n1".encode()
    assert status_of(await api.raw(b"PUT /v1/kv/a HTTP/1.1\r\n%b%b" % (HEAD, head))) == 400
    assert (await api.get("/v1/kv/a")).status_code == 404


@pytest.mark.parametrize("target", [b"OPTIONS *", b"CONNECT evil.example:443", b"GET *"])
async def test_targets_without_a_path_are_answered_as_unknown_paths_are(api: RunningApi, target: bytes) -> None:
    answer = await api.raw(b"%b HTTP/1.1\r\n%bConnection: close\r\n\r\n" % (target, HEAD))
    assert status_of(answer) in (400, 404)
    assert b"content-type: application/problem+json" in answer


async def test_a_watch_of_http_1_0_is_refused_since_it_has_no_chunks(api: RunningApi) -> None:
    assert status_of(await api.raw(b"GET /v1/watch?prefix=a HTTP/1.0\r\n%b\r\n" % HEAD)) == 400
    answer = await api.raw(b"GET /v1/info HTTP/1.0\r\n%b\r\n" % HEAD)
    assert (status_of(answer), b"transfer-encoding" in answer) == (200, False)
    assert api.context.meters.watches == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9464@evil.example", 421),
        ("localhost:port", 421),
        ("localhost:", 421),
        ("[::1", 421),
        ("localhost/..", 421),
        ("localhost.evil.example", 421),
        ("2130706433", 421),
        ("", 421),
        ("LOCALHOST:1", 200),
        ("[::1]:9464", 200),
        ("127.0.0.2", 200),
    ],
)
async def test_a_host_is_a_name_and_a_port_and_nothing_else(api: RunningApi, host: str, status: int) -> None:
    request = (
        f"GET /v1/info HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\nConnection: close\r\n\r\n"
    )
    assert status_of(await api.raw(request.encode())) == status


async def test_a_request_of_two_origins_is_refused() -> None:
    async with running_api(origins=Origins((), ["https://app.example"])) as api:
        origins = b"Origin: https://evil.example\r\nOrigin: https://app.example\r\nConnection: close\r\n\r\n"
        assert status_of(await api.raw(b"GET /v1/info HTTP/1.1\r\n%b%b" % (HEAD, origins))) == 400


async def test_a_second_request_waits_until_the_first_is_answered(api: RunningApi) -> None:
    put = b"PUT /v1/kv/a HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: 1\r\n" % HEAD
    requests = put + b"\r\n1" + put + b"Expect: 100-continue\r\n\r\n2" + b"GET /v1/kv/a HTTP/1.1\r\n%b" % HEAD
    answer = await api.raw(requests + b"Range: bytes=0-1\r\nConnection: close\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) in (
        [b"201", b"200", b"200"],
        [b"201", b"100", b"200", b"200"],
    )
    assert b'"value":2' in answer


async def test_texts_that_look_alike_are_different_keys(api: RunningApi) -> None:
    for stored, other in (("\u00e9", "e\u0301"), ("\ufb00", "ff"), ("A", "a"), ("\u212a", "K"), ("a", "a\u200b")):
        await api.put(f"/v1/kv/alike/{stored}", 1)
        assert (await api.get(f"/v1/kv/alike/{other}")).status_code == 404


async def test_another_protocol_is_not_spoken(api: RunningApi) -> None:
    upgrade = b"GET /v1/info HTTP/1.1\r\n%bUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" % HEAD
    assert status_of(await api.raw(upgrade)) == 200
    assert problem(await api.send("OPTIONS", "/v1/kv/a")) == (405, "METHOD_NOT_ALLOWED")


async def test_large_answers_are_made_only_while_clients_read_them(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        await api.put(f"/v1/kv/large/={number}", "x" * 1_000_000)
    monkeypatch.setattr(limits, "HTTP_FULL_BYTES", 4_000_000)
    monkeypatch.setattr(limits, "HTTP_STILL_CHECKS", 15)
    body = b'{"keys":[%b]}' % b",".join([b'"large/=%d"' % number for number in range(8)])
    request = b"POST /v1/get HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(body), body)
    loop, unread = asyncio.get_running_loop(), []
    for _ in range(8):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", api.port))
        await loop.sock_sendall(client, request)
        unread.append(client)
    most, done = 0, False

    async def measured() -> None:
        nonlocal most
        while not done:
            buffers = [each.transport.get_write_buffer_size() for each in api.listener.table.connections]
            most = max(most, sum(buffers))
            await asyncio.sleep(0.001)

    measuring = asyncio.create_task(measured())
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            assert (await api.get("/v1/info")).status_code == 200
            wanted = {"keys": [f"large/={number}" for number in range(8)]}
            assert len((await api.post("/v1/get", wanted)).content) > 8_000_000
            assert len((await api.get("/v1/kv/large/=1")).content) > 1_000_000
            assert len((await api.get("/v1/kv?prefix=large")).json()["entries"]) > 0
    finally:
        done = True
        await measuring
        for client in unread:
            client.close()
    assert most < 4_000_000 + 8_100_000 + 1_100_000, "at most one more answer than was allowed"
