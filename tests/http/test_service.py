"""`keyloft serve` over HTTP as a process: tokens, TLS, curl, and that nothing acknowledged is lost."""

import asyncio
import re
import shutil
import signal
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

import keyloft
from keyloft.http.listener import HttpListener
from keyloft.http.meters import HttpMeters
from keyloft.http.tokens import declaration, new_token
from keyloft.server.config import Config
from keyloft.server.http_service import HttpService
from tests.server.test_serve import LONGEST_SECONDS, Serving, serving
from tests.support.http import http_client

pytestmark = pytest.mark.slow

TOKEN = "a-token-for-tests-only"


def url_of(served: Serving) -> str:
    return str(re.findall(r"https?://[\d.]+:\d+", served.log)[0])


def headers_of(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def curl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec("curl", "-s", *arguments, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return printed.decode()


async def test_the_token_that_is_made_at_the_start_opens_the_api(tmp_path: Path) -> None:
    async with serving(tmp_path, "--nats-port", "0", "--http-make-token", "yes") as served:
        [(url, token)] = re.findall(r"page +(http://[\d.:]+)/\?token=(\S+)", served.log)
        async with http_client(url, headers=headers_of(token), timeout=LONGEST_SECONDS) as client:
            assert (await client.put("/v1/kv/users/alice", json={"name": "Alice"})).status_code == 201
            assert (await client.get("/readyz")).text == "ready\n"
            assert (await client.get("/v1/info")).json()["version"] == keyloft.__version__
        if shutil.which("curl") is not None:
            authorization = f"Authorization: Bearer {token}"
            assert '"name":"Alice"' in await curl("-H", authorization, f"{url}/v1/kv/users/alice")
            assert '"status":422' in await curl("--path-as-is", "-H", authorization, f"{url}/v1/kv/a/../b")
        assert "keyloft.audit] token made-at-start: put users/alice" in served.log
        assert '"Alice"' not in served.log


async def check_with_curl(url: str, authority: trustme.CA, token: str, folder: Path) -> None:
    """Put, get, and watch an entry over TLS; another authority, an old TLS and plain text are refused."""
    own, other = folder / "ca.pem", folder / "other.pem"
    authority.cert_pem.write_to_path(own)
    trustme.CA().cert_pem.write_to_path(other)
    trusted = ("--cacert", str(own), "-H", f"Authorization: Bearer {token}")
    put = ("-X", "PUT", "-H", "Content-Type: application/json", "-d", '{"name": "Alice"}')
    assert '"versionstamp"' in await curl(*trusted, *put, f"{url}/v1/kv/users/alice")
    assert '"name":"Alice"' in await curl(*trusted, f"{url}/v1/kv/users/alice")
    events = await curl(*trusted, "-N", "--max-time", "1", f"{url}/v1/watch?key=users/alice")
    assert ("event: ready" in events, '"name":"Alice"' in events) == (True, True)
    for refused in (
        ("--cacert", str(other), f"{url}/v1/info"),
        (*trusted, "--tls-max", "1.1", f"{url}/v1/info"),
        (*trusted, f"{url.replace('https', 'http')}/v1/info"),
    ):
        assert await curl(*refused) == ""


async def test_https_is_served_and_tokens_are_read_again_on_sighup(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    first, second, tokens = new_token(), new_token(), tmp_path / "tokens.toml"
    tokens.write_text(declaration("first", first, ["admin"]))
    files = ("--http-cert", "cert.pem", "--http-key", "key.pem", "--http-tokens", "tokens.toml")
    async with serving(tmp_path, "--nats-port", "0", *files) as served:
        trusted = ssl.create_default_context()
        authority.configure_trust(trusted)
        url = url_of(served)
        assert url.startswith("https://")
        if shutil.which("curl") is not None:
            await check_with_curl(url, authority, first, tmp_path)
        async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=LONGEST_SECONDS) as client:
            assert (await client.get("/v1/info", headers=headers_of(first))).status_code == 200
            assert (await client.get("/v1/info", headers=headers_of(second))).status_code == 401
            tokens.write_text(declaration("second", second, ["admin"]))
            served.process.send_signal(signal.SIGHUP)
            await served.logs("tokens.toml again: 1 tokens")
            assert (await client.get("/v1/info", headers=headers_of(second))).status_code == 200
            assert (await client.get("/v1/info", headers=headers_of(first))).status_code == 401


async def test_a_service_without_tls_that_others_can_reach_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(_listener: HttpListener, host: str, port: int) -> tuple[str, int]:
        return host, port  # it does not listen: a test must not be reached by other machines

    monkeypatch.setattr(HttpListener, "start", start)
    unused: Any = None
    warned = {}
    for http, token in (("0.0.0.0:80", TOKEN), ("0.0.0.0:80", None), ("localhost:80", TOKEN), ("[::1]:80", TOKEN)):
        caplog.clear()
        config = Config(http=http, http_token=token, http_page="off")
        async with HttpService(config, unused, unused, HttpMeters()) as service:
            await service.start()
        warned[http, token] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    [line] = warned.pop(("0.0.0.0:80", TOKEN))
    assert line.startswith("tokens and values travel unencrypted to http://0.0.0.0:80: use --http-cert")
    assert not any(warned.values())


async def writing(client: httpx.AsyncClient, writer: int, acknowledged: dict[str, int]) -> None:
    """Store numbers, one after the other, until the service is gone."""
    with suppress(httpx.HTTPError):
        for number in range(1_000_000):
            key = f"w/={writer}/={number}"
            answer = await client.put(f"/v1/kv/{key}", json=number)
            if answer.status_code == 503:
                return
            assert answer.status_code == 201, answer.text
            acknowledged[key] = number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_was_acknowledged_under_load_is_there_afterwards(tmp_path: Path, number: signal.Signals) -> None:
    acknowledged: dict[str, int] = {}
    async with serving(tmp_path, "--nats-port", "0", "--http-token", TOKEN) as served:
        async with (
            http_client(url_of(served), headers=headers_of(), timeout=LONGEST_SECONDS) as client,
            client.stream("GET", "/v1/watch?prefix=w") as stream,
        ):
            writers = [asyncio.create_task(writing(client, writer, acknowledged)) for writer in range(8)]
            async with asyncio.timeout(LONGEST_SECONDS):
                while len(acknowledged) < 200:
                    await asyncio.sleep(0.01)
            served.process.send_signal(number)
            await asyncio.gather(*writers)
            with suppress(httpx.HTTPError):
                async for _ in stream.aiter_lines():
                    pass  # it ends with the service
        code = await served.ends()
        assert code == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    async with keyloft.open(tmp_path / "keyloft.db") as kv:
        stored = {entry.key: entry.value async for entry in kv.list(prefix=("w",))}
    lost = [key for key, value in acknowledged.items() if stored.get(tuple_of(key)) != value]
    assert lost == []


def tuple_of(key: str) -> tuple[str, int, int]:
    _, writer, number = key.split("/=")
    return "w", int(writer), int(number)


async def test_an_admin_token_that_is_too_short_and_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for flags, reason in (
        (("--http-token", "short"), "--http-token: expected at least 16 characters"),
        (("--http-tokens", "nothing.toml"), "the file nothing.toml does not exist"),
        (("--http-key", "key.pem"), "--http-key needs --http-cert"),
    ):
        served = Serving(tmp_path, "--nats-port", "0", *flags)
        assert (await served.ends(), reason in served.log) == (2, True), served.log
    (tmp_path / "tokens.toml").write_text("[[token]]")
    served = Serving(tmp_path, "--nats-port", "0", "--http-tokens", "tokens.toml")
    assert await served.ends() == 2
    assert "tokens.toml: expected [[token]] tables" in served.log
    trustme.CA().issue_cert("localhost").cert_chain_pems[0].write_to_path(tmp_path / "srv.pem")
    served = Serving(tmp_path, "--nats-port", "0", "--http-cert", "srv.pem")
    assert await served.ends() == 2
    assert "--http-cert: srv.pem has no private key; name it with --http-key" in served.log
