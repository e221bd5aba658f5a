"""What the semantic store keeps at a key: a value, and who wrote it, why, for whom and until when."""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw, Struct

from keyloft import limits
from keyloft.core import values
from keyloft.core.records import Record
from keyloft.errors import InvalidArgument, InvalidValue, Undecodable, ValueTooLarge
from keyloft.semantic.keys import key_of_row

PURPOSES: Final = ("checkpoint", "feature_flag", "lock", "cursor", "config", "index_version")
"""What an entry can be for, besides what a store registers on its own."""

LOCK: Final = "lock"

ExpectedVersion: TypeAlias = int | str
"""0: nothing may be there; n: it must be version n; "*": whatever is there."""

ANY: Final = "*"

_PURPOSE: Final = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Semantics(Struct, frozen=True, rename="camel"):
    """What an entry means: what it is for, who makes it, who reads it, how long it lives.

    Raises:
        InvalidArgument: A field breaks a rule, which the message names.
    """

    purpose: str
    producer: str | None = None
    consumer_hints: tuple[str, ...] = ()
    ttl_seconds: int | None = None

    def __post_init__(self) -> None:
        purpose_name(self.purpose)
        if self.producer is not None:
            text(self.producer, "semantics.producer")
        hints: Any = self.consumer_hints
        if type(hints) is list:
            hints = tuple(hints)
            msgspec.structs.force_setattr(self, "consumer_hints", hints)
        if type(hints) is not tuple or len(hints) > limits.CONSUMER_HINTS:
            raise InvalidArgument(f"semantics.consumerHints: a list or tuple of at most {limits.CONSUMER_HINTS} texts")
        for hint in hints:
            text(hint, "semantics.consumerHints")
        ttl = self.ttl_seconds
        if ttl is None:
            if self.purpose == LOCK:
                raise InvalidArgument(
                    "semantics.ttlSeconds: a lock must have one, so that it comes free when its holder dies"
                )
        elif type(ttl) is not int or not 1 <= ttl <= limits.LONGEST_TTL_SECONDS:
            never = "" if self.purpose == LOCK else ", or none for an entry that never expires"
            raise InvalidArgument(
                f"semantics.ttlSeconds: a whole number of seconds from 1 to {limits.LONGEST_TTL_SECONDS}{never}"
            )

    @property
    def expire_in(self) -> int | None:
        """The time to live, in milliseconds."""
        return None if self.ttl_seconds is None else 1000 * self.ttl_seconds


class Envelope(Struct, frozen=True, rename="camel"):
    """An entry as it is stored at a key. `value` is None where values were not asked for."""

    key: str
    value: Any
    version: int
    last_writer: str
    semantics: Semantics
    request_id: str | None
    spec_ref: str | None
    updated_at: datetime
    """The database's own time."""
    expires_at: datetime | None = None
    fence: int | None = None
    """Of a lock: the fencing token of whoever holds it."""

    def __repr__(self) -> str:
        # Whoever logs an envelope does not mean to log a secret.
        return f"<{self.semantics.purpose} {self.key} version {self.version} by {self.last_writer}>"


class Stored(Struct, frozen=True, gc=False, omit_defaults=True):
    """An entry as it lies in its row, beside version and times."""

    writer: str = msgspec.field(name="w")
    semantics_json: Raw = msgspec.field(name="s")
    value: Raw = msgspec.field(name="v")
    hash: str = msgspec.field(name="h")
    """The keyed hash of the value, so that the audit record of the next change need not make it again."""
    request_id: str | None = msgspec.field(name="r", default=None)
    spec_ref: str | None = msgspec.field(name="c", default=None)
    kept_fence: int | None = msgspec.field(name="f", default=None)
    """Of a lock that was renewed: the token of its acquisition. None where the row's own version is the token."""
    number: int = msgspec.field(name="n", default=0)
    """Which of its commit's audit records tells of it."""

    @property
    def semantics(self) -> Semantics:
        return _read_semantics(bytes(self.semantics_json))

    def fence(self, version: int) -> int | None:
        return self.fence_of(self.semantics, version)

    def fence_of(self, semantics: Semantics, version: int) -> int | None:
        """The same for whoever has read the semantics already."""
        if semantics.purpose != LOCK:
            return None
        return version if self.kept_fence is None else self.kept_fence

    def envelope(self, key: str, version: int, updated_at: int, expires_at: int | None, *, value: bool) -> Envelope:
        semantics = self.semantics
        return Envelope(
            key,
            values.decode_json(bytes(self.value)) if value else None,
            version,
            self.writer,
            semantics,
            self.request_id,
            self.spec_ref,
            moment(updated_at),
            None if expires_at is None else moment(expires_at),
            self.fence_of(semantics, version),
        )


_to_json = msgspec.json.Encoder().encode
_read_stored = msgspec.json.Decoder(Stored).decode
_read_fields = msgspec.json.Decoder(Semantics).decode


# A project has few kinds of entries, and most entries of a kind mean the same.
@lru_cache(maxsize=1024)
def _read_semantics(data: bytes) -> Semantics:
    return _read_fields(data)


@lru_cache(maxsize=1024)
def semantics_json(semantics: Semantics) -> Raw:
    """The stored form of semantics."""
    return Raw(_to_json(semantics))


def write_stored(stored: Stored) -> bytes:
    return _to_json(stored)


def read_stored(record: Record) -> Stored:
    """What a row holds.

    Raises:
        Undecodable: It is none of ours.
    """
    try:
        stored = _read_stored(record.value)
        _read_semantics(bytes(stored.semantics_json))
        return stored
    except msgspec.MsgspecError as error:
        raise Undecodable(f"the row {record.key!r} is damaged: it holds no envelope") from error


def envelope_of(
    record: Record, key: str | None = None, *, stored: Stored | None = None, value: bool = True
) -> Envelope:
    """The envelope of a row; whoever knows its key or what it holds saves the work to find out.

    Raises:
        Undecodable: It is none of ours.
    """
    stored = stored or read_stored(record)
    try:
        key = key or key_of_row(record.key)
        return stored.envelope(key, record.version, record.updated_at, record.expires_at, value=value)
    except (Undecodable, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise Undecodable(f"the row {record.key!r} is damaged: {error}") from error


def moment(milliseconds: int) -> datetime:
    seconds, rest = divmod(milliseconds, 1000)
    return _EPOCH + timedelta(0, seconds, 1000 * rest)


# Rules


def value_json(value: object) -> bytes:
    """The stored form of a value.

    Raises:
        InvalidValue: It would not come back equal.
        ValueTooLarge: It takes more than 64 KB.
    """
    try:
        data = values.encode_json(value, limits.SEMANTIC_VALUE_BYTES)
    except ValueTooLarge:
        raise
    except InvalidValue as error:
        raise type(error)(f"value: {error}") from error
    if len(data) > limits.SEMANTIC_VALUE_BYTES:
        raise ValueTooLarge(len(data), limits.SEMANTIC_VALUE_BYTES)
    return data


def text(content: object, field: str, longest: int = limits.WRITER_CHARACTERS) -> str:
    """A text that can stand in a line of a log."""
    if type(content) is not str or not content:
        raise InvalidArgument(f"{field}: it must be a text that is not empty")
    if len(content) > longest:
        raise InvalidArgument(f"{field}: it must have at most {longest} characters, not {len(content)}")
    if _UNPRINTABLE.search(content):
        raise InvalidArgument(f"{field}: it must have no control characters and no lone surrogates")
    return content


def writer_name(writer: object) -> str:
    """Who writes: `<agent>:<directive>`, or the name of a service account."""
    return text(writer, "lastWriter")


def directive_of(writer: str) -> str:
    """What a writer carries out; of a service account, its name."""
    return writer.partition(":")[2] or writer


def request_name(request_id: object) -> str | None:
    return None if request_id is None else text(request_id, "requestId")


def spec_name(spec_ref: object) -> str | None:
    return None if spec_ref is None else text(spec_ref, "specRef", limits.SPEC_REF_CHARACTERS)


def expected(version: object) -> int | None:
    """A version that an entry must have; 0 for none, and None for whatever is there."""
    if version == ANY and type(version) is str:
        return None
    if type(version) is not int or not 0 <= version < 2**63:
        kind = "a negative number" if type(version) is int else "null" if version is None else type(version).__name__
        raise InvalidArgument(
            "expectedVersion: the number 0 if nothing may be there, the number of the version that must be there, "
            f'or "*" for whatever is there; this is {kind}'
        )
    return version


def fence_token(fence: object) -> int | None:
    if fence is None:
        return None
    if type(fence) is not int or not 0 <= fence < 2**63:
        raise InvalidArgument("fence: the fencing token of a lock, which is an int")
    return fence


def purpose_name(purpose: object) -> str:
    if type(purpose) is not str or _PURPOSE.fullmatch(purpose) is None or len(purpose) > limits.PURPOSE_CHARACTERS:
        raise InvalidArgument(
            f"semantics.purpose: a name of a-z 0-9 _, such as {', '.join(PURPOSES)}, "
            f"of at most {limits.PURPOSE_CHARACTERS} characters"
        )
    return purpose
