"""The operations of the semantic store over NATS: what each message asks of the store, and the reply to it."""

import sys
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Final

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import ValueTooLarge
from keyloft.nats.events import WATCH
from keyloft.nats.requests import Call, Operation, Variant
from keyloft.semantic import keys, rules, wire, workflow_wire
from keyloft.semantic.intents import WriteRequest
from keyloft.semantic.keys import Project
from keyloft.semantic.store import SemanticStore
from keyloft.semantic.wire import ListRequest
from keyloft.semantic.workflow_wire import (
    AuditRequest,
    DeadLetterDrop,
    DeadLetterRequest,
    DeadLetterRetry,
    DeadLettersRequest,
    DeadLetterToKeep,
    LockAcquisition,
    LockRelease,
    LockRenewal,
    LockRequest,
    LocksRequest,
)

_LIST: Final = "list"
"""A variant of `locks`."""


class SemanticOperation(Call):
    """An operation on a semantic store."""

    reply_bytes = limits.VALUE_REPLY_BYTES
    most_bytes = wire.LARGEST

    def __init__(self, name: str, nats: Nats, store: SemanticStore) -> None:
        self.name = name
        self._nats = nats
        self._store = store

    def read(self, about: Project, data: bytes, /) -> Any:
        return wire.read(self.name, about, data)

    def too_large(self, size: int) -> ValueTooLarge:
        return rules.too_large(size)


class SemanticGet(SemanticOperation):
    def keys_read(self, content: str) -> Collection[Hashable]:
        return (content,)

    def key(self, content: str) -> str:
        return content

    async def carry_out(self, content: str) -> tuple[bytes, None]:
        return wire.entry(await self._store.get(content)), None


class SemanticWrite(SemanticOperation):
    def written(self, content: WriteRequest) -> Collection[Hashable]:
        return {intent.key for intent in content.intents}

    async def carry_out(self, content: WriteRequest) -> tuple[bytes, None]:
        [written] = await self._store.write(content)
        return wire.entry(written), None


class SemanticBatch(SemanticWrite):
    most_bytes = sys.maxsize
    reply_bytes = limits.PAGE_REPLY_BYTES

    async def carry_out(self, content: WriteRequest) -> tuple[bytes, None]:
        written = await self._store.batch(content.intents, request_id=content.request_id)
        return wire.entries(written, self._nats.max_payload), None


class SemanticList(SemanticOperation):
    reply_bytes = limits.PAGE_REPLY_BYTES

    async def carry_out(self, content: ListRequest) -> tuple[bytes, None]:
        found = self._store.list(content.prefix, values=content.values, limit=content.limit + 1, after=content.after)
        return await wire.listed(found, content, self._nats.max_payload), None


class SemanticAudit(SemanticOperation):
    shows_entries = False
    reply_bytes = limits.PAGE_REPLY_BYTES
    read = staticmethod(workflow_wire.read_audit)

    async def carry_out(self, content: AuditRequest) -> tuple[bytes, None]:
        options: dict[str, Any] = {"after": content.after, "limit": content.limit + 1, "reverse": content.reverse}
        records = self._store.audit(content.about, **options).located(content.beyond)
        return await workflow_wire.audited(records, content, self._nats.max_payload), None


class SemanticLockList(SemanticOperation):
    # As other lists: each owner has one at a time, because a list reads all locks of its project.
    reply_bytes = limits.PAGE_REPLY_BYTES

    async def carry_out(self, content: tuple[Project, LocksRequest]) -> tuple[bytes, None]:
        project, wanted = content
        held = self._store.locks(project.prefix, values=wanted.values, limit=wanted.limit + 1, after=wanted.after)
        most_bytes = min(limits.LOCKS_REPLY_BYTES, self._nats.max_payload)
        return await workflow_wire.locks(held, wanted, most_bytes), None


class SemanticLocks(SemanticOperation):
    # Less than a page, so that renewals of many locks are carried out at a time.
    reply_bytes = limits.LOCKS_REPLY_BYTES

    def __init__(self, name: str, nats: Nats, store: SemanticStore) -> None:
        super().__init__(name, nats, store)
        self.variants = {_LIST: SemanticLockList(name, nats, store)}

    def read(self, about: Project, data: bytes, /) -> tuple[Project, LockRequest]:
        wanted = workflow_wire.read_locks(about, data)
        if isinstance(wanted, LocksRequest):
            raise Variant(_LIST, (about, wanted))
        return about, wanted

    def written(self, content: tuple[Project, LockRequest]) -> Collection[Hashable]:
        match content[1]:
            case LockAcquisition(request):
                return (request.intents[0].key,)
            case LockRenewal(key=key) | LockRelease(key=key):
                return (key,)
        return ()

    async def carry_out(self, content: tuple[Project, LockRequest]) -> tuple[bytes, None]:
        keeper = self._store.lock_keeper
        match content[1]:
            case LockAcquisition(request):
                return wire.entry(await keeper.acquire(request)), None
            case LockRenewal(key, fence, ttl_seconds):
                return workflow_wire.renewed(await keeper.renew(key, fence, ttl_seconds)), None
            case LockRelease(key, fence, writer, request_id):
                await keeper.release(key, fence, writer=writer, request_id=request_id)
        return wire.success(), None


class SemanticDeadLetters(SemanticOperation):
    most_bytes = sys.maxsize
    reply_bytes = limits.PAGE_REPLY_BYTES

    def read(self, about: Project, data: bytes, /) -> tuple[Project, DeadLetterRequest]:
        wanted = workflow_wire.read_dead_letters(about, data)
        if isinstance(wanted, DeadLetterToKeep):
            self._store.check_operations(wanted.given_up.intents)
        return about, wanted

    def written(self, content: tuple[Project, DeadLetterRequest]) -> Collection[Hashable]:
        # Which entries a retry writes is known only once its dead letter is read. The dead letter's own row stands for
        # them, so that the retry counts as a write: a write is not cancelled when its deadline is over.
        project, wanted = content
        return () if isinstance(wanted, DeadLettersRequest) else (project.dead_letter(wanted.id),)

    async def carry_out(self, content: tuple[Project, DeadLetterRequest]) -> tuple[bytes, None]:
        project, wanted = content
        kept, most_bytes = self._store.dead_letters, self._nats.max_payload
        if isinstance(wanted, DeadLettersRequest):
            found = kept.list(project.prefix, limit=wanted.limit + 1, after=wanted.after)
            return await workflow_wire.dead_letters(found, wanted, most_bytes), None
        row = project.dead_letter(wanted.id)
        match wanted:
            case DeadLetterToKeep():
                await kept.store(row, wanted.given_up)
                return wire.success(id=wanted.id), None
            case DeadLetterRetry():
                return wire.entries(await kept.retry_row(row, wanted.expected_version), most_bytes), None
            case DeadLetterDrop():
                return wire.success(dropped=await kept.drop_row(row)), None


_KINDS: Final[Mapping[str, type[SemanticOperation]]] = {
    "get": SemanticGet,
    "list": SemanticList,
    "batch": SemanticBatch,
    "audit": SemanticAudit,
    "locks": SemanticLocks,
    "dead_letters": SemanticDeadLetters,
}


def operations(nats: Nats, store: SemanticStore) -> list[Operation]:
    """The operations of a service."""
    return [_KINDS.get(name, SemanticWrite)(name, nats, store) for name in keys.OPERATIONS if name != WATCH]
