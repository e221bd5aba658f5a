"""The commands that change entries: `set`, `delete`, `touch`."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from keyloft import Store
from keyloft.cli import keytext
from keyloft.cli.look import Key
from keyloft.cli.options import AsJson, AsText, TakesNumbers, Value, Yes, with_settings
from keyloft.cli.stores import with_store
from keyloft.cli.terminal import confirm, fail, given_value, show_json, told
from keyloft.core.values import U64
from keyloft.errors import InvalidArgument
from keyloft.server.config import Flags

ExpireIn: TypeAlias = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="After so many seconds the entry is gone.")
]


def add_to(app: typer.Typer) -> None:
    for name, command in (("set", put), ("delete", delete), ("touch", touch)):
        app.command(name, cls=TakesNumbers)(told(with_settings("database")(command)))


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
) -> int:
    """Store a value, and print its versionstamp.

    Example: keyloft set users/alice '{"name": "Alice"}' --expire-in 3600
    """
    if text + counter + file > 1:
        raise InvalidArgument("--text, --counter and --file exclude each other")
    wanted = keytext.read(key)
    content: Any = Path(value).read_bytes() if file else given_value(value, is_text=text)
    if counter:
        if isinstance(content, bool) or not isinstance(content, int):
            raise InvalidArgument("--counter: VALUE is a whole number, as in 7")
        content = U64(content)
    stored = with_store(flags, lambda kv: kv.set(wanted, content, expire_in=expire_in), make=True)
    show_json(stored, as_json=as_json)
    return 0


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
        below = keytext.read_prefix(prefix)
        number = with_store(flags, lambda kv: kv.count(prefix=below))
        if not number:
            fail(f"there is nothing below {prefix!r}")
        if not yes:
            confirm(f"Remove {number:,} entries {f'below {prefix}' if below else 'in all'}?")
        removed = with_store(flags, lambda kv: kv.delete_range(prefix=below))
    else:
        wanted = [keytext.read(one) for one in key or ()]
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
) -> int:
    """Give an entry another expiry; value and versionstamp stay.

    Example: keyloft touch sessions/s1 --expire-in 1800
    """
    if (expire_in is None) != never:
        raise InvalidArgument("say --expire-in SECONDS, or --never")
    wanted = keytext.read(key)

    async def work(kv: Store) -> bool:
        return await kv.touch(wanted, expire_in=expire_in)

    if not with_store(flags, work):
        fail(f"there is no key {key}")
    if as_json:
        show_json(True, as_json=True)
    return 0
