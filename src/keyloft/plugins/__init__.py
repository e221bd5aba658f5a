"""Storage for the plugins of a bot: JSON under a plugin's name, over NATS or called directly.

    db = BotDatabase("sqlite:///bot.db")          # the entries in a database
    service = DatabaseService(nats, db)           # serves them on db.kv.<plugin>.<operation>
    client = await DatabaseClient.connect("nats://…", plugin_name="trivia")

`PluginKVStorage` is the table as a SQLAlchemy model, for migrations, reports and tests.
"""

from typing import TYPE_CHECKING, Any

from keyloft.bus import Login
from keyloft.plugins.client import DatabaseClient
from keyloft.plugins.service import DatabaseService
from keyloft.plugins.store import BotDatabase

if TYPE_CHECKING:
    from keyloft.plugins.models import PluginKVStorage

__all__ = ["BotDatabase", "DatabaseClient", "DatabaseService", "Login", "PluginKVStorage"]


def __getattr__(name: str) -> Any:
    # SQLAlchemy takes 19 MB of memory: a service that needs only the database itself never loads it.
    if name == "PluginKVStorage":
        from keyloft.plugins.models import PluginKVStorage

        return PluginKVStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
