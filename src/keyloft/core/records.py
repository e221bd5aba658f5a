"""What interfaces and engines exchange: stored records, read requests, batches of writes, and their outcomes.

A transaction is a `Batch`: a value, complete when it is handed over. Nothing stays open between two calls. These are
msgspec structs because one is made per operation: they take an eighth of the time of frozen dataclasses.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import repeat
from typing import Any, Final, TypeAlias

from msgspec import Struct

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


class Record(Struct, frozen=True, gc=False):
    """One stored entry, not decoded. Times are milliseconds since 1970.

    Only a Get fills the last two fields; in the semantic space, a Scan fills `updated_at`, too.
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


class Page(Struct, frozen=True, eq=False):
    """The records of a scan, held by column, which is faster than one object per record."""

    keys: Sequence[Key] = ()
    values: Sequence[bytes] = ()
    encodings: Sequence[int] = ()
    versions: Sequence[int] = ()
    expiries: Sequence[int | None] = ()
    updates: Sequence[int] = ()
    """Empty if the scan does not read them."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> Record:
        return list(self)[at]

    def __iter__(self) -> Iterator[Record]:
        columns = (self.keys, self.values, self.encodings, self.versions, self.expiries)
        return map(Record, *columns, repeat(0), self.updates) if self.updates else map(Record, *columns)


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

    `after` leaves `start` itself out; `keys_only` leaves the values empty.
    """

    space: Space
    start: Key
    end: Key
    limit: int
    reverse: bool = False
    keys_only: bool = False
    after: bool = False


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


class Latest(Struct, frozen=True, gc=False):
    """The version of the last commit in any space. Answered by an int."""


class Now(Struct, frozen=True, gc=False):
    """The time by which the engine decides expiry, in milliseconds. Answered by an int."""


class Usage(Struct, frozen=True, gc=False):
    """What each plugin stores. Answered by a list of Used, in the order of the plugins' names."""


class Used(Struct, frozen=True, gc=False):
    """How many live entries a plugin has, and how many bytes their values take."""

    plugin: str
    entries: int
    value_bytes: int


Ask: TypeAlias = Get | Scan | Count | Expired | Latest | Now | Usage


# Writes


class Check(AtKey, frozen=True, gc=False):
    """The batch is committed only if the entry at this key has this version; None: only if there is none.

    An expired entry counts as absent; with `include_expired` it counts until it is removed.
    """

    version: int | None
    include_expired: bool = False


class Set(AtKey, frozen=True, gc=False):
    """Store a value. `expire_in` is in milliseconds from the commit; None never expires."""

    value: bytes
    encoding: int
    expire_in: int | None = None


class Append(AtKey, frozen=True, gc=False):
    """Store a value under a key that contains the commit's version, so that entries sort in the order of their commits.

    The key is `key`, the version as 8 bytes, and `suffix`, by which several Appends of one batch differ.
    """

    value: bytes
    encoding: int
    expire_in: int | None = None
    suffix: bytes = b""

    def at(self, version: int) -> Set:
        """The Set that stores it if the batch is committed as this version."""
        return Set(self.space, appended_key(self.key, version, self.suffix), self.value, self.encoding, self.expire_in)


def appended_key(key: bytes, version: int, suffix: bytes = b"") -> bytes:
    """The key under which an Append of a version is stored."""
    return key + version.to_bytes(8) + suffix


class Delete(AtKey, frozen=True, gc=False):
    """Remove the entry, if there is one."""


class CounterOperation(AtKey, frozen=True, gc=False):
    """What Sum, Min and Max have in common: an absent counter gets this expiry, a stored one keeps its own."""

    operand: int
    expire_in: int | None = None


class Sum(CounterOperation, frozen=True, gc=False):
    """Add to a U64, modulo 2^64; an absent one starts at 0."""


class Min(CounterOperation, frozen=True, gc=False):
    """Lower a U64 to the operand; an absent one is set to it."""


class Max(CounterOperation, frozen=True, gc=False):
    """Raise a U64 to the operand; an absent one is set to it."""


class Touch(AtKey, frozen=True, gc=False):
    """Give the entry another expiry; its version stays."""

    expire_in: int | None


class Purge(AtKey, frozen=True, gc=False):
    """Remove the entry only if it is this version and has expired."""

    version: int


Mutation: TypeAlias = Set | Append | Delete | Sum | Min | Max | Touch | Purge


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
        return sum([len(mutation.value) for mutation in self.mutations if isinstance(mutation, (Set, Append))])


# Outcomes


class Committed(Struct, frozen=True, gc=False):
    """The batch was committed `at` that time; `found`: for each Delete, Touch and Purge, whether there was an entry."""

    version: int
    found: tuple[bool, ...]
    at: int


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
