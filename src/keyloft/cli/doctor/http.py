"""Examines the HTTP API: its tokens, its certificate, and who can reach it."""

import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from keyloft import limits
from keyloft.admin import Finding
from keyloft.cli.doctor.checks import ok, problem, warning
from keyloft.core.addresses import is_loopback
from keyloft.errors import InvalidArgument
from keyloft.http.listener import lacks_key, tls_context
from keyloft.http.token_file import read_token_file
from keyloft.server.config import Config

_DAY: Final = 86_400


async def examine(config: Config) -> list[Finding]:
    """What is wrong with the settings of HTTP, as far as it can be seen without a running service."""
    if config.http_address() is None:
        return []
    found = list(_tokens(config))
    if config.http_cert is not None:
        found.append(_certificate(config.http_cert, config.http_key))
    found += _exposure(config)
    return found


def _tokens(config: Config) -> Iterator[Finding]:
    if config.http_tokens is None and config.http_token is None:
        yield ok(
            "tokens", "these settings have none: `keyloft serve` has no API then, and `scripts/serve` makes a token"
        )
        return
    if config.http_token is not None:
        yield ok("tokens", "one admin token, from the settings")
    if config.http_tokens is None:
        return
    try:
        tokens = read_token_file(config.http_tokens)
    except InvalidArgument as error:
        yield problem("tokens", str(error), cure="`keyloft token new` prints lines that can be read")
        return
    if Path(config.http_tokens).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"{config.http_tokens} can be written by others, who could add a token of their own"
        yield problem("tokens", what, cure=f"chmod 600 {config.http_tokens}")
    expired = [token.name for token in tokens if token.has_expired()]
    if expired:
        yield warning("tokens", f"these have expired: {', '.join(expired)}", cure="remove them from the file")
    valid = [token for token in tokens if not token.has_expired()]
    if not valid and config.http_token is None:
        what = f"{config.http_tokens} has no valid token: all requests to the API are refused"
        yield problem("tokens", what, cure="`keyloft token new` prints the lines of one")
        return
    admins = [token.name for token in valid if token.is_admin]
    yield ok("tokens", f"{len(valid)} valid in {config.http_tokens}, of which {len(admins)} may do everything")


def _certificate(certificate: str, key: str | None) -> Finding:
    """Whether the certificate can be used, and for how long, found by a TLS handshake within this process."""
    try:
        peer = _handshake(tls_context(certificate, key), certificate)
    except ssl.SSLCertVerificationError as error:
        what = f"{certificate} can't be used: {error.verify_message}"
        return problem("certificate", what, cure="renew it, then restart the service")
    except OSError as error:
        if lacks_key(certificate, key):
            return problem("certificate", f"{certificate} has no private key", cure="name it with --http-key")
        what = f"{certificate} and its key can't be read: {error.strerror or type(error).__name__}"
        return problem("certificate", what, cure="--http-cert and --http-key take a certificate and its key in PEM")
    days = int((ssl.cert_time_to_seconds(peer["notAfter"]) - time.time()) / _DAY)
    names = ", ".join([value for _, value in peer.get("subjectAltName", ())]) or "no name"
    if days < limits.CERTIFICATE_DAYS:
        return warning("certificate", f"it ends in {days} days", cure="renew it, then restart the service")
    return ok("certificate", f"for {names}; it ends in {days} days")


def _handshake(server: ssl.SSLContext, certificate: str) -> Any:
    """What a client that trusts only this certificate sees of it."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    done: set[int] = set()
    for _ in range(10):
        for number, side in enumerate(sides):
            try:
                side.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                pass
        if len(done) == len(sides):
            break
    return sides[0].getpeercert()


def _exposure(config: Config) -> Iterator[Finding]:
    address = config.http_address()
    assert address is not None, "asked for before"
    host = address[0]
    if is_loopback(host):
        yield ok("exposure", f"HTTP is served on {host}, which other machines can't reach")
        return
    has_api = config.http_token is not None or config.http_tokens is not None or config.http_make_token == "yes"
    if has_api and config.http_cert is None:
        what = f"HTTP is served on {host} without TLS: others on the network can read tokens and values"
        yield warning("exposure", what, cure="--http-cert and --http-key; or 127.0.0.1 behind a proxy with TLS")
    if has_api and not config.http_hosts:
        what = "clients that call the service by a name are refused"
        yield warning("exposure", what, cure="--http-hosts NAME, as in the URLs of its clients")
    if not has_api:
        yield ok("exposure", f"metrics and health are served on {host}, without a token; there is no API")
