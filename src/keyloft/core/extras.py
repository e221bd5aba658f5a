"""Names that need an extra: their modules are imported at the first use, and a missing extra is named."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, elsewhere: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports some of its names at their first use.

    Args:
        package: The package's name.
        elsewhere: By name: the module that has it, and the extra that installs what the module needs.
    """

    def load(name: str) -> Any:
        if name not in elsewhere:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, extra = elsewhere[name]
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{name} needs the package {error.name}, which is not installed: "
                f'in a clone of Keyloft, pip install ".[{extra}]" installs it'
            ) from error

    return load
