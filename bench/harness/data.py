"""The keys and values of the benchmarks: 1000 keys to a group, JSON objects of about 100 bytes."""

import itertools
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str, str]
Value: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[Key, Value]

GROUP = 1000
_LARGE_PIECES = 3100
"""Of 21 bytes each."""
_serials = itertools.count(1)


def key_of(index: int) -> Key:
    return f"group-{index // GROUP:04d}", f"item-{index:07d}"


def group_of(number: int) -> str:
    return key_of(number * GROUP)[0]


def joined(key: Key) -> str:
    """The same key for stores whose keys are strings."""
    return "\x00".join(key)


def value_of(index: int, serial: int = 0) -> Value:
    return {
        "id": index,
        "name": f"User {index:07d}",
        "email": f"user{index:07d}@example.com",
        "active": index % 2 == 0,
        "serial": serial,
    }


def large_of(index: int, serial: int = 0) -> Value:
    """A value near the 64 KiB that Deno KV and the plugins' storage allow at most."""
    return {"id": index, "serial": serial, "text": f"{index:07d}.{serial:012d}." * _LARGE_PIECES}


def fresh_pair(index: int, *, large: bool = False) -> Pair:
    """A write with a new value: SQLite skips a page whose bytes stay the same, and its commit costs nothing."""
    return key_of(index), (large_of if large else value_of)(index, next(_serials))


def shuffled(keys: int) -> list[int]:
    """All indexes in random order: stores are filled in it, because real keys don't arrive sorted."""
    indexes = list(range(keys))
    random.Random(keys).shuffle(indexes)
    return indexes


def stored_pairs(stored: int) -> Iterator[Pair]:
    """The pairs that a store is filled with, in that order."""
    return ((key_of(index), value_of(index)) for index in shuffled(stored))
