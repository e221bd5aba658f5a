"""Tells a caller who takes a store for a dict what to write instead."""

from typing import TYPE_CHECKING, NoReturn


class NoSubscripts:
    """The base of the stores: `kv[key]`, `key in kv` and `for key in kv` raise an error that names the methods."""

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(
                "a store is not a dict: get(key) reads an entry, set(key, value) stores a value, delete(key) removes "
                "one, list() and keys() iterate"
            )

        def __setitem__(self, key: object, value: object) -> NoReturn:
            self[key]

        __delitem__ = __getitem__
