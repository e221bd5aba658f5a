"""Writes whose outcome shows in what is stored: chains of numbered moves, and what a store holds after them.

A chain is one caller that makes move after move. Each move writes its number, the atomic kinds to several keys, so that
a move that was made in part, twice, or not at all despite its acknowledgement can't hide.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keyloft
from keyloft.core.keys import TupleKey

Contents = dict[TupleKey, Any]

_KEPT = 40
_TOTAL: TupleKey = ("total",)


class Chain(NamedTuple):
    """One caller and the kind of its writes."""

    kind: str
    writer: int


def chains(writers: int) -> list[Chain]:
    return [Chain(kind, writer) for kind in ("single", "log", "many", "atomic") for writer in range(writers)]


class Move(NamedTuple):
    """The n-th write of a chain; the first is number 1."""

    chain: Chain
    number: int


async def make(kv: keyloft.Store, move: Move) -> int:
    """Make a move; returns its versionstamp once it is acknowledged."""
    (kind, writer), number = move
    match kind:
        case "single":
            return await kv.set(("single", writer), number)
        case "log":
            return await kv.set(("log", writer, number % _KEPT), _payload(number))
        case "many":
            return await kv.set_many([(("many", writer, part), number) for part in range(5)])
    atomic = kv.atomic().delete(("token", writer, number - 1)).set(("token", writer, number), number)
    for part in range(3):
        atomic.set(("atomic", writer, part), number)
    done = await atomic.sum(_TOTAL, 1).commit()
    assert done.versionstamp is not None
    return done.versionstamp


def after(made: Mapping[Chain, int]) -> Contents:
    """What a store holds once each chain has made this many moves."""
    contents: Contents = {}
    for (kind, writer), last in made.items():
        if last == 0:
            continue
        match kind:
            case "single":
                contents["single", writer] = last
            case "log":
                for number in range(max(1, last - _KEPT + 1), last + 1):
                    contents["log", writer, number % _KEPT] = _payload(number)
            case "many":
                contents |= {("many", writer, part): last for part in range(5)}
            case "atomic":
                contents |= {("atomic", writer, part): last for part in range(3)}
                contents["token", writer, last] = last
    if total := sum(last for chain, last in made.items() if chain.kind == "atomic"):
        contents[_TOTAL] = total
    return contents


def witness(move: Move) -> TupleKey:
    """A key that bears the versionstamp of this move until the next one."""
    (kind, writer), number = move
    match kind:
        case "single":
            return ("single", writer)
        case "log":
            return ("log", writer, number % _KEPT)
    return (kind, writer, 0)


def made_in(contents: Contents, of: Iterable[Chain]) -> dict[Chain, int]:
    """How many moves of each chain a store shows."""
    made = {}
    for chain in of:
        if chain.kind == "log":
            numbers = (_number(contents.get(("log", chain.writer, slot))) for slot in range(_KEPT))
            made[chain] = max(numbers)
        else:
            made[chain] = contents.get(witness(Move(chain, 1)), 0)
    return made


async def contents_of(kv: keyloft.Store) -> tuple[Contents, dict[TupleKey, int]]:
    """All that a store holds: values, and versionstamps, by key."""
    entries = [entry async for entry in kv.list(prefix=())]
    stamps = {entry.key: entry.versionstamp for entry in entries if entry.versionstamp is not None}
    return {entry.key: entry.value for entry in entries}, stamps


def _payload(number: int) -> bytes:
    """Of all sizes, now and then over several pages, so that pages split, overflow and become free."""
    size = 9000 if number % 31 == 0 else number * 37 % 400
    return number.to_bytes(8) + bytes(size)


def _number(payload: bytes | None) -> int:
    return 0 if payload is None else int.from_bytes(payload[:8])
