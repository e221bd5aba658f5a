"""Examines what Keyloft runs on: Python, SQLite, the packages of its extras, and the ports that a service takes."""

import asyncio
import errno
import importlib.util
import platform
import re
import socket
import ssl
from contextlib import suppress
from typing import Final

import keyloft
from keyloft import limits
from keyloft.admin import Finding
from keyloft.admin.threads import in_thread
from keyloft.cli.doctor.checks import ok, problem, warning
from keyloft.core.log_text import printable
from keyloft.engines import SQLITE_VERSION
from keyloft.errors import NatsServerFailed
from keyloft.server.config import SETTINGS, Config
from keyloft.server.nats_process import find_binary

_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine's, and the address at which such a program is reached here."""
_HEALTH: Final = re.compile(r"ok$|the database |not connected to NATS", re.MULTILINE)
"""How the health page of a Keyloft service begins."""
SQLITE: Final = (3, 53)
"""The SQLite of the oldest apsw that pyproject.toml allows."""


def versions() -> list[Finding]:
    """The versions of Python and SQLite. Only SQLite can be too old: an old Python could not import Keyloft."""
    sqlite = ok("sqlite", f"SQLite {SQLITE_VERSION}, which comes with apsw")
    if tuple(map(int, re.findall(r"\d+", SQLITE_VERSION))) < SQLITE:
        least = ".".join(map(str, SQLITE))
        sqlite = warning("sqlite", f"{sqlite.what}, is old", cure=f'pip install --upgrade "apsw>={least}"')
    python = ok("python", f"Python {platform.python_version()}")
    return [ok("keyloft", f"Keyloft {keyloft.__version__}"), python, sqlite]


def packages(config: Config) -> list[Finding]:
    """Whether the packages that these settings need are installed."""
    missing = []

    def lack(package: str, extra: str, why: str, *, must: bool = False) -> None:
        finding, advice = problem if must else warning, f'pip install ".[{extra}]" in a clone of Keyloft'
        missing.append(finding("packages", f"{package} is not installed: {why}", cure=advice))

    if config.database.lower().startswith("postgres") and not _is_there("asyncpg"):
        lack("asyncpg", "postgres", "the driver of PostgreSQL", must=True)
    if config.database.lower().startswith("etcd") and not (_is_there("grpc") and _is_there("google.protobuf")):
        lack("grpcio or protobuf", "etcd", "what calls etcd", must=True)
    if not (_is_there("alembic") and _is_there("sqlalchemy")):
        lack("Alembic", "sql", "`keyloft migrate` needs it")
    if not all([_is_there(package) for package in ("starlette", "uvicorn", "httptools")]):
        lack("Starlette, uvicorn or httptools", "http", "`keyloft serve` needs them", must=True)
    if not _is_there("nats"):
        lack("nats-py", "nats", "all that goes over NATS needs it", must=bool(config.nats))
    if not config.nats:
        try:
            find_binary()
        except NatsServerFailed:
            lack("nats-server", "server", "`keyloft serve` without --nats starts one of its own")
    return missing or [ok("packages", "all packages that these settings need are installed")]


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


async def ports(config: Config, *, is_served: bool, store: str | None) -> list[Finding]:
    """Whether `keyloft serve` could listen at the configured addresses.

    Args:
        config: The settings.
        is_served: Whether a service runs already.
        store: The id of the database's store; None if it is not known.
    """
    found = []
    if (address := config.http_address()) is not None and address[1]:
        found.append(await _pages_port(*address, is_tls=config.http_cert is not None, store=store))
    if not config.nats and config.nats_port:
        found.append(await _nats_port(config.nats_port, is_served=is_served))
    return found


async def _pages_port(host: str, port: int, *, is_tls: bool, store: str | None) -> Finding:
    name, setting = f"port {port}", SETTINGS["http"].flag
    trouble = await in_thread(lambda: _why_not(host, port))
    if trouble is None:
        return ok(name, "free, for HTTP")
    advice = f"{setting} HOST:PORT takes another address, {setting} off serves no HTTP"
    if trouble.errno != errno.EADDRINUSE:
        return warning(name, f"{host}:{port} can't be listened on: {_reason(trouble)}", cure=advice)
    status, what = await _health(host, port, is_tls=is_tls)
    first, *others = what.splitlines() or [""]
    if (status, first) == (200, "ok"):
        served = others[0].removeprefix("store ") if others else None
        if store is not None and served not in (None, store):
            what = f"the service there is healthy, but has another database (store {served}) than these settings"
            return warning(name, what, cure="pass the settings of that service, for instance its --database")
        return ok(name, f"taken by a service of Keyloft, which is healthy{f' (store {served})' if served else ''}")
    if status == 503:
        reason = "; ".join([first, *others])
        return warning(name, f"the service there is not healthy: {reason}", cure="see the log of that service")
    return warning(name, "taken by another program: `keyloft serve` would serve no HTTP", cure=advice)


async def _nats_port(port: int, *, is_served: bool) -> Finding:
    name, setting = f"port {port}", SETTINGS["nats_port"].flag
    trouble = await in_thread(lambda: _why_not("127.0.0.1", port))
    if trouble is None:
        return ok(name, "free, for a nats-server of `keyloft serve`")
    if trouble.errno != errno.EADDRINUSE:
        what = f"127.0.0.1:{port} can't be listened on: {_reason(trouble)}"
        return problem(name, what, cure=f"{setting} takes another port")
    if is_served:
        return ok(name, "taken by a NATS server on which Keyloft serves")
    if (await _first_words("127.0.0.1", port)).startswith(b"INFO "):
        advice = f"--nats nats://127.0.0.1:{port} serves on that one, {setting} starts one on another port"
        return problem(name, "taken by a NATS server, so `keyloft serve` can't start its own there", cure=advice)
    what = "taken by another program, so `keyloft serve` can't start its nats-server there"
    return problem(name, what, cure=f"{setting} takes another port")


def _why_not(host: str, port: int) -> OSError | None:
    """The error that prevents a program from listening at an address, tried as asyncio would."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        return error
    return None


def _reason(error: OSError) -> str:
    if error.errno == errno.EACCES:
        return "this user may not take ports below 1024"
    return error.strerror or str(error)


async def _health(host: str, port: int, *, is_tls: bool) -> tuple[int, str]:
    """The status and the text of a service's health page; status 0 if there is no such page."""
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await _first_words(host, port, request, is_tls=is_tls)
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    found = re.match(r"HTTP/1\.\d (\d{3})", head)
    # If another program has answered, nothing of its page is shown.
    if found is None or "content-type: text/plain" not in head.lower() or not _HEALTH.match(body):
        return 0, ""
    return int(found[1]), "\n".join(map(printable, body.splitlines()))


async def _first_words(host: str, port: int, request: bytes = b"", *, is_tls: bool = False) -> bytes:
    """What a program sends first, until a pause or the end; over TLS, any certificate is accepted."""
    tls: ssl.SSLContext | None = None
    if is_tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    said = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(limits.DOCTOR_PORT_SECONDS):
            reader, writer = await asyncio.open_connection(_LOOPBACK.get(host, host), port, ssl=tls)
            try:
                writer.write(request)
                while len(said) < 4096 and (some := await reader.read(4096)):
                    said += some
                    if not request:
                        break
            finally:
                writer.transport.abort()
    return said
