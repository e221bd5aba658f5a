"""Reads the JSON of a request strictly: the refusal of an ambiguous or broken one says exactly what is wrong."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

import msgspec

from keyloft import limits
from keyloft.core import integers
from keyloft.errors import InvalidArgument, InvalidJson, MissingField, ValueTooLarge

_TOO_DEEP: Final = f"the payload is nested too deeply; a value may have {limits.VALUE_DEPTH} levels"

skim = msgspec.json.Decoder(msgspec.Raw).decode
"""Reads JSON to its end, and returns it as it is. It overlooks broken UTF-8."""
to_json = msgspec.json.Encoder().encode


def check_json(data: bytes) -> None:
    """Check that a payload is JSON, without reading it.

    Raises:
        InvalidJson: It is not.
        InvalidArgument: It is nested too deeply.
    """
    try:
        skim(data)
    except RecursionError:
        raise InvalidArgument(_TOO_DEEP) from None
    except msgspec.MsgspecError:
        raise InvalidJson("the payload is not JSON") from None


def field(fields: Mapping[str, Any], name: str) -> Any:
    """A required field of a request.

    Raises:
        MissingField: The request does not have it.
    """
    if name not in fields:
        raise MissingField(f"Missing required field: {name}")
    return fields[name]


def refuse_misspelt(fields: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a field that differs from a known one in case or underscores alone; what it asks for would be ignored.

    Raises:
        InvalidArgument: There is one; the message has the right name.
    """
    right = {name.replace("_", ""): name for name in known}
    for name in fields.keys() - right.values():
        if meant := right.get(name.replace("_", "").lower()):
            raise InvalidArgument(f"{name:.50}: this field is called {meant}")


def read(data: bytes) -> dict[str, Any]:
    """The fields of a request.

    Raises:
        InvalidJson: It is not JSON, or a name is twice in one object: one of the two values would be lost.
        InvalidArgument: It is JSON, but not an object.
    """
    if not data.strip():
        raise InvalidJson("the payload is empty: send a JSON object, at least {}")
    try:
        fields = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)
    except UnicodeDecodeError:
        raise InvalidJson("the payload is not JSON: it is not UTF-8 text") from None
    except RecursionError:
        raise InvalidArgument(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"the payload is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument('the payload must be a JSON object, as in {"key": …}')
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidJson("the payload is ambiguous: a name is twice in one object")
    return fields


def _integer(digits: str) -> int:
    """An int of any length, unless it alone exceeds the limit: many digits take long."""
    if len(digits) > limits.LONGEST_INT_DIGITS:
        raise ValueTooLarge(len(digits), limits.LONGEST_INT_DIGITS)
    return integers.parse(digits)


def _no_constant(name: str) -> NoReturn:
    raise InvalidJson(f"the payload is not JSON: JSON has no {name}")
