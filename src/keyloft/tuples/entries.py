"""Entries: decodes the records that engines return into what callers get."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, NoReturn

from msgspec import Struct, to_builtins

from keyloft import limits
from keyloft.core import keys, values
from keyloft.core.keys import KeyLike, TupleKey
from keyloft.core.records import Page, Record
from keyloft.errors import Undecodable, WrongType
from keyloft.tuples.typed import Codec

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # `Entry` alone is `Entry[Any]`
else:
    from typing import TypeVar

    T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EXACT_MILLISECONDS = 2**33 * 1000
"""Up to this moment, in the year 2242, a float holds a time in seconds with an error below half a microsecond."""
_from_timestamp = datetime.fromtimestamp
_expiry_times: dict[int, datetime] = {}
_decode_json = values.decode_json


_IN_JSON = {"key": list[Any], "value": Any, "versionstamp": int | None, "expires_at": str | None}


# A Struct is created in an eighth of the time that a frozen dataclass takes (`scripts/bench embedded`, row «list»).
class Entry(Struct, Generic[T], frozen=True, gc=False):
    """What is stored at a key: its value, version and expiry; or, where nothing is stored, the key alone.

    `Entry[User]` is one that was read with `type=User`; where nothing is stored, its value is still the default.

    FastAPI and pydantic write it as `asdict` returns it; for `json`: `json.dumps(entries, default=Entry.asdict)`.
    """

    key: TupleKey
    value: T = None  # type: ignore[assignment]
    versionstamp: int | None = None
    expires_at: datetime | None = None

    @property
    def exists(self) -> bool:
        """Whether there is an entry. A stored None exists, too."""
        return self.versionstamp is not None

    def __bool__(self) -> bool:
        return self.exists

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError("an entry is not its value: write entry.value, as in entry.value[…]")

    def asdict(self) -> dict[str, Any]:
        """The fields as JSON has them: bytes as {"bytes": "<base64>"}, a U64 as an int, the expiry in RFC 3339."""
        return {
            "key": [values.to_builtin(part) for part in self.key],
            "value": values.to_builtin(self.value),
            "versionstamp": self.versionstamp,
            "expires_at": to_builtins(self.expires_at),
        }

    # FastAPI writes this for an object that is neither a pydantic model nor a dataclass. As a dataclass, an entry would
    # have its bytes decoded as text.
    __dict__ = property(asdict)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, schema_of: Callable[[Any], Any]) -> dict[str, Any]:
        fields = {name: {"type": "typed-dict-field", "schema": schema_of(kind)} for name, kind in _IN_JSON.items()}
        shown = {"type": "typed-dict", "fields": fields}
        writing = {"type": "function-plain", "function": cls.asdict, "return_schema": shown}
        return {"type": "is-instance", "cls": cls, "serialization": writing, "ref": f"keyloft.Entry:{id(cls)}"}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, json_schema_of: Callable[[Any], Any]) -> Any:
        return json_schema_of(schema["serialization"]["return_schema"])

    # pydantic asks a value for this where the type says nothing about it, as with Any.
    @property
    def __pydantic_serializer__(self) -> Any:
        return _pydantic_serializer()


@functools.cache
def _pydantic_serializer() -> Any:
    from pydantic import TypeAdapter  # here, since pydantic is no requirement: only pydantic itself calls this

    return TypeAdapter(Entry).serializer


def entry_of(key: TupleKey, record: Record | None, codec: Codec | None = None, default: Any = None) -> Entry:
    """The entry at a key, decoded; where nothing is stored, one with the default for its value."""
    if record is None:
        return Entry(key, default)
    due, encoding = record.expires_at, record.encoding
    try:
        if codec is not None:
            value = codec.decode(record.value, encoding)
        else:
            value = values.decode(record.value, encoding) if encoding else _decode_json(record.value)
        if due is None:
            return Entry(key, value, record.version)
        return Entry(key, value, record.version, _expiry_times.get(due) or _expiry_time(due))
    except WrongType as error:
        raise WrongType(f"the entry at {key!r} {error}") from None
    except (Undecodable, OverflowError, TypeError) as error:
        raise Undecodable(f"the entry at {key!r} is damaged: {error}") from error


def entries_at(
    wanted: Sequence[KeyLike],
    found: Page | Sequence[Record | None],
    codec: Codec | None = None,
    make_key: Callable[[KeyLike], TupleKey] = tuple,
) -> list[Entry]:
    """The entries at several keys, decoded.

    Args:
        wanted: The keys.
        found: A record or None for each key; or a page, if every key has an entry, and each is small JSON that never
            expires.
        codec: Of the type that values are read as.
        make_key: Makes the keys of the entries.

    Raises:
        Undecodable: One of them is damaged.
    """
    if codec is None:
        # Most calls find small JSON without an expiry at every key (`scripts/bench peers`, row «get_many of 10»).
        if type(found) is Page:
            data, versions = found.values, found.versions
        else:
            records = [
                record for record in found if record is not None and not record.encoding and record.expires_at is None
            ]
            data, versions = [record.value for record in records], [record.version for record in records]
            if len(data) < len(wanted) or (data and len(max(data, key=len)) >= limits.GC_PAUSE_BYTES):
                data = ()
        if data:
            with suppress(Undecodable):
                return list(map(Entry, map(make_key, wanted), values.decode_json_many(data), versions))
    return [entry_of(make_key(key), record, codec) for key, record in zip(wanted, found, strict=True)]


def _expiry_time(due: int) -> datetime:
    """The time of an expiry; `_expiry_times` remembers it."""
    if len(_expiry_times) >= limits.EXPIRY_TIMES:
        _expiry_times.clear()  # an lru_cache takes longer for an expiry that it does not hold
    # A float is exact enough, and takes half as long as the addition.
    moment = _from_timestamp(due / 1000, UTC) if due < _EXACT_MILLISECONDS else _EPOCH + timedelta(milliseconds=due)
    _expiry_times[due] = moment
    return moment


def entries_of(
    page: Page, codec: Codec | None = None, make_key: Callable[[TupleKey], TupleKey] = tuple
) -> Iterator[Entry]:
    """The entries of a page of records; a damaged one raises in its position, and the iteration can continue."""
    decode_many = values.decode_json_many if codec is None else codec.decode_json_many
    try:
        found = keys.decode_many(page.keys)
        if make_key is not tuple:
            found = list(map(make_key, found))
        # Most pages hold only JSON without an expiry: one map call decodes them (`scripts/bench embedded`, row «list»).
        if not any(page.encodings) and not any(page.expiries):
            return iter(list(map(Entry, found, decode_many(page.values), page.versions)))
        return iter([entry_of(key, record, codec) for key, record in zip(found, page, strict=True)])
    except (Undecodable, TypeError, RecursionError):
        return _OneByOne(page, lambda record: entry_of(make_key(keys.decode(record.key)), record, codec))


def keys_of(page: Page) -> Iterator[TupleKey]:
    """The keys of a page of records; a damaged one raises in its position."""
    try:
        return iter(keys.decode_many(page.keys))
    except Undecodable:
        return _OneByOne(page, lambda record: keys.decode(record.key))


class _OneByOne(Iterator[T]):
    """Decodes records one at a time, and continues after an error; `length_hint` counts those left, as for a list."""

    def __init__(self, page: Page, decode: Callable[[Record], T]) -> None:
        self._left = iter(list(page))
        self._decode = decode

    def __next__(self) -> T:
        return self._decode(next(self._left))

    def __length_hint__(self) -> int:
        return length_hint(self._left)
