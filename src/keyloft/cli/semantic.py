"""`keyloft semantic …`: the state of workflows, in a database or over NATS."""

import os
import socket
import sys
from functools import partial
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import asdict

from keyloft import limits
from keyloft.cli.options import (
    AsText,
    Commands,
    Limit,
    Options,
    Order,
    Output,
    Ttl,
    Value,
    argument,
    flag,
    number_option,
    option,
)
from keyloft.cli.semantic_access import OpenedState, SemanticAccess
from keyloft.cli.terminal import Columns, fail, given_value, remark, say, to_json
from keyloft.core.lazy import check_limit
from keyloft.errors import InvalidArgument
from keyloft.semantic import AuditRecord, Envelope, Semantics
from keyloft.semantic.keys import path_of

T = TypeVar("T")

EntryKeyArgument: TypeAlias = Annotated[str, argument("KEY", "As in tenant/acme/project/web/docs/onedrive/delta.")]
KeyPrefixArgument: TypeAlias = Annotated[
    str, argument("PREFIX", "What keys begin with, as in tenant/acme/project/web/docs/.")
]
ProjectArgument: TypeAlias = Annotated[str, argument("PROJECT", "As in tenant/acme/project/web.")]
ExpectedVersionOption: TypeAlias = Annotated[
    str, option("VERSION", "The version that must be stored: 0 for no entry, * for anything.")
]


class WriteOptions(Options, frozen=True, kw_only=True):
    """Who writes, and why."""

    writer: Annotated[str | None, option("NAME", "Who writes. [default: operator:USER@HOST]")] = None
    request_id: Annotated[str | None, option("ID", "The same request again gets the first outcome.")] = None
    spec_ref: Annotated[str | None, option("REF", "The spec that governs it.")] = None

    def arguments(self) -> dict[str, Any]:
        """As the methods of `SemanticStore` take them."""
        user = os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"
        operator = f"operator:{user}@{socket.gethostname()}"[: limits.WRITER_CHARACTERS]
        return {**asdict(self), "writer": self.writer or operator}


def get(key: EntryKeyArgument, *, out: Output, store: SemanticAccess) -> None:
    """Print an entry with its version, writer and purpose. Exit code 1 if there is none.

    Example: keyloft semantic get tenant/acme/project/web/docs/onedrive/delta
    """
    entry = store.with_semantic(key, lambda opened: opened.get(key))
    if entry is None:
        fail(f"there is no entry {key}")
    out.show(shown(entry))


def put(
    key: EntryKeyArgument,
    value: Value,
    *,
    purpose: Annotated[str, option("NAME", "What the entry is for: config, cursor, feature_flag, …")],
    expected_version: ExpectedVersionOption = "*",
    producer: Annotated[str | None, option("NAME", "Who makes it.")] = None,
    consumer: Annotated[list[str] | None, option("NAME", "Who reads it; to be repeated for several.")] = None,
    ttl: Ttl = None,
    write: WriteOptions,
    text: AsText = False,
    out: Output,
    store: SemanticAccess,
) -> None:
    """Store a value, if the stored version is the expected one. Prints the entry.

    Example: keyloft semantic put tenant/acme/project/web/flags/new-ui true --purpose feature_flag
    """
    content = given_value(value, is_text=text)
    wanted = {"expected_version": expected(expected_version), **write.arguments()}
    wanted["semantics"] = Semantics(purpose, producer, tuple(consumer or ()), ttl)
    out.show(shown(store.with_semantic(key, lambda opened: opened.put(key, content, **wanted), make=True)))


def delete(
    key: EntryKeyArgument,
    *,
    expected_version: ExpectedVersionOption = "*",
    write: WriteOptions,
    out: Output,
    store: SemanticAccess,
) -> None:
    """Remove an entry, if its version is the expected one. Prints the entry; exit code 1 if there is none.

    It can be restored for a week.

    Example: keyloft semantic delete tenant/acme/project/web/flags/new-ui
    """
    wanted = {"expected_version": expected(expected_version), **write.arguments()}
    entry = store.with_semantic(key, lambda opened: opened.delete(key, **wanted))
    if entry is None:
        fail(f"there is no entry {key}")
    out.show(shown(entry))


def restore(key: EntryKeyArgument, *, write: WriteOptions, out: Output, store: SemanticAccess) -> None:
    """Bring back an entry that was deleted or has expired. Nothing else may be stored at the key; prints the entry.

    Example: keyloft semantic restore tenant/acme/project/web/flags/new-ui
    """
    out.show(shown(store.with_semantic(key, lambda opened: opened.restore(key, **write.arguments()))))


def list_(
    prefix: KeyPrefixArgument,
    *,
    values: Annotated[bool, flag("--values", "Show values, too.")] = False,
    limit: Limit = None,
    out: Output,
    store: SemanticAccess,
) -> None:
    """Print entries, without values unless asked. At a terminal it is a table, in a pipe JSON.

    Example: keyloft semantic list tenant/acme/project/web
    """
    columns: Columns[Envelope] = {
        "path": lambda entry: path_of(entry.key),
        "purpose": lambda entry: entry.semantics.purpose,
        "version": lambda entry: entry.version,
        "last writer": lambda entry: entry.last_writer,
        "updated": lambda entry: entry.updated_at,
        "expires": lambda entry: entry.expires_at,
        **({"value": lambda entry: to_json(entry.value)} if values else {}),
    }
    fields, nothing = partial(shown, value=values), f"there are no entries below {prefix}"
    store.with_semantic(
        prefix,
        lambda opened: out.show_all(opened.list(prefix, values=values, limit=limit), fields, columns, nothing),
        argument="prefix",
    )


def watch(
    prefix: KeyPrefixArgument,
    *,
    values: Annotated[bool, flag("--values", "Show values, too.")] = False,
    limit: Limit = None,
    out: Output,
    store: SemanticAccess,
) -> None:
    """Print entries as they change, until Ctrl-C. Each is a line, in a pipe as JSON, without its value unless asked.

    What was deleted or has expired is gone. Several changes of one entry may be one line.

    Example: keyloft semantic watch tenant/acme/project/web/flags/
    """
    most = check_limit(limit)

    async def follow(opened: OpenedState) -> None:
        left = most
        async with opened.changes(prefix) as changes:
            if out.is_for_people:
                remark("Waiting for changes; Ctrl-C ends it.")
            while left > 0:
                for key, entry in (await anext(changes)).items():
                    if left > 0:
                        say(
                            _change_for_people(key, entry, values) if out.is_for_people else _change(key, entry, values)
                        )
                    left -= 1
                sys.stdout.flush()

    store.with_semantic(prefix, follow, argument="prefix")


def _change_for_people(key: str, entry: Envelope | None, values: bool) -> str:
    if entry is None:
        return f"{path_of(key)} is gone"
    value = f": {to_json(entry.value)}" if values else ""
    return f"{path_of(key)} has changed, version {entry.version}, by {entry.last_writer}{value}"


def _change(key: str, entry: Envelope | None, values: bool) -> str:
    fields = {"key": key} if entry is None else shown(entry, value=values)
    return to_json({**fields, "deleted": entry is None})


def audit(
    about: Annotated[str, argument("KEY|PROJECT", "An entry's key, or tenant/acme/project/web.")],
    *,
    order: Order,
    after: Annotated[
        int | None, number_option("SEQUENCE", "Only what happened after the record with this sequence.")
    ] = None,
    out: Output,
    store: SemanticAccess,
) -> None:
    """Print what happened to an entry, or in a project. At a terminal it is a table, in a pipe JSON.

    Example: keyloft semantic audit tenant/acme/project/web --reverse --limit 20
    """
    columns: Columns[AuditRecord] = {
        "sequence": lambda record: record.sequence,
        "when": lambda record: record.at,
        "what": lambda record: record.action,
        "path": lambda record: path_of(record.key),
        "who": lambda record: record.writer,
        "before": lambda record: record.version_before,
        "after": lambda record: record.version_after,
        "why": lambda record: record.reason,
    }
    wanted = {"after": after, **asdict(order)}
    nothing = f"nothing is recorded of {about}"
    store.with_semantic(
        about,
        lambda opened: out.show_all(opened.audit(about, **wanted), msgspec.to_builtins, columns, nothing),
        argument="about",
    )


def locks(project: ProjectArgument, *, out: Output, store: SemanticAccess) -> None:
    """Print the locks that are held: who has them, and until when.

    Example: keyloft semantic locks tenant/acme/project/web
    """
    columns: Columns[Envelope] = {
        "lock": lambda lock: path_of(lock.key),
        "holder": lambda lock: lock.last_writer,
        "fence": lambda lock: lock.fence,
        "since": lambda lock: lock.updated_at,
        "until, unless renewed": lambda lock: lock.expires_at,
    }

    nothing = f"no lock is held in {project}"
    store.with_semantic(
        project,
        lambda opened: out.show_all(opened.locks(project, values=True), shown, columns, nothing),
        argument="project",
    )


def shown(entry: Envelope, *, value: bool = True) -> dict[str, Any]:
    """An entry as the service sends it."""
    fields = {name: content for name, content in msgspec.to_builtins(entry).items() if content is not None}
    fields.pop("value", None)
    return {"key": fields.pop("key"), **({"value": entry.value} if value else {}), **fields}


def expected(text: str) -> int | str:
    """The version that --expected-version names."""
    try:
        return text if text == "*" else int(text)
    except ValueError:
        raise InvalidArgument("--expected-version: expected 0, the number of a version, or *") from None


COMMANDS: Final[Commands] = (get, put, delete, restore, list_, watch, audit, locks)
