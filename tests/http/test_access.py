"""Who may do what over HTTP: tokens, scopes, rotation, hosts, origins, guessing, and the audit log."""

import asyncio
import logging
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from keyloft.core.records import Batch, Committed, Conflict
from keyloft.errors import CommitUnknown, InvalidArgument
from keyloft.http.failed_logins import FailedLogins
from keyloft.http.origins import Origins
from keyloft.http.problems import Problem
from keyloft.http.token_file import ValidTokens, read_token_file
from keyloft.http.tokens import TokenScope, declaration, new_token
from tests.http.api import ADMIN_TOKEN, RunningApi, running_api, scoped_token
from tests.http.test_kv import problem

TOKENS = (
    scoped_token("users-reader", "read:kv/users"),
    scoped_token("users-writer", "write:kv/users"),
    scoped_token("shop-writer", "write:db/shop", "read:kv/users"),
    scoped_token("any-shop", "read:db/*/public"),
    scoped_token("trivia", "write:plugin/trivia"),
)


async def statuses(api: RunningApi, token: str) -> list[int]:
    """What a token is answered: reading and writing in and out of users, in shop, in lists, batches and watches."""
    set_a = {"mutations": [{"op": "set", "key": "users/a", "value": 1}]}
    done = [
        await api.get("/v1/kv/users/a", token=token),
        await api.put("/v1/kv/users/a", 1, token=token),
        await api.get("/v1/kv/users", token=token),
        await api.get("/v1/kv/users%00x", token=token),
        await api.get("/v1/kv/other", token=token),
        await api.get("/v1/db/shop/kv/users/a", token=token),
        await api.put("/v1/db/shop/kv/a", 1, token=token),
        await api.get("/v1/kv?prefix=users", token=token),
        await api.get("/v1/kv?count=true", token=token),
        await api.get("/v1/kv?start=users/a&end=z", token=token),
        await api.send("DELETE", "/v1/kv?prefix=users/x", token=token),
        await api.post("/v1/get", {"keys": ["users/a", "users/b"]}, token=token),
        await api.post("/v1/get", {"keys": ["users/a", "b"]}, token=token),
        await api.post("/v1/atomic", set_a, token=token),
        await api.post("/v1/atomic", {"checks": [{"key": "b", "versionstamp": None}], **set_a}, token=token),
        await api.post("/v1/atomic", {"mutations": [{"op": "append", "prefix": "", "value": 1}]}, token=token),
        await api.post("/v1/atomic", {}, token=token),
        await api.post("/v1/atomic", {"checks": [{"key": "users/none", "versionstamp": None}]}, token=token),
        await api.get("/v1/info", token=token),
    ]
    for answer in done:
        if answer.status_code == 403:
            assert problem(answer) == (403, "NOT_PERMITTED")
    return [answer.status_code for answer in done]


async def test_a_token_reaches_what_its_scopes_name_and_nothing_else() -> None:
    async with running_api(*TOKENS) as api:
        await api.put("/v1/kv/users/a", 0)
        assert await statuses(api, "users-reader") == [
            *(200, 403, 404, 403, 403, 403, 403, 200, 403, 403, 403, 200, 403, 403, 403, 403, 403, 403, 200)
        ]
        assert await statuses(api, "users-writer") == [
            *(200, 200, 404, 403, 403, 403, 403, 200, 403, 403, 200, 200, 403, 200, 403, 403, 200, 200, 200)
        ]
        assert await statuses(api, "shop-writer") == [
            *(200, 403, 404, 403, 403, 404, 201, 200, 403, 403, 403, 200, 403, 403, 403, 403, 403, 403, 200)
        ]
        assert await statuses(api, "trivia") == [*([403] * 18), 200]
        assert (await api.post("/v1/db/shop/atomic", {}, token="shop-writer")).status_code == 200
        assert (await api.post("/v1/db/one/atomic", {}, token="any-shop")).status_code == 403
        assert (await api.get("/v1/db/one/kv/public/a", token="any-shop")).status_code == 404
        assert (await api.get("/v1/db/one/kv/private", token="any-shop")).status_code == 403
        assert (await api.get("/v1/kv/public/a", token="any-shop")).status_code == 403
        assert problem(await api.get("/v1/watch?prefix=", token="users-reader")) == (403, "NOT_PERMITTED")
        assert problem(await api.get("/v1/watch?key=b", token="users-reader")) == (403, "NOT_PERMITTED")


async def test_a_refusal_names_the_key_and_a_scope_that_would_do() -> None:
    append = {"mutations": [{"op": "append", "prefix": "", "value": 1}]}
    async with running_api(*TOKENS) as api:
        reader = "users-reader"
        for answer, what, scope in (
            (await api.put("/v1/kv/users/q", 1, token=reader), "write users/q", "write:kv/users"),
            (await api.get("/v1/kv/other", token=reader), "read other", "read:kv/other"),
            (await api.get("/v1/kv/a%2Fb/=1/=x00", token=reader), "read a%2Fb/=1/=x00", "read:kv/a%2Fb/=1"),
            (await api.put("/v1/db/one/kv/a/b", 1, token="any-shop"), "write a/b", "write:db/one/a"),
            (await api.post("/v1/atomic", append, token=reader), "write all keys of this store", "write:kv"),
            (await api.post("/v1/db/one/atomic", {}, token="any-shop"), "write in this store", "write:db/one"),
        ):
            detail = answer.json()["detail"]
            assert (answer.status_code, detail.partition(" may not ")[2]) == (
                403,
                f"{what}: it needs a scope such as {scope}",
            )
            TokenScope.read(scope)


async def test_a_request_without_a_valid_token_is_refused_and_pages_need_none() -> None:
    async with running_api() as api:
        for given in ("", "Bearer", "Bearer wrong", ADMIN_TOKEN, f"Basic {ADMIN_TOKEN}", f"Bearer {ADMIN_TOKEN}x"):
            answer = await api.get("/v1/kv/a", headers={"authorization": given})
            assert problem(answer) == (401, "UNAUTHORIZED")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            # A right token without the word is not called wrong.
            assert ("wrong" in answer.json()["detail"]) == given.startswith("Bearer ")
        for page in ("/metrics", "/healthz", "/readyz"):
            assert (await api.client.get(page, headers={"authorization": "", "host": "any.example"})).status_code == 200
        assert (await api.get("/v1/info", headers={"authorization": f"bearer {ADMIN_TOKEN}"})).status_code == 200


async def test_without_a_token_there_is_no_api() -> None:
    async with running_api(valid=ValidTokens()) as api:
        assert problem(await api.get("/v1/kv/a")) == (404, "NOT_FOUND")
        assert (await api.get("/healthz")).status_code == 200


async def test_names_that_were_not_given_are_refused() -> None:
    async with running_api(origins=Origins(["api.example"], ["https://app.example"])) as api:
        for host in ("localhost", "127.0.0.1:80", "[::1]:9464", "127.9.9.9", "API.example:443"):
            assert (await api.get("/v1/info", headers={"host": host})).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "", "evil.example:80"):
            answer = await api.get("/v1/info", headers={"host": host})
            assert problem(answer)[0] == 421
        twice = "GET /v1/info HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n"
        assert b" 400 " in await api.raw(f"{twice}Authorization: Bearer {ADMIN_TOKEN}\r\n\r\n".encode())
        assert b" 400 " in await api.raw(b"GET /v1/info HTTP/1.1\r\nConnection: close\r\n\r\n")


async def test_pages_of_other_sites_are_refused_unless_they_are_configured() -> None:
    async with running_api(origins=Origins([], ["https://app.example"])) as api:
        for origin in ("https://evil.example", "null", "http://app.example", "https://app.example.evil.example"):
            assert problem(await api.get("/v1/info", headers={"origin": origin})) == (403, "NOT_PERMITTED")
        own = await api.get("/v1/info", headers={"origin": f"http://127.0.0.1:{api.port}"})
        assert own.status_code == 200
        assert "access-control-allow-origin" not in own.headers
        behind_tls = await api.get("/v1/info", headers={"origin": f"https://127.0.0.1:{api.port}"})
        assert (behind_tls.status_code, behind_tls.headers.get("access-control-allow-origin")) == (200, None)
        other_port = await api.get("/v1/info", headers={"origin": f"https://127.0.0.1:{api.port + 1}"})
        assert problem(other_port) == (403, "NOT_PERMITTED")
        asked = {"origin": "https://app.example", "access-control-request-method": "PUT"}
        before = await api.send("OPTIONS", "/v1/kv/a", headers=asked)
        assert before.status_code == 204
        assert not {"content-length", "content-type", "transfer-encoding"} & {*before.headers}
        assert "PUT" in before.headers["access-control-allow-methods"]
        assert "if-match" in before.headers["access-control-allow-headers"]
        made = await api.put("/v1/kv/a", 1, headers={"origin": "https://app.example"})
        assert made.headers["access-control-allow-origin"] == "https://app.example"
        assert made.headers["vary"] == "origin"
        refused = {**asked, "origin": "https://evil.example"}
        assert problem(await api.send("OPTIONS", "/v1/kv/a", headers=refused)) == (403, "NOT_PERMITTED")
        missing = await api.get("/v1/kv/nothing", headers={"origin": "https://app.example"})
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, "https://app.example")


def test_a_page_of_http_may_not_call_a_service_of_https() -> None:
    scope = {"scheme": "https", "server": ("127.0.0.1", 443)}
    for origin, is_allowed in ((b"https://localhost", True), (b"http://localhost", False)):
        headers = [(b"host", b"localhost"), (b"origin", origin)]
        with nullcontext() if is_allowed else pytest.raises(Problem, match="Origin: "):
            Origins().check({**scope, "headers": headers})


async def test_wrong_tokens_are_answered_late_and_right_ones_at_once() -> None:
    now = 0.0
    logins = FailedLogins(lambda: now)
    pauses = [logins.failed("10.0.0.1") for _ in range(20)]
    assert pauses[:5] == [0.0] * 5
    assert pauses == sorted(pauses)
    assert pauses[5] > 0
    assert pauses[-1] == 10.0
    assert logins.failed("10.0.0.2") == 0.0
    assert [logins.failed(f"2001:db8::{number:x}") for number in range(6)][-1] > 0
    now = 301.0
    assert logins.failed("10.0.0.1") == 0.0
    for number in range(3000):
        logins.failed(f"10.1.{number // 256}.{number % 256}")
    assert len(logins) == 1000
    async with running_api() as api:
        guesses = [asyncio.create_task(api.get("/v1/info", token=f"guess-{number}")) for number in range(40)]
        answered = [task.result() for task in (await asyncio.wait(guesses, timeout=0.05))[0]]
        assert len(answered) < 40
        assert (await api.get("/v1/info")).status_code == 200
        for task in guesses:
            task.cancel()
        await asyncio.gather(*guesses, return_exceptions=True)


def test_tokens_are_rotated_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now, file = 0.0, tmp_path / "tokens.toml"
    first, second = new_token(), new_token()
    assert len(first) > 40
    assert first != second
    file.write_text(declaration("ci", first, ["read:kv"]))
    valid = ValidTokens((), str(file), lambda: now)
    assert first not in file.read_text()
    found = valid.find(first)
    assert found is not None
    assert (found.name, valid.find(second), valid.is_valid(found)) == ("ci", None, True)
    file.write_text(f"{declaration('ci', first, ['read:kv'])}\n\n{declaration('next', second, ['admin'])}\n")
    assert valid.find(second) is None  # it is looked at once a second
    now += 2
    assert valid.find(second) is not None
    file.write_text(declaration("next", second, ["admin"]))
    valid.reload()
    assert (valid.find(first), valid.is_valid(found)) == (None, False)
    file.write_text("[[token]]\nname = 1")
    now += 2
    with caplog.at_level(logging.ERROR):
        assert valid.find(second) is not None
    assert "the tokens stay as they were" in caplog.text
    file.unlink()
    now += 2
    assert valid.find(second) is not None
    for seconds, is_valid in ((3600, True), (-1, False)):
        file.write_text(declaration("old", first, ["read:kv"], datetime.now(UTC) + timedelta(seconds=seconds)))
        valid.reload()
        assert (valid.find(first) is not None, valid.is_valid(found)) == (is_valid, is_valid)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", "[[token]]"),
        ("not toml", "not TOML"),
        ('[[token]]\nname = "a"\nsha256 = "xyz"\nscopes = ["admin"]', "64 hex digits"),
        (f'[[token]]\nname = "a b"\nsha256 = "{"0" * 64}"\nscopes = ["admin"]', "name"),
        (f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = []', "scopes"),
        (
            f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = ["root"]',
            "expected admin, or an access and an area",
        ),
        (f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = ["admin"]\nexpires = 2030-01-01T00:00:00', "zone"),
        (
            f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = ["admin"]\n' * 2,
            "a different one for each token, got several times: a",
        ),
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_says_why(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=reason.replace("[", r"\[")):
        read_token_file(str(file))
    with pytest.raises(InvalidArgument, match="can't be read"):
        read_token_file(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "text",
    ["", "read", "read:", "write:kv/", "own:kv", "read:db", "read:db/", "read:db/a b", "read:plugin", "read:tenant/A"],
)
def test_a_scope_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="scope: "):
        TokenScope.read(text)


async def test_writes_and_reads_by_an_admin_leave_a_line_without_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "keyloft.audit"):
        async with running_api(*TOKENS) as api:
            await api.put("/v1/kv/users/a", "SECRET")
            await api.put("/v1/kv/users/b", "SECRET", token="users-writer")
            await api.put("/v1/kv/users/b", "SECRET", token="users-reader")
            await api.get("/v1/kv/users/a")
            await api.get("/v1/kv/users/a", token="users-reader")
            await api.get("/v1/kv/users/nothing")
            await api.get("/v1/kv?prefix=users")
            await api.get("/v1/kv?prefix=users&keys=true")
            await api.post("/v1/get", {"keys": ["users/a", "b"]})
            await api.post(
                "/v1/atomic", {"mutations": [{"op": "delete", "key": "x"}, {"op": "sum", "key": "u", "u64": "1"}]}
            )
            await api.put("/v1/kv/users/a", 1, headers={"if-none-match": "*"})
            await api.put("/v1/kv/nothing", 1, headers={"if-match": "*"})
            await api.post("/v1/atomic", {"checks": [{"key": "users/b", "versionstamp": None}]})
            await api.send("PATCH", "/v1/kv/users/a", json={"expire_in": 60})
            await api.send("DELETE", "/v1/db/shop/kv/a%0Ab")
            await api.send("DELETE", "/v1/kv?prefix=users")
            assert problem(await api.send("DELETE", "/v1/db/sh%20op/kv?prefix=users"))[0] == 422
            async with api.watch("key=a&key=b"):
                pass
    lines = [record.message for record in caplog.records if record.name == "keyloft.audit"]
    assert [line.partition(", versionstamp")[0] for line in lines] == [
        "token admin: put users/a",
        "token users-writer: put users/b",
        "token admin: read users/a",
        "token admin: list prefix=users",
        "token admin: read users/a b",
        "token admin: atomic delete:x sum:u",
        "token admin: read users/a",
        "token admin: read users/b",
        "token admin: touch users/a",
        "token admin: delete a%0Ab in store shop",
        "token admin: delete range prefix=users",
        "token admin: watch a b",
    ]
    assert "SECRET" not in caplog.text


async def test_a_write_whose_outcome_is_unknown_leaves_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "keyloft.audit")
    async with running_api() as api:
        engine = api.context.database()
        commit = engine.commit

        async def losing_the_reply(batch: Batch) -> Committed | Conflict:
            await commit(batch)
            raise CommitUnknown("the connection was lost")

        monkeypatch.setattr(engine, "commit", losing_the_reply)
        for answer in (
            await api.put("/v1/kv/a", 1),
            await api.put("/v1/db/shop/kv/a", 1, headers={"if-none-match": "*"}),
            await api.send("DELETE", "/v1/kv/a"),
            await api.post("/v1/atomic", {"mutations": [{"op": "set", "key": "b", "value": 1}]}),
        ):
            assert problem(answer) == (503, "COMMIT_UNKNOWN")
    unknown = "the connection to the database was lost: carried out or not"
    assert [record.message for record in caplog.records if record.name == "keyloft.audit"] == [
        f"token admin: put a, {unknown}",
        f"token admin: put a in store shop, {unknown}",
        f"token admin: delete a, {unknown}",
        f"token admin: atomic set:b, {unknown}",
    ]
