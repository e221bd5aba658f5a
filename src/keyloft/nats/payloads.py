"""Reads the JSON of a request strictly: the refusal of an ambiguous or broken one says exactly what is wrong."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from keyloft import limits
from keyloft.core import json_text
from keyloft.errors import InvalidArgument, InvalidJson, MissingField

LEVELS: Final = 1 + limits.PLUGIN_VALUE_DEPTH
"""How deep a request may nest: the value, and the object that it is a field of."""

to_json = msgspec.json.Encoder().encode


def check_json(data: bytes) -> None:
    """Check that a payload is JSON, without reading it.

    Raises:
        InvalidJson: It is not.
        InvalidArgument: It is nested too deeply.
    """
    json_text.check_depth(data, LEVELS)
    json_text.check_syntax(data)


def too_large(size: int, most: int) -> InvalidArgument:
    """The error of a message that is larger than its operation takes. It is refused by its size alone, unread."""
    return InvalidArgument(f"the payload has {size} bytes; this operation takes at most {most}")


def is_empty(data: bytes) -> bool:
    """Whether a payload has nothing but white space."""
    return not data.strip(b" \t\r\n")


def field(fields: Mapping[str, Any], name: str) -> Any:
    """A required field of a request.

    Raises:
        MissingField: The request does not have it.
    """
    if name not in fields:
        raise MissingField(f"Missing required field: {name}")
    return fields[name]


def refuse_misspelt(fields: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a field that differs from a known one in case or underscores alone: it would be ignored otherwise.

    Raises:
        InvalidArgument: There is one; the message has the right name.
    """
    # First all names at once: one by one takes several times as long, and a request may have very many. Each name
    # stands between two characters that no name has: NUL in most requests, else a surrogate, which is not Unicode text.
    edge, names = "\x00", _between(fields, "\x00")
    if names.count(edge) > 2 * len(fields):
        edge, names = "\ud800", _between(fields, "\ud800")
    plain = names.replace("_", "").lower()
    for name in known:
        plain_name = name.replace("_", "")
        if plain.count(f"{edge}{plain_name}{edge}") > (name in fields):
            wrong = next(one for one in fields if one != name and one.replace("_", "").lower() == plain_name)
            raise InvalidArgument(f"{wrong:.50}: this field is called {name}")


def refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], within: str = "") -> None:
    """Refuse an unknown field: it would be ignored otherwise.

    Args:
        fields: The fields of the request, or of an object in it.
        known: The names of fields that may be there.
        within: The field that holds the object, with a dot, for the message.

    Raises:
        InvalidArgument: There is one; the message suggests a known name.
    """
    unknown = next((name for name in fields if name not in known), None)
    if unknown is None:
        return
    # Only the first unknown name, and only if it is short: the search takes more than linear time.
    near = difflib.get_close_matches(unknown, known, 1) if len(unknown) <= limits.COMPARED_NAME_CHARACTERS else []
    names = f"the fields are {', '.join(known)}" if known else "this operation has no fields"
    cure = f"did you mean {near[0]}?" if near else names
    raise InvalidArgument(f"{within}{ascii(unknown[:60])[1:-1][:60]}: there is no such field; {cure}")


def _between(names: Iterable[str], edge: str) -> str:
    """All names, each between two edges."""
    return edge + (edge + edge).join(names) + edge


def read(data: bytes, most_levels: int = LEVELS) -> tuple[dict[str, Any], bytes]:
    """The fields of a request, and the request as compact JSON; `json_text.compact` says what differs.

    Raises:
        InvalidJson: It is not JSON, or a name is twice in one object: one of the two values would be lost.
        InvalidArgument: It is JSON, but not an object, or nested too deeply.
    """
    if is_empty(data):
        raise InvalidJson("Invalid JSON: the payload is empty; send a JSON object, at least {}")
    fields, text = json_text.compact(data, most_levels)
    if not isinstance(fields, dict):
        raise InvalidArgument('the payload must be a JSON object, as in {"key": …}')
    return fields, text
