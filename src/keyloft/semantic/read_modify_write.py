"""A read, a change and a put, which can be tried again at any point without being made twice."""

import inspect
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from keyloft.errors import InvalidArgument, VersionConflict
from keyloft.semantic.envelope import Envelope, Semantics

if TYPE_CHECKING:
    from keyloft.semantic.store import SemanticStore


class Update:
    """A read, a change and a put, which can be tried again at any point."""

    def __init__(
        self,
        store: "SemanticStore",
        key: str,
        change: Callable[[Any], Any],
        writer: str,
        semantics: Semantics | None,
        spec_ref: str | None,
        fence: int | None,
    ) -> None:
        self._store = store
        self._key = key
        self._change = change
        self._writer = writer
        self._semantics = semantics
        self._spec_ref = spec_ref
        self._fence = fence
        self._put: Callable[[], Awaitable[Envelope]] | None = None

    async def attempt(self) -> Envelope:
        put = self._put or await self._prepare()
        # If the answer to a put gets lost, the very same put is tried again: it may have been made.
        self._put = put
        try:
            return await put()
        except VersionConflict:
            self._put = None
            raise

    async def _prepare(self) -> Callable[[], Awaitable[Envelope]]:
        current = await self._store.get(self._key)
        value = self._change(None if current is None else current.value)
        if inspect.isawaitable(value):
            value = await value
        semantics, spec_ref, version = self._semantics, self._spec_ref, 0
        if current is not None:
            semantics, spec_ref, version = semantics or current.semantics, spec_ref or current.spec_ref, current.version
        if semantics is None:
            raise InvalidArgument(f"semantics: {self._key} is not there yet, so they have to be given")
        return partial(
            self._store.put,
            self._key,
            value,
            expected_version=version,
            writer=self._writer,
            semantics=semantics,
            request_id=uuid.uuid4().hex,
            spec_ref=spec_ref,
            fence=self._fence,
        )
