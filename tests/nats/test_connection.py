"""Ways to log in to NATS."""

import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]
import pytest
import trustme

import keyloft
from keyloft.nats.connection import Login, connect
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from tests.support.nats import private_server


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

    def test_secrets_are_not_shown(self) -> None:
        assert "hidden" not in repr(Login(user="ada", password="hidden", token="hidden"))


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
