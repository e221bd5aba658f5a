"""Bounds what all watches have in memory at a time, by the most bytes that each may read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keyloft import limits
from keyloft.errors import Busy
from keyloft.http.large_parts import LargeParts


class WatchTurns:
    """Lets watches read and send in turns."""

    def __init__(self, parts: LargeParts) -> None:
        self.parts = parts
        self._first_in_line = asyncio.Lock()
        self._reading_bytes = 0
        self._is_freed = asyncio.Event()
        self._large = asyncio.Semaphore(limits.HTTP_LARGE_STATES)
        self._waiting = 0

    @property
    def are_awaited(self) -> bool:
        """Whether one waits for a large state."""
        return self._waiting > 0

    @asynccontextmanager
    async def reading(self, most: int) -> AsyncIterator[None]:
        """Entries of at most this many bytes may be read, and be in memory; watches come in the order of their calls.

        By the most that they may have, not by what they had last: values grow between two reads.
        """
        async with self._first_in_line:
            while self._reading_bytes and self._reading_bytes + most > limits.HTTP_WATCH_READ_BYTES:
                self._is_freed.clear()
                await self._is_freed.wait()
            self._reading_bytes += most
        try:
            yield
        finally:
            self._reading_bytes -= most
            self._is_freed.set()

    def check_large(self) -> None:
        """Refuse one more large state.

        Raises:
            Busy: So many wait that it would take long.
        """
        if self._waiting >= limits.HTTP_WAITING_STATES:
            raise Busy("key: too many watches of large values begin at a time; try again later, or watch fewer keys")

    @asynccontextmanager
    async def large(self) -> AsyncIterator[None]:
        """A large state may be in memory."""
        self._waiting += 1
        try:
            await self._large.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._large.release()
