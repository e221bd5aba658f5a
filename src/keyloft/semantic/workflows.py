"""What the semantic store and its client over NATS both offer: updates, retries, locks, checkpoints, index versions.

All of it is built on a few calls, which `SemanticStore` and `SemanticClient` provide: reading, writing and watching
entries, keeping dead letters, and keeping locks. Keys are those of the subclass: whole ones, or paths within a project.
"""

import os
import socket
import uuid
from collections.abc import Callable
from typing import Any

from keyloft import limits
from keyloft.core.lazy import LazyList
from keyloft.core.update_turns import UpdateTurns
from keyloft.core.updated_values import copy_maker, updated
from keyloft.errors import VersionConflict
from keyloft.semantic import rules
from keyloft.semantic.checkpoints import Checkpoint
from keyloft.semantic.dead_letters import DeadLetterKeeper
from keyloft.semantic.entry_watches import EntryWatch
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.held_locks import LockKeeper
from keyloft.semantic.index_versions import IndexVersion
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.locks import Lock
from keyloft.semantic.retry import Retry
from keyloft.semantic.writes import Writes


class Workflows(Writes):
    """Entries, and what is built on them. Subclasses read, write and watch."""

    def __init__(self, dead_letters: DeadLetterKeeper, locks: LockKeeper) -> None:
        self._given_up = dead_letters
        self.lock_keeper = locks
        """Acquires, renews and releases locks by their tokens, for a `Lock`."""
        self._update_turns = UpdateTurns()

    # What subclasses provide

    async def get(self, key: str) -> Envelope | None:
        """The entry at a key, or None."""
        raise NotImplementedError

    def list(self, prefix: str, *, values: bool = False, limit: int | None = None) -> LazyList[Envelope]:
        """The entries whose keys begin with a text, in the order of their keys: await it, or use `async for`."""
        raise NotImplementedError

    def watch(self, key: str) -> EntryWatch[Envelope | None]:
        """The entry at a key now, then after each change; None once it is deleted or has expired.

        Example:
            async for entry in store.watch(key):
                ...
        """
        raise NotImplementedError

    def changes(self, prefix: str) -> EntryWatch[dict[str, Envelope | None]]:
        """The entries that change from now on, by key, where keys begin with a text; None once deleted or expired."""
        raise NotImplementedError

    def check_key(self, key: object, argument: str = "key") -> str:
        """A key, if it keeps to the rules; `argument` is its name as the caller wrote it.

        Raises:
            InvalidKey: It breaks a rule, which the message names.
        """
        raise NotImplementedError

    # What is built on these

    async def update(
        self,
        key: str,
        change: Callable[[Any], Any],
        *,
        writer: str,
        semantics: Semantics | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
        retry: Retry | None = None,
    ) -> Envelope:
        """Read a value, change it, and put the result; after a conflict again, as the retry policy says.

        Args:
            key: `tenant/<tenant>/project/<project>/<path>`; for a `SemanticClient`, the path alone.
            change: Called with the stored value, or None; returns the new value, or an awaitable of it. It may be
                called several times. If it changes a list or dict in place, it must return that list or dict.
            writer: Who writes.
            semantics: What the entry means; without them, those of the stored entry.
            spec_ref: A pointer to the spec that governs this entry; without it, that of the stored entry.
            fence: The token of a lock in the same project.
            retry: Replaces the policy of `Retry()`: conflicts again after 1, 2, 4 … 32 s, transient errors five times.

        Raises:
            Escalated: All attempts failed; what was to be written is kept as a dead letter.
            InvalidArgument: `change` changed the value in place and returned None, or updates the same key, itself or
                in a task that it begins; nothing was written.
        """
        request: WriteRequest | None = None

        async def attempt() -> Envelope:
            nonlocal request
            # After a lost answer the same request is sent again, because it may have been committed.
            request = request or await prepare()
            try:
                [entry] = await self.write(request)
            except VersionConflict:
                request = None
                raise
            assert entry is not None
            return entry

        async def prepare() -> WriteRequest:
            current = await self.get(key)
            given = None if current is None else current.value
            before = copy_maker(given, limits.SEMANTIC_VALUE_BYTES, limits.PLUGIN_VALUE_DEPTH)
            with turn.function():
                value = await updated(change, given, before, "change")
            version, meaning, spec = 0, semantics, spec_ref
            if current is not None:
                version, meaning, spec = current.version, semantics or current.semantics, spec_ref or current.spec_ref
            if meaning is None:
                raise rules.wrong("semantics", f"a Semantics, since {key} has no entry yet", None)
            intent = Intent.put(
                key, value, expected_version=version, writer=writer, semantics=meaning, spec_ref=spec, fence=fence
            )
            return WriteRequest(intents=(intent,), request_id=uuid.uuid4().hex)

        if retry is not None and not isinstance(retry, Retry):
            raise rules.wrong("retry", "a Retry, as in store.retrying(conflict_pauses=(1, 2))", retry)
        async with self._update_turns.take(self.check_key(key), "change") as turn:
            return await (retry or self.retrying()).run(attempt)

    def retrying(self, **options: Any) -> Retry:
        """The retry policy for functions that write here: a decorator, or `await store.retrying().run(function)`.

        When it gives up, the write that failed is kept as a dead letter. Options are those of `Retry`.

        Example:
            @store.retrying()
            async def advance() -> None:
                ...
        """
        return Retry(self._given_up, **options)

    def lock(
        self,
        key: str,
        *,
        writer: str,
        ttl: int = limits.LOCK_TTL_SECONDS,
        wait: float | None = None,
        producer: str | None = None,
        consumer_hints: tuple[str, ...] = (),
    ) -> Lock:
        """A lock, to be held with `async with`; it renews itself, and becomes free when its holder dies.

        Args:
            key: The key of its entry.
            writer: Who holds it.
            ttl: After how many seconds without a renewal it becomes free.
            wait: How many seconds to wait for it; None waits until it is free, 0 does not wait.
            producer: As in `Semantics`.
            consumer_hints: As in `Semantics`.

        Example:
            async with store.lock("tenant/acme/project/web/locks/sync", writer="harvester:sync") as lock:
                await store.put(…, fence=lock.fence)
        """
        rules.check_ttl(ttl, "ttl")
        semantics = Semantics(rules.LOCK, producer, consumer_hints, ttl)
        rules.check_text(writer, "writer")
        holder = {"holder": writer, "host": socket.gethostname(), "pid": os.getpid()}
        self.check_key(key)
        intent = Intent.put(key, holder, expected_version=0, writer=writer, semantics=semantics)
        return Lock(self.lock_keeper, intent, wait)

    def checkpoint(
        self, key: str, *, writer: str, order: Callable[[Any], Any] | None = None, semantics: Semantics | None = None
    ) -> Checkpoint:
        """The position that a workflow has reached: `resume` from it, `advance` it, never move it back.

        Args:
            key: The key of its entry.
            writer: Who advances it.
            order: Returns the part of a position that is compared; without it, positions are compared as they are.
            semantics: Replaces `Semantics("checkpoint")`.
        """
        rules.check_text(writer, "writer")
        semantics = semantics or Semantics("checkpoint")
        return Checkpoint(self, self.check_key(key), writer=writer, order=order, semantics=semantics)

    def index_version(self, key: str, *, writer: str | None = None) -> IndexVersion:
        """Which version of an index is active; its watch reports the next one."""
        if writer is not None:
            rules.check_text(writer, "writer")
        return IndexVersion(self, self.check_key(key), writer)
