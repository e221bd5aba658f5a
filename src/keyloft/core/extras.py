"""Names that need an extra: their modules are imported at the first use, and a missing extra is named."""

import importlib
from collections.abc import Callable
from typing import Any, Final

_PACKAGES: Final = {
    "cli": ("rich", "typer"),
    "etcd": ("google", "grpc", "grpcio", "protobuf"),
    "http": ("httptools", "starlette", "uvicorn"),
    "http-client": ("aiohttp",),
    "nats": ("nats", "nkeys"),
    "postgres": ("asyncpg",),
    "server": ("nats-server",),
    "sql": ("alembic", "sqlalchemy"),
}
EXTRAS: Final = {package: extra for extra, packages in _PACKAGES.items() for package in packages}
"""The extra that installs a package, by its import or distribution name."""


def not_installed(package: str, extra: str | None = None) -> str:
    """A message that a package is missing, with the command that installs it, or a larger `extra`."""
    extra = extra or EXTRAS.get(package, "all")
    return f'{package} is not installed: in a clone of Keyloft, pip install ".[{extra}]" installs it'


def loader(package: str, **elsewhere: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports some of its names at their first use.

    Args:
        package: The package's name.
        elsewhere: The module of each name.
    """

    def load(name: str) -> Any:
        if name not in elsewhere:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(elsewhere[name]), name)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            raise ModuleNotFoundError(f"{name} can't be imported: {not_installed(missing)}", name=missing) from error

    return load
