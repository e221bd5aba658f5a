"""What the synchronous semantic store returns besides plain values: locks, watches, live flags and retries."""

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, Self, TypeVar

from keyloft.core.closing import SyncClosing
from keyloft.core.driving import Driven
from keyloft.errors import LockLost
from keyloft.semantic.entry_watches import EntryWatch
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.flags import LiveFlags
from keyloft.semantic.locks import Lock
from keyloft.semantic.monitoring import logger
from keyloft.semantic.retry import Retry
from keyloft.semantic.writes import FAILURES

T = TypeVar("T")
P = ParamSpec("P")


class SyncLock(Driven[Lock]):
    """A lock in the store. `with` acquires it, renews it in the background, and releases it at the end.

    A thread can't be stopped from outside. So if the lock is lost meanwhile, the body runs on, its writes with
    `fence=lock.fence` are refused, and `with` raises LockLost at its end. A long body checks `is_held`.
    """

    @property
    def key(self) -> str:
        """The key as the caller wrote it."""
        return self._inner.key

    @property
    def is_held(self) -> bool:
        """Whether the lock is held: acquired, not released and not lost."""
        return self._driver.call(lambda: self._inner.is_held)

    @property
    def fence(self) -> int:
        """The fencing token: later acquisitions have larger ones.

        Raises:
            LockLost: The lock was not acquired, or is released.
        """
        return self._inner.fence

    def acquire(self) -> Envelope:
        """Acquire the lock; waits for it as long as `wait` says.

        Raises:
            LockHeld: Other holders had the lock all the time.
            InvalidArgument: The lock is held, or waited for, with this object.
        """
        return self._run(self._inner.acquire())

    def release(self) -> None:
        """Release the lock.

        Raises:
            LockLost: It was no longer held.
        """
        self._run(self._inner.release())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.release()
        except LockLost:
            if kind is None:
                raise
        except FAILURES as failure:
            logger.warning("[KV] %s could not be released, and becomes free when it expires: %s", self.key, failure)


class SyncEntryWatch(SyncClosing, Driven[EntryWatch[T]], Generic[T]):
    """An open watch: iterate it. It misses no change, but may report several changes as one.

    Closing it, or the store, ends the iteration, also from another thread.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            return self._run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the watch. A second call does nothing."""
        self._close_inner()


class SyncLiveFlags(SyncClosing, Driven[LiveFlags], Mapping[str, Any]):
    """A mapping of flags that keeps itself up to date in the background: `with flags.live() as now:`."""

    _seen = 1
    """How many changes the caller knows about: `with` waits for the first one."""

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def close(self) -> None:
        """End the updates."""
        self._close_inner()

    def changed(self) -> None:
        """Wait for a change since the last call of `changed`, or since the beginning of the block.

        Raises:
            Closed: The store is closed, so there will be none.
        """
        self._seen = self._run(self._inner.changed_after(self._seen))

    def __getitem__(self, name: str) -> Any:
        return self._inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class SyncRetry(Driven[Retry]):
    """The retry policy for plain functions: a decorator, or `store.retrying().run(function)`.

    The function is called in a thread of its own, from which it may use the store.
    """

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def retried(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(lambda: function(*args, **kwargs))

        return retried

    def run(self, function: Callable[[], T]) -> T:
        """Call a function until it succeeds, or another attempt would not help.

        Raises:
            Escalated: All attempts failed; its cause is the last error.
        """
        return self._run(self._inner.run(lambda: asyncio.to_thread(function)))
