"""Locks, audit records and dead letters of a project over NATS, where the service keeps them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from nats.errors import MaxPayloadError

from keyloft import limits
from keyloft.core.lazy import PagedList
from keyloft.core.log_text import printable
from keyloft.errors import Busy, CommitUnknown, DatabaseError, InvalidArgument, NoService, NotPermitted, Unanswered
from keyloft.semantic import wire, workflow_wire
from keyloft.semantic.audit import AuditRecord
from keyloft.semantic.background import BackgroundJobs
from keyloft.semantic.dead_letters import DeadLetter, DeadLetterKeeper, StoredDeadLetter
from keyloft.semantic.entry_watches import EntryWatch
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.intents import WriteRequest
from keyloft.semantic.rules import ExpectedVersion, check_expected_version

if TYPE_CHECKING:
    from keyloft.semantic.client import SemanticClient


class RemoteLocks:
    """The locks of a project, kept by the service: a `LockKeeper`."""

    def __init__(self, client: "SemanticClient") -> None:
        self._client = client
        self.background = BackgroundJobs()

    @property
    def shown(self) -> str:
        return repr(self._client)

    def whole_key(self, key: str) -> str:
        return self._client.project.prefix + key

    def watch(self, key: str) -> EntryWatch[Envelope | None]:
        return self._client.watch(key)

    async def acquire(self, request: WriteRequest) -> Envelope:
        _, fields = wire.fields_of(request)
        [intent] = request.intents
        assert intent.semantics is not None
        assert intent.semantics.ttl_seconds is not None
        del fields["expectedVersion"], fields["fence"]
        async with _attempt(intent.semantics.ttl_seconds):
            entry = wire.envelope_of((await self._send("acquire", fields))["entry"])
        assert entry is not None
        return entry

    async def renew(self, key: str, fence: int, ttl_seconds: int) -> datetime:
        async with _attempt(ttl_seconds):
            reply = await self._send("renew", {"key": key, "fence": fence, "ttlSeconds": ttl_seconds})
        return msgspec.convert(reply["expiresAt"], datetime)

    async def release(self, key: str, fence: int, *, writer: str, request_id: str | None) -> None:
        fields = {"key": key, "fence": fence, "lastWriter": writer, "requestId": request_id}
        async with _attempt(limits.LOCK_TTL_SECONDS):
            await self._send("release", fields)

    async def _send(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return await self._client._send("locks", {"action": action, **fields})


@asynccontextmanager
async def _attempt(ttl_seconds: int) -> AsyncIterator[None]:
    """One attempt at a request about a lock, with a timeout that leaves time for others before the lock expires.

    Raises:
        CommitUnknown: The request may have been carried out or not.
    """
    try:
        async with asyncio.timeout(ttl_seconds / limits.LOCK_RENEWALS_PER_TTL):
            yield
    except (Busy, NoService, NotPermitted):
        raise  # it was not carried out
    except (DatabaseError, Unanswered) as error:
        raise CommitUnknown(str(error)) from error
    except TimeoutError as error:
        raise CommitUnknown("the service has not answered in time; the request may have been carried out") from error


class RemoteLockList(PagedList[Envelope]):
    """The locks that are held: iterate them with `async for`, or `await` them all."""

    what = "locks"

    def __init__(self, client: "SemanticClient", values: bool, limit: int | None) -> None:
        super().__init__(client, limit)
        self._client = client
        self._values = values

    async def _page(self, limit: int, after: str | None) -> tuple[list[Envelope], str | None]:
        fields = {"values": self._values, "limit": limit, "after": None if after is None else int(after)}
        reply = await self._client._send("locks", fields)
        found = [lock for lock in map(wire.envelope_of, reply["locks"]) if lock is not None]
        return found, str(found[-1].fence) if reply["truncated"] else None


class RemoteAuditTrail(PagedList[AuditRecord]):
    """Audit records in the order of what happened: iterate them with `async for`, or `await` them all."""

    what = "audit records"

    def __init__(
        self, client: "SemanticClient", key: str | None, *, after: int | None, limit: int | None, reverse: bool
    ) -> None:
        super().__init__(client, limit)
        self._client = client
        self._fields = {"key": key, "after": after, "reverse": reverse}

    async def _page(self, limit: int, after: str | None) -> tuple[list[AuditRecord], str | None]:
        reply = await self._client._send("audit", {**self._fields, "limit": limit, "cursor": after})
        return msgspec.convert(reply["records"], list[AuditRecord]), reply.get("cursor")


class RemoteDeadLetters(DeadLetterKeeper):
    """The dead letters of a project, kept by the service."""

    def __init__(self, client: "SemanticClient") -> None:
        super().__init__()
        self._client = client

    async def _store(self, name: str, letter: StoredDeadLetter) -> None:
        fields = {
            "action": "keep",
            "id": name,
            "operations": [wire.fields_of_intent(intent) for intent in letter.intents],
            "batch": letter.is_batch,
            "requestId": letter.request_id,
            "errorCode": letter.error_code,
            "error": printable(letter.error)[: limits.DEAD_LETTER_ERROR_CHARACTERS] or letter.error_code,
            "attempts": letter.attempts,
        }
        try:
            await self._client._send("dead_letters", fields)
        except MaxPayloadError:
            raise InvalidArgument("operations: the dead letter is too long for one message of NATS") from None

    def list(self, *, values: bool = True, limit: int | None = None) -> "RemoteDeadLetterList":
        """The dead letters of the project, the oldest first: await it, or use `async for`.

        Args:
            values: Whether to show the values that were to be written. A value too long for a message is shown as null.
            limit: How many to return at most.
        """
        return RemoteDeadLetterList(self._client, values, limit)

    async def retry(
        self, letter: DeadLetter, *, expected_version: ExpectedVersion | None = None
    ) -> Sequence[Envelope | None]:
        if expected_version is not None:
            check_expected_version(expected_version)
        fields = {"action": "retry", "id": letter.id, "expectedVersion": expected_version}
        reply = await self._client._send("dead_letters", fields)
        return [wire.envelope_of(entry) for entry in reply["entries"]]

    async def drop(self, letter: DeadLetter) -> bool:
        reply = await self._client._send("dead_letters", {"action": "drop", "id": letter.id})
        return bool(reply["dropped"])


class RemoteDeadLetterList(PagedList[DeadLetter]):
    """The dead letters of a project: iterate them with `async for`, or `await` them all."""

    what = "dead letters"

    def __init__(self, client: "SemanticClient", values: bool, limit: int | None) -> None:
        super().__init__(client, limit)
        self._client = client
        self._values = values

    async def _page(self, limit: int, after: str | None) -> tuple[list[DeadLetter], str | None]:
        reply = await self._client._send("dead_letters", {"values": self._values, "limit": limit, "after": after})
        found = [workflow_wire.dead_letter_of(fields, self._client.project) for fields in reply["deadLetters"]]
        return found, found[-1].id if reply["truncated"] else None
