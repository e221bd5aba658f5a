"""Ways to log in to NATS."""

import asyncio
import base64
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]
import pytest
import trustme

import keyloft
from keyloft.core.addresses import check_nats_address
from keyloft.nats.connection import Login, connect
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from keyloft.semantic.client import SemanticClient
from tests.support.nats import private_server, settled
from tests.support.ports import free_port


async def a_value_goes_through(url: str, login: Login, folder: Path) -> None:
    connection = await connect(url, name="service", login=login)
    db = BotDatabase(folder / "bot.db")
    service = DatabaseService(connection, db)
    await service.start()
    async with await DatabaseClient.connect(url, plugin_name="trivia", login=login) as client:
        await client.kv.set("k", 1)
        assert await client.kv.get("k") == 1
    await service.stop()
    await connection.close()
    await db.close()


class TestLogin:
    async def test_by_user_and_password_or_token(self, tmp_path: Path) -> None:
        (tmp_path / "user.conf").write_text('authorization { user: "ada", password: "l0velace" }')
        async with private_server(tmp_path / "user.conf") as server:
            await a_value_goes_through(server.url, Login(user="ada", password="l0velace"), tmp_path)
            with pytest.raises(keyloft.NotPermitted, match="check the user and password"):
                await DatabaseClient.connect(server.url, plugin_name="trivia", login=Login(user="ada", password="no"))
        (tmp_path / "token.conf").write_text('authorization { token: "t0ken" }')
        async with private_server(tmp_path / "token.conf") as server:
            await a_value_goes_through(server.url, Login(token="t0ken"), tmp_path)

    async def test_by_a_credentials_file(self, tmp_path: Path) -> None:
        configuration, credentials = decentralised(tmp_path)
        async with private_server(configuration) as server:
            await a_value_goes_through(server.url, Login(credentials=credentials), tmp_path)

    async def test_over_tls_with_certificates_both_ways(self, tmp_path: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        for name in ("localhost", "client"):
            made = authority.issue_cert(name)
            made.private_key_pem.write_to_path(tmp_path / f"{name}.key")
            made.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        (tmp_path / "tls.conf").write_text(
            f'tls {{ cert_file: "{tmp_path}/localhost.pem", key_file: "{tmp_path}/localhost.key", '
            f'ca_file: "{tmp_path}/ca.pem", verify: true }}'
        )
        async with private_server(tmp_path / "tls.conf") as server:
            url = f"tls://localhost:{server.port}"
            login = Login(ca=tmp_path / "ca.pem", certificate=tmp_path / "client.pem", key=tmp_path / "client.key")
            await a_value_goes_through(url, login, tmp_path)
            for incomplete in (Login(), Login(ca=tmp_path / "ca.pem")):
                with pytest.raises(keyloft.Unanswered, match=r"certificates of NATS .*--nats-ca") as refused:
                    await DatabaseClient.connect(url, plugin_name="trivia", login=incomplete)
                assert refused.type is keyloft.Unanswered, "another login would not help"

    @pytest.mark.parametrize("asked_by", ["address", "authority"])
    @pytest.mark.parametrize("is_optional", [False, True], ids=["no tls", "optional tls"])
    async def test_a_server_gets_nothing_without_tls_from_a_client_that_asks_for_it(
        self, asked_by: str, is_optional: bool, tmp_path: Path
    ) -> None:
        received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def pose_as_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            info = {"server_id": "X", "version": "2.10.0", "max_payload": 1048576, "tls_available": is_optional}
            writer.write(f"INFO {json.dumps(info)}\r\n".encode())
            with suppress(ConnectionError):  # on a busy machine, an attempt may have ended before it was accepted
                data = await reader.read(1000)
                if not received.done():
                    received.set_result(data)
            writer.close()

        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        login = Login(user="ada", password="hidden", ca=None if asked_by == "address" else tmp_path / "ca.pem")
        async with await asyncio.start_server(pose_as_server, "127.0.0.1") as server:
            scheme = "tls" if asked_by == "address" else "nats"
            url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            refusal = "no NATS server answers" if is_optional else "does not offer TLS"
            with pytest.raises(keyloft.Unanswered, match=refusal):
                await DatabaseClient.connect(url, plugin_name="trivia", login=login, timeout=2)
            data = await asyncio.wait_for(received, 10)
        assert data[:2] == (b"\x16\x03" if is_optional else b""), "TLS begins, or nothing"

    async def test_a_server_that_does_not_answer_the_handshake_is_given_up_in_time(self) -> None:
        ended = asyncio.Event()

        async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            info = {"server_id": "X", "version": "2.10.0", "max_payload": 1048576, "tls_required": True}
            writer.write(f"INFO {json.dumps(info)}\r\n".encode())
            await ended.wait()
            writer.close()

        async with await asyncio.start_server(begin, "127.0.0.1") as server:
            url = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(keyloft.Unanswered, match="no NATS server answers"):
                await asyncio.wait_for(DatabaseClient.connect(url, plugin_name="trivia", timeout=0.5), 20)
            ended.set()

    @pytest.mark.parametrize("kind", ["credentials", "ca", "certificate", "key"])
    async def test_a_file_that_is_not_there_is_named(self, kind: str, nats_url: str) -> None:
        files: dict[str, Any] = {kind: Path("missing.file")}
        login = Login(**files)
        with pytest.raises(keyloft.InvalidArgument, match=rf"^login: {kind}: the file missing\.file does not exist"):
            await DatabaseClient.connect(nats_url, plugin_name="trivia", login=login)

    async def test_an_option_that_nats_py_does_not_have_is_named(self, nats_url: str) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'creds'"):
            await DatabaseClient.connect(nats_url, plugin_name="trivia", creds="service.creds")

    def test_secrets_are_not_shown(self) -> None:
        assert "hidden" not in repr(Login(user="ada", password="hidden", token="hidden"))


def test_a_program_that_ends_without_closing_its_client_ends_quietly(nats_url: str) -> None:
    program = (
        "import asyncio\n"
        "from keyloft.nats.connection import connect\n"
        f"asyncio.run(connect({nats_url!r}, name='left open'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def decentralised(folder: Path) -> tuple[Path, Path]:
    """A server's configuration with an operator's and an account's JWT, and a user's credentials file."""
    operator, account, user = (_Keys(prefix) for prefix in (b"O", b"A", b"U"))
    operator_jwt = operator.signs(operator, "operator", {})
    account_jwt = operator.signs(account, "account", {"limits": dict.fromkeys(_UNLIMITED, -1)})
    user_jwt = account.signs(user, "user", {"subs": -1, "data": -1, "payload": -1})
    configuration = folder / "operator.conf"
    configuration.write_text(
        f'operator: "{operator_jwt}"\nresolver: MEMORY\nresolver_preload: {{ {account.public}: "{account_jwt}" }}\n'
    )
    credentials = folder / "user.creds"
    credentials.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return configuration, credentials


_UNLIMITED = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")


class _Keys:
    def __init__(self, prefix: bytes) -> None:
        kinds = {b"O": nkeys.PREFIX_BYTE_OPERATOR, b"A": nkeys.PREFIX_BYTE_ACCOUNT, b"U": nkeys.PREFIX_BYTE_USER}
        kind = kinds[prefix]
        raw = bytes([nkeys.PREFIX_BYTE_SEED | (kind >> 5), (kind & 31) << 3]) + os.urandom(32)
        self.seed = base64.b32encode(raw + nkeys.crc16(raw).to_bytes(2, "little")).decode().rstrip("=")
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self._pair.public_key.decode()

    def signs(self, other: "_Keys", kind: str, claims: dict[str, Any]) -> str:
        body = {
            "jti": hashlib.sha256(other.public.encode()).hexdigest(),
            "iat": int(time.time()),
            "iss": self.public,
            "name": kind,
            "sub": other.public,
            "nats": {"type": kind, "version": 2, **claims},
        }
        parts = [_encoded({"typ": "JWT", "alg": "ed25519-nkey"}), _encoded(body)]
        signature = self._pair.sign(".".join(parts).encode())
        return ".".join([*parts, _text(signature)])


def _encoded(part: dict[str, Any]) -> str:
    return _text(json.dumps(part).encode())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


DENYING = """
authorization { users: [ { user: "ada", password: "x", permissions: { publish: { deny: "denied.>" } } } ] }
"""


class TestReportedErrors:
    async def test_a_refused_login_does_not_promise_another_attempt(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "deny.conf").write_text(DENYING)
        async with private_server(tmp_path / "deny.conf") as server:
            with pytest.raises(keyloft.NotPermitted):
                await connect(server.url, name="test", login=Login(user="ada", password="wrong"))
        shown = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert shown == ["NATS: 'Authorization Violation'"]

    async def test_a_client_that_gives_up_does_not_promise_another_attempt(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(keyloft.Unanswered, match="no NATS server answers"):
                await DatabaseClient.connect(url, plugin_name="trivia", timeout=0.5)
        assert any("Connect call failed" in message for message in caplog.messages)
        assert not any("trying again" in message for message in caplog.messages)

    @pytest.mark.parametrize("url", ["127.0.0.1:4222x", "http://127.0.0.1:4222", "nats://h:99999", "", "a b"])
    async def test_what_is_no_address_is_refused_at_once(self, url: str) -> None:
        with pytest.raises(keyloft.InvalidArgument, match=r"^url: expected an address like nats://127\.0\.0\.1:4222$"):
            await DatabaseClient.connect(url, plugin_name="trivia")
        with pytest.raises(keyloft.InvalidArgument, match=r"^url: expected an address"):
            await SemanticClient.connect(["nats://127.0.0.1:4222", url], tenant="acme", project="web")

    @pytest.mark.parametrize(
        "url", ["localhost", "127.0.0.1:4222", "nats://u:p@ss@[::1]:4222/", "tls://nats.example", "wss://h:443"]
    )
    def test_every_form_of_an_address_is_accepted(self, url: str) -> None:
        check_nats_address(url)

    async def test_a_refused_subject_is_logged_without_raw_control_characters(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "deny.conf").write_text(DENYING)
        login = Login(user="ada", password="x")
        async with private_server(tmp_path / "deny.conf") as server:
            connection = await connect(server.url, name="test", login=login)
            await connection.publish("denied.\x1b[2j\x9b31m\u202e", b"")
            await settled(connection)
            await connection.close()
        [line] = [message for message in caplog.messages if "permissions violation" in message]
        assert line.isprintable()
        assert r"denied.\x1b[2j" in line

    async def test_a_flood_of_errors_is_counted_at_close(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "deny.conf").write_text(DENYING)
        login, closed = Login(user="ada", password="x"), asyncio.Event()

        async def note() -> None:
            closed.set()

        async with private_server(tmp_path / "deny.conf") as server:
            connection = await connect(server.url, name="test", login=login, closed_cb=note)
            for number in range(200):
                await connection.publish(f"denied.{number}", b"")
            await settled(connection)
            await connection.close()
        assert closed.is_set()
        shown = [message for message in caplog.messages if "permissions violation" in message]
        left_out = [int(found[1]) for message in caplog.messages if (found := re.match(r"NATS: (\d+) more", message))]
        assert len(shown) + sum(left_out) == 200
        assert left_out


@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")  # nats-py calls aiohttp so
@pytest.mark.parametrize("scheme", ["nats", "ws"])
async def test_a_client_closes_while_nats_is_away(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, config = free_port(), tmp_path / "websocket.conf"
    config.write_text(f'websocket {{ listen: "127.0.0.1:{port}", no_tls: true }}\n')
    async with private_server(config) as server:
        url = server.url if scheme == "nats" else f"ws://127.0.0.1:{port}"
        client = await DatabaseClient.connect(url, plugin_name="trivia")
        with pytest.raises(keyloft.NoService):
            await client.kv.get("k")
        os.kill(server.pid, signal.SIGKILL)
        while "trying again until it answers" not in caplog.text:
            await asyncio.sleep(0.01)
        calls = [asyncio.ensure_future(client.kv.set("k", number)) for number in range(3)]
        while not client.nats.pending_data_size:
            await asyncio.sleep(0.01)
        await client.aclose()
        assert client.nats.is_closed
        assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == 3 * [
            keyloft.Unanswered
        ]
        subscriptions = [task for task in asyncio.all_tasks() if "_wait_for_msgs" in repr(task)]
        assert subscriptions == []


async def test_closing_that_is_cancelled_leaves_nothing_open() -> None:
    """The server answers the handshake, and then reads nothing, so that what is left can't be sent."""
    is_over, is_connected = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id": "a", "version": "2.10.0", "max_payload": 1048576, "headers": true}\r\n')
        while not is_connected.is_set():
            if (await reader.readline()).startswith(b"PING"):
                writer.write(b"PONG\r\n")
        await is_over.wait()
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    [listening] = server.sockets
    try:
        nats = await connect(f"nats://127.0.0.1:{listening.getsockname()[1]}", name="test")
        is_connected.set()
        before = asyncio.all_tasks()
        sending = [asyncio.create_task(nats.publish("a", bytes(1_000_000))) for _ in range(30)]
        await asyncio.wait(sending, timeout=0.1)
        # nats-py's own sending waits by now, so this is left to be sent.
        sending.append(asyncio.create_task(nats.publish("a", bytes(1_000_000))))
        await asyncio.wait(sending, timeout=0.1)
        closing = asyncio.create_task(nats.close())
        await asyncio.wait([closing], timeout=0.1)
        for task in (closing, *sending):
            task.cancel()
        await asyncio.wait([closing, *sending])
        assert nats.is_closed
        assert {task.get_name() for task in asyncio.all_tasks()} <= {task.get_name() for task in before}
    finally:
        is_over.set()
        server.close()
