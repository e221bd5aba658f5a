"""`keyloft plugin …`: what a plugin stores, over NATS."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

from msgspec import to_builtins

from keyloft import limits
from keyloft.cli.nats_server import check_timeout, over_nats
from keyloft.cli.options import (
    AsText,
    Commands,
    Limit,
    Output,
    Settings,
    Ttl,
    Value,
    Yes,
    argument,
    flag,
    number_argument,
    number_option,
    option,
    seconds_option,
    ttl_option,
)
from keyloft.cli.terminal import confirm, counted, fail, given_value, remark, say, to_json
from keyloft.core.lazy import check_limit
from keyloft.core.values import decode_json
from keyloft.errors import InvalidArgument, InvalidJson, KeyloftError
from keyloft.nats import payloads
from keyloft.plugins import rules
from keyloft.server.config import NATS_SETTINGS

if TYPE_CHECKING:
    from keyloft.nats.remote_watch import RemoteWatch
    from keyloft.plugins import DatabaseClient

S = TypeVar("S")
T = TypeVar("T")
_ABSENT: Final = object()

PluginArgument: TypeAlias = Annotated[str, argument("PLUGIN", "Whose storage, as in trivia.")]
PluginKeyArgument: TypeAlias = Annotated[str, argument("KEY", "As the plugin writes it: any text, as in score.")]
PluginPrefix: TypeAlias = Annotated[str, option("TEXT", "Only keys that begin with this text.")]


class PluginService(Settings, frozen=True, kw_only=True):
    """The service that is asked for a plugin's data, and the NATS server between."""

    names = NATS_SETTINGS
    subjects: Annotated[str, option("PREFIX", "The subjects of the service.")] = rules.PREFIXES[0]
    timeout: Annotated[float, seconds_option("How long to wait for an answer.", limits.PATIENCE_SECONDS)] = (
        limits.PATIENCE_SECONDS
    )

    def ask(self, plugin: str, request: Callable[["DatabaseClient"], Awaitable[T]]) -> T:
        """Connect as a client of a plugin's storage, and make requests with it; an error ends the command."""
        from keyloft.plugins import DatabaseClient

        settings = self.config()
        check_timeout(self.timeout)
        connect = partial(DatabaseClient.connect, plugin_name=plugin, prefix=self.subjects)
        try:
            rules.plugin_name(plugin)  # before any server is asked
            return over_nats(settings, self.timeout, connect, request)
        except KeyloftError as error:
            # Scripts rely on the code, which is the same whether the client or the service refused the request.
            fail(f"{error.code}: {error}")


def get(
    plugin: PluginArgument,
    key: PluginKeyArgument,
    *,
    meta: Annotated[bool, flag("--meta", "With its version, TTL and times.")] = False,
    out: Output,
    service: PluginService,
) -> None:
    """Print the value at a key as JSON. Exit code 1 if there is none.

    Example: keyloft plugin get trivia score
    """
    if meta:
        entry = service.ask(plugin, lambda client: client.kv.get(key, meta=True))
        if entry.exists:
            out.show(to_builtins(entry))
            return
    elif (value := service.ask(plugin, lambda client: client.kv.get(key, default=_ABSENT))) is not _ABSENT:
        out.show(value)
        return
    fail(f"{plugin} has no key {key!r}")


def get_many(
    plugin: PluginArgument,
    keys: Annotated[list[str], argument("KEY", "The keys, as the plugin writes them.")],
    *,
    out: Output,
    service: PluginService,
) -> None:
    """Print the values of several keys as a JSON object. Keys that are not there are left out.

    Example: keyloft plugin get-many trivia score:alice score:bob
    """
    out.show(service.ask(plugin, lambda client: client.kv.get_many(keys)))


def set_(
    plugin: PluginArgument,
    key: PluginKeyArgument,
    value: Value,
    *,
    text: AsText = False,
    ttl: Ttl = None,
    keep_ttl: Annotated[bool, flag("--keep-ttl", "A key that is there keeps its TTL.")] = False,
    if_absent: Annotated[bool, flag("--if-absent", "Only if the key is not there.")] = False,
    expected_version: Annotated[
        int | None, number_option("N", "Only if the key has this version; 0 if it must not be there.")
    ] = None,
    out: Output,
    service: PluginService,
) -> None:
    """Store a value, and print it as it was understood. Exit code 1 if a condition does not hold.

    Example: keyloft plugin set trivia score 100 --ttl 3600
    """
    content = given_value(value, is_text=text)
    _check_ttl(ttl)
    if if_absent and expected_version is not None:
        raise InvalidArgument("--if-absent, --expected-version: expected one of them, got both")
    if keep_ttl and ttl is not None:
        raise InvalidArgument("--keep-ttl, --ttl: expected one of them, got both")
    condition: dict[str, Any] = {"if_absent": if_absent, "expected_version": expected_version}
    service.ask(plugin, lambda client: client.kv.set(key, content, ttl=ttl, keep_ttl=keep_ttl, **condition))
    out.show(content)


def set_many(
    plugin: PluginArgument,
    file: Annotated[str, argument("FILE", "Has a JSON object: each name becomes a key. - is the standard input.")],
    *,
    ttl: Ttl = None,
    out: Output,
    service: PluginService,
) -> None:
    """Store up to 1,000 values, all or none, and print how many.

    Example: keyloft plugin set-many trivia scores.json
    """
    content = _read_object(file)
    _check_ttl(ttl)
    out.show(service.ask(plugin, lambda client: client.kv.set_many(content, ttl=ttl)))


def incr(
    plugin: PluginArgument,
    key: PluginKeyArgument,
    by: Annotated[int, number_argument("BY", "What to add; may be negative.")] = 1,
    *,
    ttl: Annotated[int | None, ttl_option("A new entry expires after so many seconds; another keeps its TTL.")] = None,
    out: Output,
    service: PluginService,
) -> None:
    """Add to an integer, and print the new one. A key that is not there counts as 0.

    Example: keyloft plugin incr trivia games
    """
    _check_ttl(ttl)
    out.show(service.ask(plugin, lambda client: client.kv.incr(key, by, ttl=ttl)))


def touch(
    plugin: PluginArgument,
    key: PluginKeyArgument,
    *,
    ttl: Ttl = None,
    never: Annotated[bool, flag("--never", "It does not expire.")] = False,
    out: Output,
    service: PluginService,
) -> int:
    """Give a key another TTL, or none. Prints whether the key is there; exit code 1 if it is not.

    Example: keyloft plugin touch trivia session --ttl 1800
    """
    if (ttl is None) != never:
        raise InvalidArgument("pass --ttl SECONDS, or --never")
    _check_ttl(ttl, none="--never")
    exists = service.ask(plugin, lambda client: client.kv.touch(key, ttl))
    out.show(exists)
    return 0 if exists else 1


def delete(plugin: PluginArgument, key: PluginKeyArgument, *, out: Output, service: PluginService) -> int:
    """Remove a key, and print whether there was one. Exit code 1 if there was none.

    Example: keyloft plugin delete trivia score
    """
    existed = service.ask(plugin, lambda client: client.kv.delete(key))
    out.show(existed)
    return 0 if existed else 1


def delete_many(
    plugin: PluginArgument,
    keys: Annotated[list[str] | None, argument("KEY", "The keys, as the plugin writes them.")] = None,
    *,
    prefix: Annotated[str | None, option("TEXT", "Instead of KEY, all keys that begin with this text.")] = None,
    out: Output,
    service: PluginService,
) -> None:
    """Remove several keys, or all with a prefix. Prints how many there were.

    Example: keyloft plugin delete-many trivia --prefix session:
    """
    if prefix == "":
        raise InvalidArgument("--prefix: expected a text; `keyloft plugin purge` removes all that a plugin stores")
    if bool(keys) == (prefix is not None):
        raise InvalidArgument("KEY, --prefix: expected one of them")
    out.show(service.ask(plugin, lambda client: client.kv.delete_many(keys or None, prefix=prefix)))


def list_(
    plugin: PluginArgument,
    *,
    prefix: PluginPrefix = "",
    limit: Limit = None,
    values: Annotated[bool, flag("--values", "An object with the values, instead of an array of keys.")] = False,
    out: Output,
    service: PluginService,
) -> None:
    """Print the keys as a JSON array. With --values, print keys and values as an object.

    Example: keyloft plugin list trivia --prefix user_
    """
    if values:
        out.show(dict(service.ask(plugin, lambda client: client.kv.list(prefix, limit=limit, values=True))))
    else:
        out.show(service.ask(plugin, lambda client: client.kv.list(prefix, limit=limit)))


def count(plugin: PluginArgument, *, prefix: PluginPrefix = "", out: Output, service: PluginService) -> None:
    """Print how many keys there are.

    Example: keyloft plugin count trivia --prefix user_
    """
    out.show(service.ask(plugin, lambda client: client.kv.count(prefix)))


def usage(plugin: PluginArgument, *, out: Output, service: PluginService) -> None:
    """Print how much a plugin stores, and its quota. Keys, and bytes of their values, at most a minute old.

    Example: keyloft plugin usage trivia
    """
    out.show(to_builtins(service.ask(plugin, lambda client: client.kv.usage())))


def watch(
    plugin: PluginArgument,
    key: Annotated[list[str] | None, argument("KEY", "Only these keys.")] = None,
    *,
    prefix: Annotated[str | None, option("TEXT", "Only keys that begin with this text.")] = None,
    since: Annotated[int | None, number_option("VERSION", "Begin with what changed after this version.")] = None,
    limit: Limit = None,
    out: Output,
    service: PluginService,
) -> None:
    """Print changes as they happen, until Ctrl-C. Each has the key, its version, and whether it is gone.

    Example: keyloft plugin watch trivia --prefix user_
    """
    most = check_limit(limit)
    if key and prefix is not None:
        raise InvalidArgument("KEY, --prefix: expected one of them, got both")

    async def follow(client: "DatabaseClient") -> None:
        async with client.kv.watch(*(key or ()), prefix=prefix, since=since) as changes:
            if out.is_for_people:
                remark("Waiting for changes; Ctrl-C ends it.")
            await say_events(changes, out, most)

    service.ask(plugin, follow)


async def say_events(changes: "RemoteWatch", out: Output, most: int) -> None:
    """Print at most this many events of a watch, one line each."""
    while most:
        event = await anext(changes)
        fields = {"key": event.key, "version": event.version, "deleted": event.deleted}
        what = "is gone" if event.deleted else f"has changed, version {event.version}"
        say(f"{event.key} {what}" if out.is_for_people else to_json(fields))
        sys.stdout.flush()
        most -= 1


def purge(plugin: PluginArgument, *, yes: Yes = False, out: Output, service: PluginService) -> None:
    """Remove all that a plugin stores. Asks first, with the number of keys, and prints how many there were.

    Example: keyloft plugin purge trivia
    """
    keys = service.ask(plugin, lambda client: client.kv.count())
    if keys and not yes:
        confirm(f"Remove {counted(keys, 'key')}, all that {plugin} stores?")
    out.show(service.ask(plugin, lambda client: client.kv.delete_many(prefix="")) if keys else 0)


def import_json(
    plugin: PluginArgument,
    file: Annotated[str, argument("FILE", "Has a JSON object: each name becomes a key. - is the standard input.")],
    *,
    replace: Annotated[bool, flag("--replace", "Keys that are there already get the file's value.")] = False,
    ttl: Ttl = None,
    out: Output,
    service: PluginService,
) -> None:
    """Store what a plugin kept in a JSON file. Prints how many keys were stored.

    Keys that are there already are left as they are, so a second run continues where the first one ended.

    Example: keyloft plugin import-json trivia trivia_data.json
    """
    content = _read_object(file)
    _check_ttl(ttl)

    async def store(client: "DatabaseClient") -> int:
        known = set() if replace else set(await client.kv.list())
        wanted = [key for key in content if key not in known]
        for key in wanted:
            rules.value(content[key])
        await some_at_once(lambda key: client.kv.set(key, content[key], ttl=ttl), wanted)
        return len(wanted)

    stored = service.ask(plugin, store)
    if left := len(content) - stored:
        remark(f"{left} of {len(content)} keys were there already, and are left as they are; --replace replaces them")
    out.show(stored)


async def some_at_once(
    request: Callable[[S], Awaitable[T]], items: Sequence[S], most: int = limits.PLUGIN_REQUESTS_AT_ONCE
) -> list[T]:
    """Make a request for each item, only this many at a time; the results are in the order of the items."""
    results: list[T] = []
    for first in range(0, len(items), most):
        results += await asyncio.gather(*map(request, items[first : first + most]))
    return results


def _check_ttl(ttl: int | None, none: str = "no --ttl") -> None:
    try:
        rules.ttl(ttl, "--ttl", none)
    except InvalidArgument as error:
        fail(f"{error.code}: {error}")


def _read_object(file: str) -> dict[str, Any]:
    if file.lstrip().startswith("{"):
        raise InvalidArgument("FILE: expected the name of a file, got JSON; - reads JSON from the standard input")
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        _, text = payloads.read(data)
    except (InvalidArgument, InvalidJson) as error:
        name = "what was read" if file == "-" else file
        wrong = str(error).removeprefix("the payload ")
        is_export = data.startswith(b'{"keyloft":"export"')
        hint = "; what `keyloft export` writes is for `keyloft import`" if is_export else ""
        raise InvalidArgument(f"{name}: {wrong}{hint}") from None
    content: dict[str, Any] = decode_json(text)
    for key in content:
        rules.key(key)
    return content


COMMANDS: Final[Commands] = (
    get,
    set_,
    delete,
    list_,
    watch,
    incr,
    get_many,
    set_many,
    delete_many,
    count,
    touch,
    usage,
    purge,
    import_json,
)
