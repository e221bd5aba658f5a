"""Checkpoints: how far a workflow has come. They only move forward, and one worker at a time moves them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyloft.errors import InvalidArgument, NotForward
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.planning import Put

if TYPE_CHECKING:
    from keyloft.semantic.store import SemanticStore


class Checkpoint:
    """How far a workflow has come.

    Example:
        checkpoint = store.checkpoint(key, writer="harvester:sync")
        done = await checkpoint.resume(0)
        ...                                     # the work after `done`
        await checkpoint.advance(done + 1)      # VersionConflict: another worker was faster
    """

    def __init__(
        self,
        store: "SemanticStore",
        key: str,
        writer: str,
        order: Callable[[Any], Any] | None,
        semantics: Semantics,
    ) -> None:
        self._store = store
        self._key = key
        self._writer = writer
        self._order = order
        self._semantics = semantics
        self._resumed = False
        self._current: Envelope | None = None

    async def resume(self, default: Any = None) -> Any:
        """The position that was reached, by whomever; the default where there is none yet."""
        self._current = await self._store.get(self._key)
        self._resumed = True
        return default if self._current is None else self._current.value

    async def advance(
        self,
        position: Any,
        *,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope:
        """Move on from where `resume`, or the last `advance`, has been.

        Raises:
            VersionConflict: Another worker has moved it meanwhile: resume, and do what is still to be done.
            NotForward: It is there already, or further.
        """
        put = await self.step(position, spec_ref=spec_ref, fence=fence)
        self._current = await self._store.put(
            put.key,
            put.value,
            expected_version=put.expected_version,
            writer=put.writer,
            semantics=put.semantics,
            request_id=request_id,
            spec_ref=put.spec_ref,
            fence=put.fence,
        )
        return self._current

    async def step(self, position: Any, *, spec_ref: str | None = None, fence: int | None = None) -> Put:
        """What `advance` would put, for a batch: a result and the step past it are made together, or not at all.

        Example:
            await store.batch([Put(…), await checkpoint.step(done + 1, fence=lock.fence)])
        """
        if not self._resumed:
            await self.resume()
        if self._current is not None and not self._is_behind(self._current.value, position):
            raise NotForward(
                f"{self._key} only moves forward, and has reached this position, or one beyond it, already "
                f"(version {self._current.version})"
            )
        version = 0 if self._current is None else self._current.version
        return Put(self._key, position, version, self._writer, self._semantics, spec_ref, fence)

    def _is_behind(self, here: Any, there: Any) -> bool:
        try:
            if self._order is not None:
                here, there = self._order(here), self._order(there)
            return bool(here < there)
        except Exception as error:
            raise InvalidArgument(
                f"{self._key}: these positions can't be compared ({type(error).__name__}): "
                "checkpoint(…, order=…) says what of them to compare, as in order=lambda position: position['sequence']"
            ) from error
