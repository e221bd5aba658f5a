"""Reads the JSON of a request that a stranger sent: whatever is ambiguous or none is refused, and told exactly."""

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import msgspec

from keyloft import limits
from keyloft.core import integers
from keyloft.errors import InvalidArgument, InvalidJson, MissingField, ValueTooLarge

_TOO_DEEP: Final = f"the payload nests too deep; a value may nest {limits.VALUE_DEPTH} levels"
_skim = msgspec.json.Decoder(msgspec.Raw).decode


def check_json(data: bytes) -> None:
    """Whether a payload that is not to be read is JSON at all.

    Raises:
        InvalidJson: It is not.
        InvalidArgument: It nests too deep.
    """
    try:
        _skim(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise InvalidArgument(_TOO_DEEP) from None
        raise InvalidJson("the payload is not JSON") from None


def field(fields: Mapping[str, Any], name: str) -> Any:
    """A field that a request needs.

    Raises:
        MissingField: It is not there.
    """
    if name not in fields:
        raise MissingField(f"Missing required field: {name}")
    return fields[name]


def read(data: bytes) -> dict[str, Any]:
    """The fields of a request.

    Raises:
        InvalidJson: It is not JSON, or a name stands twice in one object: one of the two values would get lost.
        InvalidArgument: It is JSON and no object.
    """
    if not data.strip():
        raise InvalidJson("the payload is empty: send a JSON object, {} at the least")
    try:
        fields = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_int=_integer,
        )
    except UnicodeDecodeError:
        raise InvalidJson("the payload is not JSON: it is no UTF-8 text") from None
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
        raise InvalidJson("the payload is ambiguous: a name stands twice in one object")
    return fields


def _integer(digits: str) -> int:
    """An int of any length, unless it alone is over the limit: a megabyte of digits would take a second."""
    if len(digits) > limits.LONGEST_INT_DIGITS:
        raise ValueTooLarge(len(digits), limits.LONGEST_INT_DIGITS)
    return integers.parse(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f"the payload is not JSON: JSON has no {name}")
