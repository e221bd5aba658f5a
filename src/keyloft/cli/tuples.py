"""The commands of the tuple store: `get`, `list`, `keys`, `count`, `watch`, `set`, `delete`, `touch`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from msgspec.structs import asdict

from keyloft import Entry, Store
from keyloft.cli.database import TupleDatabase
from keyloft.cli.options import (
    AsText,
    Commands,
    Options,
    Order,
    Output,
    Value,
    Yes,
    argument,
    flag,
    number_option,
    option,
    seconds_option,
)
from keyloft.cli.terminal import confirm, counted, fail, given_value, remark, say, to_json
from keyloft.core import key_text
from keyloft.core.keys import TupleKey
from keyloft.core.values import U64, to_builtin
from keyloft.errors import InvalidArgument

TupleKeyArgument: TypeAlias = Annotated[
    str, argument("KEY", "As in users/alice; =42 is an int, =1.5 a float, =true a bool, =x00ff bytes.")
]
TuplePrefixArgument: TypeAlias = Annotated[
    str, argument("PREFIX", "Only what is below it, as in users; nothing for everything.")
]
ExpireIn: TypeAlias = Annotated[float | None, seconds_option("The entry expires after this many seconds.")]


class Section(Options, frozen=True, kw_only=True):
    """Which entries below a prefix."""

    start: Annotated[str | None, option("KEY", "Only from this key on.")] = None
    end: Annotated[str | None, option("KEY", "Only what comes before this key.")] = None

    def below(self, prefix: str) -> dict[str, Any]:
        """As the methods of `Store` take them."""
        bounds = {name: None if text is None else key_text.read(text) for name, text in asdict(self).items()}
        return {"prefix": key_text.read_prefix(prefix), **bounds}


def get(
    key: TupleKeyArgument,
    *,
    out: Output,
    raw: Annotated[bool, flag("--raw", "Write bytes and texts as they are, and nothing else.")] = False,
    entry: Annotated[bool, flag("--entry", "Show key, versionstamp and expiry, too.")] = False,
    database: TupleDatabase,
) -> None:
    """Print the value at a key; exit code 1 if there is none.

    Example: keyloft get users/alice
    """
    wanted = key_text.read(key)
    found = database.with_store(lambda kv: kv.get(wanted))
    if not found.exists:
        fail(f"there is no key {key}{'; keys are written users/alice' if key.startswith(('[', '(')) else ''}")
    if raw and isinstance(found.value, (bytes, str)):
        sys.stdout.flush()
        sys.stdout.buffer.write(found.value if isinstance(found.value, bytes) else found.value.encode())
        sys.stdout.buffer.flush()
    elif entry:
        out.show(_shown(found))
    else:
        out.show(to_builtin(found.value))


def list_(
    prefix: TuplePrefixArgument = "", *, section: Section, order: Order, out: Output, database: TupleDatabase
) -> None:
    """Print entries in the order of their keys. Each is a line, in a pipe as JSON.

    Example: keyloft list users --limit 10
    """
    wanted = section.below(prefix) | asdict(order)
    line = _line_for_people if out.is_for_people else _line_of_json
    nothing = f"there are no entries below {prefix}" if prefix else "there are no entries"
    if not prefix and section == Section():
        nothing = "the tuple store has no entries; `keyloft stats` shows what plugins and workflows store"
    database.with_store(lambda kv: out.say_all((line(entry) async for entry in kv.list(**wanted)), nothing))


def keys(
    prefix: TuplePrefixArgument = "", *, section: Section, order: Order, out: Output, database: TupleDatabase
) -> None:
    """Print keys, one in each line.

    Example: keyloft keys users | wc -l
    """
    wanted = section.below(prefix) | asdict(order)
    nothing = f"there are no keys below {prefix}" if prefix else "there are no keys"

    def line(key: TupleKey) -> str:
        return to_json(key_text.write(key)) if out.as_json else key_text.write(key)

    database.with_store(lambda kv: out.say_all((line(key) async for key in kv.keys(**wanted)), nothing))


def count(prefix: TuplePrefixArgument = "", *, section: Section, out: Output, database: TupleDatabase) -> None:
    """Print how many entries there are.

    Example: keyloft count users
    """
    wanted = section.below(prefix)
    out.show(database.with_store(lambda kv: kv.count(**wanted)))


def watch(
    prefix: TuplePrefixArgument = "",
    *,
    key: Annotated[list[str] | None, option("KEY", "Watch this key instead; to be repeated for several.")] = None,
    since: Annotated[int | None, number_option("VERSION", "Begin with what changed after this versionstamp.")] = None,
    out: Output,
    database: TupleDatabase,
) -> None:
    """Print entries as they change, until Ctrl-C. Each is a line, in a pipe as JSON; an expired entry is shown as gone.

    Exit code 1 if the change log does not reach back to the version of --since.

    Example: keyloft watch users --since 4711
    """
    watched = [key_text.read(one) for one in key or ()]
    below = key_text.read_prefix(prefix)
    line = _line_for_people if out.is_for_people else _line_of_json

    async def work(kv: Store) -> None:
        if out.is_for_people:
            remark("Waiting for changes; Ctrl-C ends it.")
        async for entries in kv.watch(*watched, prefix=None if watched else below, since=since):
            for entry in entries:
                say(line(entry))
            sys.stdout.flush()

    database.with_store(work)


def set_(
    key: TupleKeyArgument,
    value: Value,
    *,
    text: AsText = False,
    counter: Annotated[bool, flag("--counter", "VALUE is the number of a U64 counter.")] = False,
    file: Annotated[bool, flag("--file", "VALUE names a file, whose bytes are stored.")] = False,
    expire_in: ExpireIn = None,
    out: Output,
    database: TupleDatabase,
) -> None:
    """Store a value, and print its versionstamp.

    Example: keyloft set users/alice '{"name": "Alice"}' --expire-in 3600
    """
    if text + counter + file > 1:
        raise InvalidArgument("--text, --counter, --file: expected one of them, got several")
    wanted = key_text.read(key)
    content: Any = Path(value).read_bytes() if file else given_value(value, is_text=text)
    if counter:
        if isinstance(content, bool) or not isinstance(content, int):
            raise InvalidArgument("VALUE: expected a whole number, as in 7, because of --counter")
        content = U64(content)
    out.show(database.with_store(lambda kv: kv.set(wanted, content, expire_in=expire_in), make=True))


def delete(
    key: Annotated[list[str] | None, argument("KEY", "As in users/alice.")] = None,
    *,
    prefix: Annotated[str | None, option("PREFIX", "Remove all below it; asks before, with the number.")] = None,
    yes: Yes = False,
    out: Output,
    database: TupleDatabase,
) -> int:
    """Remove entries, all or none. Prints how many there were; exit code 1 if there were none.

    Example: keyloft delete sessions/s1 sessions/s2
    """
    if bool(key) == (prefix is not None):
        raise InvalidArgument("name keys, or a --prefix; --prefix '' stands for everything")
    if prefix is not None:
        below = key_text.read_prefix(prefix)
        number = database.with_store(lambda kv: kv.count(prefix=below))
        if not number:
            fail(f"there is nothing below {prefix!r}")
        if not yes:
            confirm(f"Remove {counted(number, 'entry', 'entries')} {f'below {prefix}' if below else 'in all'}?")
        removed = database.with_store(lambda kv: kv.delete_range(prefix=below))
    else:
        wanted = [key_text.read(one) for one in key or ()]
        removed = database.with_store(lambda kv: kv.delete_many(wanted))
    out.show(removed)
    return 0 if removed else 1


def touch(
    key: TupleKeyArgument,
    *,
    expire_in: ExpireIn = None,
    never: Annotated[bool, flag("--never", "It does not expire.")] = False,
    out: Output,
    database: TupleDatabase,
) -> None:
    """Give an entry another expiry; value and versionstamp stay. Prints nothing; with --json, true.

    Example: keyloft touch sessions/s1 --expire-in 1800
    """
    if (expire_in is None) != never:
        raise InvalidArgument("pass --expire-in SECONDS, or --never")
    wanted = key_text.read(key)
    if not database.with_store(lambda kv: kv.touch(wanted, expire_in=expire_in)):
        fail(f"there is no key {key}")
    if out.as_json:
        say("true")


def _shown(entry: Entry) -> dict[str, Any]:
    """An entry as JSON: bytes in base64, and a counter under the name u64."""
    fields = {"key": key_text.write(entry.key), **_shown_value(entry.value), "versionstamp": entry.versionstamp}
    if entry.expires_at is not None:
        fields["expires_at"] = entry.expires_at.isoformat(timespec="milliseconds")
    return fields


def _shown_value(value: Any) -> dict[str, Any]:
    """A value under the name of its kind."""
    if isinstance(value, U64):
        return {"u64": int(value)}
    return to_builtin(value) if isinstance(value, bytes) else {"value": value}


def _line_of_json(entry: Entry) -> str:
    return to_json(_shown(entry) if entry.exists else {"key": key_text.write(entry.key), "value": None})


def _line_for_people(entry: Entry) -> str:
    key = key_text.write(entry.key)
    if not entry.exists:
        return f"{key} is gone"
    [(kind, value)] = _shown_value(entry.value).items()
    return f"{key} = {to_json(value) if kind == 'value' else f'{kind} {to_json(value)}'}"


COMMANDS: Final[Commands] = (get, list_, keys, count, watch, set_, delete, touch)
