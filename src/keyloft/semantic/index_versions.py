"""Index versions: which version of a search index is active, and a watch that reports each new one."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.rules import ANY, ExpectedVersion, wrong

if TYPE_CHECKING:
    from keyloft.semantic.workflows import Workflows


class IndexVersion:
    """The active version of an index.

    Example:
        index = store.index_version("tenant/acme/project/web/search/index/docs/version", writer="indexer:rebuild")
        await index.publish("2026-11-16")
        async for version in index.watch():     # the one now, then each next one
            ...
    """

    def __init__(self, store: "Workflows", key: str, writer: str | None) -> None:
        self._store = store
        self._key = key
        self._writer = writer

    def __repr__(self) -> str:
        return f"<IndexVersion {self._key} in {self._store!r}>"

    async def current(self) -> Any:
        """The active version, or None."""
        entry = await self._store.get(self._key)
        return None if entry is None else entry.value

    async def publish(
        self,
        version: Any,
        *,
        expected_version: ExpectedVersion = ANY,
        producer: str | None = None,
        consumer_hints: tuple[str, ...] = (),
        request_id: str | None = None,
        spec_ref: str | None = None,
    ) -> Envelope:
        """Make a version the active one; every watch reports it."""
        if self._writer is None:
            raise wrong("writer", "a non-empty str", None, cure="; publish needs it: index_version(key, writer=…)")
        return await self._store.put(
            self._key,
            version,
            expected_version=expected_version,
            writer=self._writer,
            semantics=Semantics("index_version", producer, consumer_hints),
            request_id=request_id,
            spec_ref=spec_ref,
        )

    async def watch(self) -> AsyncIterator[Any]:
        """The active version now, then after each change; None while there is none."""
        async for entry in self._store.watch(self._key):
            yield None if entry is None else entry.value
