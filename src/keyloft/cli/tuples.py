"""The commands of the tuple store: `get`, `list`, `keys`, `count`, `watch`, `set`, `delete`, `touch`."""

import base64
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from keyloft import Entry, Store
from keyloft.cli.database import with_store
from keyloft.cli.options import AsJson, AsText, Value, Yes, add_commands
from keyloft.cli.terminal import confirm, counted, fail, given_value, is_for_people, say, show_json, to_json
from keyloft.core import key_text
from keyloft.core.keys import TupleKey
from keyloft.core.values import U64
from keyloft.errors import InvalidArgument
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
ExpireIn: TypeAlias = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="After so many seconds the entry is gone.")
]


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"get": get, "list": listing, "keys": keys, "count": count, "watch": watch})
    add_commands(app, ["database"], {"set": put, "delete": delete, "touch": touch})


def get(
    key: Key,
    *,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write bytes and texts as they are, and nothing else.")] = False,
    entry: Annotated[bool, typer.Option("--entry", help="Show key, versionstamp and expiry, too.")] = False,
    flags: Flags,
) -> None:
    """Print the value at a key; exit code 1 if there is none.

    Example: keyloft get users/alice
    """
    wanted = key_text.read(key)
    found = with_store(flags, lambda kv: kv.get(wanted))
    if not found.exists:
        fail(f"there is no key {key}")
    if raw and isinstance(found.value, (bytes, str)):
        sys.stdout.flush()
        sys.stdout.buffer.write(found.value if isinstance(found.value, bytes) else found.value.encode())
        sys.stdout.buffer.flush()
        return
    if entry:
        show_json(_shown(found), as_json=as_json)
    elif isinstance(found.value, bytes):
        show_json(_shown_value(found.value), as_json=as_json)
    else:
        show_json(int(found.value) if isinstance(found.value, U64) else found.value, as_json=as_json)


def listing(
    prefix: Prefix = "",
    *,
    start: Start = None,
    end: End = None,
    limit: Limit = None,
    reverse: Reverse = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Print entries in the order of their keys: a line each, in a pipe as JSON.

    Example: keyloft list users --limit 10
    """
    selection = _selection(prefix, start, end) | {"limit": limit, "reverse": reverse}
    for_people = is_for_people() and not as_json

    async def work(kv: Store) -> None:
        async for entry in kv.list(**selection):
            say(_in_a_line(entry) if for_people else to_json(_shown(entry)))

    with_store(flags, work)


def keys(
    prefix: Prefix = "",
    *,
    start: Start = None,
    end: End = None,
    limit: Limit = None,
    reverse: Reverse = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Print keys, one in each line.

    Example: keyloft keys users | wc -l
    """
    selection = _selection(prefix, start, end) | {"limit": limit, "reverse": reverse}

    async def work(kv: Store) -> None:
        async for key in kv.keys(**selection):
            text = key_text.written(key)
            say(to_json(text) if as_json else text)

    with_store(flags, work)


def count(
    prefix: Prefix = "",
    *,
    start: Start = None,
    end: End = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Print how many entries there are.

    Example: keyloft count users
    """
    show_json(with_store(flags, lambda kv: kv.count(**_selection(prefix, start, end))), as_json=as_json)


def watch(
    prefix: Prefix = "",
    *,
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Watch this key instead; to be repeated for several.")
    ] = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Print entries as they change, a line each, in a pipe as JSON, until Ctrl-C; what has expired is gone, too.

    Example: keyloft watch users
    """
    watched = [key_text.read(one) for one in key or ()]
    below = key_text.read_prefix(prefix)

    for_people = is_for_people() and not as_json

    def line(entry: Entry) -> str:
        if not entry.exists:
            gone = {"key": key_text.written(entry.key), "value": None}
            return f"{gone['key']} is gone" if for_people else to_json(gone)
        return _in_a_line(entry) if for_people else to_json(_shown(entry))

    async def work(kv: Store) -> None:
        async for entries in kv.watch(*watched) if watched else kv.watch(prefix=below):
            for entry in entries:
                say(line(entry))
            sys.stdout.flush()

    with_store(flags, work)


def put(
    key: Key,
    value: Value,
    *,
    text: AsText = False,
    counter: Annotated[bool, typer.Option("--counter", help="VALUE is the number of a U64 counter.")] = False,
    file: Annotated[bool, typer.Option("--file", help="VALUE names a file, whose bytes are stored.")] = False,
    expire_in: ExpireIn = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Store a value, and print its versionstamp.

    Example: keyloft set users/alice '{"name": "Alice"}' --expire-in 3600
    """
    if text + counter + file > 1:
        raise InvalidArgument("--text, --counter and --file exclude each other")
    wanted = key_text.read(key)
    content: Any = Path(value).read_bytes() if file else given_value(value, is_text=text)
    if counter:
        if isinstance(content, bool) or not isinstance(content, int):
            raise InvalidArgument("--counter: VALUE is a whole number, as in 7")
        content = U64(content)
    stored = with_store(flags, lambda kv: kv.set(wanted, content, expire_in=expire_in), make=True)
    show_json(stored, as_json=as_json)


def delete(
    key: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="As in users/alice.", show_default=False)
    ] = None,
    *,
    prefix: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Remove all that is below it; asks before, with the number.")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Remove entries, all or none, and print how many there were; exit code 1 if there were none.

    Example: keyloft delete sessions/s1 sessions/s2
    """
    if bool(key) == (prefix is not None):
        raise InvalidArgument("name keys, or a --prefix; --prefix '' stands for everything")
    if prefix is not None:
        below = key_text.read_prefix(prefix)
        number = with_store(flags, lambda kv: kv.count(prefix=below))
        if not number:
            fail(f"there is nothing below {prefix!r}")
        if not yes:
            confirm(f"Remove {counted(number, 'entry', 'entries')} {f'below {prefix}' if below else 'in all'}?")
        removed = with_store(flags, lambda kv: kv.delete_range(prefix=below))
    else:
        wanted = [key_text.read(one) for one in key or ()]
        removed = with_store(flags, lambda kv: kv.delete_many(wanted))
    show_json(removed, as_json=as_json)
    return 0 if removed else 1


def touch(
    key: Key,
    *,
    expire_in: ExpireIn = None,
    never: Annotated[bool, typer.Option("--never", help="It does not expire.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print true once it is done.")] = False,
    flags: Flags,
) -> None:
    """Give an entry another expiry; value and versionstamp stay.

    Example: keyloft touch sessions/s1 --expire-in 1800
    """
    if (expire_in is None) != never:
        raise InvalidArgument("say --expire-in SECONDS, or --never")
    wanted = key_text.read(key)
    if not with_store(flags, lambda kv: kv.touch(wanted, expire_in=expire_in)):
        fail(f"there is no key {key}")
    if as_json:
        show_json(True, as_json=True)


def _shown(entry: Entry) -> dict[str, Any]:
    """An entry as JSON: bytes in base64, and a counter named as one."""
    fields = {"key": key_text.written(entry.key), **_shown_value(entry.value), "versionstamp": entry.versionstamp}
    if entry.expires_at is not None:
        fields["expires_at"] = entry.expires_at.isoformat(timespec="milliseconds")
    return fields


def _shown_value(value: Any) -> dict[str, Any]:
    """A value under the name of its kind."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, U64):
        return {"u64": int(value)}
    return {"value": value}


def _in_a_line(entry: Entry) -> str:
    """An entry for people."""
    [(kind, value)] = _shown_value(entry.value).items()
    text = to_json(value)
    return f"{key_text.written(entry.key)} = {text if kind == 'value' else f'{kind} {text}'}"


def _selection(prefix: str, start: str | None, end: str | None) -> dict[str, Any]:
    def key(text: str | None) -> TupleKey | None:
        return None if text is None else key_text.read(text)

    return {"prefix": key_text.read_prefix(prefix), "start": key(start), "end": key(end)}
