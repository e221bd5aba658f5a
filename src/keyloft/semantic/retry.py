"""When a write is tried again, and when it is given up: conflicts, transient errors, and all others.

a conflict           again after 1, 2, 4, 8, 16 and 32 s, then escalated
a transient error    five attempts, with a pause that grows and differs, then escalated
anything else        raised at once: trying again would not help
"""

import asyncio
import functools
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from keyloft import limits
from keyloft.errors import (
    CannotOpen,
    DatabaseError,
    Escalated,
    InvalidArgument,
    KeyloftError,
    NotADatabase,
    NotPermitted,
    ReadOnly,
    SchemaTooNew,
    SchemaTooOld,
    Unanswered,
    VersionConflict,
)
from keyloft.semantic.commits import Attempt, attempt

if TYPE_CHECKING:
    from keyloft.semantic.dead_letters import DeadLetters

logger = logging.getLogger("keyloft.semantic")

P = ParamSpec("P")
T = TypeVar("T")

_FATAL: Final = (CannotOpen, NotADatabase, SchemaTooNew, SchemaTooOld, ReadOnly, NotPermitted)
_TRANSIENT: Final = (DatabaseError, Unanswered)
_LONGEST_PAUSE_SECONDS: Final = 8.0


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
        dead_letters: "DeadLetters | None" = None,
        *,
        conflict_pauses: Sequence[float] = limits.CONFLICT_PAUSES,
        transient_attempts: int = limits.TRANSIENT_ATTEMPTS,
        transient_pause: float = 0.5,
        sleep: Callable[[float], Awaitable[Any]] | None = None,
        chance: Callable[[], float] | None = None,
    ) -> None:
        """Args:
        dead_letters: Where what was given up is kept; without them it is only raised and logged.
        conflict_pauses: Seconds before each further attempt at a write that met a conflict.
        transient_attempts: How often to try in all against transient errors.
        transient_pause: Seconds before the second of them; each further pause is twice as long, up to 8 s.
        sleep: How to wait; tests need not.
        chance: A number from 0 to 1: pauses differ, so that those who failed together don't come back together.
        """
        if type(transient_attempts) is not int or transient_attempts < 1:
            raise InvalidArgument("transient_attempts is an int of at least 1")
        self._dead_letters = dead_letters
        self._conflict_pauses = tuple(conflict_pauses)
        self._transient_attempts = transient_attempts
        self._transient_pause = transient_pause
        self._sleep = sleep or asyncio.sleep
        self._chance = chance or random.random

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        if not inspect.iscoroutinefunction(function):
            raise InvalidArgument("only a coroutine function can be retried: async def …")

        @functools.wraps(function)
        async def retried(*args: P.args, **kwargs: P.kwargs) -> T:
            return await self.run(lambda: function(*args, **kwargs))

        return retried

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function until it succeeds, or there is no point in trying further.

        Raises:
            Escalated: It was tried as often as it makes sense; the cause is what stood in the way last.
        """
        conflicts = transients = 0
        trying = Attempt()
        token = attempt.set(trying)
        try:
            while True:
                trying.changes = ()
                try:
                    return await function()
                except VersionConflict as error:
                    if _is_stale(error):
                        raise  # the same request would get the same answer
                    if conflicts >= len(self._conflict_pauses):
                        raise await self._escalated(error, trying, 1 + conflicts + transients) from error
                    pause = self._conflict_pauses[conflicts]
                    conflicts += 1
                except Exception as error:
                    if not _is_transient(error):
                        raise
                    transients += 1
                    if transients >= self._transient_attempts:
                        raise await self._escalated(error, trying, conflicts + transients) from error
                    longest = min(_LONGEST_PAUSE_SECONDS, self._transient_pause * 2 ** (transients - 1))
                    pause = longest * (0.5 + self._chance() / 2)
                await self._sleep(pause)
        finally:
            attempt.reset(token)

    async def _escalated(self, error: Exception, trying: Attempt, attempts: int) -> Escalated:
        code = error.code if isinstance(error, KeyloftError) else type(error).__name__
        kept = None
        if self._dead_letters is not None and trying.changes:
            kept = await self._dead_letters.keep(trying, code, str(error), attempts)
        keys = [change.place.key for change in trying.changes]
        told = "kept as a dead letter" if kept else "to be kept as a dead letter once the database is back"
        if self._dead_letters is None or not keys:
            told = "nothing is kept"
        logger.error(
            "[KV] escalated after %d attempts (%s): %s; %s",
            attempts,
            code,
            ", ".join(keys),
            told,
            extra={"error_code": code, "attempts": attempts, "keys": keys, "dead_letter": kept},
        )
        return Escalated(f"given up after {attempts} attempts ({code}), {told}: {error}", kept)


def _is_stale(error: VersionConflict) -> bool:
    return any(failed.reason == "request_id" for failed in error.conflicts)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, KeyloftError):
        return isinstance(error, _TRANSIENT) and not isinstance(error, _FATAL)
    return isinstance(error, (ConnectionError, TimeoutError))
