"""Turns for large parts of answers: one part is made at a time, and small requests are answered between two parts."""

import asyncio
from collections import deque


class LargeParts:
    """Gives out turns in the order in which they are asked for, at most one in each iteration of the event loop.

    Encoding and sending a value of 1 MB takes some milliseconds. If many watches did so in one iteration, all other
    requests would wait for all of them.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting = deque[asyncio.Future[None]]()

    async def turn(self) -> None:
        """Return when the caller may make one part; its turn ends with this iteration of the event loop."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            granted = loop.create_future()
            self._waiting.append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if not granted.cancelled():  # the turn was given, and is not used
                    self._end()
                raise
        self._is_taken = True
        loop.call_soon(self._end)

    def _end(self) -> None:
        self._is_taken = False
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                self._is_taken = True  # also until its task runs
                granted.set_result(None)
                return
