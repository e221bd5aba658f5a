"""Storage for the plugins of a bot: JSON under a plugin's name, over NATS or called directly.

    db = BotDatabase("sqlite:///bot.db")          # the entries in a database
    service = DatabaseService(nats, db)           # serves them on db.kv.<plugin>.<operation>
    client = await DatabaseClient.connect("nats://…", plugin_name="trivia")

`PluginKVStorage` is the table as a SQLAlchemy model, for migrations, reports and tests.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from keyloft.plugins.store import BotDatabase

if TYPE_CHECKING:
    from keyloft.bus import Login
    from keyloft.plugins.client import DatabaseClient
    from keyloft.plugins.models import PluginKVStorage
    from keyloft.plugins.service import DatabaseService

__all__ = ["BotDatabase", "DatabaseClient", "DatabaseService", "Login", "PluginKVStorage"]


# Loaded when they are asked for: nats-py is an extra, and SQLAlchemy takes 19 MB that a service never needs.
_ELSEWHERE: Final = {
    "DatabaseClient": ("keyloft.plugins.client", "nats"),
    "DatabaseService": ("keyloft.plugins.service", "nats"),
    "Login": ("keyloft.bus", "nats"),
    "PluginKVStorage": ("keyloft.plugins.models", "sql"),
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _ELSEWHERE[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs the package {error.name}, which comes with an extra: "
            f'pip install "keyloft[{extra}]", or in a clone pip install ".[{extra}]"'
        ) from error
