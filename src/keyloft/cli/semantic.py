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
from keyloft.cli.terminal import fail, given_value, remark, show_all, show_json, to_json
from keyloft.errors import InvalidArgument
from keyloft.semantic import AuditRecord, DeadLetter, Envelope, Semantics, SemanticStore
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
    dead_letters = typer.Typer(
        cls=Group, no_args_is_help=True, help="Writes that were given up: list, retry or drop them."
    )
    add_commands(semantic, _SETTINGS, {"get": get, "put": put, "delete": delete, "restore": restore, "list": listing})
    add_commands(semantic, _SETTINGS, {"audit": audit, "locks": locks})
    add_commands(
        dead_letters, _SETTINGS, {"list": list_dead_letters, "retry": retry_dead_letter, "drop": drop_dead_letter}
    )
    semantic.add_typer(dead_letters, name="dead-letters")
    app.add_typer(semantic, name="semantic")


def get(key: Key, *, as_json: AsJson = False, flags: Flags) -> None:
    """Print an entry with all that it says of itself; exit code 1 if there is none.

    Example: keyloft semantic get tenant/acme/project/web/docs/onedrive/delta
    """
    entry = _with_semantic(flags, lambda store: store.get(key))
    if entry is None:
        fail(f"there is no entry {key}")
    show_json(shown(entry), as_json=as_json)


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
) -> None:
    """Store a value, if what is there is what is expected, and print the entry.

    Example: keyloft semantic put tenant/acme/project/web/flags/new-ui true --purpose feature_flag
    """
    content = given_value(value, is_text=text)
    semantics = Semantics(purpose, producer, tuple(consumer or ()), ttl)

    intent: dict[str, Any] = {"expected_version": _version(expected_version), **_about(writer, request_id, spec_ref)}
    entry = _with_semantic(flags, lambda store: store.put(key, content, semantics=semantics, **intent), make=True)
    show_json(shown(entry), as_json=as_json)


def delete(
    key: Key,
    *,
    expected_version: ExpectedVersion = "*",
    writer: Writer = None,
    request_id: RequestId = None,
    spec_ref: SpecRef = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Remove an entry, if it is what is expected, and print it; exit code 1 if there is none.

    It can be restored for a week.

    Example: keyloft semantic delete tenant/acme/project/web/flags/new-ui
    """
    intent: dict[str, Any] = {"expected_version": _version(expected_version), **_about(writer, request_id, spec_ref)}
    if (entry := _with_semantic(flags, lambda store: store.delete(key, **intent))) is None:
        fail(f"there is no entry {key}")
    show_json(shown(entry), as_json=as_json)


def restore(
    key: Key,
    *,
    writer: Writer = None,
    request_id: RequestId = None,
    spec_ref: SpecRef = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Bring back what was deleted or has expired at a key where nothing is now, and print it.

    Example: keyloft semantic restore tenant/acme/project/web/flags/new-ui
    """
    about = _about(writer, request_id, spec_ref)
    show_json(shown(_with_semantic(flags, lambda store: store.restore(key, **about))), as_json=as_json)


def listing(
    prefix: Prefix,
    *,
    values: Annotated[bool, typer.Option("--values", help="Show values, too.")] = False,
    limit: Limit = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Print entries, without values unless asked: a table, in a pipe as JSON.

    Example: keyloft semantic list tenant/acme/project/web
    """

    columns: dict[str, Callable[[Envelope], object]] = {
        "path": lambda entry: _path(entry.key),
        "purpose": lambda entry: entry.semantics.purpose,
        "version": lambda entry: entry.version,
        "last writer": lambda entry: entry.last_writer,
        "updated": lambda entry: entry.updated_at,
        "expires": lambda entry: entry.expires_at,
    }
    if values:
        columns["value"] = lambda entry: to_json(entry.value)

    async def work(store: SemanticStore) -> None:
        entries = store.list(prefix, values=values, limit=limit)
        nothing = f"there are no entries below {prefix}"
        await show_all(entries, lambda entry: shown(entry, value=values), columns, nothing, as_json=as_json)

    _with_semantic(flags, work)


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
) -> None:
    """Print what happened to an entry, or in a project: a table, in a pipe as JSON.

    Example: keyloft semantic audit tenant/acme/project/web --reverse --limit 20
    """

    columns: dict[str, Callable[[AuditRecord], object]] = {
        "sequence": lambda record: record.sequence,
        "when": lambda record: record.at,
        "what": lambda record: record.action,
        "path": lambda record: _path(record.key),
        "who": lambda record: record.writer,
        "before": lambda record: record.version_before,
        "after": lambda record: record.version_after,
        "why": lambda record: record.reason,
    }

    async def work(store: SemanticStore) -> None:
        trail = store.audit(about, after=after, limit=limit, reverse=reverse)
        await show_all(trail, msgspec.to_builtins, columns, f"nothing is recorded of {about}", as_json=as_json)

    _with_semantic(flags, work)


def locks(project: Project, *, as_json: AsJson = False, flags: Flags) -> None:
    """Print the locks that are held: who has them, and until when.

    Example: keyloft semantic locks tenant/acme/project/web
    """

    columns: dict[str, Callable[[Envelope], object]] = {
        "lock": lambda lock: _path(lock.key),
        "holder": lambda lock: lock.last_writer,
        "fence": lambda lock: lock.fence,
        "since": lambda lock: lock.updated_at,
        "until, unless renewed": lambda lock: lock.expires_at,
    }

    async def work(store: SemanticStore) -> None:
        held = (entry async for entry in store.list(project, values=True) if entry.fence is not None)
        await show_all(held, shown, columns, f"no lock is held in {project}", as_json=as_json)

    _with_semantic(flags, work)


def list_dead_letters(project: Project, *, as_json: AsJson = False, flags: Flags) -> None:
    """Print the dead letters of a project, the oldest first, without values.

    Example: keyloft semantic dead-letters list tenant/acme/project/web
    """
    columns: dict[str, Callable[[DeadLetter], object]] = {
        "id": lambda letter: letter.id,
        "when": lambda letter: letter.at,
        "why": lambda letter: letter.error_code,
        "attempts": lambda letter: letter.attempts,
        "what": lambda letter: "\n".join([intent.action for intent in letter.operations]),
        "path": lambda letter: "\n".join([_path(intent.key) for intent in letter.operations]),
    }

    async def work(store: SemanticStore) -> None:
        nothing = f"there are no dead letters in {project}"
        await show_all(store.dead_letters.list(project), _shown_dead_letter, columns, nothing, as_json=as_json)

    _with_semantic(flags, work)


def retry_dead_letter(
    project: Project,
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `dead-letters list` shows it.")],
    *,
    expected_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Instead of what it expected; * puts it over whatever is there."),
    ] = None,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Try again what was given up; once it is written, the dead letter is removed.

    Example: keyloft semantic dead-letters retry tenant/acme/project/web ID
    """
    version = None if expected_version is None else _version(expected_version)

    async def work(store: SemanticStore) -> list[Envelope | None]:
        return [*await store.dead_letters.retry(await _dead_letter(store, project, letter), expected_version=version)]

    for entry in _with_semantic(flags, work):
        show_json(None if entry is None else shown(entry), as_json=as_json)


def drop_dead_letter(
    project: Project,
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `dead-letters list` shows it.")],
    *,
    yes: Yes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print true once it is done.")] = False,
    flags: Flags,
) -> None:
    """Remove a dead letter: what it holds is never written.

    Example: keyloft semantic dead-letters drop tenant/acme/project/web ID --yes
    """
    if not yes:
        raise InvalidArgument("what the dead letter holds is lost then: say --yes")

    async def work(store: SemanticStore) -> bool:
        return await store.dead_letters.drop(await _dead_letter(store, project, letter))

    if not _with_semantic(flags, work):
        fail(f"there is no dead letter {letter} in {project}")
    if as_json:
        show_json(True, as_json=True)
    else:
        remark(f"{letter} is dropped")


def shown(entry: Envelope, *, value: bool = True) -> dict[str, Any]:
    """An entry as the service sends it."""
    fields = {name: content for name, content in msgspec.to_builtins(entry).items() if content is not None}
    fields.pop("value", None)
    return {"key": fields.pop("key"), **({"value": entry.value} if value else {}), **fields}


def _shown_dead_letter(letter: DeadLetter) -> dict[str, Any]:
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


async def _dead_letter(store: SemanticStore, project: str, name: str) -> DeadLetter:
    found = [letter for letter in await store.dead_letters.list(project) if letter.id == name]
    return found[0] if found else fail(f"there is no dead letter {name} in {project}")


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


def _about(writer: str | None, request_id: str | None, spec_ref: str | None) -> dict[str, Any]:
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"
    operator = f"operator:{user}@{socket.gethostname()}"[:128]
    return {"writer": writer or operator, "request_id": request_id, "spec_ref": spec_ref}


def _path(key: str) -> str:
    """A key without its project, which is on the command line."""
    return key.split("/", 4)[4]
