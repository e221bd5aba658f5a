"""Makes texts that a sender chose safe for a log: no commands for the terminal, no forged lines or fields."""

import re
from typing import Final

_AMBIGUOUS: Final = re.compile(r"[\s'\"=\\]")


def printable(text: str) -> str:
    """The text with an escape for each character that does not print.

    These are control characters, those of C1 included, line and paragraph separators, all spaces but the usual one,
    marks that change the direction of writing, other invisible marks, and lone surrogates.
    """
    return text if text.isprintable() else "".join([_escaped(character) for character in text])


def field(content: object) -> str:
    """What follows `name=` in a line: as it is if that is unambiguous, else quoted and with escapes."""
    text = str(content)
    return text if text and text.isprintable() and _AMBIGUOUS.search(text) is None else repr(text)


def printable_json(document: str) -> str:
    """A JSON document in which each character that does not print is an escape of JSON."""
    if document.isprintable():
        return document
    return "".join([character if character.isprintable() else _json_escaped(character) for character in document])


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join([f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)])
