"""Turns msgspec's errors about a JSON body into Keyloft's: which field, what was expected, what was sent."""

import re
from typing import Any, Final

import msgspec
from msgspec import inspect

from keyloft.errors import InvalidArgument, KeyloftError, MissingField
from keyloft.nats.payloads import refuse_unknown

_AT: Final = re.compile(r"(.*) - at `\$((?:\.\w+|\[[0-9.]+\])*)`", re.DOTALL)
"""What is wrong, and at which path. The path is matched strictly: field names of a client may hold anything."""
_WRONG_TYPE: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_MISSING: Final = "Object missing required field `"
_UNKNOWN: Final = "Object contains unknown field `"
_CHOICE: Final = "Invalid enum value"
_STEP: Final = re.compile(r"\.(\w+)|\[")

_WORDS: Final = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
"""What JSON calls the types that msgspec names."""


def body_error(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> KeyloftError:
    """The refusal of a body that is JSON, but not what the route takes.

    Args:
        error: Of msgspec.
        kind: What the route takes.
    """
    divided = _AT.fullmatch(str(error))
    said, path = (str(error), "") if divided is None else (divided[1], divided[2].removeprefix("."))
    if found := _WRONG_TYPE.match(said):
        wanted = " or ".join([_WORDS.get(name, name) for name in found[1].split(" | ")])
        return InvalidArgument(f"{path or 'body'}: expected {wanted}, got {_WORDS.get(found[2], found[2])}")
    within = f"{path}." if path else ""
    if said.startswith(_MISSING):
        return MissingField(f"Missing required field: {within}{said[len(_MISSING) : -1]}")
    expected = _type_at(inspect.type_info(kind), path)
    if said.startswith(_UNKNOWN) and isinstance(expected, inspect.StructType):
        known = [field.encode_name for field in expected.fields]
        try:
            refuse_unknown({said[len(_UNKNOWN) : -1]: None}, known, within)
        except InvalidArgument as refusal:
            return refusal
    if said.startswith(_CHOICE) and isinstance(expected, inspect.LiteralType):
        return InvalidArgument(f"{path}: expected one of {', '.join(map(str, expected.values))}")
    return InvalidArgument(f"{path or 'body'}: expected what the OpenAPI document describes")


def _type_at(kind: Any, path: str) -> Any:
    """The type of what a path leads to; None if that is not known."""
    for step in _STEP.finditer(f".{path}" if path else ""):
        if step[1] is None:
            kind = getattr(kind, "item_type", None)
        else:
            fields = getattr(kind, "fields", ())
            kind = next((field.type for field in fields if field.encode_name == step[1]), None)
    return kind
