"""Locks: acquired by compare-and-set, renewed while their holder is alive, with fencing tokens against late holders.

The fencing token of a lock is the version at which it was acquired. A renewal changes only the expiry, so the token
stays. A put with the token is committed only if the lock is still held under it; the same commit checks that.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from keyloft import limits
from keyloft.core.log_text import field, printable
from keyloft.errors import (
    Closed,
    CommitUnknown,
    InvalidArgument,
    KeyloftError,
    LockHeld,
    LockLost,
    StaleFence,
    VersionConflict,
)
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.held_locks import LockKeeper
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.monitoring import logger
from keyloft.semantic.rules import LOCK, directive_of, wrong
from keyloft.semantic.writes import FAILURES

T = TypeVar("T")


class Lock:
    """A lock in the store. `async with` acquires it, renews it, and releases it at the end.

    If the lock is lost meanwhile, the body is cancelled at once, and `async with` raises LockLost. A caller of
    `acquire` and `release` checks `is_held`, or waits for `lost`.
    """

    def __init__(self, keeper: LockKeeper, intent: Intent, wait: float | None) -> None:
        # `intent` is the put that acquires the lock.
        if wait is not None and (type(wait) not in (int, float) or not wait >= 0):
            raise wrong(
                "wait", "a number of seconds from 0 on, or None to wait until the lock is free", wait, int, float
            )
        assert intent.semantics is not None
        assert intent.semantics.ttl_seconds is not None
        self._keeper = keeper
        self._intent = intent
        self._name = keeper.whole_key(intent.key)
        self._ttl = intent.semantics.ttl_seconds
        self._wait = wait
        self._entry: Envelope | None = None
        self._until = 0.0
        self._guards: list[asyncio.Task[None]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._holder: asyncio.Task[object] | None = None
        self._cancelled_before = 0
        self._acquiring = asyncio.Lock()
        self._reason = ""
        self.lost = asyncio.Event()
        """Set as soon as the lock is no longer held although its holder has not released it."""

    def __repr__(self) -> str:
        held = "not held" if self._entry is None else f"held under fence {self._entry.fence}"
        state = "lost" if self.lost.is_set() else held
        return f"<Lock {self._name} of {self._intent.writer} in {self._keeper.shown}, {state}>"

    @property
    def key(self) -> str:
        """The key as the caller wrote it: whole, or for a `SemanticClient` the path within the project."""
        return self._intent.key

    @property
    def is_held(self) -> bool:
        # The time is compared, too: while a task blocks the event loop, no timer can report the loss.
        in_time = asyncio.get_running_loop().time() < self._until
        return self._entry is not None and in_time and not self.lost.is_set()

    @property
    def fence(self) -> int:
        """The fencing token: later acquisitions have larger ones.

        Raises:
            LockLost: The lock was not acquired, or is released. A lost lock keeps its token, but writes with it are
                refused.
        """
        if self._entry is None or self._entry.fence is None:
            raise LockLost(f"{self._name} is not held: acquire it first")
        return self._entry.fence

    async def __aenter__(self) -> Self:
        await self.acquire()
        self._holder = asyncio.current_task()
        assert self._holder is not None
        self._cancelled_before = self._holder.cancelling()
        if self.lost.is_set():  # since `acquire` returned
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
            except FAILURES as failure:
                logger.warning(
                    "[KV] %s could not be released, and becomes free when it expires: %s", self._name, failure
                )
            return
        await self._stop_guarding()
        by_lock = holder.uncancel() <= self._cancelled_before
        if kind is None:
            try:
                await asyncio.sleep(0)  # the body ended before the lock's cancellation reached it
            except asyncio.CancelledError:
                if not by_lock:
                    raise
            raise LockLost(self._reason)
        if kind is asyncio.CancelledError and by_lock:
            raise LockLost(self._reason) from error

    async def acquire(self) -> Envelope:
        """Acquire the lock; waits for it as long as `wait` says.

        Raises:
            LockHeld: Other holders had the lock all the time.
            InvalidArgument: A task holds the lock, or waits for it, with this object.
        """
        if self._acquiring.locked() or self._holder is not None or self.is_held:
            raise InvalidArgument(f"{self._name} is held or waited for with this Lock already: make another Lock")
        async with self._acquiring:
            await self._stop_guarding()  # of an acquisition that was lost
            loop = asyncio.get_running_loop()
            deadline = None if self._wait is None else loop.time() + self._wait
            while True:
                began = loop.time()
                try:
                    entry = await self._finish(self._put(began), undo=self._give_back)
                except VersionConflict as conflict:
                    if not await self._is_free_in_time(conflict.current, deadline):
                        waited = f", and was not free within {self._wait:g} s" if self._wait else ""
                        raise LockHeld(f"{self._name} is held by {conflict.current.last_writer}{waited}") from None
                else:
                    self._guard(entry, began)
                    return entry

    async def release(self) -> None:
        """Release the lock.

        Raises:
            LockLost: It was no longer held.
        """
        entry = self._entry
        if entry is None:
            raise LockLost(f"{self._name} is not held: acquire it first")
        self._entry = None
        if self.lost.is_set():
            await self._stop_guarding()
            raise LockLost(self._reason)
        try:
            await self._finish(self._give_back(entry, self._until))
        except StaleFence as error:
            raise LockLost(f"{self._name} was lost before it was released: {_loss(error.current)}") from None

    # Acquiring

    async def _is_free_in_time(self, holder: Envelope | None, deadline: float | None) -> bool:
        """Wait until the lock is free; returns False if the deadline passes first."""
        self._check_purpose(holder)
        if holder is None:
            return True
        timeout = asyncio.timeout_at(deadline)
        try:
            async with timeout, self._keeper.watch(self.key) as watch:
                async for holder in watch:
                    if holder is None:
                        return True
                    self._check_purpose(holder)
            raise Closed
        except TimeoutError:
            if timeout.expired():
                return False
            raise  # a request over NATS has timed out

    def _check_purpose(self, holder: Envelope | None) -> None:
        if holder is not None and holder.semantics.purpose != LOCK:
            raise InvalidArgument(f"key: expected a lock at {self._name}, got a {holder.semantics.purpose}")

    async def _put(self, began: float) -> Envelope:
        """Put the lock's entry."""
        request = WriteRequest(intents=(self._intent,), request_id=uuid.uuid4().hex)
        return await self._to_the_end(lambda: self._keeper.acquire(request), began + self._ttl)

    async def _give_back(self, entry: Envelope, until: float | None = None) -> None:
        """Remove the lock's entry; `until` is when it expires at the earliest."""
        await self._stop_guarding()
        assert entry.fence is not None
        fence, writer, request_id = entry.fence, self._intent.writer, uuid.uuid4().hex
        until = asyncio.get_running_loop().time() + self._ttl if until is None else until
        await self._to_the_end(
            lambda: self._keeper.release(self.key, fence, writer=writer, request_id=request_id), until
        )

    async def _to_the_end(self, send: Callable[[], Coroutine[Any, Any, T]], until: float) -> T:
        """Send a request; repeat it while it is unknown whether it was carried out, until a time at most."""
        may_be_made = False
        while True:
            try:
                return await send()
            except FAILURES as error:
                may_be_made = may_be_made or isinstance(error, CommitUnknown)
                if not may_be_made or asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(limits.LOCK_RETRY_SECONDS)

    async def _finish(self, job: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
        """Do a job to its end. If the caller is cancelled meanwhile, finish the job in the background and undo it."""
        task = asyncio.ensure_future(job)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # A put may still succeed, and then no task would release the lock before it expires.
            self._keeper.background.start(self._finish_alone(task, undo))
            raise

    async def _finish_alone(self, task: Awaitable[T], undo: Callable[[T], Awaitable[None]] | None) -> None:
        try:
            done = await task
            if undo is not None:
                await undo(done)
        except (VersionConflict, StaleFence, Closed, *FAILURES) as error:
            logger.debug("[KV] %s was not released: %s", self._name, error)

    # Holding

    def _guard(self, entry: Envelope, began: float) -> None:
        self._entry = entry
        self.lost.clear()
        self._reason = ""
        self._extend(began)
        self._guards = [
            asyncio.create_task(self._renew(self.fence), name=f"keyloft renews {self._name}"),
            asyncio.create_task(self._watch_for_loss(self.fence), name=f"keyloft guards {self._name}"),
        ]

    async def _stop_guarding(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        guards, self._guards = self._guards, []
        for guard in guards:
            guard.cancel()
        if guards:
            await asyncio.wait(guards)

    async def _renew(self, fence: int) -> None:
        """Extend the expiry again and again. The version stays, and so does the fencing token."""
        loop = asyncio.get_running_loop()
        pause = usual = self._ttl / limits.LOCK_RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(pause)
            began, pause = loop.time(), usual
            try:
                await self._keeper.renew(self.key, fence, self._ttl)
            except Closed:
                self._lose("the store was closed")
                return
            except StaleFence as error:
                self._lose(_loss(error.current))
                return
            except FAILURES as error:
                logger.warning("[KV] %s could not be renewed, trying again until it expires: %s", self._name, error)
                pause = limits.LOCK_RETRY_SECONDS
            else:
                self._extend(began)

    async def _watch_for_loss(self, fence: int) -> None:
        """Notice at once when another client takes the lock away."""
        pause = limits.LOCK_RETRY_SECONDS
        while True:
            try:
                async with self._keeper.watch(self.key) as watch:
                    async for entry in watch:
                        if entry is None or entry.fence != fence:
                            self._lose(_loss(entry))
                            return
                raise Closed
            except Closed:
                self._lose("the store was closed")
                return
            except KeyloftError as error:
                # Not an error yet: renewals notice a loss as well, only later.
                logger.debug("[KV] %s can't be watched, trying again: %s", self._name, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._ttl / limits.LOCK_RENEWALS_PER_TTL)

    def _extend(self, began: float) -> None:
        """Note until when the lock is surely held: for its TTL, counted from before the request was sent."""
        self._until = began + self._ttl
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(self._until, self._lose, "it could not be renewed in time")

    def _lose(self, reason: str) -> None:
        if self.lost.is_set() or self._entry is None:
            return
        self._reason = f"{self._name} is lost: {reason}; writes with its fencing token are refused"
        self.lost.set()
        for guard in self._guards:
            guard.cancel()
        fields = {"operation": "semantic_lock_lost", "key": self._name, "writer": self._intent.writer, "reason": reason}
        fields["directive"] = directive_of(self._intent.writer)
        text = "[KV] lock lost: key=%s directive=%s %s"
        logger.warning(text, self._name, field(fields["directive"]), reason, extra=fields)
        if self._holder is not None:
            self._holder.cancel()


def _loss(current: Envelope | None) -> str:
    """Why a lock is lost, by what is stored now."""
    return "it has expired, or was deleted" if current is None else f"{printable(current.last_writer)} has it"
