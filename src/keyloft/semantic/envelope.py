"""An entry of the semantic store: a value with its writer, purpose, readers and lifetime; and its stored form."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from keyloft import limits
from keyloft.core.json_text import on_any_stack
from keyloft.core.records import Record
from keyloft.core.values import decode_json
from keyloft.errors import Undecodable
from keyloft.semantic.keys import key_of_row
from keyloft.semantic.rules import LOCK, check_purpose, check_text, check_ttl, wrong

T = TypeVar("T")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
        check_purpose(self.purpose)
        if self.producer is not None:
            check_text(self.producer, "producer")
        hints: Any = self.consumer_hints
        if type(hints) is list:
            hints = tuple(hints)
            msgspec.structs.force_setattr(self, "consumer_hints", hints)
        if type(hints) is not tuple or len(hints) > limits.CONSUMER_HINTS:
            raise wrong("consumer_hints", f"a list of at most {limits.CONSUMER_HINTS} texts", hints, tuple)
        for number, hint in enumerate(hints):
            check_text(hint, f"consumer_hints[{number}]")
        if self.ttl_seconds is not None or self.purpose == LOCK:
            check_ttl(self.ttl_seconds, "ttl_seconds", self.purpose)

    @property
    def expire_in(self) -> int | None:
        """The time to live, in milliseconds."""
        return None if self.ttl_seconds is None else 1000 * self.ttl_seconds


class Envelope(Struct, frozen=True, rename="camel", omit_defaults=True):
    """An entry as it is stored at a key. `value` is None where values were not asked for."""

    key: str
    value: Any
    version: int
    last_writer: str
    semantics: Semantics
    request_id: str | None
    spec_ref: str | None
    updated_at: datetime
    """By the database's clock."""
    expires_at: datetime | None = None
    fence: int | None = None
    """For a lock: its holder's fencing token."""

    def __repr__(self) -> str:
        # Without the value: an envelope in a log must not show a secret.
        return f"<{self.semantics.purpose} {self.key} version {self.version} by {self.last_writer}>"


class StoredEntry(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The value of an entry's row; version and times are the row's."""

    writer: str = msgspec.field(name="w")
    semantics_json: Raw = msgspec.field(name="s")
    value: Raw = msgspec.field(name="v")
    hash: str = msgspec.field(name="h")
    """The keyed hash of the value, for the audit record of the next change."""
    request_id: str | None = msgspec.field(name="r", default=None)
    spec_ref: str | None = msgspec.field(name="c", default=None)
    kept_fence: int | None = msgspec.field(name="f", default=None)
    """For a lock that a put has renewed: the token of its acquisition. None if the row's version is the token."""
    number: int = msgspec.field(name="n", default=0)
    """The number of this change's audit record within its commit."""
    unindexed: bytes = msgspec.field(name="i", default=b"")
    """The positions of the audit records of earlier changes that no index row lists; see `audit.py`."""

    @property
    def semantics(self) -> Semantics:
        return _read_semantics(bytes(self.semantics_json))

    def fence(self, version: int, semantics: Semantics | None = None) -> int | None:
        """The fencing token, if this entry is a lock; else None.

        Args:
            version: Of the entry's row.
            semantics: Of the entry, if the caller has decoded them already.
        """
        if (semantics or self.semantics).purpose != LOCK:
            return None
        return version if self.kept_fence is None else self.kept_fence

    def envelope(
        self, key: str, version: int, updated_at: int, expires_at: int | None, *, value: bool = True
    ) -> Envelope:
        semantics = self.semantics
        shown, fence = decode_json(bytes(self.value)) if value else None, self.fence(version, semantics)
        updated, expires = datetime_of(updated_at), None if expires_at is None else datetime_of(expires_at)
        return Envelope(
            key, shown, version, self.writer, semantics, self.request_id, self.spec_ref, updated, expires, fence
        )

    def new_envelope(self, key: str, version: int, now: int) -> Envelope:
        """The envelope of an entry that was stored at this moment."""
        lives = self.semantics.expire_in
        return self.envelope(key, version, now, None if lives is None else now + lives)


to_json = msgspec.json.Encoder().encode
_read_stored = msgspec.json.Decoder(StoredEntry).decode
# A project has few kinds of entries, and the entries of a kind mostly have the same semantics.
_read_semantics = lru_cache(limits.KNOWN_SEMANTICS)(msgspec.json.Decoder(Semantics).decode)


@lru_cache(limits.KNOWN_SEMANTICS)
def semantics_json(semantics: Semantics) -> Raw:
    """The stored form of semantics."""
    return Raw(to_json(semantics))


def row_reader(kind: type[T], damaged: str) -> Callable[[Record], T]:
    """A function that decodes what a row holds; it raises Undecodable for a row that holds something else.

    Args:
        kind: The struct that such rows hold.
        damaged: The message of the error, with {!r} for the row's key.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(record: Record) -> T:
        try:
            return on_any_stack(decode, record.value)
        except msgspec.MsgspecError as error:
            raise Undecodable(damaged.format(record.key)) from error

    return read


def read_entry(record: Record) -> StoredEntry:
    """The entry that a row holds.

    Raises:
        Undecodable: The row holds something else.
    """
    try:
        stored = on_any_stack(_read_stored, record.value)
        _read_semantics(bytes(stored.semantics_json))
        return stored
    except msgspec.MsgspecError as error:
        raise Undecodable(f"the row {record.key!r} is damaged: it holds no envelope") from error


def envelope_of(
    record: Record, key: str | None = None, *, stored: StoredEntry | None = None, value: bool = True
) -> Envelope:
    """The envelope of a row. A caller that knows the key, or has decoded the row, passes them to save time.

    Raises:
        Undecodable: The row holds something else.
    """
    stored = stored or read_entry(record)
    try:
        key = key or key_of_row(record.key)
        return stored.envelope(key, record.version, record.updated_at, record.expires_at, value=value)
    except (Undecodable, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise Undecodable(f"the row {record.key!r} is damaged: {error}") from error


def datetime_of(milliseconds: int) -> datetime:
    """The time this many milliseconds after 1970."""
    seconds, rest = divmod(milliseconds, 1000)
    return _EPOCH + timedelta(0, seconds, 1000 * rest)
