"""The commands that look into a database: `get`, `list`, `keys`, `count`, `watch`."""

import sys
from typing import Annotated, Any, TypeAlias

import typer

from keyloft import Entry, Store
from keyloft.cli import keytext, stores
from keyloft.cli.options import AsJson, with_settings
from keyloft.cli.stores import with_store
from keyloft.cli.terminal import fail, is_for_people, say, show_json, to_json, told
from keyloft.core.keys import TupleKey
from keyloft.core.values import U64
from keyloft.server.config import Flags

Key: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="KEY", help="As in users/alice; =42 is an int, =1.5 a float, =true a bool, =x00ff bytes."),
]
Prefix: TypeAlias = Annotated[
    str, typer.Argument(metavar="PREFIX", help="Only what is below it, as in users; nothing for everything.")
]
Start: TypeAlias = Annotated[str | None, typer.Option(metavar="KEY", help="Only from this key on.")]
End: TypeAlias = Annotated[str | None, typer.Option(metavar="KEY", help="Only what comes before this key.")]
Limit: TypeAlias = Annotated[int | None, typer.Option(metavar="N", help="At most so many.")]
Reverse: TypeAlias = Annotated[bool, typer.Option("--reverse", help="The last one first.")]


def add_to(app: typer.Typer) -> None:
    for name, command in (("get", get), ("list", listing), ("keys", keys), ("count", count), ("watch", watch)):
        app.command(name)(told(with_settings("database")(command)))


def get(
    key: Key,
    *,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write bytes and texts as they are, and nothing else.")] = False,
    entry: Annotated[bool, typer.Option("--entry", help="Show key, versionstamp and expiry, too.")] = False,
    flags: Flags,
) -> int:
    """Print the value at a key; exit code 1 if there is none.

    Example: keyloft get users/alice
    """
    wanted = keytext.read(key)
    found = with_store(flags, lambda kv: kv.get(wanted))
    if not found.exists:
        fail(f"there is no key {key}")
    if raw and isinstance(found.value, (bytes, str)):
        sys.stdout.flush()
        sys.stdout.buffer.write(found.value if isinstance(found.value, bytes) else found.value.encode())
        sys.stdout.buffer.flush()
        return 0
    if entry:
        show_json(stores.shown(found), as_json=as_json)
    elif isinstance(found.value, bytes):
        show_json(stores.shown_value(found.value), as_json=as_json)
    else:
        show_json(int(found.value) if isinstance(found.value, U64) else found.value, as_json=as_json)
    return 0


def listing(
    prefix: Prefix = "",
    *,
    start: Start = None,
    end: End = None,
    limit: Limit = None,
    reverse: Reverse = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Print entries in the order of their keys: a line each, in a pipe as JSON.

    Example: keyloft list users --limit 10
    """
    selection = _selection(prefix, start, end) | {"limit": limit, "reverse": reverse}
    for_people = is_for_people() and not as_json

    async def work(kv: Store) -> None:
        async for entry in kv.list(**selection):
            say(stores.in_a_line(entry) if for_people else to_json(stores.shown(entry)))

    with_store(flags, work)
    return 0


def keys(
    prefix: Prefix = "",
    *,
    start: Start = None,
    end: End = None,
    limit: Limit = None,
    reverse: Reverse = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Print keys, one in each line.

    Example: keyloft keys users | wc -l
    """
    selection = _selection(prefix, start, end) | {"limit": limit, "reverse": reverse}

    async def work(kv: Store) -> None:
        async for key in kv.keys(**selection):
            text = keytext.written(key)
            say(to_json(text) if as_json else text)

    with_store(flags, work)
    return 0


def count(
    prefix: Prefix = "",
    *,
    start: Start = None,
    end: End = None,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Print how many entries there are.

    Example: keyloft count users
    """
    show_json(with_store(flags, lambda kv: kv.count(**_selection(prefix, start, end))), as_json=as_json)
    return 0


def watch(
    prefix: Prefix = "",
    *,
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Watch this key instead; to be repeated for several.")
    ] = None,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Print entries as they change, a line each, in a pipe as JSON, until Ctrl-C; what has expired is gone, too.

    Example: keyloft watch users
    """
    watched = [keytext.read(one) for one in key or ()]
    below = keytext.read_prefix(prefix)

    for_people = is_for_people() and not as_json

    def line(entry: Entry) -> str:
        if not entry.exists:
            gone = {"key": keytext.written(entry.key), "value": None}
            return f"{gone['key']} is gone" if for_people else to_json(gone)
        return stores.in_a_line(entry) if for_people else to_json(stores.shown(entry))

    async def work(kv: Store) -> None:
        async for entries in kv.watch(*watched) if watched else kv.watch(prefix=below):
            for entry in entries:
                say(line(entry))
            sys.stdout.flush()

    with_store(flags, work)
    return 0


def _selection(prefix: str, start: str | None, end: str | None) -> dict[str, Any]:
    def key(text: str | None) -> TupleKey | None:
        return None if text is None else keytext.read(text)

    return {"prefix": keytext.read_prefix(prefix), "start": key(start), "end": key(end)}
