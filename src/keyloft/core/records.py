"""What interfaces and engines exchange: stored records, read requests, batches of writes, and their outcomes.

A transaction is a `Batch`: a value, complete when it is handed over. Nothing stays open between two calls. All are
msgspec structs, which are made much faster than frozen dataclasses (`scripts/bench embedded`, row «list»).
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft.core import keys

Key: TypeAlias = Any
"""A key as the engine orders it; all keys of a space are of one type."""

PluginKey: TypeAlias = tuple[str, str]
"""A plugin's name, and its key. Both are texts that SQL can hold: no NUL, no lone surrogate."""


class Space(StrEnum):
    """The key space of an interface: no interface sees keys of another."""

    TUPLES = "tuples"
    """Keys are bytes."""
    SEMANTIC = "semantic"
    """Keys are bytes."""
    PLUGINS = "plugins"
    """Keys are a PluginKey; a Scan or Count stays with one plugin. Values are JSON."""


SERVICE_ROWS: Final = b"w\x00"
"""The beginning of those rows of the space SEMANTIC that services on NATS keep for themselves: leases of watches, and
which services publish for them. They are of no use in another database, so exports and copies leave them out."""


class Record(Struct, frozen=True, gc=False):
    """One stored entry, not decoded. Times are milliseconds since 1970.

    A Scan fills the last two fields only if it has `times`; a Get of a plugin's key never does.
    """

    key: Key
    value: bytes
    encoding: int
    version: int
    expires_at: int | None
    created_at: int = 0
    updated_at: int = 0

    def is_alive(self, now: int) -> bool:
        return self.expires_at is None or now < self.expires_at


class Head(Record, frozen=True, gc=False):
    """A stored entry whose value was not read: `value` is empty."""


class RecordColumns(Struct, frozen=True, eq=False):
    """The cells of some records, by column."""

    keys: Sequence[Key] = ()
    values: Sequence[bytes] = ()
    encodings: Sequence[int] = ()
    versions: Sequence[int] = ()
    expiries: Sequence[int | None] = ()
    created: Sequence[int] = ()
    updated: Sequence[int] = ()
    """Both are empty unless the scan asked for times."""


class Page(RecordColumns, frozen=True, eq=False, kw_only=True):
    """The records of a scan, held by column, which is faster than one object per record."""

    value_bytes: int | None = None
    """How many bytes the values have together, if the engine knows that."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> Record:
        return list(self)[at]

    def __iter__(self) -> Iterator[Record]:
        columns = (self.keys, self.values, self.encodings, self.versions, self.expiries)
        return map(Record, *columns, self.created, self.updated) if self.created else map(Record, *columns)


Address: TypeAlias = tuple[Space, Key]


class AtKey(Struct, frozen=True, gc=False):
    """What every request, check and mutation of one key begins with."""

    space: Space
    key: Key


# Read requests


class Get(AtKey, frozen=True, gc=False):
    """The entry at a key. Answered by a Record or None."""

    include_expired: bool = False


class Scan(Struct, frozen=True, gc=False):
    """The live entries in `[start, end)`, in the order of their keys. Answered by a Page.

    `after` leaves `start` itself out; `keys_only` leaves the values empty; `times` adds the times of creation and of
    the last change.
    """

    space: Space
    start: Key
    end: Key
    limit: int
    reverse: bool = False
    keys_only: bool = False
    after: bool = False
    times: bool = False


NO_LIMIT: Final = 2**62
"""The limit of a Scan that has none."""


class Count(Struct, frozen=True, gc=False):
    """How many live entries there are in `[start, end)`. Answered by an int."""

    space: Space
    start: Key
    end: Key


class Expired(Struct, frozen=True, gc=False):
    """The entries that have expired but are still stored, earliest expiry first, without their values."""

    space: Space
    limit: int


class Due(Struct, frozen=True, gc=False):
    """The keys of entries that expired after a moment and are still stored. Answered by a DuePage."""

    space: Space
    after: int
    """In milliseconds; entries that expired at that moment or before are left out."""
    limit: int
    """About how many keys to answer; keys that expire in the same millisecond are never divided."""


class DuePage(Struct, frozen=True, gc=False):
    """Keys whose entries have expired."""

    keys: Sequence[Key]
    expired_at: Sequence[int]
    """When each of them expired, in milliseconds."""
    up_to: int
    """All entries that expired up to this moment are included. If these are all, it is the time of the read, which is
    before `after` if the clock was set back."""
    version: int
    """The version of the last commit that was seen."""
    is_last: bool
    """Whether these are all expired entries."""
    next_expiry: int | None
    """When the next entry will expire; None if none will, or if the page is not the last one."""


class Latest(Struct, frozen=True, gc=False):
    """The version of the last commit in any space. Answered by an int."""


WHOLE: Final = 2**31
"""A part number above all parts of a version in the change log."""


class LogPosition(Struct, frozen=True, order=True, gc=False):
    """How far a reader has read the change log: up to and including one part of the changes of a version."""

    version: int
    part: int = WHOLE


class Changes(Struct, frozen=True, gc=False):
    """The change log after a position, oldest first, about as many bytes as a slice has. Answered by a LogSlice.

    Raises HistoryGone if the log no longer reaches back to the position, or has not reached it.
    """

    after: LogPosition


class ChangeKind(IntEnum):
    """What a commit did to a key."""

    PUT = 0
    DELETE = 1
    TOUCH = 2
    """The expiry changed, and nothing else."""
    EXPIRED = 3
    """An expired entry was removed, or an entry got an expiry that has passed."""


class LoggedChange(Struct, frozen=True, gc=False):
    """One change of the log; the value is not part of it."""

    version: int
    space: Space
    key: Key
    kind: ChangeKind
    at: int


class LogSlice(Struct, frozen=True, gc=False):
    """A piece of the change log."""

    changes: Sequence[LoggedChange]
    end: LogPosition
    """Where the next slice begins; if there is none yet, the position of the last commit."""
    is_last: bool
    """Whether the log ends with this slice."""
    began: int
    """The time of the version after which the slice begins, in milliseconds."""
    ended: int
    """The time of the version with which it ends."""


class Now(Struct, frozen=True, gc=False):
    """The time by which the engine decides expiry, in milliseconds. Answered by an int."""


class StoreId(Struct, frozen=True, gc=False):
    """The random id of the store, which no other store has. Answered by a str."""


class Usage(Struct, frozen=True, gc=False):
    """What plugins store under some keys: a slice of all plugins' keys. Answered by a UsageSlice.

    No row is returned for an entry, so a slice of a thousand keys is as small as one of ten.
    """

    after: PluginKey
    """The slice begins after this key."""
    limit: int
    """How many rows the slice has at most, expired ones included."""


class Used(Struct, frozen=True, gc=False):
    """How many live entries a plugin has, and how many bytes their values take."""

    plugin: str
    entries: int
    value_bytes: int


class UsageSlice(Struct, frozen=True, gc=False):
    """What plugins store in one slice of their keys."""

    used: Sequence[Used]
    """In the order of the plugins' names."""
    end: PluginKey | None
    """The last key of the slice; None if it reaches to the last key of all."""
    version: int
    """The version of the last commit that the slice includes."""


Ask: TypeAlias = Get | Scan | Count | Expired | Due | Latest | Changes | Now | StoreId | Usage


# Writes


class Check(AtKey, frozen=True, gc=False):
    """The batch is committed only if the entry at this key has this version; None: only if there is none.

    An expired entry counts as absent; with `include_expired` it counts until it is removed.
    """

    version: int | None
    include_expired: bool = False


class Set(AtKey, frozen=True, gc=False):
    """Store a value, which expires `expire_in` milliseconds after the commit, or at the time `expire_at`, or never.

    With `if_absent`, a key that has an entry keeps it, and the rest of the batch is committed nevertheless. With
    `keep_expiry`, an entry that exists keeps its expiry.
    """

    value: bytes
    encoding: int
    expire_in: int | None = None
    expire_at: int | None = None
    if_absent: bool = False
    keep_expiry: bool = False


class Append(AtKey, frozen=True, gc=False):
    """Store a value under a key that contains the commit's version, so that entries sort in the order of their commits.

    The key is `key`, the version, and `suffix`, by which several Appends of one batch differ. The version is an int as
    tuple keys have it; in the space SEMANTIC it is 8 bytes.
    """

    value: bytes
    encoding: int
    expire_in: int | None = None
    suffix: bytes = b""
    expire_at: int | None = None

    def at(self, version: int) -> Set:
        """The Set that stores the value if the batch is committed with this version."""
        key = appended_key(self.space, self.key, version, self.suffix)
        return Set(self.space, key, self.value, self.encoding, self.expire_in, self.expire_at)


def appended_key(space: Space, key: bytes, version: int, suffix: bytes = b"") -> bytes:
    """The key under which an Append of a version is stored."""
    return key + (keys.encode_int(version) if space is Space.TUPLES else version.to_bytes(8)) + suffix


class Delete(AtKey, frozen=True, gc=False):
    """Remove the entry, if there is one."""


class CounterOperation(AtKey, frozen=True, gc=False):
    """What Sum, Add, Min and Max have in common: an absent counter gets this expiry, a stored one keeps its own."""

    operand: int
    expire_in: int | None = None
    expire_at: int | None = None


class Sum(CounterOperation, frozen=True, gc=False):
    """Add to a U64, modulo 2^64; an absent one starts at 0."""


class Add(CounterOperation, frozen=True, gc=False):
    """Add to a JSON integer or to a U64, which stays a U64 and never wraps around; absent counts as a JSON 0."""


class Min(CounterOperation, frozen=True, gc=False):
    """Lower a U64 to the operand; an absent one is set to it."""


class Max(CounterOperation, frozen=True, gc=False):
    """Raise a U64 to the operand; an absent one is set to it."""


class Touch(AtKey, frozen=True, gc=False):
    """Give the entry another expiry, or none; its version stays."""

    expire_in: int | None = None
    expire_at: int | None = None


class Purge(AtKey, frozen=True, gc=False):
    """Remove the entry only if it is this version and has expired."""

    version: int
    expires_at: int | None = None
    """The expiry that the caller has read, if any. It spares an engine reading the row, and decides nothing."""


Mutation: TypeAlias = Set | Append | Delete | Sum | Add | Min | Max | Touch | Purge


class Batch(Struct, frozen=True, gc=False):
    """All of it or nothing: checks see the state before the batch, mutations apply in their order."""

    mutations: tuple[Mutation, ...]
    checks: tuple[Check, ...] = ()

    @property
    def operations(self) -> int:
        return len(self.checks) + len(self.mutations)

    @property
    def size(self) -> int:
        """The size of its values in bytes."""
        if len(self.mutations) == 1:  # most batches
            return len(getattr(self.mutations[0], "value", b""))
        return sum([len(mutation.value) for mutation in self.mutations if isinstance(mutation, (Set, Append))])


# Outcomes


class Committed(Struct, frozen=True, gc=False):
    """The batch was committed `at` that time."""

    version: int
    found: tuple[bool, ...]
    """For each Delete, Touch, Purge, and Set with `if_absent`, in their order, whether there was an entry."""
    at: int
    values: tuple[int, ...] = ()
    """For each Sum, Add, Min and Max, in their order, the new value."""


class FailedCheck(Struct, frozen=True, gc=False):
    """A check that failed, with the entry that is stored there now."""

    check: Check
    current: Record | None


class Conflict(Struct, frozen=True, gc=False):
    """Nothing of the batch was written; every check that failed is named."""

    failed: tuple[FailedCheck, ...]


class Change(Struct, frozen=True, gc=False):
    """What a watch reports about a key: its entry now, or None once it is deleted or expired."""

    key: Key
    record: Record | None
