"""Plans rounds of reads and writes for arms that track what they store, in each arm's form of key."""

import random
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from bench.harness.data import GROUP, Key, Value, fresh_pair, joined, key_of, value_of

K = TypeVar("K")


class Reads(Struct, Generic[K], frozen=True):
    """Keys to read, and the values stored there."""

    keys: list[K]
    expected: list[Value]


Writes: TypeAlias = list[tuple[K, Value]]
"""Distinct keys and new values: after the round, each value must be found at its key."""


def as_tuple(key: Key) -> Key:
    return key


def as_bytes(key: Key) -> bytes:
    return joined(key).encode()


def reads(stored: int, shape: Callable[[Key], K]) -> Callable[[random.Random, int], Reads[K]]:
    """Keys at random."""

    def plan(chances: random.Random, operations: int) -> Reads[K]:
        indexes = [chances.randrange(stored) for _ in range(operations)]
        return Reads([shape(key_of(index)) for index in indexes], [value_of(index) for index in indexes])

    return plan


def writes(stored: int, shape: Callable[[Key], K]) -> Callable[[random.Random, int], Writes[K]]:
    """New values for keys at random, no key twice."""

    def plan(chances: random.Random, operations: int) -> Writes[K]:
        pairs = [fresh_pair(index) for index in chances.sample(range(stored), operations)]
        return [(shape(key), value) for key, value in pairs]

    return plan


def rewrites(shape: Callable[[Key], K]) -> Callable[[random.Random, int], Writes[K]]:
    """New values for one key, again and again."""

    def plan(_: random.Random, operations: int) -> Writes[K]:
        return [(shape(key), value) for key, value in (fresh_pair(0) for _ in range(operations))]

    return plan


def groups(stored: int) -> Callable[[random.Random, int], list[int]]:
    """Numbers of groups to list, at random."""
    return lambda chances, operations: [chances.randrange(stored // GROUP) for _ in range(operations)]
