"""What type checkers know of typed calls: never run, but checked by mypy and by pyright, in `scripts/check`."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import attrs
import msgspec
from pydantic import BaseModel

import keyloft
from keyloft import Children, CommitResult, Entry, EntryList, Store, SyncListing, SyncStore
from keyloft.plugins import BotDatabase


@dataclass
class Person:
    name: str
    age: int = 0


class Struct(msgspec.Struct):
    name: str


@attrs.define
class Attrs:
    name: str


class Typed(TypedDict):
    name: str


class PersonModel(BaseModel):
    name: str


def older(person: Person) -> Person:
    return Person(person.name, person.age + 1)


async def older_later(person: Person) -> Person:
    return older(person)


async def reads(kv: Store) -> None:
    key = ("people", 1)
    assert_type(await kv.get(key), Entry[Any])
    assert_type((await kv.get(key, default=0)).value, Any)
    assert_type(await kv.get(key, type=Person), Entry[Person])
    assert_type((await kv.get(key, type=Person)).value.age, int)
    assert_type((await kv.get(key, None, type=Person)).value, Person | None)
    assert_type((await kv.get(key, type=Struct)).value, Struct)
    assert_type((await kv.get(key, type=Attrs)).value, Attrs)
    assert_type((await kv.get(key, type=Typed)).value, Typed)
    assert_type((await kv.get(key, type=PersonModel)).value, PersonModel)
    assert_type((await kv.get(key, type=list[Person])).value, list[Person])
    assert_type(await kv.get_many([key]), list[Entry[Any]])
    assert_type(await kv.get_many([key], type=Person), list[Entry[Person]])
    assert_type(await kv.list(("people",)), EntryList[Entry[Any]])
    assert_type(await kv.list(("people",), type=Person), EntryList[Entry[Person]])
    async for entry in kv.list(("people",), limit=5, type=Person):
        assert_type(entry, Entry[Person])
        assert_type(entry.expires_at is None and entry.exists, bool)
    async for entries in kv.watch(prefix=("people",), type=Person):
        assert_type(entries, list[Entry[Person]])
    async for [plain] in kv.watch(key):
        assert_type(plain.value, Any)
    assert_type(kv.children(("people",)), Children)
    person = (await kv.get(key, type=Person)).value
    print(person.nothing)  # type: ignore[attr-defined]  # noqa: T201  # pyright: ignore


async def writes(kv: Store) -> None:
    key = ("people", 1)
    assert_type(await kv.set(key, Person("Alice"), type=Person), int)
    assert_type(await kv.add(key, Person("Alice"), type=Person), bool)
    assert_type(await kv.pop(key), Entry[Any])
    assert_type(await kv.pop(key, type=Person), Entry[Person])
    assert_type(await kv.pop(key, None, type=Person), Entry[Person | None])
    assert_type(await kv.increment(key, 2), int)
    assert_type(await kv.update(key, lambda number: number + 1, 0), Entry[Any])
    assert_type(await kv.update(key, older, type=Person), Entry[Person])
    assert_type(await kv.update(key, older_later, Person("Eve"), type=Person), Entry[Person])
    assert_type(await kv.update(key, lambda person: Person(person.name), type=Person), Entry[Person])
    assert_type(await kv.atomic().set(key, Person("Alice"), type=Person).commit(), CommitResult)
    assert_type(kv.scoped(("people",)), Store)


def synchronous(kv: SyncStore) -> None:
    key = ("people", 1)
    assert_type(kv.get(key, type=Person), Entry[Person])
    assert_type(kv.get(key, None, type=Person).value, Person | None)
    assert_type(kv.get_many([key], type=Person), list[Entry[Person]])
    assert_type(kv.list(("people",), type=Person), SyncListing[Entry[Person]])
    assert_type(kv.list(("people",), type=Person).all(), EntryList[Entry[Person]])
    assert_type([entry.value.age for entry in kv.list(type=Person)], list[int])
    for entries in kv.watch(key, type=Person):
        assert_type(entries, list[Entry[Person]])
    assert_type(kv.pop(key, None, type=Person), Entry[Person | None])
    assert_type(kv.update(key, older, Person("Eve"), type=Person), Entry[Person])
    kv.update(key, lambda person: person.age, type=Person)  # type: ignore[arg-type, return-value]  # pyright: ignore
    kv.list().cursor.upper()  # type: ignore[union-attr]  # pyright: ignore


def keys(kv: SyncStore, parts: list[str], many: list[tuple[str, int]]) -> None:
    """A key is a tuple or a list of parts; a text is none, though it is a sequence of texts."""
    assert_type(kv.get(parts), Entry[Any])
    assert_type(kv.get(["people", 1]), Entry[Any])
    assert_type(kv.get_many(many), list[Entry[Any]])
    assert_type(kv.set_many(dict.fromkeys(many, 1)), int)
    kv.set("people", 1)  # type: ignore[arg-type]  # pyright: ignore
    kv.delete(b"people")  # type: ignore[arg-type]  # pyright: ignore
    kv.scoped("people")  # type: ignore[arg-type]  # pyright: ignore
    kv.delete_many(["people"])  # type: ignore[list-item]  # pyright: ignore
    kv.get_many("people")  # type: ignore[arg-type]  # pyright: ignore
    kv.watch("people")  # type: ignore[call-overload]  # pyright: ignore
    kv.get((None,))  # type: ignore[arg-type]  # pyright: ignore


def names() -> None:
    """A type checker knows which names there are, also in the packages that are imported at their first use."""
    assert_type(keyloft.plugins.BotDatabase("app.db"), BotDatabase)
    keyloft.opened("app.db")  # type: ignore[attr-defined]  # pyright: ignore
    keyloft.plugins.Nothing()  # type: ignore[attr-defined]  # pyright: ignore
    keyloft.semantic.Nothing()  # type: ignore[attr-defined]  # pyright: ignore
    keyloft.open("app.db").set(("people",), 1)  # type: ignore[attr-defined]  # pyright: ignore


def entries(one: Entry, other: Entry[Person], opened: Awaitable[Store]) -> tuple[Entry, str]:
    """`Entry` alone is `Entry[Any]`, also for strict checkers."""
    assert_type(opened, Awaitable[Store])
    return one, other.value.name


async def opens() -> None:
    async with keyloft.open("app.db", name="shop") as kv:
        assert_type(kv, Store)
