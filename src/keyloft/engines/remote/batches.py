"""Batches as the HTTP API takes them, and their outcomes."""

from collections import Counter
from datetime import datetime
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw, Struct

from keyloft.core import keys, values
from keyloft.core.records import (
    Add,
    Append,
    Batch,
    Check,
    Committed,
    Conflict,
    CounterOperation,
    Delete,
    FailedCheck,
    Max,
    Min,
    Mutation,
    Set,
    Space,
    Sum,
    Touch,
)
from keyloft.core.values import Encoding
from keyloft.engines.remote.entries import ApiEntry, key_of, milliseconds, moment_of, record_of, text_of
from keyloft.errors import InvalidArgument

_COUNTING: Final[dict[type[Mutation], str]] = {Sum: "sum", Min: "min", Max: "max"}
_ENTRIES_ALONE: Final = (
    "over HTTP, a store has the entries of the tuple store alone: open the database itself for all else, or use the "
    "clients over NATS"
)


class ApiCommitted(Struct):
    """What the API answers to an atomic that was committed."""

    versionstamp: str
    committed_at: datetime
    values: list[bool | int | str | None]


class ApiConflict(Struct):
    """What the API answers to an atomic whose checks failed."""

    conflicts: list[ApiEntry]


_to_json: Final = msgspec.json.Encoder().encode
_read_committed: Final = msgspec.json.Decoder(ApiCommitted).decode
_read_conflict: Final = msgspec.json.Decoder(ApiConflict).decode


def refuse_other(what: object) -> NoReturn:
    """Refuse what only the database itself has.

    Raises:
        InvalidArgument: Always.
    """
    raise InvalidArgument(f"{type(what).__name__}: {_ENTRIES_ALONE}")


def check_space(space: Space) -> None:
    """Refuse what is not of the tuple store.

    Raises:
        InvalidArgument: The space belongs to another interface.
    """
    if space is not Space.TUPLES:
        raise InvalidArgument(f"{space}: {_ENTRIES_ALONE}")


def commit_body(batch: Batch) -> bytes:
    """The body of the request that commits a batch.

    Raises:
        InvalidArgument: The batch holds something that the API does not take.
    """
    appends = Counter[bytes]()
    return _to_json(
        {
            "checks": [_check(check) for check in batch.checks],
            "mutations": [_mutation(mutation, appends) for mutation in batch.mutations],
        }
    )


def outcome(batch: Batch, status: int, reply: bytes) -> Committed | Conflict:
    """What became of a batch that was answered with status 200, or 412 if checks have failed."""
    return _committed(batch, reply) if status == 200 else _conflict(batch, reply)


def _committed(batch: Batch, reply: bytes) -> Committed:
    done = _read_committed(reply)
    answers = list(zip(batch.mutations, done.values, strict=True))
    # For a set with `if_absent`, the API answers whether the value was stored: then no entry was found.
    found = [
        not answer if isinstance(mutation, Set) else bool(answer)
        for mutation, answer in answers
        if isinstance(mutation, (Delete, Touch)) or (isinstance(mutation, Set) and mutation.if_absent)
    ]
    numbers = [int(answer or 0) for mutation, answer in answers if isinstance(mutation, CounterOperation)]
    at = milliseconds(done.committed_at) or 0
    return Committed(int(done.versionstamp), tuple(found), at, tuple(numbers))


def _conflict(batch: Batch, reply: bytes) -> Conflict:
    """The conflict that a reply describes: the API sends the entries that are stored at the failed checks."""
    current = {(key := key_of(entry.key)): record_of(entry, key) for entry in _read_conflict(reply).conflicts}
    failed = [
        FailedCheck(check, record)
        for check in batch.checks
        if check.key in current
        and (None if (record := current[check.key]) is None else record.version) != check.version
    ]
    return Conflict(tuple(failed))


def _check(check: Check) -> dict[str, Any]:
    check_space(check.space)
    if check.include_expired:
        refuse_other(check)
    return {"key": text_of(check.key), "versionstamp": None if check.version is None else str(check.version)}


def _mutation(mutation: Mutation, appends: Counter[bytes]) -> dict[str, Any]:
    check_space(mutation.space)
    match mutation:
        case Set():
            made = {"op": "set", "key": text_of(mutation.key), **_value(mutation), **_expiry(mutation)}
            for name in ("if_absent", "keep_expiry"):
                if getattr(mutation, name):
                    made[name] = True
            return made
        case Append():
            number = appends[mutation.key]
            appends[mutation.key] += 1
            if mutation.suffix != (keys.encode_int(number) if number else b""):
                refuse_other(mutation)
            return {"op": "append", "prefix": text_of(mutation.key), **_value(mutation), **_expiry(mutation)}
        case Delete():
            return {"op": "delete", "key": text_of(mutation.key)}
        case Touch():
            return {"op": "touch", "key": text_of(mutation.key), **(_expiry(mutation) or {"expire_in": None})}
        case Add():
            return {"op": "add", "key": text_of(mutation.key), "by": mutation.operand, **_expiry(mutation)}
        case Sum() | Min() | Max():
            number = mutation.operand % 2**64
            operation = _COUNTING[type(mutation)]
            return {"op": operation, "key": text_of(mutation.key), "u64": str(number), **_expiry(mutation)}
    refuse_other(mutation)


def _value(mutation: Set | Append) -> dict[str, Any]:
    match mutation.encoding:
        case Encoding.JSON:
            return {"value": Raw(mutation.value)}
        case Encoding.BYTES:
            return {"bytes": mutation.value}
        case Encoding.U64:
            return {"u64": str(values.unpack_counter(mutation.value))}
    refuse_other(mutation)


def _expiry(mutation: Set | Append | Touch | CounterOperation) -> dict[str, Any]:
    if mutation.expire_at is not None:
        return {"expire_at": moment_of(mutation.expire_at)}
    return {} if mutation.expire_in is None else {"expire_in": mutation.expire_in / 1000}
