"""An event loop beside a synchronous store, for work in the background: locks that renew themselves, watches."""

from collections.abc import Callable, Coroutine
from typing import Any

from keyloft.core.drivers import LoopThread
from keyloft.core.waiting import ThreadLock, refuse_reentry
from keyloft.errors import Closed
from keyloft.tuples.store import Store


class LoopSide:
    """An asynchronous store on the same database, on an event loop in a thread; opened when it is first needed."""

    def __init__(self, open_store: Callable[[], Coroutine[Any, Any, Store]], shown: str) -> None:
        self._open_store = open_store
        self._shown = shown
        self._lock = ThreadLock()
        self._opened: tuple[Store, LoopThread] | None = None
        self._is_closed = False

    def opened(self) -> tuple[Store, LoopThread]:
        """The store, and the thread that runs its event loop.

        Raises:
            Closed: `close` was called.
        """
        refuse_reentry(self._lock)
        with self._lock:
            if self._is_closed:
                raise Closed
            if self._opened is None:
                loop = LoopThread(f"keyloft {self._shown}")
                try:
                    store = loop.run(self._open_store())
                    loop.closing = store.aclose
                    self._opened = store, loop
                except BaseException:
                    loop.close()
                    raise
            return self._opened

    def close(self) -> None:
        refuse_reentry(self._lock)
        with self._lock:
            self._is_closed = True
            if self._opened is not None:
                store, loop = self._opened
                if not loop.is_closed:
                    loop.run(store.aclose())
                loop.close()
