"""Storage for the plugins of a bot: JSON under a plugin's name, over NATS or called directly.

    db = BotDatabase("sqlite:///bot.db")          # the entries in a database
    service = DatabaseService(nats, db)           # serves them on db.kv.<plugin>.<operation>
    client = await DatabaseClient.connect("nats://…", plugin_name="trivia")

`PluginKVStorage` is the table as a SQLAlchemy model, for migrations, reports and tests.
"""

from typing import TYPE_CHECKING

from keyloft.core.extras import loader
from keyloft.plugins.entries import CurrentValue, PluginEntry, UsedStorage
from keyloft.plugins.store import BotDatabase

if TYPE_CHECKING:
    from keyloft.nats.connection import Login
    from keyloft.nats.events import Event
    from keyloft.plugins.client import DatabaseClient
    from keyloft.plugins.models import PluginKVStorage
    from keyloft.plugins.service import DatabaseService

__all__ = ["BotDatabase", "DatabaseClient", "DatabaseService", "Event", "Login", "PluginKVStorage"]
__all__ += ["CurrentValue", "PluginEntry", "UsedStorage"]


# nats-py is an extra, and SQLAlchemy takes memory that a service never needs.
if not TYPE_CHECKING:  # with a `__getattr__`, a type checker would accept any name
    __getattr__ = loader(
        __name__,
        DatabaseClient="keyloft.plugins.client",
        DatabaseService="keyloft.plugins.service",
        Event="keyloft.nats.events",
        Login="keyloft.nats.connection",
        PluginKVStorage="keyloft.plugins.models",
    )
