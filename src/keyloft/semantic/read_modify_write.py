"""A read, a change and a put, which can be tried again after any failure without being made twice."""

import inspect
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyloft.errors import InvalidArgument, VersionConflict
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.intents import Intent, WriteRequest

if TYPE_CHECKING:
    from keyloft.semantic.store import SemanticStore


class Update:
    """A read, a change and a put. Each attempt continues where the last one failed."""

    def __init__(
        self,
        store: "SemanticStore",
        key: str,
        change: Callable[[Any], Any],
        *,
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
        self._request: WriteRequest | None = None

    async def attempt(self) -> Envelope:
        # If the answer to a put got lost, the same request is sent again: it may have been committed.
        self._request = request = self._request or await self._prepare()
        try:
            [entry] = await self._store.write(request)
        except VersionConflict:
            self._request = None
            raise
        assert entry is not None
        return entry

    async def _prepare(self) -> WriteRequest:
        current = await self._store.get(self._key)
        value = self._change(None if current is None else current.value)
        if inspect.isawaitable(value):
            value = await value
        semantics, spec_ref, version = self._semantics, self._spec_ref, 0
        if current is not None:
            semantics, spec_ref, version = semantics or current.semantics, spec_ref or current.spec_ref, current.version
        if semantics is None:
            raise InvalidArgument(f"semantics: {self._key} has no entry yet, so they must be given")
        intent = Intent.put(
            self._key,
            value,
            expected_version=version,
            writer=self._writer,
            semantics=semantics,
            spec_ref=spec_ref,
            fence=self._fence,
        )
        return WriteRequest(intents=(intent,), request_id=uuid.uuid4().hex)
