"""`keyloft plugin …`: what a plugin stores, over NATS."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import typer

from keyloft import limits
from keyloft.cli.options import AsJson, AsText, Group, Value, Yes, add_commands
from keyloft.cli.terminal import confirm, counted, given_value, remark, show_json
from keyloft.core.urls import without_login
from keyloft.errors import InvalidArgument, InvalidJson, KeyloftError, Unanswered
from keyloft.nats import payloads
from keyloft.plugins import rules
from keyloft.server.config import DEFAULT_NATS_PORT, NATS_SETTINGS, Flags, load
from keyloft.server.error_output import print_error

if TYPE_CHECKING:
    from keyloft.nats.connection import Login
    from keyloft.plugins import DatabaseClient

_ABSENT: Final = object()
_PREFIX: Final = "db.kv"

Plugin: TypeAlias = Annotated[str, typer.Argument(metavar="PLUGIN", help="Whose storage, as in trivia.")]
Key: TypeAlias = Annotated[str, typer.Argument(metavar="KEY", help="As the plugin writes it: any text, as in score.")]
Subjects: TypeAlias = Annotated[str, typer.Option("--subjects", metavar="PREFIX", help="The subjects of the service.")]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for an answer.")
]


def add_to(app: typer.Typer) -> None:
    plugin = typer.Typer(cls=Group, no_args_is_help=True, help="Read and write what a plugin stores, over NATS.")
    add_commands(
        plugin,
        NATS_SETTINGS,
        {"get": get, "set": put, "delete": delete, "list": listing, "purge": purge, "import-json": import_json},
    )
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
    """Print the value at a key as JSON; exit code 1 if there is none.

    Example: keyloft plugin get trivia score
    """
    value = _request(plugin, subjects, timeout, flags, lambda client: client.kv.get(key, default=_ABSENT))
    if value is _ABSENT:
        print_error(f"{plugin} has no key {key!r}")
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
) -> None:
    """Store a value, and print it as it was understood.

    Example: keyloft plugin set trivia score 100 --ttl 3600
    """
    content = given_value(value, is_text=text)
    _request(plugin, subjects, timeout, flags, lambda client: client.kv.set(key, content, ttl=ttl))
    show_json(content, as_json=as_json)


def delete(
    plugin: Plugin,
    key: Key,
    *,
    as_json: AsJson = False,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> int:
    """Remove a key, and print whether there was one; exit code 1 if there was none.

    Example: keyloft plugin delete trivia score
    """
    existed = _request(plugin, subjects, timeout, flags, lambda client: client.kv.delete(key))
    show_json(existed, as_json=as_json)
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
) -> None:
    """Print the keys as a JSON array.

    Example: keyloft plugin list trivia --prefix user_
    """
    keys = _request(plugin, subjects, timeout, flags, lambda client: client.kv.list(prefix, limit=limit))
    show_json(keys, as_json=as_json)


def purge(
    plugin: Plugin,
    *,
    yes: Yes = False,
    as_json: AsJson = False,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> None:
    """Remove all that a plugin stores, and print how many keys there were; says how many before, and asks.

    Example: keyloft plugin purge trivia
    """
    there = _request(plugin, subjects, timeout, flags, lambda client: client.kv.list())
    if there and not yes:
        confirm(f"Remove {counted(len(there), 'key')}, all that {plugin} stores?")

    async def remove(client: "DatabaseClient") -> int:
        removed = 0
        for first in range(0, len(there), limits.PLUGIN_REQUESTS_AT_ONCE):
            some = there[first : first + limits.PLUGIN_REQUESTS_AT_ONCE]
            removed += sum(await asyncio.gather(*[client.kv.delete(key) for key in some]))
        return removed

    show_json(_request(plugin, subjects, timeout, flags, remove) if there else 0, as_json=as_json)


def import_json(
    plugin: Plugin,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSON object: each name becomes a key. - reads it.")],
    *,
    replace: Annotated[
        bool, typer.Option("--replace", help="Keys that are there already get the file's value.")
    ] = False,
    ttl: Annotated[int | None, typer.Option(metavar="SECONDS", help="After so many seconds they are gone.")] = None,
    as_json: AsJson = False,
    subjects: Subjects = _PREFIX,
    timeout: Timeout = 5.0,
    flags: Flags,
) -> None:
    """Store what a plugin kept in a JSON file, and print how many keys were stored.

    Keys that are there already are left as they are, so a second try goes on where a first one ended.

    Example: keyloft plugin import-json trivia trivia_data.json
    """
    content = _read_object(file)

    async def store(client: "DatabaseClient") -> list[str]:
        known = set() if replace else set(await client.kv.list())
        wanted = [key for key in content if key not in known]
        for key in wanted:
            rules.key(key)
            rules.value(content[key])
        for first in range(0, len(wanted), limits.PLUGIN_REQUESTS_AT_ONCE):
            some = wanted[first : first + limits.PLUGIN_REQUESTS_AT_ONCE]
            await asyncio.gather(*[client.kv.set(key, content[key], ttl=ttl) for key in some])
        return wanted

    stored = _request(plugin, subjects, timeout, flags, store)
    if left := len(content) - len(stored):
        remark(f"{left} of {len(content)} keys were there already, and are left as they are; --replace replaces them")
    show_json(len(stored), as_json=as_json)


def _read_object(file: str) -> dict[str, Any]:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{file} can't be read: {error.strerror}") from None
    try:
        content = payloads.read(data)
    except (InvalidArgument, InvalidJson) as error:
        name = "what was read" if file == "-" else file
        wrong = str(error).removeprefix("the payload ")
        raise InvalidArgument(f"{name} {wrong}; what `keyloft export` writes is for `keyloft import`") from None
    for key in content:
        rules.key(key)
    return content


def _request(
    plugin: str,
    subjects: str,
    timeout: float,
    flags: Flags,
    request: Callable[["DatabaseClient"], Awaitable[Any]],
) -> Any:
    settings = load(flags, only=NATS_SETTINGS)
    if not 0 < timeout <= 3600:
        raise InvalidArgument("--timeout: a number of seconds above 0, and 3600 at most")
    # What NATS reports reaches the user as the error of the request.
    logging.getLogger("keyloft").addHandler(logging.NullHandler())
    addresses = list(settings.nats) or [f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"]

    async def requesting() -> Any:
        from keyloft.plugins import DatabaseClient

        await check_server_listens(addresses, timeout)
        login = settings.login()
        async with await DatabaseClient.connect(
            addresses,
            plugin_name=plugin,
            login=login,
            prefix=subjects,
            timeout=timeout,
            **_inbox(login, addresses),
        ) as client:
            return await request(client)

    try:
        return asyncio.run(requesting())
    except KeyloftError as error:
        # Scripts go by the code, which is the same whether the client or the service refused the request.
        print_error(f"{error.code}: {error}")
        raise typer.Exit(1) from None


def _inbox(login: "Login", addresses: list[str]) -> dict[str, str]:
    """ADMIN receives replies in another inbox than a plugin does."""
    from keyloft.server.isolation import ADMIN

    users = {login.user, *[urlsplit(address).username for address in addresses]}
    return {"inbox_prefix": "_INBOX"} if ADMIN in users else {}


async def check_server_listens(addresses: list[str], seconds: float) -> None:
    """Refuse at once if no server listens; a client would wait for one to start."""
    for address in addresses:
        parts = urlsplit(address)
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_NATS_PORT)
        except (OSError, TimeoutError, ValueError):
            continue
        writer.transport.abort()
        return
    raise Unanswered(
        f"no NATS server answers at {', '.join(map(without_login, addresses))}: "
        "start one with `keyloft serve`, or name another with --nats"
    )
