"""The retry policy: when a write is tried again, and when it is given up.

a conflict           again after 1, 2, 4, 8, 16 and 32 s, then escalated
a transient error    five attempts, with growing pauses of random length, then escalated
any other error      raised at once: trying again would not help
"""

import asyncio
import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from keyloft import errors, limits
from keyloft.errors import Escalated, KeyloftError, VersionConflict
from keyloft.semantic.dead_letters import DeadLetterKeeper
from keyloft.semantic.intents import WriteRequest
from keyloft.semantic.monitoring import logger
from keyloft.semantic.rules import wrong
from keyloft.semantic.writes import FAILURES

P = ParamSpec("P")
T = TypeVar("T")

_OPENING: Final = (errors.CannotOpen, errors.NotADatabase, errors.SchemaTooNew, errors.SchemaTooOld)
_FATAL: Final = (*_OPENING, errors.ReadOnly, errors.NotPermitted)


class Retry:
    """A retry policy: decorate a coroutine function with it, or `run` one.

    Example:
        @store.retrying()
        async def advance() -> None:
            entry = await store.get(key)
            ...
    """

    def __init__(
        self,
        dead_letters: DeadLetterKeeper | None = None,
        *,
        conflict_pauses: Sequence[float] = limits.CONFLICT_PAUSES,
        transient_attempts: int = limits.TRANSIENT_ATTEMPTS,
        transient_pause: float = limits.TRANSIENT_PAUSE_SECONDS,
        sleep: Callable[[float], Awaitable[Any]] | None = None,
        chance: Callable[[], float] | None = None,
    ) -> None:
        """Args:
        dead_letters: Where a write that was given up is kept; if None, the error is only raised and logged.
        conflict_pauses: Seconds before each further attempt after a conflict.
        transient_attempts: How many attempts to make in all against transient errors.
        transient_pause: Seconds before the second of them; each further pause is twice as long, up to 8 s.
        sleep: Replaces `asyncio.sleep`, for tests.
        chance: Returns a number from 0 to 1 that varies the pauses, so that callers that failed together don't all
            return at the same moment.
        """
        if type(transient_attempts) is not int or transient_attempts < 1:
            raise wrong("transient_attempts", "a whole number of at least 1", transient_attempts, int)
        self._dead_letters = dead_letters
        self._conflict_pauses = tuple(conflict_pauses)
        self._transient_attempts = transient_attempts
        self._transient_pause = transient_pause
        self._sleep = sleep or asyncio.sleep
        self._chance = chance or random.random

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        if not inspect.iscoroutinefunction(function):
            raise wrong("function", "a coroutine function: async def …", function)

        @functools.wraps(function)
        async def retried(*args: P.args, **kwargs: P.kwargs) -> T:
            return await self.run(lambda: function(*args, **kwargs))

        return retried

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function until it succeeds, or another attempt would not help.

        Raises:
            Escalated: All attempts failed; its cause is the last error.
        """
        conflicts = transients = 0
        while True:
            try:
                return await function()
            except VersionConflict as error:
                if any(failed.reason == "request_id" for failed in error.conflicts):
                    raise  # the same request would get the same answer
                if conflicts >= len(self._conflict_pauses):
                    raise await self._escalated(error, 1 + conflicts + transients) from error
                pause = self._conflict_pauses[conflicts]
                conflicts += 1
            except Exception as error:
                if not _is_transient(error):
                    raise
                transients += 1
                if transients >= self._transient_attempts:
                    raise await self._escalated(error, conflicts + transients) from error
                longest = min(limits.LONGEST_TRANSIENT_PAUSE_SECONDS, self._transient_pause * 2 ** (transients - 1))
                pause = longest * (0.5 + self._chance() / 2)
            await self._sleep(pause)

    async def _escalated(self, error: Exception, attempts: int) -> Escalated:
        code = error.code if isinstance(error, KeyloftError) else type(error).__name__
        request, kept = _failed_request(error), None
        keys = [] if request is None else [intent.key for intent in request.intents]
        outcome = "nothing is kept"
        if self._dead_letters is not None and request is not None:
            kept = await self._dead_letters.keep(request, code, str(error), attempts)
            if kept:
                outcome = "kept as a dead letter"
            elif self._dead_letters.unsaved:
                outcome = "to be kept as a dead letter once the store answers again"
        fields = {"error_code": code, "attempts": attempts, "keys": keys, "dead_letter": kept}
        text = "[KV] escalated after %d attempts (%s): %s; %s"
        logger.error(text, attempts, code, ", ".join(keys), outcome, extra=fields)
        return Escalated(f"given up after {attempts} attempts ({code}), {outcome}: {error}", kept)


def _failed_request(error: BaseException | None) -> WriteRequest | None:
    """The write request that failed: the error has it, or an earlier error that led to it."""
    while error is not None:
        request = error.failed_request if isinstance(error, KeyloftError) else None
        if isinstance(request, WriteRequest):
            return request
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _is_transient(error: Exception) -> bool:
    if isinstance(error, KeyloftError):
        return isinstance(error, FAILURES) and not isinstance(error, _FATAL)
    return isinstance(error, (ConnectionError, TimeoutError))
