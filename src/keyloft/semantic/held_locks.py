"""Keeps locks in a database: acquires, renews and releases them by token, and lists those that are held."""

import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Protocol

from keyloft.core.lazy import SourceList
from keyloft.core.paging import Pages
from keyloft.core.records import NO_LIMIT, Batch, Check, Committed, Get, Record, Scan, Touch
from keyloft.errors import StaleFence, VersionConflict
from keyloft.semantic import keys
from keyloft.semantic.background import BackgroundJobs
from keyloft.semantic.commits import Committer
from keyloft.semantic.entry_watches import EntryWatch, watch_entry
from keyloft.semantic.envelope import Envelope, datetime_of, envelope_of, read_entry
from keyloft.semantic.intents import FailedWrite, Intent, WriteRequest, conflict_error
from keyloft.semantic.keys import SPACE, Project, rows_below
from keyloft.semantic.rules import ANY


class LockKeeper(Protocol):
    """What a `Lock` needs of the store that keeps it. Keys are as the caller of `lock` wrote them."""

    background: BackgroundJobs

    @property
    def shown(self) -> str:
        """Where the lock is kept, for `repr`."""

    def whole_key(self, key: str) -> str:
        """The key with its tenant and project, for messages."""

    def watch(self, key: str) -> AbstractAsyncContextManager["EntryWatch[Envelope | None]"]:
        """The lock's entry now, then after each change; None while the lock is free."""

    async def acquire(self, request: WriteRequest) -> Envelope:
        """Put the lock's entry if there is none. A lost race is not recorded as a conflict: it is usual for locks.

        Raises:
            VersionConflict: Another holder has the lock.
            CommitUnknown: The lock may be acquired or not; the same request again finds out.
        """

    async def renew(self, key: str, fence: int, ttl_seconds: int) -> datetime:
        """Let the lock expire this many seconds from now; returns when that is, by the database's clock.

        Raises:
            StaleFence: The lock is not held under this token.
        """

    async def release(self, key: str, fence: int, *, writer: str, request_id: str | None) -> None:
        """Remove the lock's entry.

        Raises:
            StaleFence: The lock is not held under this token.
            CommitUnknown: The lock may be released or not; the same request again finds out.
        """


class StoredLocks:
    """The locks of a database: a `LockKeeper`."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self.background = committer.background

    @property
    def shown(self) -> str:
        return self._committer.shown

    def whole_key(self, key: str) -> str:
        return key

    def watch(self, key: str) -> "EntryWatch[Envelope | None]":
        return watch_entry(self._committer.open_engine(), key)

    async def acquire(self, request: WriteRequest) -> Envelope:
        [entry] = await self._committer.carry_out(request, quiet=True)
        assert entry is not None
        return entry

    async def renew(self, key: str, fence: int, ttl_seconds: int) -> datetime:
        row, lives = keys.parse(key).entry, 1000 * ttl_seconds
        await self._check_token(key, fence)
        # The row's version is the token, unless the holder has put the lock again with its token.
        version = fence
        while True:
            done = await self._committer.commit(Batch((Touch(SPACE, row, lives),), (Check(SPACE, row, version),)))
            if isinstance(done, Committed):
                return datetime_of(done.at + lives)
            current = done.failed[0].current
            if current is None or not _is_held(current, fence):
                raise _stale(key, current)
            version = current.version

    async def release(self, key: str, fence: int, *, writer: str, request_id: str | None) -> None:
        await self._check_token(key, fence, gone_too=True)
        intent = Intent.delete(key, expected_version=ANY, writer=writer, fence=fence)
        await self._committer.carry_out(WriteRequest(intents=(intent,), request_id=request_id))

    async def _check_token(self, key: str, fence: int, *, gone_too: bool = False) -> None:
        """Refuse the token of another lock, or a token of no lock; `gone_too` accepts one whose lock is gone."""
        entry_key = keys.parse(key)
        lock = await self._committer.lock_of(entry_key.project, fence)
        if lock is None:  # perhaps a standby has answered that is behind
            await self._committer.catch_up()
            lock = await self._committer.lock_of(entry_key.project, fence)
        if lock is None and gone_too:
            return
        if lock is None or lock.key != key:
            [record] = await self._committer.read(Get(SPACE, entry_key.entry))
            raise _stale(key, record)


def _is_held(record: Record, fence: int) -> bool:
    """Whether a row is a lock that is held under this token."""
    return read_entry(record).fence(record.version) == fence


def _stale(key: str, current: Record | None) -> VersionConflict | StaleFence:
    shown = None if current is None else envelope_of(current)
    return conflict_error([FailedWrite(key, ANY, shown, "fence")], uuid.uuid4().hex)


class HeldLocks(SourceList[Envelope]):
    """The locks of a project that are held, in the order of their tokens: iterate them, or `await` them all."""

    what = "locks"

    def __init__(self, committer: Committer, project: Project, *, values: bool, limit: int, after: int | None) -> None:
        super().__init__(committer)
        self._project = project
        self._values = values
        self._limit = limit
        self._after = after

    async def __aiter__(self) -> AsyncIterator[Envelope]:
        # The rows of fencing tokens are read, not the entries: a project has few locks, and may have very many entries.
        start, end = rows_below(self._project.fences)
        if self._after is not None:
            start = self._project.fence(self._after + 1)
        left = self._limit
        async for page in Pages(self._engine, Scan(SPACE, start, end, NO_LIMIT)):
            paths = [keys.parse(self._project.prefix + token.value.decode()) for token in page]
            records = await self._engine.read(*[Get(SPACE, path.entry) for path in paths])
            for token, record in zip(page, records, strict=True):
                if record is not None and self._project.fence_of(token.key) == read_entry(record).fence(record.version):
                    yield envelope_of(record, value=self._values)
                    left -= 1
                    if not left:
                        return
