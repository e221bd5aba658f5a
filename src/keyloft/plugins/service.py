"""Serves the plugins' storage on NATS: `db.kv.<plugin>.<operation>`."""

import asyncio
import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from msgspec.structs import replace
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.errors import DatabaseError, InvalidValue, KeyloftError, NotACounter, ValueTooLarge, VersionConflict
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.connection import cancel
from keyloft.nats.errors import is_unexpected, refusal, wire_code
from keyloft.nats.meters import OTHER
from keyloft.nats.reporting import Route
from keyloft.nats.requests import Operation, Request
from keyloft.nats.service import Metadata, NatsService
from keyloft.plugins import rules
from keyloft.plugins.logs import OperationLog
from keyloft.plugins.meters import Meters
from keyloft.plugins.operations import operations
from keyloft.plugins.quota_writes import under_quotas
from keyloft.plugins.schemas import MESSAGES
from keyloft.plugins.store import BotDatabase
from keyloft.plugins.usage import PluginUsage
from keyloft.plugins.watchable import WatchablePlugins

logger = logging.getLogger(__name__)


class DatabaseService(NatsService):
    """Lets plugins store JSON by sending NATS messages.

    Example:
        async with DatabaseService(nats, BotDatabase("sqlite:///bot.db")):
            …                     # after this the connection and the database can be closed
    """

    meters: Meters
    name = "keyloft-plugins"
    description = "JSON storage for the plugins of a bot"
    subject_names = ("plugin",)
    messages = MESSAGES

    def __init__(
        self,
        nats: Nats,
        db: BotDatabase,
        *,
        prefixes: Sequence[str] = rules.PREFIXES,
        reserved: Sequence[str] = (),
        queue: str = rules.QUEUE,
        bounds: IntakeBounds | None = None,
        deadline: float = limits.DEADLINE_SECONDS,
        cleanup_every: float = limits.CLEANUP_SECONDS,
        usage: PluginUsage | None = None,
        meters: Meters | None = None,
        metadata: Metadata | None = None,
        lease_seconds: float = limits.LEASE_SECONDS,
    ) -> None:
        """Args:
        nats: A client of nats-py, connected when `start` is called; the caller closes it.
        db: The plugins' entries; the caller closes it.
        prefixes: The subjects before `.<plugin>.<operation>`.
        reserved: Prefixes of other services on this connection: no answer is sent there.
        queue: Services of one queue group share the requests.
        bounds: How much one plugin, and all together, may send before the next request is answered BUSY.
        deadline: Seconds after which a request is answered with an error if the database has not answered.
        cleanup_every: Seconds between two removals of expired entries.
        usage: What plugins store, and their quotas; the caller closes it. Without it, there are no quotas.
        meters: Where to count the operations.
        metadata: Shown for this instance by `$SRV.PING`; a function is called each time.
        lease_seconds: How long a watch lasts unless its client renews it.
        """
        self._usage = usage or PluginUsage(db)
        self._owns_usage = usage is None
        super().__init__(
            nats,
            prefixes,
            operations(nats, db, self._usage, self._part_of_many),
            WatchablePlugins(),
            reserved=reserved,
            queue=queue,
            deadline=deadline,
            bounds=bounds or IntakeBounds(),
            meters=meters or Meters(),
            metadata=metadata,
            lease_seconds=lease_seconds,
        )
        self.db = db
        self._under_quotas = under_quotas(db, self._usage)
        self._cleanup_every = cleanup_every
        self._cleaning: asyncio.Task[None] | None = None
        self._log = OperationLog(logger)

    async def start(self) -> None:
        await super().start()
        self._cleaning = asyncio.create_task(self._clean_up_regularly(), name="keyloft plugins: clean-up")

    async def aclose(self) -> None:
        await super().aclose()
        cleaning, self._cleaning = self._cleaning, None
        if cleaning is not None:
            await cancel(cleaning)
        if self._owns_usage:
            await self._usage.aclose()
        self._log.close()

    stop = aclose

    async def _engine(self) -> Engine:
        return await self.db.engine()

    def _owner_of(self, names: Sequence[str]) -> tuple[str, str]:
        [name] = names
        return rules.plugin_name(name), name

    def _route(self, subject: str) -> Route:
        route = super()._route(subject)
        return replace(route, operation=self._under_quota(route.owner, route.operation)) if route.owner else route

    def _under_quota(self, plugin: str, operation: Operation) -> Operation:
        """The operation of this name for a plugin, which may have a quota."""
        if self._usage.quotas.of(plugin) is None:
            return operation
        return self._under_quotas.get(operation.name, operation)

    def _part_of_many(self, plugin: str, name: str) -> Operation:
        return self._under_quota(plugin, self._named(name))

    # What became of requests

    def done(self, request: Request, seconds: float, outcome: Any) -> None:
        operation, content = request.operation, request.content
        details = operation.details(content, outcome)
        self._log.operation(operation.name, request.about, operation.key(content), seconds, **details)

    def refused(self, request: Request, error: Exception) -> bytes:
        if isinstance(error, NotACounter):
            error = error.at(request.operation.key(request.content))  # without the plugin
        message = str(error) if isinstance(error, KeyloftError) else type(error).__name__
        if isinstance(error, DatabaseError) and error.is_for_callers and error.__cause__ is not None:
            message += f"; {error.__cause__}"
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            message = "the value was refused"  # the full message names parts of the value; only the sender gets it
        if is_unexpected(error):
            self._log.unexpected(error)
        content, operation, code = request.content, request.operation, wire_code(error)
        self._count_errors(operation.name, code)
        key = "" if isinstance(content, bytes) else operation.key(content)
        self._log.refusal(operation.name, request.about or OTHER, key, code, message)
        return refusal(error, {"current": error.current} if isinstance(error, VersionConflict) else None)

    def unsent(self, reason: str) -> None:
        self._log.unsent(reason)

    # Cleaning up

    async def _clean_up_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._cleanup_every)
            began = perf_counter()
            try:
                removed = await self.db.kv_cleanup_expired()
            except KeyloftError as error:
                logger.error("[KV] Cleanup error (%s): %s", error.code, error, exc_info=True)
                continue
            except Exception:
                logger.exception("[KV] Cleanup error")
                continue
            self._report_cleaned(removed, perf_counter() - began)

    def _report_cleaned(self, removed: int, seconds: float) -> None:
        self.meters.cleanups.add(seconds)
        self.meters.cleaned += removed
        fields = {"operation": "kv_cleanup", "removed": removed, "latency_ms": round(seconds * 1000, 1)}
        if removed:
            logger.info("[KV] Cleanup: removed %d expired keys in %.2fs", removed, seconds, extra=fields)
        if seconds > limits.SLOW_CLEANUP_SECONDS:
            logger.warning("[KV] Cleanup slow: %.2fs for %d keys", seconds, removed, extra=fields)
