"""Finds the part of a typed value that can't be written as JSON, for messages: where it is, and what to do instead."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from keyloft.core import values
from keyloft.core.values import shown_place
from keyloft.tuples.comparing import Difference, cure_of_number, fields_of

_OF_KEYS: Final = "JSON has no dict keys of the type {}: use str, int or UUID, or a list of pairs"
_OF_OTHERS: Final = "JSON has nothing for it: store a dataclass, a str or the like that can be made from it"
_OF_INTS: Final = "it has more digits than Python converts: store a str, or without a type"


def refused_part(value: Any, write: Callable[[Any], object] | None) -> Difference | None:
    """The first part of a value that can't be written, or is no number in JSON; None if none is found.

    Args:
        value: The value.
        write: Raises for what can't be written. Without it, only numbers are looked at.
    """
    try:
        return _refused(value, write, "value", ())
    except Exception:  # also of the value's own methods; or it nests too deep, which another message says
        return None


def _refused(
    value: Any, write: Callable[[Any], object] | None, path: str, around: tuple[Any, ...]
) -> Difference | None:
    if (cure := cure_of_number(value)) is not None:
        return Difference(path, type(value).__name__, cure)
    if any([outer is value for outer in around]):
        return None  # it contains itself, which another message says
    if hasattr(value, "__pydantic_validator__"):
        write = None  # the model may write what JSON does not have
    if isinstance(value, dict):
        for key in value:
            if cure_of_number(key) is not None or not _succeeds(write, {key: None}):
                return Difference(path, type(value).__name__, _OF_KEYS.format(type(key).__name__))
    has_parts = isinstance(value, (dict, list, tuple, set, frozenset))
    for place, part in _parts(value):
        has_parts = True
        if (found := _refused(part, write, path + place, (*around, value))) is not None:
            return found
    if has_parts or _succeeds(write, value):
        return None
    return Difference(path, type(value).__name__, _OF_INTS if type(value) is int else values.cure_of(value, _OF_OTHERS))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with how it is reached."""
    if isinstance(value, dict):
        return ((shown_place(name), part) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ((shown_place(index), part) for index, part in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return (("", part) for part in value)
    kind: Any = type(value)
    return ((f".{name}", getattr(value, name, None)) for name in fields_of(kind))


def _succeeds(write: Callable[[Any], object] | None, value: Any) -> bool:
    try:
        if write is not None:
            write(value)
    except UnicodeEncodeError:
        return True  # a lone surrogate, which another message says
    except (TypeError, ValueError):
        return False
    return True
