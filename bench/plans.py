"""What a round of reads or writes is about, in the shape of key that an arm takes, and what must come of it."""

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from bench.data import GROUP, Key, Value, fresh_pair, joined, key_of, value_of

E = TypeVar("E")
K = TypeVar("K")

TENS = 200
LISTS = 10
"""Laps of operations that read more than one entry."""


class Reads(Struct, Generic[K], frozen=True):
    """Keys to look up, and the values that are stored there."""

    keys: list[K]
    expected: list[Value]


Writes: TypeAlias = list[tuple[K, Value]]
"""Distinct keys and new values: after the round, each value must be found at its key."""


def as_tuple(key: Key) -> Key:
    return key


def as_text(key: Key) -> str:
    return joined(key)


def as_bytes(key: Key) -> bytes:
    return joined(key).encode()


def reads(stored: int, shape: Callable[[Key], K]) -> Callable[[random.Random, int], Reads[K]]:
    """Keys at random."""

    def plan(chances: random.Random, operations: int) -> Reads[K]:
        indexes = [chances.randrange(stored) for _ in range(operations)]
        return Reads([shape(key_of(index)) for index in indexes], [value_of(index) for index in indexes])

    return plan


def tens(stored: int, shape: Callable[[Key], K]) -> Callable[[random.Random, int], list[Reads[K]]]:
    """Ten keys at random per operation."""
    ten = reads(stored, shape)
    return lambda chances, operations: [ten(chances, 10) for _ in range(operations)]


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


def expected_group(number: int) -> list[tuple[Key, Value]]:
    """What the list of a group shows, in its order."""
    return [(key_of(index), value_of(index)) for index in range(number * GROUP, (number + 1) * GROUP)]


class Listed(Struct, Generic[E], frozen=True):
    """What a lap of lists found: how many entries each, and all of the last; nobody keeps them all."""

    counts: list[int]
    last: list[E]


def check_lists(plan: list[int], counts: list[int], last: Sequence[tuple[object, Value]]) -> None:
    same(counts, [GROUP] * len(plan))
    same(last, expected_group(plan[-1]))


def same(found: object, expected: object) -> None:
    """Raises unless the arm did what was asked of it."""
    if found != expected:
        raise AssertionError("an arm did not read or write what it should have")
