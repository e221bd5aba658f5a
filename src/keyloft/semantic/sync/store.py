"""The semantic store for threads and scripts: every method, run by an event loop in a thread.

Written by `scripts/reference` from the asynchronous classes: change those.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keyloft import limits
from keyloft.core.driving import SyncList
from keyloft.semantic.audit import AuditRecord
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.intents import Intent
from keyloft.semantic.retry import Retry
from keyloft.semantic.rules import ExpectedVersion
from keyloft.semantic.sync.base import SyncSemanticBase
from keyloft.semantic.sync.helpers import SyncEntryWatch, SyncLock, SyncRetry
from keyloft.semantic.sync.workflows import SyncCheckpoint, SyncDeadLetters, SyncFlags, SyncIndexVersion
from keyloft.semantic.writes import Written


class SyncSemanticStore(SyncSemanticBase):
    """Entries with meaning, on an open synchronous store: each write says what it expects, who writes it and what for.

    Example:
        store = SyncSemanticStore(kv)
        cursor = Semantics("cursor", producer="harvester", ttl_seconds=86_400)
        key = "tenant/acme/project/web/docs/onedrive/delta"
        first = store.put(key, {"token": "a"}, expected_version=0, writer="harvester:sync", semantics=cursor)
        store.put(
            key, {"token": "b"}, expected_version=first.version, writer="harvester:sync", semantics=cursor
        )
    """

    @property
    def dead_letters(self) -> SyncDeadLetters:
        """Writes that were given up: to be listed, retried or dropped."""
        return SyncDeadLetters(self._inner.dead_letters, self._driver)

    def put(
        self,
        key: str,
        value: Any,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        semantics: Semantics,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope:
        """Store a value, if the stored entry is the expected one.

        Args:
            key: `tenant/<tenant>/project/<project>/<path>`; for a `SemanticClient`, the path alone.
            value: Any value that JSON can hold, up to 64 KiB of it.
            expected_version: 0: the key must have no entry. n: its entry must be version n. "*": either.
            writer: Who writes: `<agent>:<directive>`, or the name of a service account.
            semantics: What the entry means; with a TTL it expires after this many seconds.
            request_id: Makes a retry harmless: the same request again gets the first outcome, and writes nothing.
            spec_ref: A pointer to the spec that governs this entry.
            fence: The token of a lock in the same project: the put is committed only while that lock is held.

        Raises:
            VersionConflict: Another entry is stored; or the request id was used for another request.
            StaleFence: The lock is no longer held under this token.
            InvalidInput: An argument breaks a rule, which the message names.
            TimedOut: Over NATS: the put may be committed or not. Repeat the call with the same request id to find out.
        """
        return self._run(
            self._inner.put(
                key,
                value,
                expected_version=expected_version,
                writer=writer,
                semantics=semantics,
                request_id=request_id,
                spec_ref=spec_ref,
                fence=fence,
            )
        )

    def delete(
        self,
        key: str,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope | None:
        """Remove an entry, if it is the expected one, and return it. It can be restored for some days.

        Raises:
            VersionConflict: Another entry is stored; or the request id was used for another request.
            StaleFence: The lock is no longer held under this token.
        """
        return self._run(
            self._inner.delete(
                key,
                expected_version=expected_version,
                writer=writer,
                request_id=request_id,
                spec_ref=spec_ref,
                fence=fence,
            )
        )

    def restore(self, key: str, *, writer: str, request_id: str | None = None, spec_ref: str | None = None) -> Envelope:
        """Restore the entry that was deleted last, or has expired, at a key that has no entry now. Its TTL restarts.

        Raises:
            NothingToRestore: Nothing was deleted or has expired there, or too long ago.
            VersionConflict: The key has an entry.
        """
        return self._run(self._inner.restore(key, writer=writer, request_id=request_id, spec_ref=spec_ref))

    def batch(self, operations: Iterable[Intent], *, request_id: str | None = None) -> Written:
        """Make several puts and deletes, all or none; returns what `put` and `delete` would, in the same order.

        Example:
            store.batch([
                Intent.put(key, value, expected_version=0, writer="indexer:swap", semantics=Semantics("config")),
                Intent.delete(other, expected_version=version, writer="indexer:swap"),
            ])

        Raises:
            VersionConflict: Its `conflicts` names every operation that met one.
        """
        return self._run(self._inner.batch(operations, request_id=request_id))

    def get(self, key: str) -> Envelope | None:
        """The entry at a key, or None."""
        return self._run(self._inner.get(key))

    def list(
        self, prefix: str, *, values: bool = False, limit: int | None = None, after: str | None = None
    ) -> "SyncList[Envelope]":
        """The entries whose keys begin with a text, in the order of their keys: iterate it, or call `all`.

        Args:
            prefix: A whole tenant and project, and the beginning of a path: `tenant/acme/project/web/docs/`.
            values: Whether to show values. Without them, a list can be shown to readers who may not see values.
            limit: How many to return at most.
            after: Only entries after this key: the last key of a list continues it.
        """
        return SyncList(self._inner.list(prefix, values=values, limit=limit, after=after), self._driver)

    def watch(self, key: str) -> SyncEntryWatch[Envelope | None]:
        """The entry at a key now, then after each change; None once it is deleted or has expired.

        Example:
            for entry in store.watch(key):
                ...
        """
        return SyncEntryWatch(self._driver.call(self._inner.watch, key), self._driver)

    def changes(self, prefix: str) -> SyncEntryWatch[dict[str, Envelope | None]]:
        """The entries that change from now on, by key, where keys begin with a text; None once deleted or expired."""
        return SyncEntryWatch(self._driver.call(self._inner.changes, prefix), self._driver)

    def check_key(self, key: object, argument: str = "key") -> str:
        """A key, if it keeps to the rules; `argument` is its name as the caller wrote it.

        Raises:
            InvalidKey: It breaks a rule, which the message names.
        """
        return self._inner.check_key(key, argument)

    def update(
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
        return self._run(
            self._inner.update(
                key, change, writer=writer, semantics=semantics, spec_ref=spec_ref, fence=fence, retry=retry
            )
        )

    def retrying(self, **options: Any) -> SyncRetry:
        """The retry policy for functions that write here: a decorator, or `store.retrying().run(function)`.

        When it gives up, the write that failed is kept as a dead letter. Options are those of `Retry`.

        Example:
            @store.retrying()
            def advance() -> None:
                ...
        """
        return SyncRetry(self._inner.retrying(**options), self._driver)

    def lock(
        self,
        key: str,
        *,
        writer: str,
        ttl: int = limits.LOCK_TTL_SECONDS,
        wait: float | None = None,
        producer: str | None = None,
        consumer_hints: tuple[str, ...] = (),
    ) -> SyncLock:
        """A lock, to be held with `with`; it renews itself, and becomes free when its holder dies.

        Args:
            key: The key of its entry.
            writer: Who holds it.
            ttl: After how many seconds without a renewal it becomes free.
            wait: How many seconds to wait for it; None waits until it is free, 0 does not wait.
            producer: As in `Semantics`.
            consumer_hints: As in `Semantics`.

        Example:
            with store.lock("tenant/acme/project/web/locks/sync", writer="harvester:sync") as lock:
                store.put(…, fence=lock.fence)
        """
        return SyncLock(
            self._inner.lock(key, writer=writer, ttl=ttl, wait=wait, producer=producer, consumer_hints=consumer_hints),
            self._driver,
        )

    def checkpoint(
        self, key: str, *, writer: str, order: Callable[[Any], Any] | None = None, semantics: Semantics | None = None
    ) -> SyncCheckpoint:
        """The position that a workflow has reached: `resume` from it, `advance` it, never move it back.

        Args:
            key: The key of its entry.
            writer: Who advances it.
            order: Returns the part of a position that is compared; without it, positions are compared as they are.
            semantics: Replaces `Semantics("checkpoint")`.
        """
        return SyncCheckpoint(
            self._inner.checkpoint(key, writer=writer, order=order, semantics=semantics), self._driver
        )

    def index_version(self, key: str, *, writer: str | None = None) -> SyncIndexVersion:
        """Which version of an index is active; its watch reports the next one."""
        return SyncIndexVersion(self._inner.index_version(key, writer=writer), self._driver)

    def locks(
        self, project: str, *, values: bool = False, limit: int | None = None, after: int | None = None
    ) -> SyncList[Envelope]:
        """The locks of a project that are held, in the order of their fencing tokens: iterate it, or call `all`.

        Args:
            project: `tenant/<tenant>/project/<project>`.
            values: Whether to show values: of a `Lock`, its writer, host and process.
            limit: How many to return at most.
            after: Only locks whose token is larger than this one.
        """
        return SyncList(self._inner.locks(project, values=values, limit=limit, after=after), self._driver)

    def audit(
        self, about: str, *, after: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> SyncList[AuditRecord]:
        """The audit records of a key, or of a project, in the order of what happened: iterate it, or call `all`.

        Args:
            about: A key, or `tenant/<tenant>/project/<project>`.
            after: Only records after the one with this `sequence`.
            limit: How many to return at most.
            reverse: The last one first.
        """
        return SyncList(self._inner.audit(about, after=after, limit=limit, reverse=reverse), self._driver)

    def flags(self, tenant: str, project: str, defaults: Mapping[str, Any] | None = None) -> SyncFlags:
        """The feature flags of a project; a flag that is not set has its default."""
        return SyncFlags(self._inner.flags(tenant, project, defaults), self._driver)

    def shorten(self, tenant: str, project: str, identifier: str, *, writer: str) -> str:
        """A part of a path for an identifier of any length, with the identifier recorded at `identifiers/<part>`.

        Example:
            repo = store.shorten("acme", "web", "https://github.com/acme/a-very-long-name", writer="indexer")
            key = key_of("acme", "web", "code", repo, "last_sha")
        """
        return self._run(self._inner.shorten(tenant, project, identifier, writer=writer))

    def identifier(self, tenant: str, project: str, part: str) -> str | None:
        """The identifier for which `shorten` returned a part."""
        return self._run(self._inner.identifier(tenant, project, part))

    def sweep(self) -> int:
        """Keep expired entries for a restore, each with its audit record, and remove rows that were kept long enough.

        Returns how many entries expired. Readers don't see them, swept or not.
        """
        return self._run(self._inner.sweep())
