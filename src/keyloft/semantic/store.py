"""The semantic store: compare-and-set on entries that say who wrote them, why, for whom and until when."""

import asyncio
import inspect
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine, Watch
from keyloft.core.lazy import ClosableSource, SourceList, check_limit
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import NO_LIMIT, Change, Get, Scan
from keyloft.core.sweeper import sweep_regularly
from keyloft.errors import Closed, DatabaseError, InvalidArgument, KeyloftError, Undecodable, VersionConflict
from keyloft.semantic import keys, rules
from keyloft.semantic.audit import AuditTrail, configured_hasher
from keyloft.semantic.checkpoints import Checkpoint
from keyloft.semantic.commits import Committer
from keyloft.semantic.dead_letters import DeadLetters
from keyloft.semantic.envelope import Envelope, Semantics, envelope_of, read_entry
from keyloft.semantic.flags import Flags
from keyloft.semantic.index_versions import IndexVersion
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.keys import SPACE
from keyloft.semantic.locks import Lock
from keyloft.semantic.monitoring import Alert, Signals
from keyloft.semantic.planning import Retention
from keyloft.semantic.retry import Retry
from keyloft.semantic.writes import Writes, Written
from keyloft.tuples.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SemanticStore(AsyncClosing, Writes):
    """Entries with meaning, on an open store: each write says what it expects, who writes it and what for.

    Example:
        store = SemanticStore(kv)
        cursor = Semantics("cursor", producer="harvester", ttl_seconds=86_400)
        key = "tenant/acme/project/web/docs/onedrive/delta"
        first = await store.put(key, {"token": "a"}, expected_version=0, writer="harvester:sync", semantics=cursor)
        await store.put(
            key, {"token": "b"}, expected_version=first.version, writer="harvester:sync", semantics=cursor
        )
    """

    def __init__(
        self,
        kv: Store,
        *,
        audit_key: bytes | str | None = None,
        purposes: Iterable[str] = (),
        request_memory: float = limits.REQUEST_MEMORY_SECONDS,
        restore_within: float = limits.RESTORE_SECONDS,
        audit_retention: float = limits.AUDIT_SECONDS,
        sweep_every: float | None = limits.SWEEP_EVERY,
        on_alert: Callable[[Alert], None] | None = None,
        signals: Signals | None = None,
    ) -> None:
        """Args:
        kv: An open store, which the caller closes. The tuple store and the semantic store share no keys.
        audit_key: The secret of the audit's hashes; without it the environment's KEYLOFT_AUDIT_KEY. Without either, a
            random key is kept in the database: a reader of the database can then guess small values.
        purposes: Purposes of entries besides checkpoint, feature_flag, lock, cursor, config and index_version.
        request_memory: For how many seconds a repeated request gets the outcome of the first one.
        restore_within: For how many seconds a deleted or expired entry can be restored.
        audit_retention: For how many seconds audit records are kept.
        sweep_every: Seconds between two sweeps of expired entries; None leaves them to `sweep()`.
        on_alert: Called when too many writes meet conflicts, when the database fails for long, and when that is over.
        signals: Counters and alerts with other settings; instead of `on_alert`.
        """
        if not isinstance(kv, Store):
            raise rules.wrong("kv", "an open store, as in `async with keyloft.open(…) as kv`", kv)
        if isinstance(purposes, str):
            raise rules.wrong("purposes", "several names, as in ['lease']", purposes)
        self._kv = kv
        self._purposes = frozenset(
            [*rules.PURPOSES, *[rules.check_purpose(purpose, "purposes") for purpose in purposes]]
        )
        self.signals = signals or Signals(on_alert)
        """Counters and alerts."""
        retention = Retention(
            requests=rules.milliseconds("request_memory", request_memory),
            deleted=rules.milliseconds("restore_within", restore_within),
            audit=rules.milliseconds("audit_retention", audit_retention),
        )
        self._committer = Committer(kv.engine, self.signals, retention, configured_hasher(audit_key))
        self.dead_letters = DeadLetters(self._committer)
        """Writes that were given up: to be listed, retried or dropped."""
        self._page_size = PageSize()
        self._updating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sweeping: asyncio.Task[None] | None = None
        if sweep_every is not None:
            rules.milliseconds("sweep_every", sweep_every)
            self._sweeping = asyncio.create_task(
                sweep_regularly(self.sweep, sweep_every), name="keyloft semantic sweeper"
            )

    def __repr__(self) -> str:
        return f"<SemanticStore on {self._kv!r}, {'closed' if self._committer.is_closed else 'open'}>"

    @property
    def engine(self) -> Engine:
        """The database.

        Raises:
            Closed: This store is closed.
        """
        return self._committer.open_engine()

    async def aclose(self) -> None:
        """End the sweeps and refuse further calls. The caller closes the store below."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await self._committer.finish()
        try:
            await self.dead_letters.save()
        except (DatabaseError, Closed) as error:
            logger.error("[KV] %d dead letters could not be stored: %s", self.dead_letters.unsaved, error)
        self._committer.is_closed = True

    # Reading

    async def get(self, key: str) -> Envelope | None:
        """The entry at a key, or None."""
        entry_key = keys.parse(key)
        [record] = await self._committer.read(Get(SPACE, entry_key.entry))
        if record is None:
            return None
        stored = read_entry(record)
        self._committer.saw(entry_key, stored, record.version)
        return envelope_of(record, key, stored=stored)

    def list(
        self, prefix: str, *, values: bool = False, limit: int | None = None, after: str | None = None
    ) -> "EnvelopeList":
        """The entries whose keys begin with a text, in the order of their keys: await it, or use `async for`.

        Args:
            prefix: A whole tenant and project, and the beginning of a path: `tenant/acme/project/web/docs/`.
            values: Whether to show values. Without them, a list can be shown to readers who may not see values.
            limit: At most so many.
            after: Only entries after this key: the last key of a list continues it.
        """
        start, end = keys.parse_prefix(prefix).entries
        scan = Scan(SPACE, start, end, check_limit(limit), times=True)
        if after is not None and (last := keys.parse(after, "after").entry) >= start:
            scan = replace(scan, start=last, end=max(end, last), after=True)
        return EnvelopeList(self._committer, scan, self._page_size, values=values)

    def watch(self, key: str) -> "EntryWatch[Envelope | None]":
        """The entry at a key now, then after each change; None once it is deleted or has expired.

        Example:
            async for entry in store.watch(key):
                ...
        """
        watch = self._committer.open_engine().watch(Get(SPACE, keys.parse(key).entry))
        return EntryWatch(watch, lambda found: _shown(found[0]))

    def changes(self, prefix: str) -> "EntryWatch[dict[str, Envelope | None]]":
        """The entries that change from now on, by key, where keys begin with a text; None once deleted or expired."""
        watch = self._committer.open_engine().watch(Scan(SPACE, *keys.parse_prefix(prefix).entries, NO_LIMIT))
        return EntryWatch(watch, lambda found: {keys.key_of_row(change.key): _shown(change) for change in found})

    def audit(
        self, about: str, *, after: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> AuditTrail:
        """The audit records of a key, or of a project, in the order of what happened: await it, or use `async for`.

        Args:
            about: A key, or `tenant/<tenant>/project/<project>`.
            after: Only records after the one with this `sequence`.
            limit: At most so many.
            reverse: The last one first.
        """
        most = check_limit(limit)
        rules.check_number(after, "after", "the sequence of an audit record", 2**63 - 1)
        within = keys.parse_prefix(about, "about")
        key = keys.parse(about, "about") if within.path else None
        return AuditTrail(self._committer, within.project, key, after=after, limit=most, reverse=reverse)

    # Writing

    async def restore(
        self, key: str, *, writer: str, request_id: str | None = None, spec_ref: str | None = None
    ) -> Envelope:
        """Restore the entry that was deleted last, or has expired, at a key that has no entry now. Its TTL restarts.

        Raises:
            NothingToRestore: Nothing was deleted or has expired there, or too long ago.
            VersionConflict: The key has an entry.
        """
        intent = Intent.restore(key, writer=writer, spec_ref=spec_ref)
        [entry] = await self.write(WriteRequest(intents=(intent,), request_id=request_id))
        assert entry is not None
        return entry

    async def write(self, request: WriteRequest) -> Written:
        """Carry out a write request, as `put`, `delete`, `restore` and `batch` make them.

        Raises:
            InvalidArgument: The request has no intents, or a purpose is not registered.
        """
        if not request.intents:
            raise InvalidArgument("request: expected at least one intent, got none")
        for intent in request.intents:
            self._check(intent)
        try:
            return await self._committer.carry_out(request)
        except KeyloftError as error:
            error.failed_request = request
            raise

    def _check(self, intent: Intent) -> None:
        keys.parse(intent.key)
        if intent.semantics is not None and intent.semantics.purpose not in self._purposes:
            raise InvalidArgument(
                f"semantics.purpose: expected one of {', '.join(sorted(self._purposes))}, "
                f"got {intent.semantics.purpose!r}; SemanticStore(kv, purposes=[…]), "
                "or `keyloft serve --purposes …`, registers another one"
            )

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
            key: `tenant/<tenant>/project/<project>/<path>`.
            change: Gets the stored value, or None, and returns the next one; it may be called several times.
            writer: Who writes.
            semantics: What the entry means; without them, those of the stored entry.
            spec_ref: A pointer to the spec that governs this entry; without it, that of the stored entry.
            fence: The token of a lock in the same project.
            retry: Another policy than conflicts after 1, 2, 4 … 32 s, transient errors five times.

        Raises:
            Escalated: All attempts failed; what was to be written is kept as a dead letter.
        """
        request: WriteRequest | None = None

        async def attempt() -> Envelope:
            nonlocal request
            # If the answer to a put got lost, the same request is sent again: it may have been committed.
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
            value = change(None if current is None else current.value)
            if inspect.isawaitable(value):
                value = await value
            version, meaning, spec = 0, semantics, spec_ref
            if current is not None:
                version, meaning, spec = current.version, semantics or current.semantics, spec_ref or current.spec_ref
            if meaning is None:
                raise rules.wrong("semantics", f"a Semantics, since {key} has no entry yet", None)
            intent = Intent.put(
                key, value, expected_version=version, writer=writer, semantics=meaning, spec_ref=spec, fence=fence
            )
            return WriteRequest(intents=(intent,), request_id=uuid.uuid4().hex)

        # One at a time: the tasks of one process never conflict with each other.
        async with self._updating.setdefault(keys.parse(key).key, asyncio.Lock()):
            return await (retry or self.retrying()).run(attempt)

    def retrying(self, **options: Any) -> Retry:
        """The retry policy for functions that write here: a decorator, or `await store.retrying().run(function)`.

        When it gives up, the write that failed is kept as a dead letter. Options are those of `Retry`.

        Example:
            @store.retrying()
            async def advance() -> None:
                ...
        """
        return Retry(self.dead_letters, **options)

    # Built on it

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
        keys.parse(key)
        return Lock(
            self._committer, Intent.put(key, holder, expected_version=0, writer=writer, semantics=semantics), wait
        )

    def checkpoint(
        self, key: str, *, writer: str, order: Callable[[Any], Any] | None = None, semantics: Semantics | None = None
    ) -> Checkpoint:
        """The position that a workflow has reached: `resume` from it, `advance` it, never move it back.

        Args:
            key: The key of its entry.
            writer: Who advances it.
            order: Returns what of a position to compare; without it, positions are compared as they are.
            semantics: Replaces `Semantics("checkpoint")`.
        """
        rules.check_text(writer, "writer")
        semantics = semantics or Semantics("checkpoint")
        return Checkpoint(self, keys.parse(key).key, writer=writer, order=order, semantics=semantics)

    def flags(self, tenant: str, project: str, defaults: Mapping[str, Any] | None = None) -> Flags:
        """The feature flags of a project; a flag that is not set has its default."""
        return Flags(self, keys.checked_project(tenant, project), defaults or {})

    def index_version(self, key: str, *, writer: str | None = None) -> IndexVersion:
        """Which version of an index is active; its watch reports the next one."""
        if writer is not None:
            rules.check_text(writer, "writer")
        return IndexVersion(self, keys.parse(key).key, writer)

    async def shorten(self, tenant: str, project: str, identifier: str, *, writer: str) -> str:
        """A part of a path for an identifier of any length, with the identifier recorded at `identifiers/<part>`.

        Example:
            repo = await store.shorten("acme", "web", "https://github.com/acme/a-very-long-name", writer="indexer")
            key = key_of("acme", "web", "code", repo, "last_sha")
        """
        part = keys.shortened(identifier)
        key = keys.key_of(tenant, project, "identifiers", part)
        if (await self.get(key)) is None:
            await self.put(key, identifier, expected_version=rules.ANY, writer=writer, semantics=Semantics("config"))
        return part

    async def identifier(self, tenant: str, project: str, part: str) -> str | None:
        """The identifier for which `shorten` returned a part."""
        folder = f"{keys.checked_project(tenant, project).prefix}identifiers/"
        entry = await self.get(folder + keys.check_part(part, "part"))
        return None if entry is None else str(entry.value)

    # Expiry

    async def sweep(self) -> int:
        """Keep expired entries for a restore, each with its audit record, and remove rows that were kept long enough.

        Returns how many entries expired. Readers don't see them, swept or not.
        """
        try:
            await self.dead_letters.save()
            return await self._committer.sweep()
        finally:
            self.signals.check_alerts()


class EntryWatch(AsyncClosing, Generic[T]):
    """Iterate it with `async for`. It misses no change after it was made, but may merge several into one.

    Closing it, or the store, ends the iteration.
    """

    def __init__(self, watch: Watch, show: Callable[[list[Change]], T]) -> None:
        self._watch = watch
        self._show = show

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return self._show(await self._watch.__anext__())

    async def aclose(self) -> None:
        await self._watch.aclose()


class EnvelopeList(SourceList[Envelope]):
    """Entries on request: iterate them with `async for`, or `await` them all."""

    what = "entries"

    def __init__(self, source: ClosableSource, scan: Scan, page_size: PageSize, *, values: bool) -> None:
        super().__init__(source)
        self._scan = scan
        self._page_size = page_size
        self._values = values

    async def __aiter__(self) -> AsyncIterator[Envelope]:
        async for page in Pages(self._engine, self._scan, self._page_size):
            for record in page:
                try:
                    entry = envelope_of(record, value=self._values)
                except Undecodable as error:
                    logger.error("[KV] a list leaves out an entry that can't be read: %s", error)
                else:
                    yield entry


def _shown(change: Change) -> Envelope | None:
    return None if change.record is None else envelope_of(change.record)
