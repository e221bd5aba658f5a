"""Slows down guessing: wrong tokens are answered late, and the later, the more of them an address sends."""

import asyncio
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from keyloft import limits
from keyloft.http.problems import Problem

logger = logging.getLogger(__name__)


class _Guesser:
    """One address that has sent wrong tokens."""

    __slots__ = ("failures", "last", "next_answer", "waiting")

    def __init__(self) -> None:
        self.failures = 0
        self.last = 0.0
        self.next_answer = 0.0
        self.waiting = 0


class FailedLogins:
    """Addresses that have sent wrong tokens lately, a bounded number of them. A valid token is never delayed."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._guessers: OrderedDict[str, _Guesser] = OrderedDict()
        self._ending = asyncio.Event()

    def __len__(self) -> int:
        return len(self._guessers)

    async def slow_down(self, address: str) -> None:
        """Wait until a wrong token of this address may be answered.

        Raises:
            Problem: Too many of its wrong tokens wait already.
        """
        pause = self.failed(address)
        guesser = self._guessers[_network(address)]
        if guesser.waiting >= limits.HTTP_WAITING_LOGINS:
            raise Problem(
                429, "BUSY", "too many wrong tokens from this address", headers=((b"retry-after", b"%d" % (pause + 1)),)
            )
        guesser.waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ending.wait()
        finally:
            guesser.waiting -= 1

    def end(self) -> None:
        """Answer all waiting requests now, because the service is ending."""
        self._ending.set()

    def failed(self, address: str) -> float:
        """Count a wrong token; returns after how many seconds it may be answered."""
        now, network = self._now(), _network(address)
        guesser = self._guessers.pop(network, None)
        if guesser is None or now - guesser.last > limits.HTTP_LOGIN_MEMORY_SECONDS:
            guesser = _Guesser()
        self._guessers[network] = guesser
        while len(self._guessers) > limits.HTTP_LOGIN_ADDRESSES:
            self._guessers.popitem(last=False)
        guesser.failures += 1
        guesser.last = now
        over = guesser.failures - limits.HTTP_FREE_LOGINS
        if over <= 0:
            return 0.0
        if over & (over - 1) == 0:  # at 1, 2, 4, 8 …: guessing does not fill the log
            logger.warning("%d wrong tokens from %s; they are answered late", guesser.failures, network)
        first, longest = limits.HTTP_LOGIN_PAUSES
        pause = min(longest, first * 2 ** min(over - 1, 16))
        guesser.next_answer = max(now, guesser.next_answer) + pause
        return min(guesser.next_answer - now, limits.HTTP_LONGEST_LOGIN_SECONDS)


def _network(address: str) -> str:
    """The address; for IPv6, its /64 network, since one client may have all addresses of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address
