"""What the files of other stores hold: entries that can be stored, and entries that can't."""

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct


class ForeignEntry(Struct, frozen=True):
    """A key and a value as the other store gave them to its users."""

    key: Any
    value: Any
    expires_at: int | None = None
    """In milliseconds since 1970."""


class RefusedEntry(Struct, frozen=True):
    """An entry that is not imported."""

    key: str
    """The key, as it can be shown."""
    reason: str


class NotReadable(Exception):
    """A key or value can't be imported; the message says why, and shows no value."""


Unpickle: TypeAlias = Callable[[bytes], Any]


def refuse_pickle(data: bytes) -> Any:
    """Refuse a pickle.

    Raises:
        NotReadable: Always.
    """
    raise NotReadable(
        "is a pickle, and loading one can run any code that its writer chose (as in CVE-2025-69872): pass trust=True, "
        "or --trust, if you trust all who could write this file"
    )


def read_plain_pickle(data: bytes) -> Any:
    """The plain data in a pickle. A pickle that names a class or a function is refused, so that none of its code runs.

    Raises:
        NotReadable: The pickle names a class or a function, or is damaged.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except NotReadable:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise NotReadable(f"is not a pickle that can be read ({type(error).__name__})") from None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NotReadable(
            f"is a pickle with an object of {ascii(f'{module}.{name}')[1:-1]}; only None, bool, int, float, str, "
            "bytes, list, tuple and dict can be imported: convert it with the program that wrote it"
        )


def shown_key(key: object) -> str:
    """A key for messages."""
    text = ascii(key)
    return text if len(text) <= 80 else f"{text[:79]}…"
