"""Names that come with an extra: loaded when they are asked for, with a word to whoever lacks it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, elsewhere: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names may be elsewhere.

    Args:
        package: Its name.
        elsewhere: By name: the module that has it, and the extra that brings what the module needs.
    """

    def load(name: str) -> Any:
        if name not in elsewhere:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, extra = elsewhere[name]
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{name} needs the package {error.name}, which comes with an extra: "
                f'pip install "keyloft[{extra}]", or in a clone pip install ".[{extra}]"'
            ) from error

    return load
