"""Lets the updates of one key take turns within a process, so that its tasks don't conflict with each other.

A turn only saves attempts: each update still checks that the entry has not changed. So an update that has waited long
for its turn goes on without it, and so does one that would wait for itself; and a turn ends while its function takes
long.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Final
from weakref import WeakValueDictionary

from keyloft import limits
from keyloft.errors import InvalidArgument


class _FunctionCall:
    """A call of an update's function, until it returns. Tasks that begin in it inherit it by their context."""

    __slots__ = ("has_returned", "lock", "outer")

    def __init__(self, lock: asyncio.Lock, outer: "_FunctionCall | None") -> None:
        self.lock = lock
        """The lock of the key that is updated."""
        self.outer = outer
        """The call of another update's function in which this update was made, if it had not returned by then."""
        self.has_returned = False


_inside: Final[ContextVar[_FunctionCall | None]] = ContextVar("keyloft_update", default=None)


def _calls_in_progress() -> Iterator[_FunctionCall]:
    """The calls in which this code runs, or whose tasks it belongs to, from the innermost one outwards."""
    call = _inside.get()
    while call is not None:
        if not call.has_returned:
            yield call
        call = call.outer


class UpdateTurn:
    """The turn of one update, which has the lock of its key or goes on without it."""

    def __init__(self, lock: asyncio.Lock, *, is_locked: bool) -> None:
        self._lock = lock
        self._is_locked = is_locked

    @contextmanager
    def function(self) -> Iterator[None]:
        """Marks the call of the update's function.

        An update of the same key in it is refused. If the function takes long, the next update begins meanwhile: the
        function may wait for it, through a task that it did not begin, such as a worker with a queue.
        """
        # Not `_inside.get()`: a task that begins tasks, each in its own update, would keep all former calls.
        outer = next(_calls_in_progress(), None)
        call = _FunctionCall(self._lock, outer)
        timer = asyncio.get_running_loop().call_later(limits.UPDATE_TURN_SECONDS, self.end)
        _inside.set(call)
        try:
            yield
        finally:
            timer.cancel()
            call.has_returned = True
            _inside.set(outer)

    def end(self) -> None:
        """Let the next update begin; a second call does nothing."""
        if self._is_locked:
            self._is_locked = False
            self._lock.release()


class UpdateTurns:
    """The turns of the keys that are updated now."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def keys_in_use(self) -> list[str]:
        """For tests: the keys whose locks are in memory."""
        return list(self._locks)

    @asynccontextmanager
    async def take(self, key: str, argument: str) -> AsyncIterator[UpdateTurn]:
        """Wait for the turn of a key, unless that takes long.

        Args:
            key: The key to be updated.
            argument: The name of the function that updates it, as the caller wrote it.

        Raises:
            InvalidArgument: The caller is such a function for this key, or a task that it began, and would wait for
                itself.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        calls = list(_calls_in_progress())
        if any([call.lock is lock for call in calls]):
            raise InvalidArgument(
                f"{argument}: the function that already updates {key} can't update it again, nor can a task that it "
                "begins: return the new value instead"
            )
        is_locked = False
        # Within a function, it does not wait: two functions that each update the other's key would wait for each other.
        if not (calls and lock.locked()):
            with suppress(TimeoutError):
                # If the service does not answer, each update ahead waits for its own timeout.
                async with asyncio.timeout(limits.UPDATE_WAIT_SECONDS):
                    is_locked = await lock.acquire()
        turn = UpdateTurn(lock, is_locked=is_locked)
        try:
            yield turn
        finally:
            turn.end()
