"""The format of exports: entries as lines of JSON, which every database can import as they were.

The first line has the version of the database, each line after it an entry, and the last line the number of entries and
the SHA-256 of all lines before it, so that a file that was cut is noticed. Times are milliseconds since 1970.

    {"keyloft":"export","format":2,"version":42}
    {"space":"tuples","key":"users/alice","value":{"name":"Alice"},"version":7,"created_at":…,"updated_at":…}
    {"space":"tuples","store":"shop","key":"users/alice","value":…,…}
    {"space":"plugins","plugin":"trivia","key":"score","value":100,"version":9,"expires_at":…,…}
    {"space":"semantic","key":"e/acme/web/config/theme","value":…,…}
    {"keyloft":"end","entries":4,"version":42,"sha256":"…"}

A key of a tuple store is written as on the command line, with the name of its store if it has one; a key of the
semantic store as its row has it, with percent signs as in a URL. A value has the name of its kind: `value` is JSON,
`bytes` is base64, `u64` a counter. A key that is damaged, or can't be written in a line, is `key_hex`; such a value is
`raw` in base64, with its `encoding`.

A file written by hand has only entries: neither a first nor a last line.
"""

import base64
import binascii
import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from keyloft import limits
from keyloft.core import key_text, keys
from keyloft.core.json_text import on_any_stack
from keyloft.core.maintenance import UNVERSIONED
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import LAST_MOMENT, VERSION_BY_HAND
from keyloft.core.values import BYTES, COUNTER, JSON, Encoding, decode_json, pack_counter, unpack_counter
from keyloft.errors import InvalidArgument, InvalidKey, Undecodable
from keyloft.semantic.keys import is_entry, key_of_row
from keyloft.tuples.named import check_name

FORMAT: Final = 2

_Moment: TypeAlias = Annotated[int, Meta(ge=0, le=LAST_MOMENT)]
_Version: TypeAlias = Annotated[int, Meta(ge=0, le=limits.LAST_VERSION)]


class FirstLine(
    Struct, kw_only=True, tag_field="keyloft", tag="export", forbid_unknown_fields=True, omit_defaults=True
):
    """The first line."""

    format: int
    version: _Version = 0
    """The version of the last commit that the export contains."""
    clock: _Version = 0
    """The version in format 1, so that such files are recognised, and refused with a message."""
    only: dict[str, str] = {}
    """Which part of the database the export has; empty for all of it."""


class LastLine(Struct, kw_only=True, tag_field="keyloft", tag="end", forbid_unknown_fields=True):
    """The last line."""

    entries: int
    version: _Version
    sha256: str


class Line(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An entry. A line written by hand needs only a key and a value."""

    space: Space | UnsetType = UNSET
    store: str | UnsetType = UNSET
    plugin: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_hex: str | UnsetType = UNSET
    value: Raw | UnsetType = UNSET
    bytes: str | UnsetType = UNSET
    u64: int | UnsetType = UNSET
    raw: str | UnsetType = UNSET
    encoding: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    version: Annotated[int, Meta(ge=UNVERSIONED, le=limits.LAST_VERSION)] = UNVERSIONED
    expires_at: _Moment | None = None
    created_at: _Moment | UnsetType = UNSET
    updated_at: _Moment | UnsetType = UNSET


_encoder: Final = msgspec.json.Encoder()
_read_line: Final = msgspec.json.Decoder(Line).decode
_read_mark: Final = msgspec.json.Decoder(FirstLine | LastLine).decode
_PLAIN: Final = re.compile(rb"[!-$&-~]*")


BEGINNING: Final = b'{"keyloft":"export"'
"""How the first line of a file begins."""


def head(version: int, only: Mapping[str, str]) -> bytes:
    """The first line of a file."""
    return _encoder.encode(FirstLine(format=FORMAT, version=version, only=dict(only))) + b"\n"


def end(entries: int, version: int, sha256: str) -> bytes:
    """The last line of a file."""
    return _encoder.encode(LastLine(entries=entries, version=version, sha256=sha256)) + b"\n"


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
            line.key_hex = key.hex()
            with contextlib.suppress(Undecodable, InvalidKey, InvalidArgument):
                store, encoded = keys.split_store(key)
                parts = keys.decode(encoded)
                if keys.encode(parts) == encoded:
                    line.store = UNSET if store is None else check_name(store)
                    line.key, line.key_hex = key_text.write(parts), UNSET


def written_key(space: Space, key: Key) -> Line:
    """A line with a key alone."""
    line = Line(space=space)
    _write_key(line, space, key)
    return line


def row_name(space: Space, key: Any) -> str:
    """The name of a row for people: its space, and its key as text, with unprintable characters escaped."""
    name = ascii(key)
    if space is Space.PLUGINS:
        if all(isinstance(part, str) for part in key):
            name = key_text.write(key)
    elif isinstance(key, bytes):
        line = written_key(space, key)
        name = line.key if line.key is not UNSET else name[2:-1]
        if line.store is not UNSET:
            name = f"{name} of store {line.store}"
        if is_entry(key) and space is Space.SEMANTIC and "%" not in name:
            with contextlib.suppress(ValueError):
                name = key_of_row(key)
    return f"{space} {name if len(name) <= limits.SHOWN_KEY_CHARACTERS else f'{name[: limits.SHOWN_KEY_CHARACTERS]}…'}"


def _escaped(key: bytes) -> str:
    return "".join([chr(byte) if _PLAIN.fullmatch(bytes((byte,))) else f"%{byte:02X}" for byte in key])


def _write_value(line: Line, row: Record) -> None:
    value = row.value
    if row.encoding == JSON and _is_one_line(value):
        line.value = Raw(value)
    elif row.encoding == BYTES:
        line.bytes = base64.b64encode(value).decode()
    elif row.encoding == COUNTER and len(value) == 8:
        line.u64 = unpack_counter(value)
    else:
        line.raw, line.encoding = base64.b64encode(value).decode(), row.encoding


def _is_one_line(value: bytes) -> bool:
    """Whether a value is JSON that can stand in a line, and is read back unchanged."""
    with contextlib.suppress(Undecodable):
        decode_json(value)
        return b"\n" not in value and value.strip() == value
    return False


def read_mark(line: bytes) -> FirstLine | LastLine | None:
    """The first or the last line of an export, if it is one.

    Raises:
        InvalidArgument: The export has another format.
    """
    if b'"keyloft"' not in line:
        return None
    try:
        mark: FirstLine | LastLine = _read_mark(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(mark, FirstLine) and mark.format != FORMAT:
        later, earlier = "a later version of Keyloft: upgrade Keyloft", "an earlier version: export the database again"
        whose = later if mark.format > FORMAT else earlier
        raise InvalidArgument(f"this file has format {mark.format}, which is that of {whose}")
    return mark


def read(line: bytes, now: int) -> tuple[Space, Record]:
    """The entry of a line.

    Raises:
        InvalidArgument: The line holds no entry; the message says why, and shows no value.
    """
    try:
        entry = on_any_stack(_read_line, line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"not an entry: {error}") from None
    space = entry.space or (Space.PLUGINS if entry.plugin is not UNSET else Space.TUPLES)
    value, encoding = _value(entry)
    if space is Space.PLUGINS and encoding != JSON:
        raise InvalidArgument("value: expected, because the entry of a plugin is JSON")
    created_at = entry.created_at if entry.created_at is not UNSET else now
    updated_at = entry.updated_at if entry.updated_at is not UNSET else now
    version = entry.version if entry.version == UNVERSIONED else max(entry.version, VERSION_BY_HAND)
    return space, Record(_key(entry, space), value, encoding, version, entry.expires_at, created_at, updated_at)


def _key(entry: Line, space: Space) -> Key:
    if (entry.key is UNSET) == (entry.key_hex is UNSET) or (entry.plugin is not UNSET) != (space is Space.PLUGINS):
        raise InvalidArgument("key, plugin: an entry has a key, and the entry of a plugin has both")
    if entry.store is not UNSET and (space is not Space.TUPLES or entry.key is UNSET):
        raise InvalidArgument("store: only an entry of a tuple store has it, with a key")
    try:
        if entry.key_hex is not UNSET:
            return bytes.fromhex(entry.key_hex)
        assert entry.key is not UNSET
        match space:
            case Space.PLUGINS:
                if "\x00" in f"{entry.plugin}{entry.key}":
                    raise InvalidArgument("key: the key of a plugin can't contain NUL")
                return entry.plugin, entry.key
            case Space.SEMANTIC:
                return unquote_to_bytes(entry.key)
        before = b"" if entry.store is UNSET else keys.store_prefix(_store_name(entry.store))
        return before + keys.encode(key_text.read(entry.key))
    except (InvalidKey, ValueError) as error:
        raise InvalidArgument(f"key: {error}") from None


def _store_name(name: str) -> str:
    try:
        return check_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("name:", "store:", 1)) from None


def _value(entry: Line) -> tuple[bytes, int]:
    given = [kind for kind in (entry.value, entry.bytes, entry.u64, entry.raw) if kind is not UNSET]
    if len(given) != 1 or (entry.raw is UNSET) != (entry.encoding is UNSET):
        raise InvalidArgument("an entry has one of value, bytes, u64, or raw with its encoding")
    try:
        if entry.value is not UNSET:
            data = bytes(entry.value)
            decode_json(data)
            return data, JSON
        if entry.bytes is not UNSET:
            return base64.b64decode(entry.bytes, validate=True), BYTES
        if entry.u64 is not UNSET:
            if not 0 <= entry.u64 <= limits.U64_MAX:
                raise InvalidArgument("u64: expected a number from 0 to 2**64 - 1")
            return pack_counter(entry.u64), COUNTER
        assert entry.raw is not UNSET
        return base64.b64decode(entry.raw, validate=True), int(entry.encoding or Encoding.JSON)
    except Undecodable as error:
        raise InvalidArgument(f"value: {error}") from None
    except binascii.Error:
        raise InvalidArgument("bytes, raw: expected base64") from None
