"""A read, a change and a put, which can be tried again after any failure without being made twice."""

import inspect
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from keyloft.errors import InvalidArgument, VersionConflict
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.intents import Intent, WriteRequest

if TYPE_CHECKING:
    from keyloft.semantic.store import SemanticStore


def update(
    store: "SemanticStore",
    key: str,
    change: Callable[[Any], Any],
    *,
    writer: str,
    semantics: Semantics | None,
    spec_ref: str | None,
    fence: int | None,
) -> Callable[[], Awaitable[Envelope]]:
    """A function that reads, changes and puts an entry. Each call continues where the last one failed."""
    request: WriteRequest | None = None

    async def attempt() -> Envelope:
        nonlocal request
        # If the answer to a put got lost, the same request is sent again: it may have been committed.
        request = request or await prepare()
        try:
            [entry] = await store.write(request)
        except VersionConflict:
            request = None
            raise
        assert entry is not None
        return entry

    async def prepare() -> WriteRequest:
        current = await store.get(key)
        value = change(None if current is None else current.value)
        if inspect.isawaitable(value):
            value = await value
        meaning = semantics or (None if current is None else current.semantics)
        if meaning is None:
            raise InvalidArgument(f"semantics: {key} has no entry yet, so they must be given")
        intent = Intent.put(
            key,
            value,
            expected_version=0 if current is None else current.version,
            writer=writer,
            semantics=meaning,
            spec_ref=spec_ref or (None if current is None else current.spec_ref),
            fence=fence,
        )
        return WriteRequest(intents=(intent,), request_id=uuid.uuid4().hex)

    return attempt
