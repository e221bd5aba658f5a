"""The pages for monitoring: what they answer, and that no client can bring them down."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest

from keyloft.server.http import HttpServer, Response, shown

_LONGEST_SECONDS = 20


async def page() -> Response:
    return Response(b"hello\n")


async def broken() -> Response:
    raise RuntimeError("secret")


async def endless() -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def huge() -> Response:
    return Response(b"x" * 20_000_000)


async def unwell() -> Response:
    return Response(b"why\n", HTTPStatus.SERVICE_UNAVAILABLE)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    pages = {"/": page, "/broken": broken, "/endless": endless, "/huge": huge, "/unwell": unwell}
    server = HttpServer(pages)
    server.request_seconds = server.answer_seconds = 0.3
    _, port = await server.start("127.0.0.1", 0)
    yield port
    await server.aclose()


async def send(port: int, request: bytes) -> bytes:
    """All that is answered until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(_LONGEST_SECONDS):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


async def test_a_page_is_shown_and_the_connection_ends(port: int) -> None:
    head, body = (await send(port, b"GET /?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 6" in head
    assert b"Connection: close" in head
    assert body == b"hello\n"


async def test_head_shows_no_body(port: int) -> None:
    answer = await send(port, b"HEAD / HTTP/1.0\r\n\r\n")
    assert b"Content-Length: 6\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /unwell HTTP/1.1", 503),
        ("GET /nothing HTTP/1.1", 404),
        ("POST / HTTP/1.1", 405),
        ("DELETE / HTTP/1.1", 405),
        ("GET / HTTP/2", 400),
        ("GET /", 400),
        ("", 400),
        ("\x16\x03\x01 rubbish", 400),
        ("GET /broken HTTP/1.1", 500),
        ("GET /endless HTTP/1.1", 504),
    ],
)
async def test_other_requests_get_their_status(port: int, request_line: str, status: int) -> None:
    answer = await send(port, f"{request_line}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"secret" not in answer


async def test_a_request_that_is_too_long_is_refused(port: int) -> None:
    assert (await send(port, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000))[:12] in (b"HTTP/1.1 431", b"")


@pytest.mark.parametrize("begun", [b"", b"GET / HT"])
async def test_a_slow_sender_is_cut_off(port: int, begun: bytes) -> None:
    assert await send(port, begun) == b""


async def test_a_client_that_hangs_up_does_no_harm(port: int) -> None:
    for begun in (b"", b"GET /", b"GET / HTTP/1.1\r\n\r\n", b"GET /huge HTTP/1.1\r\n\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        writer.transport.abort()
    assert b"hello" in await send(port, b"GET / HTTP/1.1\r\n\r\n")


async def test_a_slow_reader_is_cut_off() -> None:
    server = HttpServer({"/huge": huge})
    server.answer_seconds = 0.3
    _, port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET /huge HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(_LONGEST_SECONDS):
        await reader.readexactly(10)
        while any(task.get_name() == "keyloft http" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(20_000_000)
    writer.transport.abort()
    await server.aclose()


async def test_many_connections_are_cut_off_and_then_it_goes_on(port: int) -> None:
    answers = await asyncio.gather(*[send(port, b"GET / HT") for _ in range(200)], return_exceptions=True)
    assert not any(answers)
    assert b"hello" in await send(port, b"GET / HTTP/1.1\r\n\r\n")


async def test_stopping_ends_open_connections() -> None:
    asked_for = asyncio.Event()

    async def page() -> Response:
        asked_for.set()
        return await endless()

    async with asyncio.timeout(_LONGEST_SECONDS):
        async with HttpServer({"/": page}) as server:
            await server.aclose()  # it was not started: nothing to do
            _, port = await server.start("127.0.0.1", 0)
            asked = asyncio.create_task(send(port, b"GET / HTTP/1.1\r\n\r\n"))
            await asked_for.wait()
        assert await asked == b""


async def test_a_taken_port_is_an_os_error(port: int) -> None:
    with pytest.raises(OSError, match=r"address already in use"):
        await HttpServer({}).start("127.0.0.1", port)


def test_an_address_is_shown_as_a_url() -> None:
    assert (shown("127.0.0.1", 1), shown("::1", 1)) == ("http://127.0.0.1:1", "http://[::1]:1")
