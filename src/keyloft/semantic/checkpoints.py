"""Checkpoints: the position that a workflow has reached. They only move forward, one worker at a time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyloft.errors import InvalidArgument, NotForward
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.intents import Intent, WriteRequest

if TYPE_CHECKING:
    from keyloft.semantic.workflows import Workflows


class Checkpoint:
    """The position that a workflow has reached.

    Example:
        checkpoint = store.checkpoint(key, writer="harvester:sync")
        done = await checkpoint.resume(0)
        ...                                     # the work after `done`
        await checkpoint.advance(done + 1)      # VersionConflict: another worker was faster
    """

    def __init__(
        self, store: "Workflows", key: str, *, writer: str, order: Callable[[Any], Any] | None, semantics: Semantics
    ) -> None:
        self._store = store
        self._key = key
        self._writer = writer
        self._order = order
        self._semantics = semantics
        self._resumed = False
        self._current: Envelope | None = None

    def __repr__(self) -> str:
        return f"<Checkpoint {self._key} of {self._writer} in {self._store!r}>"

    async def resume(self, default: Any = None) -> Any:
        """The position that any worker has reached; the default where there is none yet."""
        self._current = await self._store.get(self._key)
        self._resumed = True
        return default if self._current is None else self._current.value

    async def advance(
        self, position: Any, *, request_id: str | None = None, spec_ref: str | None = None, fence: int | None = None
    ) -> Envelope:
        """Move on from the position that `resume`, or the last `advance`, returned.

        Raises:
            VersionConflict: Another worker has moved the checkpoint meanwhile: resume, then do what is left.
            NotForward: The checkpoint has reached this position already, or a later one.
        """
        intent = await self.step(position, spec_ref=spec_ref, fence=fence)
        [self._current] = await self._store.write(WriteRequest(intents=(intent,), request_id=request_id))
        assert self._current is not None
        return self._current

    async def step(self, position: Any, *, spec_ref: str | None = None, fence: int | None = None) -> Intent:
        """What `advance` would put, for a batch: a result and the step past it are committed together or not at all.

        Example:
            await store.batch([Intent.put(…), await checkpoint.step(done + 1, fence=lock.fence)])
        """
        if not self._resumed:
            await self.resume()
        if self._current is not None and not self._is_before(self._current.value, position):
            raise NotForward(
                f"position: {self._key} only moves forward, and has reached this position, or a later one, already "
                f"(version {self._current.version})"
            )
        return Intent.put(
            self._key,
            position,
            expected_version=0 if self._current is None else self._current.version,
            writer=self._writer,
            semantics=self._semantics,
            spec_ref=spec_ref,
            fence=fence,
        )

    def _is_before(self, here: Any, there: Any) -> bool:
        try:
            if self._order is not None:
                here, there = self._order(here), self._order(there)
            return bool(here < there)
        except Exception as error:
            raise InvalidArgument(
                f"position: positions of {self._key} can't be compared ({type(error).__name__}): "
                "checkpoint(…, order=…) says what to compare, as in order=lambda position: position['sequence']"
            ) from error
