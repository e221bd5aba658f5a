"""What the HTTP API answers to reads: entries, which become records, keys as text, and times."""

from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from msgspec import Raw, Struct, field

from keyloft.core import key_text, keys
from keyloft.core.records import Page, Record, Scan
from keyloft.core.schema import LAST_MOMENT
from keyloft.core.values import LOST, Encoding, pack_counter
from keyloft.errors import InvalidArgument

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class ApiEntry(Struct, gc=False):
    """An entry as the API shows it; where nothing is stored, `versionstamp` is None."""

    key: str
    versionstamp: str | None = None
    value: Raw = Raw()
    data: bytes | None = field(default=None, name="bytes")
    u64: str | None = None
    expires_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


class ApiEntries(Struct):
    """Several entries; `cursor` is set if a list goes on."""

    entries: list[ApiEntry]
    cursor: str | None = None


class ApiCount(Struct):
    """How many entries there are in a range."""

    count: int


class ServiceInfo(Struct):
    """What a service tells about itself."""

    store: str
    now: datetime
    versionstamp: str


read_info: Final = msgspec.json.Decoder(ServiceInfo).decode
read_count: Final = msgspec.json.Decoder(ApiCount).decode
read_entry: Final = msgspec.json.Decoder(ApiEntry).decode
read_entries: Final = msgspec.json.Decoder(ApiEntries).decode


def text_of(key: bytes) -> str:
    """An encoded key as text, as the API takes it."""
    return key_text.write(keys.decode(key))


def key_of(text: str) -> bytes:
    """The encoded key of a key that the API shows as text."""
    return keys.encode_prefix(key_text.read(text))


def milliseconds(moment: datetime | None) -> int | None:
    """A moment in milliseconds since 1970, as records have it."""
    return None if moment is None else (moment - _EPOCH) // _MILLISECOND


def moment_of(time: int) -> str:
    """A time of a record in RFC 3339.

    Raises:
        InvalidArgument: The year is not from 1970 to 9999.
    """
    if not 0 <= time <= LAST_MOMENT:
        raise InvalidArgument("expire_at: expected a moment from 1970 to 9999")
    return (_EPOCH + time * _MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_of(entry: ApiEntry, key: bytes) -> Record | None:
    """The record of an entry whose encoded key is known; None where nothing is stored."""
    if entry.versionstamp is None:
        return None
    value, encoding = _stored(entry)
    created, updated = milliseconds(entry.created_at), milliseconds(entry.updated_at)
    due = milliseconds(entry.expires_at)
    return Record(key, value, encoding, int(entry.versionstamp), due, created or 0, updated or 0)


def page_of(entries: list[ApiEntry], ask: Scan) -> Page:
    """The page of a scan, or a part of it."""
    stored = [(b"", Encoding.JSON)] * len(entries) if ask.keys_only else [_stored(entry) for entry in entries]
    times = (
        [
            [milliseconds(entry.created_at) or 0 for entry in entries],
            [milliseconds(entry.updated_at) or 0 for entry in entries],
        ]
        if ask.times
        else []
    )
    return Page(
        [key_of(entry.key) for entry in entries],
        [value for value, _ in stored],
        [encoding for _, encoding in stored],
        [int(entry.versionstamp or 0) for entry in entries],
        [milliseconds(entry.expires_at) for entry in entries],
        *times,
    )


def _stored(entry: ApiEntry) -> tuple[bytes, int]:
    """The stored form of an entry's value, and its encoding."""
    if value := bytes(entry.value):
        return value, Encoding.JSON
    if entry.data is not None:
        return entry.data, Encoding.BYTES
    if entry.u64 is not None:
        return pack_counter(int(entry.u64)), Encoding.U64
    return b"", LOST
