"""Compares a typed value with what is read back, field by field, because a class's own `==` may leave fields out.

A dataclass may have fields with `compare=False`, an attrs class with `eq=False`, and any class its own `__eq__`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec

from keyloft import limits
from keyloft.core.values import shown_place

_WHOLE: Final = frozenset({str, int, bool, float, bytes, type(None)})
"""Types whose `==` compares all there is."""
_MINUTE: Final = timedelta(minutes=1)
_OF_TYPES: Final = (
    "the type must have all that the value holds, leave it as it is when an object is made, and compare by content, as "
    "a dataclass does"
)
_OF_NUMBERS: Final = "NaN equals nothing, and JSON has neither NaN nor infinity: store None, or a str"
_OF_TIMES: Final = (
    "it is in an hour that its time zone repeats or skips; it is read back with an offset instead of the zone, and "
    "Python never calls the two equal: store .astimezone(datetime.UTC)"
)
_OF_FOLDS: Final = "fold=1 is not read back without a time zone: store .astimezone(datetime.UTC)"
_OF_FOLDS_OF_TIMES: Final = "fold=1 is not read back without a time zone: store .replace(fold=0)"
_OF_ZONES: Final = (
    "a time without a date has no offset in that zone, and is read back without the zone: store a datetime"
)
_OF_OFFSETS: Final = "an offset is read back in whole minutes: store .astimezone(datetime.UTC)"
_OF_OFFSETS_OF_TIMES: Final = "an offset is read back in whole minutes: store a time in UTC"


class Difference(msgspec.Struct, frozen=True):
    """Where a copy is not equal to a value."""

    path: str
    kind: str
    """The name of the type of what differs."""
    cure: str = _OF_TYPES


def difference(value: Any, copy: Any, path: str = "value") -> Difference | None:
    """The first difference between a value and a copy of it; None if all of it is equal."""
    if type(value) is not type(copy) or type(value) in _WHOLE:
        return None if value == copy else Difference(path, type(value).__name__, _cure(value, copy))
    if isinstance(value, (list, tuple)):
        if len(value) != len(copy):
            return Difference(path, type(value).__name__)
        return _difference_of_items(range(len(value)), value, copy, path)
    if isinstance(value, dict):
        if value.keys() != copy.keys():
            return Difference(path, type(value).__name__)
        if (found := _difference_of_keys(value, copy, path)) is not None:
            return found
        return _difference_of_items(value, [*value.values()], [copy[name] for name in value], path)
    kind: Any = type(value)
    for name in fields_of(kind):
        field, other = getattr(value, name, None), getattr(copy, name, None)
        if type(field) is type(other) and type(field) in _WHOLE and field == other:
            continue  # most fields
        if (found := difference(field, other, f"{path}.{name}")) is not None:
            return found
    if isinstance(value, (datetime, time)):
        cure = _lost_of_time(value, copy)
        return None if cure is None else Difference(path, kind.__name__, cure)
    if value != copy:
        return Difference(path, kind.__name__, cure_of_number(value) or _OF_TYPES)
    return _difference_of_keys(value, copy, path) if isinstance(value, (set, frozenset)) else None


def _cure(value: object, copy: object) -> str:
    if (cure := cure_of_number(value)) is not None:
        return cure
    if type(value) is type(copy):
        return _OF_TYPES
    return f"it is read back as a {type(copy).__name__}: the type must say what stands there"


def cure_of_number(value: object) -> str | None:
    """What to do about a float or a Decimal that can't be stored; None for any other value.

    An infinite Decimal is stored as a text.
    """
    if isinstance(value, Decimal):
        return _OF_NUMBERS if value.is_nan() else None
    return _OF_NUMBERS if isinstance(value, float) and not math.isfinite(value) else None


def _difference_of_keys(value: Iterable[Any], copy: Iterable[Any], path: str) -> Difference | None:
    """The first difference of the items of two equal sets, or of the names of two dicts."""
    if {*map(type, value)} <= _WHOLE:
        return None
    copies = {item: item for item in copy}
    differences = (difference(item, copies[item], path) for item in value)
    return next((found for found in differences if found is not None), None)


def _difference_of_items(
    places: Iterable[object], items: Sequence[Any], copies: Sequence[Any], path: str
) -> Difference | None:
    if {*map(type, items)} <= _WHOLE and items == copies:
        return None  # in C: there may be a million of them
    for place, item, copy in zip(places, items, copies, strict=True):
        # The item that differs is compared again, with its path: making a path for each item would take longer.
        if difference(item, copy) is not None:
            return difference(item, copy, path + shown_place(place))
    return None


def _lost_of_time(value: datetime | time, copy: datetime | time) -> str | None:
    """What to do about a part of a time that is not read back; `==` leaves out a fold, and the zone of some times."""
    offset = value.utcoffset()
    if value.tzinfo is None and value.fold:
        return _OF_FOLDS if isinstance(value, datetime) else _OF_FOLDS_OF_TIMES
    if offset is None and value.tzinfo is not None and copy.tzinfo is None:
        return _OF_ZONES
    if value == copy:
        return None
    if isinstance(value, datetime) and isinstance(copy, datetime) and _is_repeated(value, copy):
        return _OF_TIMES
    if offset is None or not offset % _MINUTE:
        return _OF_TYPES
    return _OF_OFFSETS if isinstance(value, datetime) else _OF_OFFSETS_OF_TIMES


def _is_repeated(value: datetime, copy: datetime) -> bool:
    """Whether these are the same moment, although Python calls them unequal (PEP 495)."""
    is_fold = value.utcoffset() != value.replace(fold=not value.fold).utcoffset()
    return is_fold and value.timestamp() == copy.timestamp()


@functools.lru_cache(limits.TYPES_REMEMBERED)
def fields_of(kind: Any) -> tuple[str, ...]:
    """The names of the fields that a class declares."""
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    if hasattr(kind, "__pydantic_validator__") and isinstance(fields := getattr(kind, "model_fields", None), Mapping):
        return (*fields,)
    declared = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else getattr(kind, "__attrs_attrs__", ())
    return tuple([field.name for field in declared])
