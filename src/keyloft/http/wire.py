"""Entries, values, times and keys of the tuple store as HTTP carries them."""

import base64
import binascii
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from keyloft import limits
from keyloft.core import key_text, keys
from keyloft.core.json_text import check_syntax, compact
from keyloft.core.keys import TupleKey
from keyloft.core.records import Record
from keyloft.core.values import BYTES, COUNTER, JSON, check_json, decode, pack_counter, unpack_counter
from keyloft.errors import InvalidArgument, InvalidInput, InvalidKey, Undecodable, ValueTooLarge

U64_TYPE: Final = "application/vnd.keyloft.u64"

_DOTS: Final = re.compile(r"(?:^|/)(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)
_DIGITS: Final = re.compile(r"[0-9]{1,20}", re.ASCII)
_ZONE: Final = re.compile(r"(?:Z|[+-][0-9]{2}:[0-9]{2})$", re.IGNORECASE)


class WireEntry(Struct, omit_defaults=True):
    """An entry. Where nothing is stored, the key alone, and a versionstamp of null."""

    key: str
    versionstamp: str | UnsetType | None = UNSET
    value: Raw | UnsetType = UNSET
    bytes: str | UnsetType = UNSET
    u64: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET
    updated_at: str | UnsetType = UNSET


class WireValue(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a mutation stores: one of these."""

    value: Raw | UnsetType = UNSET
    bytes: str | UnsetType = UNSET
    u64: str | UnsetType = UNSET


to_json: Final = msgspec.json.Encoder().encode


def wire_entry(key: str, record: Record | None, *, with_value: bool = True) -> WireEntry:
    """A record as an entry of the API; where nothing is stored, an entry without a versionstamp.

    Raises:
        Undecodable: The record is damaged.
    """
    if record is None:
        return WireEntry(key, None)
    entry = WireEntry(key, str(record.version))
    if with_value:
        _fill(entry, record)
    if record.expires_at is not None:
        entry.expires_at = shown_time(record.expires_at)
    if record.created_at:
        entry.created_at = shown_time(record.created_at)
        entry.updated_at = entry.created_at if record.updated_at == record.created_at else shown_time(record.updated_at)
    return entry


def _fill(entry: WireEntry, record: Record) -> None:
    data = record.value
    if record.encoding == JSON:
        try:
            check_syntax(data)
        except InvalidInput:
            raise Undecodable(f"the entry at {entry.key} is damaged: its value is not JSON") from None
        entry.value = Raw(data)
    elif record.encoding == BYTES:
        entry.bytes = base64.b64encode(data).decode()
    elif record.encoding == COUNTER and len(data) == 8:
        entry.u64 = str(unpack_counter(data))
    else:
        decode(data, record.encoding)  # raises Undecodable, with the reason


# Keys


def read_path_key(text: str) -> tuple[str, bytes]:
    """The key in a path: as text, as entries show it, and encoded. The path is not yet decoded: `a%2Fb` is one part.

    Raises:
        InvalidKey: It is not the text of a key, or URL parsers would change it.
    """
    if "." in text or "%2e" in text.lower():
        check_dots(text)
    key = key_text.read(text)
    # Only with % or = can one key be written in several ways.
    return key_text.write(key) if "%" in text or "=" in text else text, keys.encode(key)


def check_dots(path: str) -> None:
    """Refuse the segments `.` and `..` of a path, which browsers and proxies resolve.

    Raises:
        InvalidKey: The path has one.
    """
    if _DOTS.search(path):
        raise InvalidKey(
            "key: the parts . and .. are written =. and =.. in a path; URL parsers would resolve them otherwise"
        )


def read_key(text: str, name: str = "key") -> bytes:
    """The encoded key of a text in a query or body.

    Raises:
        InvalidKey: It is not the text of a key.
    """
    return keys.encode(read_parts(text, name), name)


def read_parts(text: str, name: str) -> TupleKey:
    """The key of a text; errors name the parameter or field."""
    try:
        return key_text.read(text)
    except InvalidKey as error:
        raise InvalidKey(f"{name}: {error}") from None


def read_prefix(text: str, name: str = "prefix") -> TupleKey:
    """The prefix of a text; the empty text is all keys."""
    try:
        return key_text.read_prefix(text)
    except InvalidKey as error:
        raise InvalidKey(f"{name}: {error}") from None


def shown_key(encoded: bytes) -> str:
    """The text of an encoded key."""
    return key_text.write(keys.decode(encoded))


# Values


def json_value(data: bytes) -> tuple[bytes, int]:
    """The stored form of a JSON text.

    Raises:
        InvalidJson: It is not JSON.
        InvalidInput: It could not be read back equal, or is too large.
    """
    _, text = compact(data, limits.VALUE_DEPTH)
    check_json(text, limits.VALUE_BYTES)
    return text, JSON


def bytes_value(data: bytes) -> tuple[bytes, int]:
    """The stored form of bytes."""
    if len(data) > limits.VALUE_BYTES:
        raise ValueTooLarge(len(data), limits.VALUE_BYTES)
    return data, BYTES


def u64_value(text: str, name: str = "u64") -> tuple[bytes, int]:
    """The stored form of a U64 in decimal digits."""
    return pack_counter(read_u64(text, name)), COUNTER


def read_u64(text: str, name: str = "u64") -> int:
    """A U64 in decimal digits.

    Raises:
        InvalidArgument: It is not a U64.
    """
    if not _DIGITS.fullmatch(text) or int(text) > limits.U64_MAX:
        raise InvalidArgument(f"{name}: expected a whole number from 0 to 2**64 - 1 in decimal digits")
    return int(text)


def read_value(given: WireValue) -> tuple[bytes, int]:
    """The stored form of the one value that a mutation has.

    Raises:
        InvalidInput: It has none, or several, or one that can't be stored.
    """
    if given.value is not UNSET and given.bytes is UNSET and given.u64 is UNSET:
        return json_value(bytes(given.value))
    if given.bytes is not UNSET and given.value is UNSET and given.u64 is UNSET:
        try:
            return bytes_value(base64.b64decode(given.bytes, validate=True))
        except (binascii.Error, ValueError) as error:
            if isinstance(error, ValueTooLarge):
                raise
            raise InvalidArgument("bytes: expected base64") from None
    if given.u64 is not UNSET and given.value is UNSET and given.bytes is UNSET:
        return u64_value(given.u64)
    raise InvalidArgument("value: expected one of value, bytes and u64")


# Versions and times


def read_versionstamp(text: str, name: str = "versionstamp") -> int:
    """A versionstamp in decimal digits.

    Raises:
        InvalidArgument: It is not a versionstamp.
    """
    if not _DIGITS.fullmatch(text) or int(text) > limits.LAST_VERSION:
        raise InvalidArgument(f"{name}: expected a versionstamp in decimal digits, as an entry has it")
    return int(text)


def shown_time(milliseconds: int) -> str:
    """A time in RFC 3339, in UTC, with milliseconds."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_shown_second(seconds)}.{rest:03}Z"


@lru_cache(maxsize=1024)
def _shown_second(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0")
    except (ValueError, OverflowError, OSError):
        raise Undecodable("a stored time is out of range") from None


def read_time(text: str, name: str = "expire_at") -> datetime:
    """A time in RFC 3339.

    Raises:
        InvalidArgument: It is not a time, or has no zone.
    """
    try:
        if not _ZONE.search(text):
            raise ValueError
        return msgspec.convert(text, datetime)
    except (ValueError, msgspec.ValidationError):
        raise InvalidArgument(f"{name}: expected a time with a zone, as in 2030-01-01T00:00:00Z") from None


def read_seconds(text: str, name: str = "expire_in") -> float:
    """Seconds in decimal digits.

    Raises:
        InvalidArgument: It is not a number of seconds.
    """
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text, re.ASCII):
        raise InvalidArgument(f"{name}: expected seconds, as in 30 or 0.5")
    return float(text)


def etag(version: int) -> tuple[bytes, bytes]:
    """The header with the versionstamp of an entry."""
    return b"etag", b'"%d"' % version
