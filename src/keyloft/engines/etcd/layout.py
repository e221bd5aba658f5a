"""How a store lies in etcd: the form of its keys and values.

    PREFIX/counter                          the version counter, and what else belongs to the store as a whole
    PREFIX/counter NUL VERSION              what a commit wrote lately, without values, while several processes write
    PREFIX/waiting NUL DIGIT                which processes have lost a race, so that they ask for a place in the queue
    PREFIX/GENERATION/d/ SPACE KEY          an entry: a head, then its value, or where its chunks are
    PREFIX/GENERATION/x/ SPACE EXPIRY KEY   the index of expiries, without values
    PREFIX/GENERATION/l/ VERSION PART       the change log
    PREFIX/GENERATION/v/ ID NUMBER          chunks of large values; number 0 holds the key that they belong to

Entries, their index, the log and chunks lie below the number of a generation. A restore fills another generation, and
the counter then names that one: so readers see all of it or nothing.

The prefix of another store may be PREFIX/NAME, and the name may be counter or waiting, or look like a generation. No
prefix contains NUL: so what begins with PREFIX/counter NUL or PREFIX/waiting NUL belongs to this store alone. Of what
is below PREFIX/GENERATION, only the keys above belong to it.
"""

import re
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from keyloft.core.maintenance import LogRow
from keyloft.core.records import Address, Head, Key, Record, Space
from keyloft.core.schema import VERSION_BY_HAND
from keyloft.errors import DatabaseError, SchemaTooNew

FORMAT: Final = 1
"""The layout that this version reads and writes."""

_SPACE_NAMES: Final = {Space.TUPLES: b"t", Space.SEMANTIC: b"s", Space.PLUGINS: b"p"}
_SPACES: Final = tuple(Space)
_SPACE_NUMBERS: Final = {space: number for number, space in enumerate(_SPACES)}
_MOMENT: Final = struct.Struct(">Q")
_HEAD: Final = struct.Struct(">BBQqQQ")
"""Whether the value is in chunks, then encoding, version, expiry or -1, and the times of creation and last change."""
_HEAD_BYTES: Final = _HEAD.size
_CHUNKED: Final = struct.Struct(">16sHQ")
"""Id and number of the chunks, and the size of the value."""
_LOG_KEY: Final = struct.Struct(">QI")
_LOG_HEAD: Final = struct.Struct(">BqQQ16s")
"""Whether the changes are in chunks, then base, time, size of the log, and the id of the commit."""
_CHUNK_NUMBER: Final = struct.Struct(">H")
_GENERATION: Final = re.compile(rb"[0-9a-f]{16}")
NO_COMMIT: Final = bytes(16)


class StoreState(Struct, frozen=True, kw_only=True, array_like=True):
    """The state of the store as a whole; each commit compares and replaces it."""

    format: int = FORMAT
    version: int = VERSION_BY_HAND
    at: int = 0
    """The time of the last commit."""
    log_size: int = 0
    generation: int = 0
    store_id: str
    writer: str = ""
    """Which engine made the last commit; that engine ignores it in its watch."""
    turn_left: int = 0
    """Written by earlier versions of Keyloft, which divided time among engines."""
    queue: tuple[str, ...] = ()
    """The engines that have something to write, in the order in which they are to commit."""


_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(StoreState).decode
_decode_written = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, bytes, bytes | None]]]).decode


def pack_state(counter: StoreState) -> bytes:
    return _encode(counter)


def unpack_state(name: str, value: bytes) -> StoreState:
    """The state of a store, as the key of its counter holds it.

    Raises:
        SchemaTooNew: A later version of Keyloft wrote it.
        DatabaseError: It is not a counter.
    """
    try:
        counter = _decode_state(value)
    except msgspec.MsgspecError:
        raise DatabaseError(f"{name}: the key counter is not Keyloft's: use another prefix") from None
    if counter.format > FORMAT:
        raise SchemaTooNew(
            f"{name} has layout {counter.format}, which this version of Keyloft does not know (it has {FORMAT}): "
            "upgrade keyloft; it was left as it is"
        )
    return counter


class Chunks(Struct, frozen=True, gc=False):
    """Where the chunks of a value are that is too large for its row."""

    id: bytes
    number: int
    size: int


class StoredRow(Struct, frozen=True, gc=False):
    """A row as it is stored."""

    record: Record
    """A Head, if the value is in chunks."""
    chunks: Chunks | None = None

    @property
    def size(self) -> int:
        return len(self.record.value) if self.chunks is None else self.chunks.size


class KeyLayout:
    """The keys of one generation of a store."""

    def __init__(self, prefix: str, generation: int) -> None:
        self.generation = generation
        self.counter = counter_key(prefix)
        self._waiting = prefix.encode() + b"/waiting\x00"
        self.base = generation_prefix(prefix, generation)
        self._data = {space: self.base + b"d/" + name for space, name in _SPACE_NAMES.items()}
        self._index = {space: self.base + b"x/" + name for space, name in _SPACE_NAMES.items()}
        self._log = self.base + b"l/"
        self._chunks = self.base + b"v/"
        self._written = self.counter + b"\x00"

    @property
    def own_ranges(self) -> list[tuple[bytes, bytes]]:
        """All keys of this generation. What else is below its name is another store, which is named like it."""
        prefixes = [*self._data.values(), *self._index.values(), self._log, self._chunks]
        notes, _ = self.former_written_ranges
        return [
            *[(prefix, after_prefix(prefix)) for prefix in prefixes],
            notes,
            (self.under_way, self.under_way + b"\x00"),
        ]

    @property
    def folder_end(self) -> bytes:
        """The first key after all that lie below the name of this generation."""
        return after_prefix(self.base)

    @property
    def under_way(self) -> bytes:
        """The key that exists while a restore fills this generation."""
        return self.base + b"restoring"

    # Entries

    def data(self, space: Space, key: Key) -> bytes:
        return self._data[space] + raw(space, key)

    def space_range(self, space: Space) -> tuple[bytes, bytes]:
        """All entries of a space."""
        return self._data[space], after_prefix(self._data[space])

    def key_of(self, space: Space, data: bytes) -> Key:
        return key_of(space, data[len(self._data[space]) :])

    def row(self, space: Space, data: bytes, value: bytes) -> StoredRow:
        """The entry that is stored under a key of etcd."""
        record = record_of(self.key_of(space, data), value)
        return StoredRow(record, chunks_of(value) if type(record) is Head else None)

    # Expiries

    def index(self, space: Space, expires_at: int, key: Key = None) -> bytes:
        """An entry of the index of expiries; without a key, the prefix of all entries that expire at that moment."""
        start = self._index[space] + _MOMENT.pack(expires_at)
        return start if key is None else start + raw(space, key)

    def expiry_of(self, space: Space, index: bytes) -> tuple[int, Key]:
        at = len(self._index[space])
        [moment] = _MOMENT.unpack_from(index, at)
        return moment, key_of(space, index[at + _MOMENT.size :])

    def index_range(self, space: Space) -> tuple[bytes, bytes]:
        return self._index[space], after_prefix(self._index[space])

    # The change log

    def log(self, version: int, part: int = 0) -> bytes:
        return self._log + _LOG_KEY.pack(version, part)

    @property
    def log_range(self) -> tuple[bytes, bytes]:
        return self._log, after_prefix(self._log)

    def log_row(self, key: bytes, value: bytes) -> tuple[LogRow, Chunks | None]:
        """A row of the log; without its changes, if they are in chunks."""
        version, part = _LOG_KEY.unpack_from(key, len(self._log))
        chunked, base, at, size, _ = _LOG_HEAD.unpack_from(value)
        if chunked:
            return LogRow(version, part, base, at, size, b""), Chunks(*_CHUNKED.unpack_from(value, _LOG_HEAD.size))
        return LogRow(version, part, base, at, size, value[_LOG_HEAD.size :]), None

    # What was written lately

    def written(self, version: int) -> bytes:
        return self._written + _MOMENT.pack(version)

    @property
    def written_range(self) -> tuple[bytes, bytes]:
        return self._written, after_prefix(self._written)

    @property
    def commit_range(self) -> tuple[bytes, bytes]:
        """The keys that each commit writes: the counter, and the note of what it wrote."""
        return self.counter, after_prefix(self._written)

    @property
    def former_written_ranges(self) -> list[tuple[bytes, bytes]]:
        """Where earlier versions of Keyloft kept the notes of what was written lately.

        A version begins with NUL, being below 2**53, and nothing else at these places does.
        """
        return [(former + b"\x00", former + b"\x01") for former in (self.base + b"w/", self.counter + b"/")]

    # Who waits

    def waiting(self, writer: str) -> bytes:
        """Where an engine asks for a place in the queue: one of few keys, which are never removed."""
        return self._waiting + writer[-1].encode()

    @property
    def waiting_range(self) -> tuple[bytes, bytes]:
        return self._waiting, after_prefix(self._waiting)

    # Chunks

    @property
    def chunk_range(self) -> tuple[bytes, bytes]:
        return self._chunks, after_prefix(self._chunks)

    def chunk(self, identity: bytes, number: int) -> bytes:
        return self._chunks + identity + _CHUNK_NUMBER.pack(number)

    def all_chunks(self, identity: bytes) -> tuple[bytes, bytes]:
        return self._chunks + identity, after_prefix(self._chunks + identity)

    def chunk_id(self, key: bytes) -> bytes:
        return key[len(self._chunks) : -_CHUNK_NUMBER.size]


def counter_key(prefix: str) -> bytes:
    return prefix.encode() + b"/counter"


def generation_prefix(prefix: str, generation: int) -> bytes:
    return b"%s/%016x/" % (prefix.encode(), generation)


def store_prefix(prefix: str) -> tuple[bytes, bytes]:
    """All keys of a store."""
    start = prefix.encode() + b"/"
    return start, after_prefix(start)


def generation_of(prefix: str, key: bytes) -> int | None:
    """The generation that a key of a store belongs to; None for the counter, and for what is not this store's."""
    name, slash, _ = key[len(prefix.encode()) + 1 :].partition(b"/")
    return int(name, 16) if slash and _GENERATION.fullmatch(name) else None


def after_folder(prefix: str, key: bytes) -> bytes:
    """The first key after all that lie, like a key, below PREFIX/NAME/; after the key itself if it does not."""
    start = len(prefix.encode()) + 1
    name, slash, _ = key[start:].partition(b"/")
    return after_prefix(key[:start] + name + b"/") if slash else key + b"\x00"


def raw(space: Space, key: Key) -> bytes:
    """The bytes of a key, which sort as the keys do. The texts of a plugin's key contain no NUL."""
    if space is Space.PLUGINS:
        plugin, name = key
        return b"%s\x00%s" % (plugin.encode(), name.encode())
    return bytes(key)


def key_of(space: Space, raw: bytes) -> Key:
    if space is Space.PLUGINS:
        plugin, _, name = raw.partition(b"\x00")
        return plugin.decode(), name.decode()
    return raw


def after_prefix(prefix: bytes) -> bytes:
    """The first key after all that begin with a prefix, which does not end with FF."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def pack_row(record: Record, chunks: Chunks | None = None) -> bytes:
    expiry = -1 if record.expires_at is None else record.expires_at
    head = _HEAD.pack(chunks is not None, record.encoding, record.version, expiry, record.created_at, record.updated_at)
    return head + (record.value if chunks is None else _pack_chunks(chunks))


def pack_log_row(row: LogRow, commit_id: bytes, chunks: Chunks | None = None) -> bytes:
    head = _LOG_HEAD.pack(chunks is not None, row.base, row.at, row.size, commit_id)
    return head + (row.changes if chunks is None else _pack_chunks(chunks))


def pack_written(counter_revision: int, written: Mapping[Address, StoredRow | None]) -> bytes:
    """The rows that a commit wrote, without their values, and the revision of the counter that it replaced."""
    rows = [
        (_SPACE_NUMBERS[space], raw(space, key), None if row is None else pack_row(row.record, row.chunks))
        for (space, key), row in written.items()
    ]
    return _encode((counter_revision, rows))


def unpack_written(value: bytes) -> tuple[int, dict[Address, bytes | None]]:
    """The revision of the counter that a commit replaced, and the rows that it wrote; None for those it removed.

    `row_without_value` takes such a row apart.
    """
    revision, rows = _decode_written(value)
    return revision, {(_SPACES[number], key_of(_SPACES[number], key)): row for number, key, row in rows}


def record_of(key: Key, value: bytes) -> Record:
    """The entry in a row; a Head, if its value is in chunks."""
    chunked, encoding, version, expiry, created, updated = _HEAD.unpack_from(value)
    expires_at = None if expiry < 0 else expiry
    if chunked:
        return Head(key, b"", encoding, version, expires_at, created, updated)
    return Record(key, value[_HEAD_BYTES:], encoding, version, expires_at, created, updated)


def chunks_of(value: bytes) -> Chunks:
    """Where the chunks of a value are, as its row says."""
    return Chunks(*_CHUNKED.unpack_from(value, _HEAD_BYTES))


def row_without_value(key: Key, value: bytes) -> StoredRow:
    """The row of an entry whose value is not read: what `pack_written` has packed."""
    chunked, encoding, version, expiry, created, updated = _HEAD.unpack_from(value)
    head = Head(key, b"", encoding, version, None if expiry < 0 else expiry, created, updated)
    return StoredRow(head, chunks_of(value) if chunked else None)


def commit_id_of(value: bytes) -> bytes:
    """The id of the commit that wrote a row of the log."""
    identity: Any = _LOG_HEAD.unpack_from(value)[4]
    return bytes(identity)


def _pack_chunks(chunks: Chunks) -> bytes:
    return _CHUNKED.pack(chunks.id, chunks.number, chunks.size)
