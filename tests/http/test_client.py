"""The store over HTTP: the same calls and results as on a file, and messages that say what to do."""

import asyncio
import os
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

import keyloft
import keyloft.engines.remote.engine  # here: to import it takes the event loop of the first test too long
from keyloft import (
    U64,
    CannotOpen,
    InvalidArgument,
    KeyloftError,
    NotPermitted,
    Store,
    Unreachable,
    ValueTooLarge,
    WrongType,
    admin,
)
from keyloft.core.urls import DatabaseUrl
from keyloft.http.token_file import ValidTokens
from keyloft.plugins import BotDatabase
from keyloft.semantic import SemanticStore
from tests.http.api import ADMIN_TOKEN, RunningApi, running_api, scoped_token
from tests.support.fork_server import run
from tests.support.ports import free_port

KEYS: list[tuple[Any, ...]] = [
    ("plain",),
    ("a/b", "%2F", "%"),
    ("=", "=42", ""),
    (".", "..", "..."),
    ("a b", "+", "?x=1&y#z"),
    ("ü", "\u2028", "\U0001f600", "\x00", "\n"),
    (0, 42, -7, 2**70, -(2**70)),
    (1.5, -0.0, 0.0, float("inf"), float("-inf")),
    (True, False, 1, 1.0),
    (b"", b"\x00\xff", b"/"),
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1.5,
    10**40,
    "",
    "ü\u2028\x00",
    [],
    {"a": [1, {"b": None}], "": "/"},
    b"",
    bytes(range(256)),
    U64(0),
    U64(2**64 - 1),
]


@dataclass
class Player:
    name: str
    score: int


def url_of(api: RunningApi) -> str:
    return f"http://127.0.0.1:{api.port}"


@pytest.fixture
async def api() -> AsyncIterator[RunningApi]:
    reader = scoped_token("kl_reader", "read:kv/public")
    async with running_api(reader) as api:
        yield api


@pytest.fixture
async def kv(api: RunningApi) -> AsyncIterator[Store]:
    async with keyloft.open(url_of(api), token=ADMIN_TOKEN) as kv:
        yield kv


async def program(kv: Store) -> list[object]:
    """Uses every call of a store; returns what they return, without versionstamps, which differ."""
    seen: list[object] = []
    first = await kv.set(("users", "alice"), {"name": "Alice"})
    alice = await kv.get(("users", "alice"))
    assert alice.versionstamp == first
    seen += [alice.value, (await kv.get(("none",), default=7)).value, await kv.add(("users", "alice"), 1)]
    seen += [await kv.add(("users", "bob"), b"\x00"), await kv.increment(("n",), 5), await kv.increment(("n",), -7)]
    assert await kv.set_many({("many", number): number for number in range(200)}) > first
    seen.append([entry.value for entry in await kv.get_many([("many", 7), ("none",), ("users", "bob")])])
    some = await kv.list(prefix=("many",), limit=150)
    rest = await kv.list(prefix=("many",), limit=150, cursor=some.cursor)
    seen += [len(some), [entry.key for entry in rest][:2], len(rest)]
    seen.append([key async for key in kv.keys(start=("many", 190), end=("users",), reverse=True, limit=3)])
    seen += [await kv.children(), await kv.children(("users",), reverse=True), await kv.count(("many",))]
    seen.append(await kv.delete_range(start=("many", 100), end=("many", 150)))
    updated = await kv.update(("users", "alice"), lambda user: {**user, "admin": True}, expire_in=60)
    assert updated.expires_at is not None
    kept = await kv.update(("users", "alice"), lambda user: {**user, "again": 1})
    assert kept.expires_at == updated.expires_at == (await kv.get(("users", "alice"))).expires_at
    seen += [kept.value, await kv.touch(("users", "alice"), expire_in=None), await kv.touch(("none",), expire_in=1)]
    seen.append((await kv.get(("users", "alice"))).expires_at)
    done = await kv.atomic().check(kept).sum(("c",), 3).sum(("c",), -1).min(("m",), 4).append(("log",), "x").commit()
    assert done.appended == (("log", done.versionstamp),)
    seen += [done.ok, done.values, [entry.value for entry in await kv.list(("log",))]]
    failed = await kv.atomic().check(("n",), None).check(("c",), 1).delete(("n",)).commit()
    seen += [failed.ok, [(entry.key, entry.value) for entry in failed.conflicts]]
    await kv.set(("p",), Player("eve", 1), type=Player)
    seen += [(await kv.get(("p",), type=Player)).value, (await kv.pop(("p",))).value, (await kv.pop(("p",))).exists]
    below = kv.scoped(("users",))
    seen += [[entry.key for entry in await below.list()], await below.delete(("bob",)), await kv.delete_many([("n",)])]
    for wrong in (kv.increment(("users", "alice")), kv.atomic().sum(("users", "alice"), 1).commit()):
        with pytest.raises(keyloft.NotACounter) as not_a_counter:
            await wrong
        seen.append(str(not_a_counter.value))
    with pytest.raises(WrongType) as wrong_type:
        await kv.get(("users", "alice"), type=Player)
    seen.append(str(wrong_type.value))
    with pytest.raises(ValueTooLarge) as too_large:
        await kv.set(("big",), "x" * 2**20)
    seen.append(str(too_large.value))
    seen.append(await kv.sweep())
    return seen


async def test_a_program_moves_from_a_file_to_a_service_by_its_url(kv: Store, tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db") as file:
        assert await program(kv) == await program(file)


async def test_a_key_that_is_watched_twice_is_reported_twice(kv: Store) -> None:
    await kv.set(("a",), 1)
    async with asyncio.timeout(30), kv.watch(("a",), ("b",), ("a",)) as watch:
        assert [entry.value for entry in await anext(watch)] == [1, None, 1]


async def test_every_key_and_value_comes_back_equal(kv: Store) -> None:
    watch = kv.watch(prefix=("watched",))
    for key in KEYS:
        await kv.set(key, list(map(repr, key)))
    assert [entry.value for entry in await asyncio.gather(*map(kv.get, KEYS))] == [list(map(repr, key)) for key in KEYS]
    assert [repr(entry.key) for entry in await kv.get_many(KEYS)] == [repr(key) for key in KEYS]
    assert sorted(map(repr, await kv.keys())) == sorted(map(repr, KEYS))
    for number, value in enumerate(VALUES):
        await kv.set(("watched", number), value)
        assert _alike((await kv.get(("watched", number))).value, value)
    assert all(map(_alike, [entry.value for entry in await kv.list(("watched",))], VALUES))
    seen: dict[Any, object] = {}
    async with asyncio.timeout(30):
        while len(seen) < len(VALUES):
            seen |= {entry.key[1]: entry.value for entry in await anext(watch)}
    assert all(map(_alike, [seen[number] for number in range(len(VALUES))], VALUES))
    with pytest.raises(keyloft.KeyTooLarge):
        await kv.get(("k" * 2048,))
    longest = (b"\xff" * 2000,)
    await kv.set(longest, 1)
    assert (await kv.get(longest)).value == 1


def _alike(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


async def test_a_named_store_is_part_of_the_url_or_an_argument(api: RunningApi, kv: Store) -> None:
    async with keyloft.open(f"{url_of(api)}/db/shop", token=ADMIN_TOKEN) as shop:
        await shop.set(("apples",), 3)
        assert repr(shop) == f"<Store on {url_of(api)}/db/shop, open>"
    async with keyloft.open(url_of(api), name="shop", token=ADMIN_TOKEN) as shop:
        assert (await shop.get(("apples",))).value == 3
        watch = shop.watch(prefix=())
        await shop.delete(("apples",))
        assert [entry.key for entry in await anext(watch)] == [("apples",)]
    assert not (await kv.get(("apples",))).exists
    with pytest.raises(InvalidArgument, match="name: the URL names the store shop"):
        await keyloft.open(f"{url_of(api)}/db/shop", name="other", token=ADMIN_TOKEN)
    with pytest.raises(InvalidArgument, match="name: expected 1 to 64 characters"):
        await keyloft.open(url_of(api), name="a/b", token=ADMIN_TOKEN)


async def test_without_an_event_loop_the_same(api: RunningApi) -> None:
    def follow(watching: Any, seen: list[object]) -> None:
        for [entry] in watching:
            seen.append(entry.value)
            if entry.value == 2:
                return

    def script() -> None:
        with keyloft.open_sync(url_of(api), token=ADMIN_TOKEN) as kv:
            kv.set(("k",), 1)
            seen: list[object] = []
            thread = threading.Thread(target=follow, args=(kv.watch(("k",)), seen))
            thread.start()
            threads = [threading.Thread(target=kv.increment, args=(("n",),)) for _ in range(10)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert kv.get(("n",)).value == 10
            kv.set(("k",), 2)
            thread.join(30)
            assert seen[-1] == 2
            assert [entry.key for entry in kv.list()] == [("k",), ("n",)]
        with pytest.raises(keyloft.Closed):
            kv.get(("k",))

    await asyncio.to_thread(script)


async def listed(kv: Store) -> list[Any]:
    return await kv.list()


async def test_a_token_may_do_what_its_scope_covers_and_the_error_names_it(api: RunningApi, kv: Store) -> None:
    """Gets that travel together don't suffer from one that is refused."""
    await kv.set_many({("public", number): number for number in range(20)} | {("secret",): 1})
    async with keyloft.open(url_of(api), token="kl_reader") as reader:
        gets = [reader.get(("public", number)) for number in range(20)]
        gets[5:5] = [reader.get(("secret",)), reader.get(("secret",))]
        found = await asyncio.gather(*gets, return_exceptions=True)
        assert [type(one) for one in found if isinstance(one, Exception)] == [NotPermitted] * 2
        assert [one.value for one in found if not isinstance(one, BaseException)] == list(range(20))
        assert all([one.is_out_of_scope for one in found if isinstance(one, NotPermitted)])
        for call in (
            lambda: reader.set(("public", 1), 2),
            lambda: listed(reader),
            lambda: anext(reader.watch(("secret",))),
        ):
            with pytest.raises(NotPermitted, match="refused this request: the token kl_reader may not"):
                await call()
        assert len(await reader.list(("public",))) == 20


async def test_many_gets_at_once_are_few_requests(api: RunningApi, kv: Store) -> None:
    await kv.set_many({("k", number): number for number in range(300)})
    before = api.listener.served
    found = await asyncio.gather(*[kv.get(("k", number % 310)) for number in range(620)])
    assert [entry.value for entry in found] == [number % 310 if number % 310 < 300 else None for number in range(620)]
    assert api.listener.served - before < 10
    with pytest.raises(InvalidArgument, match="at most 1,000"):
        await kv.get_many([("k", number) for number in range(1001)])


async def test_no_token_or_a_wrong_one_says_where_to_put_it(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KEYLOFT_HTTP_TOKEN", raising=False)
    with pytest.raises(NotPermitted, match=r"asks for a token; pass one as keyloft\.open\(…, token=…\)"):
        await keyloft.open(url_of(api))
    with pytest.raises(NotPermitted, match="does not accept this token") as wrong:
        await keyloft.open(url_of(api), token="kl_wrong-secret")
    assert not wrong.value.is_out_of_scope
    monkeypatch.setenv("KEYLOFT_HTTP_TOKEN", ADMIN_TOKEN)
    async with keyloft.open(url_of(api)) as kv:
        await kv.set(("k",), 1)
        engine: Any = kv.engine
        shown = [repr(kv), repr(vars(engine)), str(wrong.value), caplog.text]
    assert not any("secret" in text or ADMIN_TOKEN in text for text in shown)
    for token in ("", "two words", "line\nbreak", "ü", 7):
        if token != "":
            with pytest.raises(InvalidArgument, match="token: expected the text"):
                await keyloft.open(url_of(api), token=token)  # type: ignore[arg-type]
    for url in ("app.db", None):
        with pytest.raises(InvalidArgument, match="token: only a service has tokens"):
            keyloft.open_sync(url, token="t")
    with pytest.raises(InvalidArgument, match="clock: the time of a service is its own"):
        await keyloft.open(url_of(api), clock=keyloft.ManualClock())


async def test_what_a_service_does_not_give_over_http_is_refused(api: RunningApi, kv: Store) -> None:
    with pytest.raises(InvalidArgument, match="over HTTP, a store has the entries of the tuple store alone"):
        await SemanticStore(kv).get("tenant/acme/project/web/docs/x")
    with pytest.raises(CannotOpen, match="is a service: this works on the database itself"):
        await admin.stats(url_of(api))
    with pytest.raises(CannotOpen, match="is a service"):
        await BotDatabase(url_of(api)).kv_get("trivia", "score")


@pytest.mark.slow
async def test_commands_for_tuples_take_the_url_of_a_service(api: RunningApi) -> None:
    environment = {**os.environ, "KEYLOFT_DATABASE_URL": url_of(api), "KEYLOFT_HTTP_TOKEN": ADMIN_TOKEN}
    for arguments, printed in (
        (("set", "users/alice", '{"name":"Alice"}'), "2"),
        (("get", "users/alice", "--name", "shop"), ""),
        (("get", "users/alice"), '{"name":"Alice"}'),
        (("keys",), "users/alice"),
    ):
        done = await asyncio.to_thread(run, ["-m", "keyloft", *arguments], env=environment)
        assert printed in done.stdout
        assert ADMIN_TOKEN not in done.stdout + done.stderr
    refused = await asyncio.to_thread(run, ["-m", "keyloft", "stats"], env=environment)
    assert "is a service: this works on the database itself" in refused.stderr


# Mistakes of newcomers


@pytest.mark.parametrize("address", ["localhost:9464", "127.0.0.1:9464", "kv.example:443/db/shop", "[::1]:9464"])
async def test_an_address_without_a_scheme_is_no_file(address: str) -> None:
    with pytest.raises(InvalidArgument, match="looks like the address of a server: write http://"):
        await keyloft.open(address)
    assert DatabaseUrl.parse(f"./{address}").engine == "sqlite"


@pytest.mark.parametrize(
    "url",
    [
        *("https://", "https://me:secret@host", "https://secret@host", "https://host:99999", "http://a,b"),
        *("https://host/#x", "https://host/x y", "https://host?token=secret", "http://host?ca=x", "https:host"),
        "https://ho st",
    ],
)
def test_a_url_that_is_none_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        DatabaseUrl.parse(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "origin", "store"),
    [
        ("https://host", "https://host", None),
        ("HTTP://host:80/", "http://host:80", None),
        ("https://[::1]:9464/db/shop", "https://[::1]:9464", "shop"),
        ("https://host/v1", "https://host", None),
        ("https://host/v1/kv", "https://host", None),
        ("https://host/kv", "https://host/kv", None),
        ("https://host/v1/db/shop/", "https://host", "shop"),
        ("https://host/behind/a-proxy/db/db", "https://host/behind/a-proxy", "db"),
    ],
)
def test_a_url_names_a_service_and_a_store(url: str, origin: str, store: str | None) -> None:
    address = DatabaseUrl.parse(url).http
    assert address is not None
    assert (address.origin, address.store) == (origin, store)


async def test_a_name_that_the_service_does_not_answer_to_is_named(api: RunningApi) -> None:
    with pytest.raises(CannotOpen, match="does not answer to that name; the setting http_hosts"):
        await keyloft.open(f"http://0.0.0.0:{api.port}", token=ADMIN_TOKEN)


async def test_another_server_is_not_taken_for_keyloft() -> None:
    async def answer(status: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        page = b"<html>hello</html>"
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nLocation: https://other.example/\r\n"
        writer.write(f"{head}Content-Length: {len(page)}\r\nConnection: close\r\n\r\n".encode() + page)
        await writer.drain()
        writer.close()

    cases = [("200 OK", "not as Keyloft's HTTP API does"), ("404 Not Found", "check host, port and path")]
    cases += [("302 Found", "use that address"), ("503 Unavailable", "is the service behind a proxy down")]
    for status, message in cases:
        server = await asyncio.start_server(lambda *ends, status=status: answer(status, *ends), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(KeyloftError, match=message):
                await keyloft.open(f"http://127.0.0.1:{port}", token="t", patience=0.1)


async def test_a_service_without_tokens_has_no_api_and_says_so() -> None:
    async with running_api(valid=ValidTokens(())) as api:
        with pytest.raises(CannotOpen, match="a service without a token has no API"):
            await keyloft.open(url_of(api), token="t")


async def test_no_service_at_the_address_is_said_after_the_patience(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unreachable, match=r"does not answer \(.*\): is the service running"):
        await keyloft.open(f"http://127.0.0.1:{free_port()}", token="t", patience=0.2)
    assert "trying for" in caplog.text
    with pytest.raises(CannotOpen, match="there is no host of this name"):
        await keyloft.open("http://nowhere.invalid", token="t")


async def test_a_certificate_is_checked_and_an_own_authority_can_be_named(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with running_api(tls=tls) as api:
        async with keyloft.open(f"https://localhost:{api.port}?ca={tmp_path}/ca.pem", token=ADMIN_TOKEN) as kv:
            watch = kv.watch(("k",))
            await kv.set(("k",), 1)
            assert (await anext(watch))[0].key == ("k",)
        with pytest.raises(CannotOpen, match=r"its certificate is refused: .*\?ca=FILE"):
            await keyloft.open(f"https://localhost:{api.port}", token=ADMIN_TOKEN)
        with pytest.raises(CannotOpen, match="its certificate is refused"):
            await keyloft.open(f"https://127.0.0.1:{api.port}?ca={tmp_path}/ca.pem", token=ADMIN_TOKEN)
        with pytest.raises(CannotOpen, match="can't be read as certificates"):
            await keyloft.open(f"https://localhost:{api.port}?ca={tmp_path}/none.pem", token=ADMIN_TOKEN)
        with pytest.raises(Unreachable, match=r"the port right\? A service with TLS has an https:// URL"):
            await keyloft.open(f"http://localhost:{api.port}", token=ADMIN_TOKEN, patience=0.2)
    async with running_api() as api:
        with pytest.raises(CannotOpen, match="a service without TLS has an http:// URL"):
            await keyloft.open(f"https://127.0.0.1:{api.port}", token=ADMIN_TOKEN)
