"""Knows whether an engine may be used: open, in its own event loop, and in the process that opened it."""

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from keyloft.errors import CLOSED, Closed, WrongLoop


class Lifetime:
    """From opening to closing."""

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._close = close
        self._closing: asyncio.Task[None] | None = None
        self.refusal: str | None = None
        """Why the engine can't be used any more."""
        _lifetimes.add(self)

    def check(self) -> None:
        """Refuse to work for whoever the engine is not open for.

        Raises:
            Closed: It is closed, or was opened by another process.
            WrongLoop: This is another event loop.
        """
        if self.refusal is not None:
            raise Closed(self.refusal)
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop

    async def aclose(self) -> None:
        """Close, once. It goes on even if the caller is cancelled: half closed is no state to be left in."""
        if self._closing is None and self.refusal is not None:
            return  # the parent's, not ours to close
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        if self._closing is None:
            self.refusal = CLOSED
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)


_lifetimes: "weakref.WeakSet[Lifetime]" = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A connection must not be used by two processes: locks would not hold, and answers would go astray."""
    for lifetime in _lifetimes:
        lifetime.refusal = "this store was opened before a fork: open it again in this process"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
