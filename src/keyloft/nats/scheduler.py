"""Schedules owners fairly (deficit round robin): each is charged with the time that its requests take."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from time import perf_counter
from types import coroutine
from typing import Any, TypeVar

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.nats.messages import NatsConnection
from keyloft.nats.requests import Owner

T = TypeVar("T")


class OwnerScheduler:
    """The owners that have something to do. A turn lasts a millisecond; time beyond that is a debt of its owner."""

    def __init__(
        self,
        nats: Nats,
        take_turn: Callable[[Owner, float], None],
        can_go_on: Callable[[Owner], bool],
        end: Callable[[], None],
    ) -> None:
        """Args:
        nats: The connection on which requests arrive: while very much arrives, it is read first.
        take_turn: Called with an owner and the time; it works for as long as the owner's credit lasts.
        can_go_on: Whether an owner has something to do in its next turn.
        end: Called after some turns, before other tasks run.
        """
        self._take_turn = take_turn
        self._can_go_on = can_go_on
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._owners: deque[Owner] = deque()
        self._is_scheduled = False
        self._connection = nats if isinstance(nats, NatsConnection) else None
        self._read_bytes = 0
        """How many bytes the connection had read when turns were last due."""
        self._reads_until = 0.0
        """Until then, turns give way to reading while much arrives."""

    def give(self, owner: Owner) -> None:
        """Let an owner that does not wait for a turn have one soon."""
        owner.is_in_turn = True
        self._owners.append(owner)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        """Let owners have their turns for a while, then other tasks run."""
        began = now = perf_counter()
        if self._is_reading(now):
            self._loop.call_soon(self._take)
            return
        owners = self._owners
        try:
            while owners and now - began < limits.TURNS_SECONDS:
                owner = owners.popleft()
                if owner.credit <= 0.0:
                    owner.credit = max(owner.credit, -limits.LONGEST_DEBT_SECONDS) + limits.TURN_SECONDS
                    owners.append(owner)
                    continue
                owner.is_in_turn = False
                self._take_turn(owner, now)
                ended = perf_counter()
                owner.credit -= ended - now
                now = ended
                if (owner.waiting or owner.ready) and not owner.is_in_turn and self._can_go_on(owner):
                    owner.is_in_turn = True
                    owners.append(owner)
        finally:
            self._end()
            self._is_scheduled = bool(owners)
            if owners:
                self._loop.call_soon(self._take)
            self._reads_until = now + max(limits.READING_SECONDS, 2 * (now - began))

    def _is_reading(self, now: float) -> bool:
        """Whether so much arrives that reading goes first: others' requests wait behind a flood in the socket, too."""
        if self._connection is None:
            return False
        arrived, self._read_bytes = self._connection.read_bytes - self._read_bytes, self._connection.read_bytes
        return arrived >= limits.READING_BYTES and now < self._reads_until


@coroutine
def steps(owner: Owner, work: Coroutine[Any, Any, T], wanted: Any = None) -> Generator[Any, Any, T]:
    """Run a coroutine, and charge its owner for the time that each step takes.

    Args:
        owner: Whose credit pays for it.
        work: The coroutine.
        wanted: The future that it waits for, if the caller has already made its first step.
    """
    step: Callable[[], Any] = partial(work.send, None)
    is_waiting = wanted is not None
    while True:
        if not is_waiting:
            began = perf_counter()
            try:
                wanted = step()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                owner.credit -= perf_counter() - began
        is_waiting = False
        try:
            step = partial(work.send, (yield wanted))
        except BaseException as error:
            step = partial(work.throw, error)
