"""`keyloft plugin …`: what a plugin stores, over NATS."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import typer

from keyloft.cli.options import AsJson, AsText, TakesNumbers, Value, with_settings
from keyloft.cli.terminal import given_value, show_json, told
from keyloft.errors import InvalidArgument, KeyloftError, Unanswered
from keyloft.server.complaints import complain
from keyloft.server.config import DEFAULT_NATS_PORT, NATS_SETTINGS, Flags, load
from keyloft.urls import without_password

if TYPE_CHECKING:
    from keyloft.bus import Login
    from keyloft.plugins import DatabaseClient

_ABSENT: Final = object()
_PREFIX: Final = "db.kv"

Plugin: TypeAlias = Annotated[str, typer.Argument(metavar="PLUGIN", help="Whose storage.")]
Key: TypeAlias = Annotated[str, typer.Argument(metavar="KEY")]
Subjects: TypeAlias = Annotated[str, typer.Option("--subjects", metavar="PREFIX", help="The subjects of the service.")]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for an answer.")
]


def add_to(app: typer.Typer) -> None:
    plugin = typer.Typer(no_args_is_help=True, help="Read and write what a plugin stores, over NATS.")
    for name, command in (("get", get), ("set", put), ("delete", delete), ("list", listing)):
        plugin.command(name, cls=TakesNumbers)(told(with_settings(*NATS_SETTINGS)(command)))
    app.add_typer(plugin, name="plugin")


def get(
    plugin: Plugin,
    key: Key,
    *,
    as_json: AsJson = False,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> int:
    """Print the value at a key as JSON; exit code 1 if there is none."""
    value = _ask(plugin, subjects, timeout, flags, lambda client: client.kv.get(key, default=_ABSENT))
    if value is _ABSENT:
        complain(f"{plugin} has no key {key!r}")
        return 1
    show_json(value, as_json=as_json)
    return 0


def put(
    plugin: Plugin,
    key: Key,
    value: Value,
    *,
    text: AsText = False,
    ttl: Annotated[int | None, typer.Option(metavar="SECONDS", help="After so many seconds it is gone.")] = None,
    as_json: AsJson = False,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> int:
    """Store a value, and print it as it was understood."""
    content = given_value(value, is_text=text)
    _ask(plugin, subjects, timeout, flags, lambda client: client.kv.set(key, content, ttl=ttl))
    show_json(content, as_json=as_json)
    return 0


def delete(
    plugin: Plugin,
    key: Key,
    *,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> int:
    """Remove a key; exit code 1 if there was none."""
    existed = _ask(plugin, subjects, timeout, flags, lambda client: client.kv.delete(key))
    show_json(existed, as_json=True)
    return 0 if existed else 1


def listing(
    plugin: Plugin,
    *,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="Only keys that begin with this text.")] = "",
    limit: Annotated[int | None, typer.Option(metavar="N", help="At most so many keys.")] = None,
    as_json: AsJson = False,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> int:
    """Print the keys as a JSON array."""

    async def keys(client: "DatabaseClient") -> list[str]:
        return await client.kv.list(prefix, limit=limit)

    show_json(_ask(plugin, subjects, timeout, flags, keys), as_json=as_json)
    return 0


def _ask(
    plugin: str,
    subjects: str,
    timeout: float,
    flags: Flags,
    question: Callable[["DatabaseClient"], Awaitable[Any]],
) -> Any:
    settings = load(flags, only=NATS_SETTINGS)
    if not 0 < timeout <= 3600:
        raise InvalidArgument("--timeout: a number of seconds above 0, and 3600 at most")
    # What NATS says by the way reaches the user as the error of the request.
    logging.getLogger("keyloft").addHandler(logging.NullHandler())
    addresses = list(settings.nats) or [f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"]

    async def asking() -> Any:
        from keyloft.plugins import DatabaseClient

        await _check_somebody_listens(addresses, timeout)
        login = settings.login()
        async with await DatabaseClient.connect(
            addresses,
            plugin_name=plugin,
            login=login,
            prefix=subjects,
            timeout=timeout,
            **_inbox(login, addresses),
        ) as client:
            return await question(client)

    try:
        return asyncio.run(asking())
    except KeyloftError as error:
        # A program that calls us can go by the code, which is the same whoever refused the request.
        complain(f"{error.code}: {error}")
        raise typer.Exit(1) from None


def _inbox(login: "Login", addresses: list[str]) -> dict[str, str]:
    """A user that may reach all plugins' storage does not receive its answers where a plugin does."""
    from keyloft.server.isolation import ADMIN

    users = {login.user, *[urlsplit(address).username for address in addresses]}
    return {"inbox_prefix": "_INBOX"} if ADMIN in users else {}


async def _check_somebody_listens(addresses: list[str], seconds: float) -> None:
    """A client would patiently wait for a server to come up; somebody at a terminal wants to know at once."""
    for address in addresses:
        parts = urlsplit(address if "://" in address else f"nats://{address}")
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_NATS_PORT)
        except (OSError, TimeoutError, ValueError):
            continue
        writer.transport.abort()
        return
    raise Unanswered(
        f"no NATS server answers at {', '.join(map(without_password, addresses))}: "
        "start one with `keyloft serve`, or name another with --nats"
    )
