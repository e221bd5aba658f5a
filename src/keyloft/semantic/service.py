"""Serves the semantic store on NATS: `db.semantic.<tenant>.<project>.<operation>`."""

import logging
from collections.abc import Sequence
from typing import Any

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.errors import Busy, DatabaseError, InvalidValue, KeyloftError, ValueTooLarge
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.errors import is_unexpected, wire_code
from keyloft.nats.log_rate import LogRate
from keyloft.nats.meters import ServiceMeters
from keyloft.nats.requests import Request
from keyloft.nats.service import Metadata, NatsService
from keyloft.semantic import keys, wire
from keyloft.semantic.keys import Project
from keyloft.semantic.operations import operations
from keyloft.semantic.schemas import MESSAGES
from keyloft.semantic.store import SemanticStore
from keyloft.semantic.watchable import WatchableProjects

logger = logging.getLogger(__name__)


class SemanticService(NatsService):
    """Lets workflows keep their state by sending NATS messages.

    Example:
        async with SemanticService(nats, store):
            …                     # after this the connection and the store can be closed
    """

    name = "keyloft-semantic"
    description = "semantic store: state of workflows"
    subject_names = ("tenant", "project")
    messages = MESSAGES

    def __init__(
        self,
        nats: Nats,
        store: SemanticStore,
        *,
        prefix: str = keys.PREFIX,
        reserved: Sequence[str] = (),
        queue: str = "keyloft",
        bounds: IntakeBounds | None = None,
        deadline: float = limits.DEADLINE_SECONDS,
        meters: ServiceMeters | None = None,
        metadata: Metadata | None = None,
        lease_seconds: float = limits.LEASE_SECONDS,
    ) -> None:
        """Args:
        nats: A client of nats-py, connected when `start` is called; the caller closes it.
        store: The caller closes it, too.
        prefix: The subject before `.<tenant>.<project>.<operation>`.
        reserved: Prefixes of other services on this connection, to which no reply is sent.
        queue: Services of one queue group share the requests.
        bounds: How much one tenant, and all together, may send before the next request is answered BUSY.
        deadline: Seconds after which a request is answered with an error if the database has not answered.
        meters: Where to count the operations.
        metadata: Shown for this instance by `$SRV.PING`; a function is called each time.
        lease_seconds: How long a watch lasts unless its client renews it.
        """
        super().__init__(
            nats,
            [prefix],
            operations(nats, store),
            WatchableProjects(),
            reserved=reserved,
            queue=queue,
            deadline=deadline,
            bounds=bounds or IntakeBounds(),
            meters=meters or ServiceMeters(),
            metadata=metadata,
            lease_seconds=lease_seconds,
        )
        self.store = store
        self._log_rate = LogRate(limits.LOG_LINES_PER_SECOND, self._log_left_out)

    async def aclose(self) -> None:
        await super().aclose()
        self._log_rate.close()

    stop = aclose

    async def _engine(self) -> Engine:
        return self.store.engine

    def _owner_of(self, names: Sequence[str]) -> tuple[str, Project]:
        project = keys.checked_project(*names)
        return project.tenant, project

    # What became of requests

    def logs_all(self) -> bool:
        return False  # the store itself logs each write

    def done(self, request: Request, seconds: float, outcome: Any) -> None:
        if self._log_rate.allows():
            fields = {"operation": f"semantic_{request.operation.name}", "where": _where(request)}
            text = "[KV] slow semantic %s: %s latency_ms=%.1f"
            logger.warning(text, request.operation.name, _where(request), seconds * 1000, extra=fields)

    def refused(self, request: Request, error: Exception) -> bytes:
        code = wire_code(error)
        self._count_errors(request.operation.name, code)
        if code not in ("VERSION_CONFLICT", "STALE_FENCE"):  # the store itself has logged the conflict
            self._log(request, error, code)
        return wire.refusal(error, self.nats.max_payload)

    def _log(self, request: Request, error: Exception, code: str) -> None:
        is_failure = not isinstance(error, KeyloftError) or (
            isinstance(error, DatabaseError) and not isinstance(error, Busy)
        )
        reason = str(error)
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            reason = "the value was refused"  # the full message names parts of the value; only the sender gets it
        if self._log_rate.allows():
            name, level = request.operation.name, logging.ERROR if is_failure else logging.WARNING
            text = f"[KV] semantic {name or 'request'} failed: %(where)s error=%(error_code)s %(reason)s"
            fields = {"operation": f"semantic_{name}", "where": _where(request), "error_code": code}
            traceback_of = error if is_unexpected(error) else None
            logger.log(level, text, fields | {"reason": reason}, exc_info=traceback_of, extra=fields)

    def unsent(self, reason: str) -> None:
        if self._log_rate.allows():
            logger.error("[KV] a reply could not be sent: %s", reason)

    def _log_left_out(self, lines: int) -> None:
        logger.warning("[KV] %d more semantic requests failed or were slow within a second", lines)


def _where(request: Request) -> str:
    return "no project" if request.about is None else f"{request.about.tenant}/{request.about.name}"
