"""Locks that hold: acquired by compare-and-set, renewed while their holder is alive, fenced against a late one.

The version of its acquisition is a lock's fencing token. Renewing changes the expiry alone, so the token stays. A put
that is given the token is made only if the lock is still held under it, by the same commit that makes the put.
"""

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Awaitable
from types import TracebackType
from typing import TYPE_CHECKING, Final

from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Check, Conflict, Get, Record, Space, Touch
from keyloft.errors import Closed, CommitUnknown, DatabaseError, InvalidArgument, LockHeld, LockLost, VersionConflict
from keyloft.semantic.commits import Writer, attempt
from keyloft.semantic.envelope import LOCK, Envelope, Semantics, directive_of, envelope_of, read_stored
from keyloft.semantic.keys import Place
from keyloft.semantic.planning import Put, putting

if TYPE_CHECKING:
    from keyloft.semantic.store import SemanticStore

logger = logging.getLogger("keyloft.semantic")

_SEMANTIC: Final = Space.SEMANTIC
_RENEWALS_PER_TTL: Final = 3
_PAUSE_SECONDS: Final = 0.1


class Lock:
    """A lock in the store. `async with` acquires it, renews it, and releases it at the end.

    `lost` is an event that is set as soon as it is no longer held although nobody released it.

    If it is lost meanwhile, the body is cancelled at once, and `async with` raises LockLost. Whoever calls `acquire`
    and `release` instead looks at `is_held`, or waits for `lost`.
    """

    def __init__(
        self,
        store: "SemanticStore",
        engine: Engine,
        making: Writer,
        place: Place,
        writer: str,
        semantics: Semantics,
        wait: float | None,
    ) -> None:
        if wait is not None and (type(wait) not in (int, float) or not wait >= 0):
            raise InvalidArgument("wait: a number of seconds, 0 for not at all, None for as long as it takes")
        assert semantics.ttl_seconds is not None
        self._store = store
        self._engine = engine
        self._making = making
        self._place = place
        self._writer = writer
        self._semantics = semantics
        self._ttl = float(semantics.ttl_seconds)
        self._wait = wait
        self._entry: Envelope | None = None
        self._until = 0.0
        self._guards: list[asyncio.Task[None]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._holder: asyncio.Task[object] | None = None
        self._cancelled_before = 0
        self._is_acquiring = False
        self._reason = ""
        self.lost = asyncio.Event()
        """Set as soon as the lock is no longer held although nobody released it."""

    @property
    def key(self) -> str:
        return self._place.key

    @property
    def is_held(self) -> bool:
        # By the clock, too: whoever held up the event loop has not heard yet that it is over.
        in_time = asyncio.get_running_loop().time() < self._until
        return self._entry is not None and in_time and not self.lost.is_set()

    @property
    def fence(self) -> int:
        """The fencing token: later acquisitions have larger ones.

        Raises:
            LockLost: It was not acquired, or is released. That it was lost shows when the token is used.
        """
        if self._entry is None or self._entry.fence is None:
            raise LockLost(f"{self.key} is not held: acquire it first")
        return self._entry.fence

    async def __aenter__(self) -> "Lock":
        await self.acquire()
        self._holder = asyncio.current_task()
        assert self._holder is not None
        self._cancelled_before = self._holder.cancelling()
        if self.lost.is_set():  # between the two
            await self._stop_guarding()
            raise LockLost(self._reason)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        holder, self._holder = self._holder, None
        assert holder is not None
        if not self.lost.is_set():
            try:
                await self.release()
            except LockLost:
                if kind is None:
                    raise
            except DatabaseError as failure:
                logger.warning("[KV] %s could not be released, and comes free by itself: %s", self.key, failure)
            return
        await self._stop_guarding()
        ours = holder.uncancel() <= self._cancelled_before
        if kind is None:
            try:
                await asyncio.sleep(0)  # our cancellation came too late to be noticed inside
            except asyncio.CancelledError:
                if not ours:
                    raise
            raise LockLost(self._reason)
        if kind is asyncio.CancelledError and ours:
            raise LockLost(self._reason) from error

    async def acquire(self) -> Envelope:
        """Acquire the lock; waits for it as long as it was made to.

        Raises:
            LockHeld: Somebody else had it all the time.
            InvalidArgument: Another task holds it, or waits for it, by this very object.
        """
        if self._is_acquiring or self._holder is not None or self.is_held:
            raise InvalidArgument(f"{self.key} is held or waited for by this lock already: make another one")
        self._is_acquiring = True
        try:
            return await self._acquire()
        finally:
            self._is_acquiring = False

    async def _acquire(self) -> Envelope:
        await self._stop_guarding()  # what was lost before
        loop = asyncio.get_running_loop()
        deadline = None if self._wait is None else loop.time() + self._wait
        while True:
            if (holder := await self._until_free(deadline)) is not None:
                waited = f", and was not free within {self._wait:g} s" if self._wait else ""
                raise LockHeld(f"{self.key} is held by {holder.last_writer}{waited}")
            try:
                entry, began = await self._take()
            except VersionConflict:
                if deadline is not None and loop.time() >= deadline:
                    raise LockHeld(f"{self.key} is held by somebody who was faster") from None
                continue
            self._guard(entry, began)
            return entry

    async def release(self) -> None:
        """Give the lock back.

        Raises:
            LockLost: It was no longer held.
        """
        entry = self._entry
        if entry is None:
            raise LockLost(f"{self.key} is not held: acquire it first")
        self._entry = None
        if self.lost.is_set():
            await self._stop_guarding()
            raise LockLost(self._reason)
        releasing = asyncio.ensure_future(self._give_back(entry))
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            self._making.see_to(self._quietly(releasing))
            raise
        except VersionConflict as error:
            raise LockLost(f"{self.key} was lost before it was released: {_who(error.current)}") from None

    # Acquiring

    async def _until_free(self, deadline: float | None) -> Envelope | None:
        """Wait until nobody holds it; returns who does, if there is no more time."""
        watch = self._engine.watch(Get(_SEMANTIC, self._place.entry))
        holder: Envelope | None = None
        try:
            async with asyncio.timeout(None) as patience:
                async for [change] in watch:
                    if change.record is None:
                        return None
                    holder = envelope_of(change.record)
                    if holder.semantics.purpose != LOCK:
                        raise InvalidArgument(f"{self.key} holds a {holder.semantics.purpose}, which is no lock")
                    # Only now: a first look takes its time, and even who has none hears how things are.
                    patience.reschedule(deadline)
            raise Closed
        except TimeoutError:
            if holder is None:
                raise
            return holder
        finally:
            await watch.aclose()

    async def _take(self) -> tuple[Envelope, float]:
        """Put the lock's entry; returns it, and since when at the earliest it lives."""
        putting = asyncio.ensure_future(self._put_patiently())
        try:
            return await asyncio.shield(putting)
        except asyncio.CancelledError:
            # It may be ours all the same, and then nobody would give it back before it expires.
            self._making.see_to(self._quietly(self._undo(putting)))
            raise

    async def _put_patiently(self) -> tuple[Envelope, float]:
        attempt.set(None)  # whoever gives up on a lock leaves no dead letter
        request_id = uuid.uuid4().hex
        holder = {"holder": self._writer, "host": socket.gethostname(), "pid": os.getpid()}
        wanted = putting(Put(self.key, holder, 0, self._writer, self._semantics))
        loop = asyncio.get_running_loop()
        began = loop.time()
        may_be_made = False
        while True:
            try:
                # Quietly: that somebody else was faster is what a lock is for, and no conflict to be told of.
                [entry] = await self._making.carry_out([wanted], request_id, quiet=True)
                assert entry is not None
            except DatabaseError as error:
                # If it may have been made, the same request tells, as long as it matters.
                may_be_made = may_be_made or isinstance(error, CommitUnknown)
                if not may_be_made or loop.time() > began + self._ttl:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return entry, began

    async def _undo(self, putting: "asyncio.Future[tuple[Envelope, float]]") -> None:
        entry, _ = await putting
        await self._give_back(entry)

    async def _give_back(self, entry: Envelope) -> None:
        attempt.set(None)
        await self._stop_guarding()
        while True:
            try:
                await self._store.delete(
                    self.key, expected_version=entry.version, writer=self._writer, request_id=uuid.uuid4().hex
                )
                return
            except VersionConflict as error:
                if error.current is None or error.current.fence != entry.fence:
                    raise
                entry = error.current  # somebody who has our token has put it meanwhile

    async def _quietly(self, job: Awaitable[None]) -> None:
        """Do what nobody waits for any more."""
        try:
            await job
        except (VersionConflict, DatabaseError, Closed) as error:
            logger.debug("[KV] %s was not given back: %s", self.key, error)

    # Holding

    def _guard(self, entry: Envelope, began: float) -> None:
        self._entry = entry
        self.lost.clear()
        self._reason = ""
        self._lives_from(began)
        self._guards = [
            asyncio.create_task(self._renew(entry), name=f"keyloft renews {self.key}"),
            asyncio.create_task(self._look_out(), name=f"keyloft guards {self.key}"),
        ]

    async def _stop_guarding(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        guards, self._guards = self._guards, []
        for guard in guards:
            guard.cancel()
        if guards:
            await asyncio.wait(guards)

    async def _renew(self, entry: Envelope) -> None:
        """Extend the expiry, again and again. The version stays, so the fencing token does, too."""
        loop = asyncio.get_running_loop()
        version = entry.version
        touch = Touch(_SEMANTIC, self._place.entry, round(1000 * self._ttl))
        pause = self._ttl / _RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(pause)
            began = loop.time()
            try:
                done = await self._making.commit(Batch((touch,), (Check(_SEMANTIC, self._place.entry, version),)))
            except Closed:
                self._lose("the store was closed")
                return
            except DatabaseError as error:
                # Until it expires, there is hope.
                logger.warning("[KV] %s could not be renewed, trying again: %s", self.key, error)
                pause = _PAUSE_SECONDS
                continue
            if isinstance(done, Conflict):
                current = done.failed[0].current
                if current is None or not self._is_ours(current):
                    self._lose(_who_has_it(current))
                    return
                version, pause = current.version, 0.0  # somebody who has our token has put it meanwhile
                continue
            self._lives_from(began)
            pause = self._ttl / _RENEWALS_PER_TTL

    def _is_ours(self, record: Record) -> bool:
        return self._entry is not None and read_stored(record).fence(record.version) == self._entry.fence

    async def _look_out(self) -> None:
        """Hear at once if somebody takes the lock away."""
        while True:
            try:
                watch = self._engine.watch(Get(_SEMANTIC, self._place.entry))
                try:
                    async for [change] in watch:
                        if change.record is None or not self._is_ours(change.record):
                            self._lose(_who_has_it(change.record))
                            return
                finally:
                    await watch.aclose()
                raise Closed
            except Closed:
                self._lose("the store was closed")
                return
            except DatabaseError:
                await asyncio.sleep(_PAUSE_SECONDS)

    def _lives_from(self, began: float) -> None:
        """It lives for its TTL, from the moment at which we asked for it, at the latest."""
        self._until = began + self._ttl
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(self._until, self._lose, "it could not be renewed in time")

    def _lose(self, reason: str) -> None:
        if self.lost.is_set() or self._entry is None:
            return
        self._reason = f"{self.key} is lost: {reason}; writes with its fencing token are refused"
        self.lost.set()
        for guard in self._guards:
            guard.cancel()
        directive = directive_of(self._writer)
        logger.warning(
            "[KV] lock lost: key=%s directive=%s %s",
            self.key,
            directive,
            reason,
            extra={
                "operation": "semantic_lock_lost",
                "key": self.key,
                "directive": directive,
                "writer": self._writer,
                "reason": reason,
            },
        )
        if self._holder is not None:
            self._holder.cancel()


def _who(current: Envelope | None) -> str:
    return "it has expired, or was deleted" if current is None else f"{current.last_writer} has it"


def _who_has_it(record: Record | None) -> str:
    return _who(None if record is None else envelope_of(record))
