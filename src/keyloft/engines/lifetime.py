"""Checks that an engine may be used: that it is open, in its event loop, and in the process that opened it."""

import asyncio
from abc import ABC, abstractmethod

from keyloft.core.forks import ProcessBound
from keyloft.core.health import ServerHealth
from keyloft.errors import CLOSED, Closed, WrongLoop


class ClosableEngine(ProcessBound, ABC):
    """The part of an engine that refuses callers who may not use it, and closes it once."""

    reads_at_once = False
    """As `Engine` describes it."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None

    def check_usable(self) -> None:
        """Refuse a caller that may not use the engine.

        Raises:
            Closed: The engine is closed, or was opened by another process.
            WrongLoop: The engine was opened in another event loop.
        """
        if self.refusal is not None:
            raise Closed(self.refusal)
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop

    def health(self) -> ServerHealth | None:
        """Nothing is known of servers."""
        return None

    async def aclose(self) -> None:
        """Close, once. Cancelling the caller does not stop it, so that the engine is never left half closed."""
        if self._closing is None and self.refusal is not None:
            return  # after a fork: only the parent may close it
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        if self._closing is None:
            self.refusal = CLOSED
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    @abstractmethod
    async def _close(self) -> None: ...
