"""Bounds the memory of all watches over HTTP: the entries that they read at a time, and the large states they send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keyloft import limits
from keyloft.http.large_parts import LargeParts
from keyloft.nats.errors import overloaded


class WatchMemory:
    """What all watches of a server share, so that their memory together is bounded."""

    def __init__(self, parts: LargeParts) -> None:
        self.parts = parts
        self.reads = ReadBudget()
        self.large_states = LargeStates()


class ReadBudget:
    """Bounds the bytes of the entries that watches have read and not yet sent."""

    def __init__(self) -> None:
        self._first_in_line = asyncio.Lock()
        self._reading_bytes = 0
        self._is_freed = asyncio.Event()

    @asynccontextmanager
    async def reading(self, most: int) -> AsyncIterator[None]:
        """Wait until entries of at most this many bytes may be read; callers come in the order of their calls.

        `most` is the size that the entries may have, not the one that they had last: values grow between two reads.
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


class LargeStates:
    """Bounds how many watches send a large state of their keys at a time, and how many wait to do so."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(limits.HTTP_LARGE_STATES)
        self._waiting = 0

    @property
    def are_awaited(self) -> bool:
        """Whether a watch waits to send its state."""
        return self._waiting > 0

    def check_waiting(self) -> None:
        """Refuse a further watch of large values, if too many wait.

        Raises:
            Busy: So many wait that it would take long.
        """
        if self._waiting >= limits.HTTP_WAITING_STATES:
            raise overloaded(
                "key: too many watches of large values begin at a time; try again later, or watch fewer keys"
            )

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Wait until one more large state may be in memory."""
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()
