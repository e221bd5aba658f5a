"""Typed values: what is stored with a type comes back equal, and what would not is refused."""

import asyncio
import dataclasses
import enum
import subprocess
import sys
import uuid
import zoneinfo
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NotRequired, TypedDict

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyloft
from keyloft import U64, Entry, InvalidArgument, InvalidValue, Store, Undecodable, ValueTooLarge, WrongType
from keyloft.core.records import Batch, Set, Space
from keyloft.core.values import DAMAGED
from keyloft.tuples.typed import codec_of


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class ShirtSize(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclasses.dataclass
class Corner:
    x: float
    y: float = 0.0


@dataclasses.dataclass
class OfDataclass:
    when: datetime
    day: date
    id: uuid.UUID
    price: Decimal
    color: Color
    tags: set[str]
    picture: bytes
    points: list[Corner]
    by_number: dict[int, bytes]
    lasts: timedelta | None = None


class OfStruct(msgspec.Struct):
    when: datetime
    day: date
    id: uuid.UUID
    price: Decimal
    color: Color
    tags: frozenset[ShirtSize]
    picture: bytes
    points: tuple[Corner, ...]
    by_number: dict[int, bytes]
    lasts: timedelta | None = None


@attrs.define
class OfAttrs:
    when: datetime
    day: date
    id: uuid.UUID
    price: Decimal
    color: Color
    tags: set[int]
    picture: bytes
    points: list[Corner]
    by_number: dict[int, bytes]
    lasts: timedelta | None = None


class OfTypedDict(TypedDict):
    when: datetime
    day: date
    id: uuid.UUID
    price: Decimal
    color: Color
    tags: set[str]
    picture: bytes
    points: list[Corner]
    by_number: dict[int, bytes]
    lasts: NotRequired[timedelta]


class Picture(pydantic.BaseModel):
    data: bytes
    taken: datetime


class OfPydantic(pydantic.BaseModel):
    when: datetime
    day: date
    id: uuid.UUID
    price: Decimal
    color: Color
    tags: set[str]
    picture: bytes
    points: list[Corner]
    by_number: dict[int, bytes]
    pictures: list[Picture] = []
    named: str = pydantic.Field("", alias="theName")
    lasts: timedelta | None = None

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        return len(self.points)


@dataclasses.dataclass
class Album:
    cover: Picture
    pictures: dict[str, Picture]


zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
datetimes = st.datetimes(
    min_value=datetime(1, 1, 3),
    max_value=datetime(9999, 12, 29),
    timezones=st.none() | st.just(UTC) | zones,  # type: ignore[arg-type]
).map(lambda moment: moment.replace(fold=0))
texts = st.text(st.characters(exclude_categories=["Cs"]))
points = st.builds(Corner, st.floats(allow_nan=False, allow_infinity=False), st.integers(-5, 5).map(float))
fields: dict[str, st.SearchStrategy[Any]] = {
    "when": datetimes,
    "day": st.dates(),
    "id": st.uuids(),
    "price": st.decimals(allow_nan=False, allow_infinity=False),
    "color": st.sampled_from(Color),
    "tags": st.sets(texts),
    "picture": st.binary(),
    "points": st.lists(points, max_size=3),
    "by_number": st.dictionaries(st.integers(-(2**53), 2**53), st.binary(), max_size=3),
}
pictures = st.builds(Picture, data=st.binary(), taken=st.datetimes(timezones=st.just(UTC)))
values_of: dict[Any, st.SearchStrategy[Any]] = {
    OfDataclass: st.builds(OfDataclass, **fields, lasts=st.none() | st.timedeltas()),
    OfStruct: st.builds(
        OfStruct,
        **fields
        | {"tags": st.frozensets(st.sampled_from(ShirtSize)), "points": st.lists(points, max_size=3).map(tuple)},
    ),
    OfAttrs: st.builds(OfAttrs, **fields | {"tags": st.sets(st.integers())}),
    OfTypedDict: st.fixed_dictionaries(fields, optional={"lasts": st.timedeltas()}),
    OfPydantic: st.builds(OfPydantic, **fields, pictures=st.lists(pictures, max_size=2), theName=texts),
    Album: st.builds(Album, pictures, st.dictionaries(texts, pictures, max_size=2)),
    list[OfAttrs | None]: st.lists(
        st.none() | st.builds(OfAttrs, **fields | {"tags": st.just(set[int]())}), max_size=2
    ),
}


@pytest.fixture
async def kv() -> AsyncIterator[Store]:
    async with keyloft.open(sweep_every=None) as store:
        yield store


@pytest.mark.parametrize("wanted", values_of, ids=str)
@given(data=st.data())
def test_what_is_stored_with_a_type_comes_back_exactly(wanted: Any, data: st.DataObject) -> None:
    value, codec = data.draw(values_of[wanted]), codec_of(wanted)
    try:
        stored, encoding = codec.encode(value, 2**20)
    except InvalidValue:
        # The longest spans of time, and such that days can't hold, are more than some libraries write.
        assert abs(getattr(value, "lasts", None) or timedelta()) > timedelta(days=10_000)
        return
    back = codec.decode(stored, encoding)
    assert back == value
    assert type(back) is type(value)
    assert repr(back.price if hasattr(back, "price") else 0) == repr(value.price if hasattr(value, "price") else 0)


class Narrow(TypedDict):
    name: str


class Missing(msgspec.Struct):
    name: str
    age: int


@dataclasses.dataclass
class Account:
    name: str
    age: int = 0


@attrs.define
class Hidden:
    _hidden: int


class Measured(pydantic.BaseModel):
    value: float


class Renamed(pydantic.BaseModel):
    value: int = pydantic.Field(validation_alias="read", serialization_alias="written")


def _containing_itself() -> list[object]:
    endless: list[object] = []
    endless.append(endless)
    return endless


class TestTheStore:
    async def test_every_call_takes_a_type(self, kv: Store) -> None:
        alice, bob = Account("Alice", 30), Account("Bob")
        watch = kv.watch(prefix=("users",), type=Account)
        await kv.set(("users", "alice"), alice, type=Account)
        assert await kv.add(("users", "bob"), bob, type=Account)
        assert not await kv.add(("users", "bob"), alice, type=Account)
        entry = await kv.get(("users", "alice"), type=Account)
        assert entry.value == alice
        assert [found.value for found in await kv.get_many([("users", "bob"), ("x",)], type=Account)] == [bob, None]
        assert [found.value for found in await kv.list(("users",), type=Account)] == [alice, bob]
        assert [found.value.name async for found in kv.list(("users",), type=Account, reverse=True)] == ["Bob", "Alice"]
        assert [found.value for found in await asyncio.wait_for(watch.__anext__(), 10)] == [alice, bob]
        older = await kv.update(("users", "bob"), lambda user: Account(user.name, user.age + 1), type=Account)
        assert older.value == Account("Bob", 1)
        assert (await kv.update(("users", "eve"), lambda user: user, Account("Eve"), type=Account)).value == Account(
            "Eve"
        )
        assert await kv.atomic().check(older).set(("users", "bob"), bob, type=Account, expire_in=60).commit()
        assert (await kv.list(("users",), type=Account))[1].value == bob
        await kv.set_many({("users", "dave"): Account("Dave")}, type=Account)
        assert (await kv.pop(("users", "dave"), type=Account)).value == Account("Dave")
        absent = await kv.get(("users", "dave"), Account("default"), type=Account)
        assert (absent.exists, absent.value) == (False, Account("default"))
        assert (await kv.get(("users", "alice"))).value == {"name": "Alice", "age": 30}

    async def test_without_a_type_the_refusal_names_the_typed_way(self, kv: Store) -> None:
        for value in (Account("Alice"), datetime.now(UTC), {1}, {"a": [Decimal(1)]}, Color.RED, uuid.uuid4()):
            with pytest.raises(InvalidValue, match=r"would not be read back equal.*set\(key, value, type=…\)"):
                await kv.set(("k",), value)

    @pytest.mark.parametrize(
        ("value", "wanted", "message"),
        [
            (Account("Alice", "secret"), Account, r"as Account: Expected `int`, got `str` - at `\$.age`"),  # type: ignore[arg-type]
            (
                Corner(float("nan")),
                Corner,
                r"value\.x: a float .* as Corner; NaN equals nothing, .*: store None, or a str",
            ),
            ([Corner(float("inf"))], list[Corner], r"value\[0\]\.x: a float .* neither NaN nor infinity"),
            (float("nan"), float | None, "value: a float .* store None"),
            (Decimal("NaN"), Decimal, "value: a Decimal .* store None"),
            (Decimal("sNaN"), Decimal, "value: a Decimal .* store None"),
            (Measured(value=float("inf")), Measured, r"value\.value: a float .* as Measured; .* store None"),
            (OfTypedDict, OfTypedDict, "as OfTypedDict"),
            ({"name": "x", "age": 1, "secret": 2}, Narrow, "a dict would not be read back"),
            (Account("Alice"), Missing, "a Account would not be read back equal as Missing"),
            (
                {(1, 2): 3},
                dict[tuple[int, int], int],
                "value: a dict .* no dict keys of the type tuple: .* list of pairs",
            ),
            ({"x": [{True: 3}]}, dict[str, list[dict[bool, int]]], r"value\['x'\]\[0\]: a dict .* of the type bool"),
            ({"x": [deque()]}, dict[str, list[Any]], r"value\['x'\]\[0\]: a deque would not .*; store a list"),
            ([1, U64(5)], list[U64], r"value\[1\]: a U64 .* only as a whole value .* store an int"),
            (10**5000, int, "value: a int .* more digits than Python converts: store a str, or without a type"),
            ([Hidden(1)], list[Hidden], "missing required field `_hidden` .*no field's name may begin with _"),
            (Renamed.model_validate({"read": 5}), Renamed, r"missing at \['read'\]; .*: give it one alias for both"),
            ((1, 2), list[int], "a tuple would not be read back equal"),
            (Color.RED, str, "a Color would not be read back equal as str"),
            (object(), object, "value: a object would not .*: store a dataclass"),
            (OfPydantic.model_construct(when="secret"), OfPydantic, "would not be read back as OfPydantic: "),
            ({1}, Any, "value: a set .* as Any; it is read back as a list: the type must say what stands there"),
            (
                Album(Picture.model_construct(), {}),
                Album,
                r"as Album: missing at \['data'\] - at `\$\.cover`; .*must be set",
            ),
            (time(1, fold=1), time, r"value: a time .*: store \.replace\(fold=0\)"),
            (
                time(1, tzinfo=timezone(timedelta(seconds=1))),
                time,
                "value: a time .* whole minutes: store a time in UTC",
            ),
            (Picture(data=b"", taken=datetime.now(UTC)), Account, "would not be read back as Account: "),
            ("\ud800", str, "would not be read back as str: it holds a lone surrogate, which is not Unicode text"),
            (_containing_itself(), list, "would not be read back as list: it nests too deep, or contains itself"),
            (5, bytes, "value: expected bytes, got int"),
        ],
        ids=lambda value: value.__name__ if isinstance(value, type) else "",
    )
    async def test_what_would_not_come_back_equal_is_refused(
        self, kv: Store, value: object, wanted: Any, message: str
    ) -> None:
        with pytest.raises(InvalidValue, match=message) as refused:
            await kv.set(("k",), value, type=wanted)
        assert "secret" not in str(refused.value)
        assert not (await kv.get(("k",))).exists

    async def test_size_and_depth_are_limited(self, kv: Store) -> None:
        with pytest.raises(ValueTooLarge, match="max_value_bytes"):
            await kv.set(("k",), Account("x" * 2**20), type=Account)
        deep: list[Any] = []
        for _ in range(200):
            deep = [deep]
        with pytest.raises(InvalidValue, match="nests more than 128"):
            await kv.set(("k",), deep, type=list[Any])

    async def test_bytes_and_counters_stay_what_they_are(self, kv: Store) -> None:
        await kv.set(("b",), b"\xff", type=bytes)
        await kv.set(("n",), U64(5), type=U64)
        assert [entry.value for entry in await kv.list()] == [b"\xff", U64(5)]
        assert (await kv.get(("b",), type=bytes)).value == b"\xff"
        assert (await kv.get(("n",), type=U64)).value == U64(5)
        assert (await kv.get(("n",), type=int)).value == 5
        for key, wanted in ((("n",), bytes), (("b",), U64), (("b",), Account), (("n",), OfPydantic)):
            with pytest.raises(WrongType, match="without a type it can be read as it is"):
                await kv.get(key, type=wanted)
        await kv.set(("j",), "AAAA")
        with pytest.raises(WrongType, match=r"the entry at \('j',\) is not bytes"):
            await kv.get(("j",), type=bytes)
        with pytest.raises(WrongType):
            await kv.list(type=bytes)

    async def test_an_entry_that_does_not_fit_is_named_without_its_value(self, kv: Store) -> None:
        await kv.set(("users", 1), {"name": "Alice", "age": 3})
        await kv.set(("users", 2), {"name": "Bob", "age": "secret"})
        await kv.set(("users", 3), {"name": "Carol", "color": "secret"})
        with pytest.raises(
            WrongType, match=r"\('users', 2\) can't be read as Account: Expected `int`, got `str` - at"
        ) as no:
            await kv.get(("users", 2), type=Account)
        assert "secret" not in str(no.value)
        listing = kv.list(("users",), type=Account)
        one_by_one = aiter(listing)
        assert (await anext(one_by_one)).value == Account("Alice", 3)
        with pytest.raises(WrongType, match=r"\('users', 2\)"):
            await anext(one_by_one)
        assert [entry.value for entry in await kv.list(("users",), type=Account, cursor=listing.cursor)] == [
            Account("Carol")
        ]
        with pytest.raises(WrongType, match=r"can't be read as Painted: a wrong value - at `\$.color`") as no:
            await kv.get(("users", 3), type=dataclasses.make_dataclass("Painted", [("color", Color)]))
        assert "secret" not in str(no.value)
        with pytest.raises(WrongType, match=r"can't be read as Picture: missing at \['data'\]"):
            await kv.get(("users", 3), type=Picture)
        await kv.set(("albums", 1), {"cover": {"data": "", "taken": "secret"}, "pictures": {}})
        with pytest.raises(
            WrongType, match=r"can't be read as Album: datetime .* at \['taken'\] - at `\$.cover`"
        ) as no:
            await kv.get(("albums", 1), type=Album)
        assert "secret" not in str(no.value)
        with pytest.raises(WrongType):
            await kv.pop(("users", 2), type=Account)
        assert await kv.count(("users",)) == 3
        async with kv.watch(prefix=("users",), type=Account) as watch:
            await kv.set_many([(("users", 4), {"age": 1}), (("users", 5), {"name": "Eve"})])
            with pytest.raises(WrongType, match=r"\('users', 4\)"):
                await asyncio.wait_for(watch.__anext__(), 10)
            assert [entry.value for entry in await asyncio.wait_for(watch.__anext__(), 10)] == [Account("Eve")]

    async def test_a_damaged_entry_is_not_of_a_wrong_type(self, kv: Store) -> None:
        for encoding in (0, DAMAGED):
            await kv.engine.commit(Batch((Set(Space.TUPLES, b"\x02k\x00", b"{", encoding),)))
            with pytest.raises(Undecodable, match="is damaged"):
                await kv.get(("k",), type=Account)

    async def test_a_field_that_is_new_has_its_default_and_one_that_is_gone_is_left_out(self, kv: Store) -> None:
        await kv.set(("u",), {"name": "Alice", "old": 1})
        assert (await kv.get(("u",), type=Account)).value == Account("Alice", 0)

    @pytest.mark.parametrize("wanted", [5, "Account", {}, datetime | str], ids=str)
    async def test_what_is_no_type_is_refused(self, kv: Store, wanted: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"type: (expected a type|values of .* can't be stored)"):
            await kv.get(("k",), type=wanted)


@dataclasses.dataclass
class Link:
    next: "Link | None" = None


def test_a_nested_object_is_written_and_read_on_any_stack() -> None:
    chain, codec = Link(), codec_of(Link)
    for _ in range(99):
        chain = Link(chain)

    def descend(frames: int) -> Link:
        if frames:
            return descend(frames - 1)
        link: Link = codec.decode(*codec.encode(chain, 2**20))
        return link

    with ThreadPoolExecutor(1) as own_stack:
        assert own_stack.submit(descend, sys.getrecursionlimit() - 100).result() is not None


async def test_a_union_of_pydantic_models_is_pydantics(kv: Store) -> None:
    class Cat(pydantic.BaseModel):
        meows: int

    class Dog(pydantic.BaseModel):
        barks: int

    await kv.set(("pet",), Dog(barks=2), type=Cat | Dog)
    assert (await kv.get(("pet",), type=Cat | Dog)).value == Dog(barks=2)


def test_nothing_but_the_library_is_imported() -> None:
    code = """
import asyncio, dataclasses, sys, keyloft
@dataclasses.dataclass
class Account:
    name: str
async def main():
    async with keyloft.open() as kv:
        await kv.set(("u",), Account("Alice"), type=Account)
        assert (await kv.get(("u",), type=Account)).value == Account("Alice")
asyncio.run(main())
print([name for name in ("pydantic", "attrs", "attr") if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"


def test_an_entry_says_what_it_is_of() -> None:
    assert Entry(("k",), Account("Alice"), 1) == Entry[Account](("k",), Account("Alice"), 1)


@dataclasses.dataclass
class PartlyCompared:
    name: str
    note: Any = dataclasses.field(default=None, compare=False)


@attrs.define
class PartlyComparedAttrs:
    name: str
    note: Any = attrs.field(default=None, eq=False)


class PartlyComparedStruct(msgspec.Struct):
    name: str
    note: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartlyComparedStruct) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [PartlyCompared, PartlyComparedAttrs, PartlyComparedStruct])
async def test_fields_that_a_class_does_not_compare_come_back_equal_or_are_refused(kv: Store, kind: Any) -> None:
    await kv.set(("k",), kind("a", {"b": [1]}), type=kind)
    assert (await kv.get(("k",), type=kind)).value.note == {"b": [1]}
    for changed in (datetime.now(UTC), b"bytes", {1}, (1, 2), {1: 2}):
        with pytest.raises(InvalidValue, match=r"^value(\.note)?: "):
            await kv.set(("k",), kind("a", changed), type=kind)
    with pytest.raises(InvalidValue, match=r"^value\[1\]\['x'\]\.note: a tuple would not be read back equal"):
        await kv.set(("k",), [{}, {"x": kind("a", (1, 2))}], type=list[dict[str, kind]])


async def test_a_naive_time_of_the_second_occurrence_is_refused(kv: Store) -> None:
    for moment in (datetime(2026, 10, 25, 2, 30, fold=1), time(2, 30, fold=1)):
        with pytest.raises(InvalidValue, match=r"^value: .* fold=1 is not read back"):
            await kv.set(("k",), moment, type=type(moment))
        await kv.set(("k",), moment.replace(fold=0), type=type(moment))
    berlin = datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1)
    await kv.set(("k",), berlin, type=datetime)
    assert (await kv.get(("k",), type=datetime)).value == berlin


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (time(2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), time),
        (time(2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1), time),
        ({time(2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))}, set[time]),
        ({datetime(2026, 10, 25, 2, 30, fold=1)}, set[datetime]),
        (frozenset({(datetime(2026, 10, 25, 2, 30, fold=1), 1)}), frozenset[tuple[datetime, int]]),
        ({datetime(2026, 10, 25, 2, 30, fold=1): 1}, dict[datetime, int]),
    ],
    ids=["zone of a time", "its fold", "in a set", "fold in a set", "deeper in a set", "key of a dict"],
)
async def test_what_python_leaves_out_of_comparisons_of_times_is_not_lost(kv: Store, value: Any, wanted: Any) -> None:
    with pytest.raises(
        InvalidValue, match=r"^value(\[0\])?: a (date)?time would not be .* is (not read back|read back without)"
    ):
        await kv.set(("k",), value, type=wanted)


async def test_an_offset_with_seconds_is_refused_with_the_reason(kv: Store) -> None:
    moment = datetime(2026, 7, 1, tzinfo=timezone(timedelta(hours=1, seconds=5)))
    with pytest.raises(InvalidValue, match=r"whole minutes: store \.astimezone\(datetime\.UTC\)"):
        await kv.set(("k",), moment, type=datetime)


@pytest.mark.parametrize("fold", [0, 1])
async def test_a_time_in_a_repeated_hour_is_refused_with_the_reason(kv: Store, fold: int) -> None:
    """Python calls it unequal to the same moment in another zone, so it can't come back equal (PEP 495)."""
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    repeated = datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=fold)
    with pytest.raises(InvalidValue, match=r"^value\.taken: .* repeats .* store \.astimezone\(datetime\.UTC\)"):
        await kv.set(("k",), Picture(data=b"", taken=repeated), type=Picture)
    for taken in (repeated.astimezone(UTC), repeated + timedelta(hours=2)):
        await kv.set(("k",), Picture(data=b"", taken=taken), type=Picture)
        assert (await kv.get(("k",), type=Picture)).value.taken == taken
