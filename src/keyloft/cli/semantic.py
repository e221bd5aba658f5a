"""`keyloft semantic …`: the state of workflows, in a database."""

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import typer

from keyloft import Store
from keyloft.cli.database import with_store
from keyloft.cli.options import AsJson, AsText, Group, Value, Yes, add_commands
from keyloft.cli.terminal import fail, given_value, is_for_people, local_time, remark, say, show_json, table, to_json
from keyloft.errors import InvalidArgument
from keyloft.semantic import DeadLetter, Envelope, Semantics, SemanticStore
from keyloft.server.config import Flags, load

T = TypeVar("T")
_SETTINGS: Final = ("database", "purposes", "audit_key")

Key: TypeAlias = Annotated[
    str, typer.Argument(metavar="KEY", help="As in tenant/acme/project/web/docs/onedrive/delta.")
]
Prefix: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="PREFIX", help="A tenant and project, and what paths begin with: tenant/acme/project/web/docs/."
    ),
]
Project: TypeAlias = Annotated[str, typer.Argument(metavar="PROJECT", help="As in tenant/acme/project/web.")]
Limit: TypeAlias = Annotated[int | None, typer.Option(metavar="N", help="At most so many.")]
ExpectedVersion: TypeAlias = Annotated[
    str,
    typer.Option(metavar="VERSION", help="0: nothing may be there. N: it must be version N. *: whatever is there."),
]

Writer: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Who writes. [default: operator:USER@HOST]", show_default=False)
]
RequestId: TypeAlias = Annotated[
    str | None, typer.Option(metavar="ID", help="The same request again gets the first outcome.")
]
SpecRef: TypeAlias = Annotated[str | None, typer.Option(metavar="REF", help="The spec that governs it.")]


def add_to(app: typer.Typer) -> None:
    semantic = typer.Typer(cls=Group, no_args_is_help=True, help="Read and change the state of workflows.")
    letters = typer.Typer(cls=Group, no_args_is_help=True, help="Writes that were given up: list, retry or drop them.")
    add_commands(semantic, _SETTINGS, {"get": get, "put": put, "delete": delete, "restore": restore, "list": listing})
    add_commands(semantic, _SETTINGS, {"audit": audit, "locks": locks})
    add_commands(letters, _SETTINGS, {"list": list_letters, "retry": retry_letter, "drop": drop_letter})
    semantic.add_typer(letters, name="dead-letters")
    app.add_typer(semantic, name="semantic")


def get(key: Key, *, as_json: AsJson = False, flags: Flags) -> int:
    """Print an entry with all that it says of itself; exit code 1 if there is none.

    Example: keyloft semantic get tenant/acme/project/web/docs/onedrive/delta
    """
    entry = _with_semantic(flags, lambda store: store.get(key))
    if entry is None:
        fail(f"there is no entry {key}")
    show_json(shown(entry), as_json=as_json)
    return 0


def put(
    key: Key,
    value: Value,
    *,
    purpose: Annotated[
        str, typer.Option(metavar="NAME", help="What the entry is for: config, cursor, feature_flag, …")
    ],
    expected_version: ExpectedVersion = "*",
    writer: Writer = None,
    producer: Annotated[str | None, typer.Option(metavar="NAME", help="Who makes it.")] = None,
    consumer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Who reads it; to be repeated for several.")
    ] = None,
    ttl: Annotated[int | None, typer.Option(metavar="SECONDS", help="After so many seconds it is gone.")] = None,
    request_id: RequestId = None,
    spec_ref: SpecRef = None,
    text: AsText = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Store a value, if what is there is what is expected, and print the entry.

    Example: keyloft semantic put tenant/acme/project/web/flags/new-ui true --purpose feature_flag
    """
    content = given_value(value, is_text=text)
    semantics = Semantics(purpose, producer, tuple(consumer or ()), ttl)

    async def work(store: SemanticStore) -> Envelope:
        return await store.put(
            key,
            content,
            expected_version=_version(expected_version),
            writer=writer or _operator(),
            semantics=semantics,
            request_id=request_id,
            spec_ref=spec_ref,
        )

    show_json(shown(_with_semantic(flags, work, make=True)), as_json=as_json)
    return 0


def delete(
    key: Key,
    *,
    expected_version: ExpectedVersion = "*",
    writer: Writer = None,
    request_id: RequestId = None,
    spec_ref: SpecRef = None,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Remove an entry, if it is what is expected, and print it; exit code 1 if there is none.

    It can be restored for a week.

    Example: keyloft semantic delete tenant/acme/project/web/flags/new-ui
    """

    async def work(store: SemanticStore) -> Envelope | None:
        return await store.delete(
            key,
            expected_version=_version(expected_version),
            writer=writer or _operator(),
            request_id=request_id,
            spec_ref=spec_ref,
        )

    if (entry := _with_semantic(flags, work)) is None:
        fail(f"there is no entry {key}")
    show_json(shown(entry), as_json=as_json)
    return 0


def restore(
    key: Key,
    *,
    writer: Writer = None,
    request_id: RequestId = None,
    spec_ref: SpecRef = None,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Bring back what was deleted or has expired at a key where nothing is now, and print it.

    Example: keyloft semantic restore tenant/acme/project/web/flags/new-ui
    """

    async def work(store: SemanticStore) -> Envelope:
        return await store.restore(key, writer=writer or _operator(), request_id=request_id, spec_ref=spec_ref)

    show_json(shown(_with_semantic(flags, work)), as_json=as_json)
    return 0


def listing(
    prefix: Prefix,
    *,
    values: Annotated[bool, typer.Option("--values", help="Show values, too.")] = False,
    limit: Limit = None,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Print entries, without values unless asked: a table, in a pipe as JSON.

    Example: keyloft semantic list tenant/acme/project/web
    """

    async def work(store: SemanticStore) -> None:
        entries = store.list(prefix, values=values, limit=limit)
        if as_json or not is_for_people():
            async for entry in entries:
                say(to_json(shown(entry, value=values)))
            return
        rows = [
            [
                _path(entry.key),
                entry.semantics.purpose,
                str(entry.version),
                entry.last_writer,
                local_time(entry.updated_at),
                local_time(entry.expires_at),
                *([to_json(entry.value)] if values else []),
            ]
            async for entry in entries
        ]
        columns = ["path", "purpose", "version", "last writer", "updated", "expires", *(["value"] if values else [])]
        table(columns, rows, f"there are no entries below {prefix}")

    _with_semantic(flags, work)
    return 0


def audit(
    about: Annotated[str, typer.Argument(metavar="KEY|PROJECT", help="An entry's key, or tenant/acme/project/web.")],
    *,
    limit: Limit = None,
    after: Annotated[
        int | None, typer.Option(metavar="SEQUENCE", help="Only what happened after the record with this sequence.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The last one first.")] = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Print what happened to an entry, or in a project: a table, in a pipe as JSON.

    Example: keyloft semantic audit tenant/acme/project/web --reverse --limit 20
    """

    async def work(store: SemanticStore) -> None:
        trail = store.audit(about, after=after, limit=limit, reverse=reverse)
        if as_json or not is_for_people():
            async for record in trail:
                say(to_json(msgspec.to_builtins(record)))
            return
        rows = [
            [
                str(record.sequence),
                local_time(record.at),
                record.action,
                _path(record.key),
                record.writer,
                "" if record.version_before is None else str(record.version_before),
                "" if record.version_after is None else str(record.version_after),
                record.reason or "",
            ]
            async for record in trail
        ]
        table(["sequence", "when", "what", "path", "who", "before", "after", "why"], rows, "nothing happened")

    _with_semantic(flags, work)
    return 0


def locks(project: Project, *, as_json: AsJson = False, flags: Flags) -> int:
    """Print the locks that are held: who has them, and until when.

    Example: keyloft semantic locks tenant/acme/project/web
    """

    async def work(store: SemanticStore) -> list[Envelope]:
        return [entry async for entry in store.list(project, values=True) if entry.fence is not None]

    held = _with_semantic(flags, work)
    if as_json or not is_for_people():
        for entry in held:
            say(to_json(shown(entry)))
        return 0
    rows = [
        [
            _path(entry.key),
            entry.last_writer,
            str(entry.fence),
            local_time(entry.updated_at),
            local_time(entry.expires_at),
        ]
        for entry in held
    ]
    table(["lock", "holder", "fence", "since", "until, unless renewed"], rows, f"no lock is held in {project}")
    return 0


def list_letters(project: Project, *, as_json: AsJson = False, flags: Flags) -> int:
    """Print the dead letters of a project, the oldest first, without values.

    Example: keyloft semantic dead-letters list tenant/acme/project/web
    """
    found = _with_semantic(flags, lambda store: _letters(store, project))
    if as_json or not is_for_people():
        for letter in found:
            say(to_json(_shown_letter(letter)))
        return 0
    rows = [
        [
            letter.id,
            local_time(letter.at),
            letter.error_code,
            str(letter.attempts),
            operation.action,
            _path(operation.key),
        ]
        for letter in found
        for operation in letter.operations
    ]
    table(["id", "when", "why", "attempts", "what", "path"], rows, f"there are no dead letters in {project}")
    return 0


def retry_letter(
    project: Project,
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `dead-letters list` shows it.")],
    *,
    expected_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Instead of what it expected; * puts it over whatever is there."),
    ] = None,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Try once more what was given up; once it is made, the letter is gone.

    Example: keyloft semantic dead-letters retry tenant/acme/project/web ID
    """
    version = None if expected_version is None else _version(expected_version)

    async def work(store: SemanticStore) -> list[Envelope | None]:
        return [*await store.dead_letters.retry(await _letter(store, project, letter), expected_version=version)]

    for entry in _with_semantic(flags, work):
        show_json(None if entry is None else shown(entry), as_json=as_json)
    return 0


def drop_letter(
    project: Project,
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `dead-letters list` shows it.")],
    *,
    yes: Yes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print true once it is done.")] = False,
    flags: Flags,
) -> int:
    """Remove a dead letter: what it is about is never made.

    Example: keyloft semantic dead-letters drop tenant/acme/project/web ID --yes
    """
    if not yes:
        raise InvalidArgument("what the letter is about is lost then: say --yes")

    async def work(store: SemanticStore) -> bool:
        return await store.dead_letters.drop(await _letter(store, project, letter))

    if not _with_semantic(flags, work):
        fail(f"there is no dead letter {letter} in {project}")
    if as_json:
        show_json(True, as_json=True)
    else:
        remark(f"{letter} is dropped")
    return 0


def shown(entry: Envelope, *, value: bool = True) -> dict[str, Any]:
    """An entry as it travels, too."""
    fields = {name: content for name, content in msgspec.to_builtins(entry).items() if content is not None}
    fields.pop("value", None)
    return {"key": fields.pop("key"), **({"value": entry.value} if value else {}), **fields}


def _shown_letter(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "at": letter.at.isoformat(timespec="milliseconds"),
        "error_code": letter.error_code,
        "error": letter.error,
        "attempts": letter.attempts,
        "requestId": letter.request_id,
        "operations": [
            {"action": one.action, "key": one.key, "expectedVersion": one.expected_version, "lastWriter": one.writer}
            for one in letter.operations
        ],
    }


async def _letters(store: SemanticStore, project: str) -> list[DeadLetter]:
    return [letter async for letter in store.dead_letters.list(project)]


async def _letter(store: SemanticStore, project: str, name: str) -> DeadLetter:
    found = [letter for letter in await _letters(store, project) if letter.id == name]
    if not found:
        fail(f"there is no dead letter {name} in {project}")
    return found[0]


def _with_semantic(flags: Flags, work: Callable[[SemanticStore], Awaitable[T]], *, make: bool = False) -> T:
    settings = load(flags, only=_SETTINGS)

    async def working(kv: Store) -> T:
        async with SemanticStore(
            kv, purposes=settings.purposes, audit_key=settings.audit_key, sweep_every=None
        ) as store:
            return await work(store)

    return with_store(flags, working, make=make)


def _version(text: str) -> int | str:
    try:
        return text if text == "*" else int(text)
    except ValueError:
        raise InvalidArgument("--expected-version: 0, the number of a version, or *") from None


def _operator() -> str:
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "somebody"
    return f"operator:{user}@{socket.gethostname()}"[:128]


def _path(key: str) -> str:
    """A key without its project, which is on the command line."""
    return key.split("/", 4)[4]
