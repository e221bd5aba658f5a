"""A plugin service over an ORM, as a child process: `python -m bench.arms.nats.orm_handlers ADDRESS PREFIX FILE KEYS`.

A subscription and a handler per operation, a session per call.
"""

import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from bench.arms.sqlalchemy_orm import Database, filled
from bench.harness.child_main import run
from bench.harness.data import stored_pairs

logger = logging.getLogger(__name__)


class Handlers:
    """Answers gets and sets, one after the other: nats-py awaits each handler before it delivers the next message."""

    def __init__(self, client: Client, db: Database, prefix: str) -> None:
        self._nats = client
        self._db = db
        self._prefix = prefix

    async def start(self) -> None:
        await self._nats.subscribe(f"{self._prefix}.*.set", cb=self._set)
        await self._nats.subscribe(f"{self._prefix}.*.get", cb=self._get)

    async def _set(self, message: Msg) -> None:
        plugin_name = None
        try:
            plugin_name = self._plugin_name(message.subject)
            data = json.loads(message.data.decode())
            for field in ("key", "value"):
                if field not in data:
                    raise ValueError(f"Missing required field: {field}")
            await self._db.kv_set(plugin_name, data["key"], data["value"], data.get("ttl"))
            logger.debug(f"set: plugin={plugin_name} key={data['key']}")
            if message.reply:
                await self._answer(message, {"success": True})
        except json.JSONDecodeError as error:
            await self._refuse(message, "INVALID_JSON", f"Invalid JSON: {error}")
        except ValueError as error:
            await self._refuse(message, "VALIDATION_ERROR", str(error))
        except Exception:
            logger.exception(f"set failed: plugin={plugin_name}")
            await self._refuse(message, "DATABASE_ERROR", "Internal database error")

    async def _get(self, message: Msg) -> None:
        plugin_name = None
        try:
            plugin_name = self._plugin_name(message.subject)
            data = json.loads(message.data.decode())
            if "key" not in data:
                raise ValueError("Missing required field: key")
            found = await self._db.kv_get(plugin_name, data["key"])
            logger.debug(f"get: plugin={plugin_name} key={data['key']} hit={found['exists']}")
            await self._answer(message, found)
        except Exception:
            logger.exception(f"get failed: plugin={plugin_name}")
            await self._refuse(message, "DATABASE_ERROR", "Internal database error")

    def _plugin_name(self, subject: str) -> str:
        parts = subject.split(".")
        if len(parts) != 4 or ".".join(parts[:2]) != self._prefix or not re.match(r"^[a-z0-9\-_]+$", parts[2]):
            raise ValueError("Invalid subject format")
        return parts[2]

    async def _refuse(self, message: Msg, code: str, text: str) -> None:
        if message.reply:
            await self._answer(message, {"success": False, "error_code": code, "message": text})

    async def _answer(self, message: Msg, reply: dict[str, Any]) -> None:
        await self._nats.publish(message.reply, json.dumps(reply).encode())


@asynccontextmanager
async def handling(address: str, prefix: str, path: Path, stored: int) -> AsyncIterator[None]:
    engine = await filled(path, stored_pairs(stored))
    client = await nats.connect(address)
    await Handlers(client, Database(engine), prefix).start()
    # Twice: nats-py's first ping may overtake the subscriptions that are still in its buffer.
    await client.flush()
    await client.flush()
    yield
    await client.close()
    await engine.dispose()


if __name__ == "__main__":
    run(handling(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
