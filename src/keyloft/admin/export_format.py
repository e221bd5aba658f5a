"""Entries as lines of JSON, to be moved from one database to another: whatever is stored comes back as it was.

The first line tells the clock of the database; each other line is an entry. Times are milliseconds since 1970.

    {"keyloft":"export","format":1,"clock":42}
    {"space":"tuples","key":"users/alice","value":{"name":"Alice"},"version":7,"created_at":…,"updated_at":…}
    {"space":"plugins","plugin":"trivia","key":"score","value":100,"version":9,"expires_at":…,…}
    {"space":"semantic","key":"e/acme/web/config/theme","value":…,…}

A key of the tuple store is written as on the command line, one of the semantic store as its row has it, with percent
signs as in a URL. A value stands under the name of its kind: `value` is JSON, `bytes` is base64, `u64` a counter. What
is damaged, or could not stand in a line as it is, is `key_hex`, or `raw` in base64 with its `encoding`.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from keyloft import limits
from keyloft.core import key_text, keys
from keyloft.core.maintenance import LAST_MOMENT, UNVERSIONED
from keyloft.core.records import Key, Record, Space
from keyloft.core.values import BYTES, COUNTER, JSON, Encoding, decode_json, pack_counter, unpack_counter
from keyloft.errors import InvalidArgument, InvalidKey, Undecodable

FORMAT: Final = 1


_Moment: TypeAlias = Annotated[int, Meta(ge=0, le=LAST_MOMENT)]


class Header(Struct, kw_only=True, tag_field="keyloft", tag="export", forbid_unknown_fields=True):
    """The first line."""

    format: int = FORMAT
    clock: Annotated[int, Meta(ge=0, le=2**62)]
    only: dict[str, str] | UnsetType = UNSET
    """Which part of the database it is; all of it, if nothing is said."""


class Line(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An entry. What somebody writes by hand needs a key and a value."""

    space: Space | UnsetType = UNSET
    plugin: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_hex: str | UnsetType = UNSET
    value: Raw | UnsetType = UNSET
    bytes: str | UnsetType = UNSET
    u64: int | UnsetType = UNSET
    raw: str | UnsetType = UNSET
    encoding: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    version: Annotated[int, Meta(ge=UNVERSIONED, le=2**62)] = UNVERSIONED
    expires_at: _Moment | None = None
    created_at: _Moment | UnsetType = UNSET
    updated_at: _Moment | UnsetType = UNSET


_encoder: Final = msgspec.json.Encoder()
_read_line: Final = msgspec.json.Decoder(Line).decode
_read_header: Final = msgspec.json.Decoder(Header).decode
_PLAIN: Final = re.compile(rb"[!-$&-~]*")


def head(clock: int, only: Mapping[str, str] | None = None) -> bytes:
    """The first line of a file."""
    return _encoder.encode(Header(clock=clock, only=dict(only) if only else UNSET)) + b"\n"


def write(space: Space, rows: Iterable[Record]) -> bytes:
    """Entries as lines."""
    return _encoder.encode_lines([_line(space, row) for row in rows])


def _line(space: Space, row: Record) -> Line:
    line = Line(
        space=space,
        version=row.version,
        expires_at=row.expires_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
    _write_key(line, space, row.key)
    _write_value(line, row)
    return line


def _write_key(line: Line, space: Space, key: Key) -> None:
    match space:
        case Space.PLUGINS:
            line.plugin, line.key = key
        case Space.SEMANTIC:
            line.key = key.decode() if _PLAIN.fullmatch(key) else _escaped(key)
        case Space.TUPLES:
            try:
                parts = keys.decode(key)
                if keys.encode(parts) == key:
                    line.key = key_text.written(parts)
                    return
            except (Undecodable, InvalidKey):
                pass
            line.key_hex = key.hex()


def shown_key(space: Space, key: Key) -> str:
    """A key, as it can be shown to people."""
    line = Line()
    _write_key(line, space, key)
    name = line.key if line.key is not UNSET else f"the key {line.key_hex}"
    return f"{space} {f'{line.plugin} {name!a}' if line.plugin is not UNSET else name}"


def _escaped(key: bytes) -> str:
    return "".join([chr(byte) if _PLAIN.fullmatch(bytes((byte,))) else f"%{byte:02X}" for byte in key])


def _write_value(line: Line, row: Record) -> None:
    value = row.value
    if row.encoding == JSON and b"\n" not in value and value.strip() == value:
        try:
            decode_json(value)
        except Undecodable:
            pass
        else:
            line.value = Raw(value)
            return
    elif row.encoding == BYTES:
        line.bytes = base64.b64encode(value).decode()
        return
    elif row.encoding == COUNTER and len(value) == 8:
        line.u64 = unpack_counter(value)
        return
    line.raw, line.encoding = base64.b64encode(value).decode(), row.encoding


def read_head(line: bytes) -> Header | None:
    """The first line, if it is one; a file that somebody made may have none.

    Raises:
        InvalidArgument: It is of a later format.
    """
    if b'"keyloft"' not in line:
        return None
    try:
        header = _read_header(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if header.format > FORMAT:
        raise InvalidArgument(
            f"this file has format {header.format}, which this version of Keyloft does not know: upgrade keyloft"
        )
    return header


def read(line: bytes, now: int) -> tuple[Space, Record]:
    """The entry of a line.

    Raises:
        InvalidArgument: It holds none; the message says why, and quotes no value.
    """
    try:
        told = _read_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"no entry: {error}") from None
    space = told.space or (Space.PLUGINS if told.plugin is not UNSET else Space.TUPLES)
    value, encoding = _value(told)
    if space is Space.PLUGINS and encoding != JSON:
        raise InvalidArgument("an entry of a plugin has a value in JSON")
    created_at = told.created_at if told.created_at is not UNSET else now
    updated_at = told.updated_at if told.updated_at is not UNSET else now
    return space, Record(_key(told, space), value, encoding, told.version, told.expires_at, created_at, updated_at)


def _key(told: Line, space: Space) -> Key:
    if (told.key is UNSET) == (told.key_hex is UNSET) or (told.plugin is not UNSET) != (space is Space.PLUGINS):
        raise InvalidArgument("an entry has a key, and one of a plugin has a plugin")
    try:
        if told.key_hex is not UNSET:
            return bytes.fromhex(told.key_hex)
        assert told.key is not UNSET
        match space:
            case Space.PLUGINS:
                if "\x00" in f"{told.plugin}{told.key}":
                    raise InvalidArgument("the key of a plugin holds no NUL")
                return told.plugin, told.key
            case Space.SEMANTIC:
                return unquote_to_bytes(told.key)
        return keys.encode(key_text.read(told.key))
    except (InvalidKey, ValueError) as error:
        raise InvalidArgument(f"its key is none: {error}") from None


def _value(told: Line) -> tuple[bytes, int]:
    given = [kind for kind in (told.value, told.bytes, told.u64, told.raw) if kind is not UNSET]
    if len(given) != 1 or (told.raw is UNSET) != (told.encoding is UNSET):
        raise InvalidArgument("an entry has one of value, bytes, u64, or raw with its encoding")
    try:
        if told.value is not UNSET:
            data = bytes(told.value)
            decode_json(data)
            return data, JSON
        if told.bytes is not UNSET:
            return base64.b64decode(told.bytes, validate=True), BYTES
        if told.u64 is not UNSET:
            return _counter(told.u64), COUNTER
        assert told.raw is not UNSET
        return base64.b64decode(told.raw, validate=True), int(told.encoding or Encoding.JSON)
    except Undecodable as error:
        raise InvalidArgument(f"its value can't be stored: {error}") from None
    except binascii.Error:
        raise InvalidArgument("its bytes are no base64") from None


def _counter(number: int) -> bytes:
    if not 0 <= number <= limits.U64_MAX:
        raise InvalidArgument("a u64 is between 0 and 2**64 - 1")
    return pack_counter(number)
