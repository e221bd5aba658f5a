"""Keys as text, for commands and exports: `users/alice`, with a form for every type that a key can have.

    text      as it is: alice
    int       =42, =-7
    float     =1.5, =1e300, =inf, =nan; always with a point, an exponent or a name
    bool      =true, =false
    bytes     =x00ff, in hex
    nothing   =, the empty text
    dots      =. and =.., the texts . and .., which URL parsers would resolve

In a text, `/`, `%`, spaces, control characters and an `=` at its beginning are written with a percent sign, as in a
URL: `%2F`. What `write` writes, `read` reads as the same key, types included.
"""

import re
from typing import Final
from urllib.parse import quote, unquote, unquote_to_bytes

from keyloft.core.keys import Part, TupleKey
from keyloft.errors import InvalidKey

_WORDS: Final[dict[str, Part]] = {"": "", ".": ".", "..": "..", "true": True, "false": False}
_DOTS: Final = (".", "..")
_INT: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
_HEX: Final = re.compile(r"x(?:[0-9A-Fa-f]{2})*", re.ASCII)
_FLOAT: Final = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|inf|nan)", re.ASCII)
_TO_ESCAPE: Final = re.compile("[/%\x00-\x20\x7f-\xa0\u2028\u2029]|^=")
_BROKEN_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_FORMS: Final = "=42 is an int, =1.5 a float, =true a bool, =x00ff bytes, and = alone the empty text"


def read(text: str) -> TupleKey:
    """The key that a text stands for.

    Raises:
        InvalidKey: It is not the text of a key.
    """
    if not text:
        raise InvalidKey("a key has at least one part, as in users/alice")
    return tuple([_read_part(part) for part in text.split("/")])


def read_prefix(text: str) -> TupleKey:
    """The prefix that a text stands for: the empty text for everything; a slash at the end is ignored."""
    text = text.removesuffix("/")
    return read(text) if text else ()


def write(key: TupleKey) -> str:
    """The text that stands for a key."""
    return "/".join([_written_part(part) for part in key])


def _read_part(part: str) -> Part:
    if not part:
        raise InvalidKey(f"a key has no empty parts between its slashes; {_FORMS}")
    if not part.startswith("="):
        if "%" not in part and part.isascii():
            return part
        if _BROKEN_ESCAPE.search(part):
            raise InvalidKey(
                f"in {part!a} a percent sign is not followed by two hex digits; write %25 for the sign itself"
            )
        try:
            return unquote_to_bytes(part).decode()
        except (UnicodeDecodeError, UnicodeEncodeError):
            raise InvalidKey(f"{part!a} stands for no Unicode text") from None
    typed = unquote(part[1:])  # a client may write =1e%2B16
    if typed in _WORDS:
        return _WORDS[typed]
    if _INT.fullmatch(typed):
        try:
            return int(typed)
        except ValueError:
            raise InvalidKey(f"an int of {len(typed)} digits is too long for a key") from None
    if _FLOAT.fullmatch(typed):
        return float(typed)
    if _HEX.fullmatch(typed):
        return bytes.fromhex(typed[1:])
    raise InvalidKey(f"{part!a} is no part of a key: {_FORMS}; a text that begins with an equals sign is written %3D…")


def _written_part(part: Part) -> str:
    match part:
        case bool():
            return "=true" if part else "=false"
        case int():
            return f"={int(part)}"
        case float():
            return f"={float(part)!r}"
        case bytes():
            return f"=x{part.hex()}"
    if part in _DOTS:
        return f"={part}"
    return _TO_ESCAPE.sub(lambda found: quote(found[0], safe=""), part) or "="
