"""The event loop beside a synchronous store, for what works in the background: locks that renew themselves, watches."""

import threading
from collections.abc import Callable, Coroutine
from typing import Any

from keyloft.core.drivers import LoopThread
from keyloft.tuples.store import Store


class LoopSide:
    """An asynchronous store on the same database, on an event loop in a thread; opened when it is first needed."""

    def __init__(self, open_store: Callable[[], Coroutine[Any, Any, Store]], shown: str) -> None:
        self._open_store = open_store
        self._shown = shown
        self._lock = threading.Lock()
        self._opened: tuple[Store, LoopThread] | None = None

    def opened(self) -> tuple[Store, LoopThread]:
        """The store, and what runs it."""
        with self._lock:
            if self._opened is None:
                loop = LoopThread(f"keyloft {self._shown}")
                try:
                    self._opened = loop.run(self._open_store()), loop
                except BaseException:
                    loop.close()
                    raise
            return self._opened

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                store, loop = self._opened
                if not loop.is_closed:
                    loop.run(store.aclose())
                    loop.close()
