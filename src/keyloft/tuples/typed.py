"""Typed values: JSON that is read back as an object of the type that a caller names.

A type is a dataclass, a msgspec Struct, an attrs class, a TypedDict, a pydantic model, or a type made of such. What is
stored is JSON that others can read without the type: datetimes and UUIDs as texts, sets as lists, bytes in base64.
A value is read back before it is stored, and refused unless that gives an equal one.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol, get_args, get_origin

import msgspec

from keyloft import limits
from keyloft.core import json_text, values
from keyloft.core.interrupts import raised_by_a_handler
from keyloft.core.values import BYTES, COUNTER, JSON, U64, Encoding
from keyloft.errors import InvalidArgument, InvalidValue, InvalidValueType, Undecodable, WrongType
from keyloft.tuples.comparing import Difference, difference
from keyloft.tuples.refusals import refused_part

_PLAIN: Final[dict[Any, Encoding]] = {bytes: BYTES, U64: COUNTER}
"""Types that the tuple store holds in an encoding of their own."""
_MODULES_OF_TYPES: Final = frozenset({"typing", "typing_extensions", "types"})
# Messages of msgspec that are safe to repeat: others may show the value.
_NAMES_TYPES_ONLY: Final = re.compile(
    r"Expected `|Object (missing required|contains unknown) field |(Encoding o|O)bjects of type "
)
_OF_ALIASES: Final = "it nests too deep, as a type alias does that contains itself; a class may contain itself"


class JsonForm(Protocol):
    """How objects of a type are written in JSON, and read."""

    def write(self, value: Any) -> bytes: ...

    def read(self, data: bytes) -> Any: ...

    def convert(self, value: Any) -> Any:
        """An object of the type from bytes or a U64."""


class Codec:
    """Stores and reads the values of one type."""

    def __init__(self, wanted: Any, form: JsonForm) -> None:
        self._name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
        self._form = form

    def encode(self, value: object, limit: int) -> tuple[bytes, Encoding]:
        """The stored form of a value.

        Raises:
            InvalidValue: It would not be read back equal.
            ValueTooLarge: Its stored form has more than `limit` bytes.
        """
        try:
            data, differs = json_text.on_any_stack(self._write, value)
        except Exception as error:  # also of the type's own methods
            if raised_by_a_handler(error, lambda: json_text.on_any_stack(self._write, value)):
                raise
            part = refused_part(value, self._form.write if isinstance(self._form, _MsgspecForm) else None)
            kind = InvalidValueType if isinstance(error, TypeError) else InvalidValue
            reason = f"value: would not be read back as {self._name}{_reason(error)}{_cure(error)}"
            raise kind(reason if part is None else self._shown_difference(part)) from None
        if differs is not None:
            raise InvalidValue(self._shown_difference(differs))
        values.check_json(data, limit)
        return data, JSON

    def _shown_difference(self, found: Difference) -> str:
        return f"{found.path}: a {found.kind} would not be read back equal as {self._name}; {found.cure}"

    def decode(self, data: bytes, encoding: int) -> Any:
        """The value of its stored form.

        Raises:
            WrongType: What is stored does not fit the type.
            Undecodable: The bytes don't have this encoding.
        """
        stored = values.decode(data, encoding) if encoding else None
        try:
            return json_text.on_any_stack(self._read, data) if not encoding else self._form.convert(stored)
        except RecursionError:
            raise  # the caller's stack is used up
        except Exception as error:  # also of the type's own methods
            if not encoding and raised_by_a_handler(error, lambda: json_text.on_any_stack(self._read, data)):
                raise
            if not encoding:
                values.decode_json(data)  # raises if it is damaged
            reason = _reason(error)
        raise WrongType(f"can't be read as {self._name}{reason}; without a type it can be read as it is")

    def _write(self, value: object) -> tuple[bytes, Difference | None]:
        data = self._form.write(value)
        return data, difference(value, self._read(data))

    def _read(self, data: bytes) -> Any:
        return values.read_json(self._form.read, data)

    def decode_json_many(self, many: Sequence[bytes]) -> list[Any]:
        """The values of several JSON texts.

        Raises:
            Undecodable: One is not JSON, or does not fit the type; `decode` says which, and why.
        """
        try:
            return list(map(self._form.read, many))
        except Exception as error:
            if raised_by_a_handler(error, lambda: list(map(self._form.read, many))):
                raise
            raise Undecodable("a stored value does not fit") from None


class _PlainCodec(Codec):
    """Bytes and U64 counters, which are stored as they are without a type, too."""

    def __init__(self, wanted: type) -> None:
        self._wanted = wanted
        self._name = wanted.__name__

    def encode(self, value: object, limit: int) -> tuple[bytes, Encoding]:
        if type(value) is not self._wanted:
            raise InvalidValueType(f"value: expected {self._name}, got {type(value).__name__}")
        return values.encode(value, limit)

    def decode(self, data: bytes, encoding: int) -> Any:
        if encoding != _PLAIN[self._wanted] and encoding >= 0:
            raise WrongType(f"is not {self._name}; without a type it can be read as it is")
        return values.decode(data, encoding)

    def decode_json_many(self, many: Sequence[bytes]) -> list[Any]:
        raise Undecodable("a stored value does not fit")


def codec_of(wanted: Any) -> Codec:
    """The codec that stores and reads values of a type.

    Raises:
        InvalidArgument: Values of this type can't be stored.
    """
    try:
        return _remembered_codec(wanted)
    except TypeError:  # it has no hash, as some annotations
        return _new_codec(wanted)


def _new_codec(wanted: Any) -> Codec:
    if wanted is bytes or wanted is U64:
        return _PlainCodec(wanted)
    if not (isinstance(wanted, type) or get_origin(wanted) or type(wanted).__module__ in _MODULES_OF_TYPES):
        raise InvalidArgument(f"type: expected a type, got an instance of {type(wanted).__name__}")
    if isinstance(wanted, type) and hasattr(wanted, "__pydantic_validator__"):
        return Codec(wanted, _pydantic_form(wanted))
    try:
        return Codec(wanted, _MsgspecForm(wanted))
    except Exception as error:  # NameError for a type that is not defined yet; TypeError for most others
        if _names_pydantic(wanted):  # it takes unions of several models, which msgspec can't tell from each other
            return Codec(wanted, _pydantic_form(wanted))
        if raised_by_a_handler(error, lambda: _MsgspecForm(wanted)):
            raise
        reason = _OF_ALIASES if isinstance(error, RecursionError) else error
        raise InvalidArgument(f"type: values of {_shown(wanted)} can't be stored: {reason}") from None


def _names_pydantic(wanted: Any) -> bool:
    return hasattr(wanted, "__pydantic_validator__") or any([_names_pydantic(part) for part in get_args(wanted)])


_remembered_codec: Final = functools.lru_cache(limits.TYPES_REMEMBERED)(_new_codec)


def encode(value: object, wanted: Any, limit: int) -> tuple[bytes, Encoding]:
    """The stored form of a value; with a type, by its codec."""
    return values.encode(value, limit) if wanted is None else codec_of(wanted).encode(value, limit)


def codec_or_none(wanted: Any) -> Codec | None:
    """The codec of a type, if a caller has named one."""
    return None if wanted is None else codec_of(wanted)


class _MsgspecForm:
    """Dataclasses, Structs, attrs classes, TypedDicts and what is made of them, also with pydantic models inside."""

    def __init__(self, wanted: Any) -> None:
        self.write = msgspec.json.Encoder(enc_hook=_write_other).encode
        self.read = msgspec.json.Decoder(wanted, dec_hook=_read_other).decode
        self.convert = functools.partial(msgspec.convert, type=wanted, dec_hook=_read_other)


def _write_other(value: Any) -> msgspec.Raw:
    wanted: Any = type(value)
    if hasattr(wanted, "__pydantic_validator__"):
        return msgspec.Raw(_pydantic_form(wanted).write(value))
    raise TypeError(f"Objects of type {type(value).__name__} can't be stored")


def _read_other(wanted: Any, value: Any) -> Any:
    if hasattr(wanted, "__pydantic_validator__"):
        return _pydantic_form(wanted).read(msgspec.json.encode(value))
    raise TypeError(f"Objects of type {_shown(wanted)} can't be read from JSON")


class _PydanticForm:
    """Types that pydantic reads and writes; bytes are base64 here, because pydantic would write them as text."""

    def __init__(self, serializer: Any, validator: Any) -> None:
        self.write = functools.partial(serializer.to_json, by_alias=True, round_trip=True)
        self.read = validator.validate_json
        self.convert = validator.validate_python


@functools.lru_cache(limits.TYPES_REMEMBERED)
def _pydantic_form(wanted: Any) -> _PydanticForm:
    from pydantic import TypeAdapter  # no requirement: only a caller that has it names a type of it
    from pydantic_core import SchemaSerializer, SchemaValidator

    adapter = TypeAdapter(wanted)
    schema, holds_bytes = _with_base64(adapter.core_schema)
    if not holds_bytes:
        return _PydanticForm(adapter.serializer, adapter.validator)
    try:
        # Without `_use_prebuilt=False`, models inside of others would still write bytes as text.
        return _PydanticForm(
            SchemaSerializer(schema, None, _use_prebuilt=False), SchemaValidator(schema, None, _use_prebuilt=False)
        )
    except TypeError:  # an earlier version of pydantic
        return _PydanticForm(SchemaSerializer(schema), SchemaValidator(schema))


def _with_base64(node: Any) -> tuple[Any, bool]:
    """A copy of a pydantic schema in which bytes are base64, and whether it has any bytes."""
    if isinstance(node, (list, tuple)):
        copies = [_with_base64(item) for item in node]
        return type(node)([copy for copy, _ in copies]), any([found for _, found in copies])
    if not isinstance(node, dict):
        return node, False
    holds_bytes = node.get("type") == "bytes"
    copy = {}
    for name, item in node.items():
        copy[name], found = (item, False) if name in ("cls", "metadata") else _with_base64(item)
        holds_bytes = holds_bytes or found
    if node.get("type") in ("model", "dataclass", "typed-dict"):
        copy["config"] = {**node.get("config", {}), "ser_json_bytes": "base64", "val_json_bytes": "base64"}
    return copy, holds_bytes


def _reason(error: Any) -> str:
    """Why a value does not fit a type, for messages: where, and which type is expected, but never the value."""
    if _is_of_pydantic(error):
        [first, *_] = error.errors(include_url=False, include_context=False, include_input=False)
        where = "".join([f"[{part!r}]" for part in first["loc"]])
        return f": {first['type'].replace('_', ' ')}{f' at {where}' if where else ''}"
    if isinstance(error, RecursionError):
        return ": it nests too deep, or contains itself"
    if isinstance(error, UnicodeEncodeError):
        return ": it holds a lone surrogate, which is not Unicode text"
    text = str(error)
    if _NAMES_TYPES_ONLY.match(text):
        return f": {text}"
    if isinstance(error, msgspec.ValidationError):
        _, at, path = text.rpartition(" - at ")
        inner = _reason(error.__cause__) if _is_of_pydantic(error.__cause__) else ": a wrong value"
        return f"{inner}{at}{path if at else ''}"
    return f": {type(error).__name__}"


def _cure(error: Any) -> str:
    """What to do if a value can't be read back from what was just written, for messages; often the reason says it."""
    if isinstance(error, msgspec.ValidationError) and "missing required field `_" in str(error):
        return "; in an attrs class, no field's name may begin with _"
    of_model = error if _is_of_pydantic(error) else error.__cause__
    if _is_of_pydantic(of_model) and of_model.errors(include_input=False)[0]["type"] == "missing":
        return "; every field must be set, and must be written by a name that it is read by: give it one alias for both"
    return ""


def _is_of_pydantic(error: Any) -> bool:
    return hasattr(error, "errors") and hasattr(error, "error_count")


def _shown(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)
