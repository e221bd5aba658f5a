"""The semantic store: compare-and-set on entries that say who wrote them, why, for whom and until when."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from keyloft import limits
from keyloft.core import records
from keyloft.core.engine import Engine
from keyloft.core.lazy import LazyList
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import EVERYTHING, Batch, Committed, Expired, Get, Purge, Scan, Space
from keyloft.errors import (
    Closed,
    DatabaseError,
    InvalidArgument,
    InvalidInput,
    KeyloftError,
    Undecodable,
    ValueTooLarge,
)
from keyloft.semantic import envelope as rules
from keyloft.semantic import keys, planning
from keyloft.semantic.audit import AuditTrail
from keyloft.semantic.checkpoints import Checkpoint
from keyloft.semantic.commits import Retention, Writer
from keyloft.semantic.dead_letters import DeadLetters
from keyloft.semantic.envelope import PURPOSES, Envelope, ExpectedVersion, Semantics, envelope_of, read_stored
from keyloft.semantic.flags import Flags
from keyloft.semantic.index_versions import IndexVersion
from keyloft.semantic.keys import place
from keyloft.semantic.locks import Lock
from keyloft.semantic.monitoring import Alert, Signals
from keyloft.semantic.planning import Change, Delete, Put
from keyloft.semantic.read_modify_write import Update
from keyloft.semantic.retry import Retry
from keyloft.semantic.watches import Watching
from keyloft.tuples.store import Store

logger = logging.getLogger(__name__)

_SEMANTIC: Final = Space.SEMANTIC

Envelopes: TypeAlias = list[Envelope]


class SemanticStore:
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
        kv: An open store; it stays the caller's to close. Keys of the tuple store and of this one never meet.
        audit_key: The secret of the audit's hashes. Without it the environment's KEYLOFT_AUDIT_KEY, and without that a
            random one, which is kept in the database: whoever reads the database can then guess small values.
        purposes: What entries may be for, besides checkpoint, feature_flag, lock, cursor, config and index_version.
        request_memory: For how many seconds a request that comes again gets the outcome of the first one.
        restore_within: For how many seconds what was deleted or has expired can be restored.
        audit_retention: For how many seconds audit records are kept.
        sweep_every: Seconds between two sweeps, which put aside what has expired; None leaves them to `sweep()`.
        on_alert: Called when too many writes meet conflicts, when the database is away for long, and when that is over.
        signals: Counters and alerts with other settings; instead of `on_alert`.
        """
        if not isinstance(kv, Store):
            raise InvalidArgument(
                f"kv: an open store, as in `async with keyloft.open(…) as kv`, not {type(kv).__name__}"
            )
        if isinstance(purposes, str):
            raise InvalidArgument(f"purposes: several names, as in [{purposes!r}]")
        self._engine: Engine = kv.engine
        self._purposes = frozenset([*PURPOSES, *[rules.purpose_name(purpose) for purpose in purposes]])
        self.signals = signals or Signals(on_alert)
        keep = Retention(
            _milliseconds("request_memory", request_memory),
            _milliseconds("restore_within", restore_within),
            _milliseconds("audit_retention", audit_retention),
        )
        self._writer = Writer(self._engine, self.signals, keep, audit_key)
        self.dead_letters = DeadLetters(self._engine, self._writer)
        """Writes that were given up: to be listed, retried or dropped."""
        self._page_size = PageSize()
        self._updating: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._sweeping: asyncio.Task[None] | None = None
        if sweep_every is not None:
            _milliseconds("sweep_every", sweep_every)
            self._sweeping = asyncio.create_task(self._sweep_regularly(sweep_every), name="keyloft semantic sweeper")

    async def __aenter__(self) -> "SemanticStore":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the sweeps, and take no more calls. The store below stays open, and its owner's to close."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await self._writer.finish()
        try:
            await self.dead_letters.save()
        except (DatabaseError, Closed) as error:
            logger.error("[KV] %d dead letters could not be kept: %s", self.dead_letters.unsaved, error)
        self._writer.close()

    # Reading

    async def get(self, key: str) -> Envelope | None:
        """The entry at a key, or None."""
        at = place(key)
        [record] = await self._writer.read(Get(_SEMANTIC, at.entry))
        if record is None:
            return None
        stored = read_stored(record)
        self._writer.saw(at, stored, record.version)
        return envelope_of(record, at.key, stored=stored)

    def list(
        self, prefix: str, *, values: bool = False, limit: int | None = None, after: str | None = None
    ) -> "EnvelopeList":
        """The entries whose keys begin with a text, in the order of their keys: await them, or use `async for`.

        Args:
            prefix: A whole tenant and project, and what the path begins with: `tenant/acme/project/web/docs/`.
            values: Whether to show values. Without them, status can be shown to those who may not see values.
            limit: At most so many.
            after: Only entries behind this key: the last one of a list continues it.
        """
        self._writer.check_open()
        start, end = keys.below(prefix).rows
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgument("limit: a whole number of at least 1; leave it out for no limit")
        behind = None if after is None else place(after).entry
        goes_on = behind is not None and behind >= start
        scan = Scan(
            _SEMANTIC,
            behind if goes_on and behind is not None else start,
            max(end, behind) if goes_on and behind is not None else end,
            EVERYTHING if limit is None else limit,
            after=goes_on,
        )
        return EnvelopeList(Pages(self._engine, scan, self._page_size), values=values)

    def watch(self, key: str) -> Watching[Envelope | None]:
        """The entry at a key now, then whenever it changed; None once it is deleted or has expired.

        Example:
            async for entry in store.watch(key):
                ...
        """
        self._writer.check_open()
        watch = self._engine.watch(Get(_SEMANTIC, place(key).entry))
        return Watching(watch, lambda found: _shown(found[0]))

    def changes(self, prefix: str) -> Watching[dict[str, Envelope | None]]:
        """What changes from now on at the keys that begin with a text, by key; None once deleted or expired."""
        self._writer.check_open()
        start, end = keys.below(prefix).rows
        watch = self._engine.watch(Scan(_SEMANTIC, start, end, EVERYTHING))
        return Watching(watch, lambda found: {keys.key_of_row(change.key): _shown(change) for change in found})

    def audit(
        self, about: str, *, after: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> AuditTrail:
        """What happened to a key, or in a project, in that order.

        Args:
            about: A key, or `tenant/<tenant>/project/<project>`.
            after: Only what happened after the record with this `sequence`.
            limit: At most so many.
            reverse: The last one first.
        """
        self._writer.check_open()
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgument("limit: a whole number of at least 1; leave it out for no limit")
        if after is not None and (type(after) is not int or not 0 <= after < 2**63 - 1):
            raise InvalidArgument("after: the sequence of an audit record")
        within = keys.below(about)
        at = place(about) if within.path else None
        return AuditTrail(self._engine, within.tenant, within.project, at, after=after, limit=limit, reverse=reverse)

    # Writing

    async def put(
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
        """Store a value, if what is there is what is expected.

        Args:
            key: `tenant/<tenant>/project/<project>/<path>`.
            value: Whatever JSON can hold, up to 64 KB of it.
            expected_version: 0: nothing may be there. n: it must be version n. "*": whatever is there.
            writer: Who writes: `<agent>:<directive>`, or the name of a service account.
            semantics: What the entry means; with a TTL it is gone after so many seconds.
            request_id: Makes a retry harmless: the same request again gets the first outcome, and writes nothing.
            spec_ref: A pointer to the spec that governs this.
            fence: The token of a lock in the same project: the write is made only while that lock is held.

        Raises:
            VersionConflict: Something else is there; or the request id was used for another request.
            StaleFence: The lock is no longer held by whoever got this token.
            InvalidInput: A rule is broken, which the message names.
        """
        change = self._putting(Put(key, value, expected_version, writer, semantics, spec_ref, fence))
        [entry] = await self._writer.carry_out([change], request_id)
        assert entry is not None
        return entry

    async def delete(
        self,
        key: str,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope | None:
        """Remove an entry, if it is what is expected; returns what was removed. It can be restored for a while.

        Raises:
            VersionConflict: Something else is there; or the request id was used for another request.
            StaleFence: The lock is no longer held by whoever got this token.
        """
        change = planning.deleting(Delete(key, expected_version, writer, spec_ref, fence))
        [removed] = await self._writer.carry_out([change], request_id)
        return removed

    async def restore(
        self, key: str, *, writer: str, request_id: str | None = None, spec_ref: str | None = None
    ) -> Envelope:
        """Bring back what was deleted last, or has expired, at a key where nothing is now. Its TTL begins anew.

        Raises:
            NothingToRestore: There is nothing, or it is too long ago.
            VersionConflict: Something is there.
        """
        change = planning.restoring(key, writer, spec_ref)
        [entry] = await self._writer.carry_out([change], request_id)
        assert entry is not None
        return entry

    async def batch(
        self, operations: Iterable[Put | Delete], *, request_id: str | None = None
    ) -> Sequence[Envelope | None]:
        """Make several puts and deletes, all or none; returns what `put` and `delete` would, in the same order.

        Raises:
            VersionConflict: Its `conflicts` names every operation that stood against what is stored.
        """
        if isinstance(operations, (Put, Delete)):
            raise InvalidArgument("operations: several, as in batch([Put(…), Delete(…)])")
        asked = [*operations]
        if not 1 <= len(asked) <= limits.BATCH_OPERATIONS:
            raise InvalidArgument(f"operations: from 1 to {limits.BATCH_OPERATIONS} puts and deletes, not {len(asked)}")
        prepared = [self._prepared(operation, number) for number, operation in enumerate(asked)]
        named = [change.place.key for change in prepared]
        if len(set(named)) < len(named):
            twice = next(key for key in named if named.count(key) > 1)
            raise InvalidArgument(f"operations: {twice} is named twice; a batch writes each key once")
        first = prepared[0].place
        row = None
        if (name := rules.request_name(request_id)) is not None:
            row = keys.batch_request(first.tenant, first.project, name)
        return await self._writer.carry_out(prepared, request_id, row)

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
        """Read a value, change it, and put the result; again, as the retry policy says, if somebody else was faster.

        Args:
            key: `tenant/<tenant>/project/<project>/<path>`.
            change: Is given the value that is there, or None, and returns the next one; it may be called several times.
            writer: Who writes.
            semantics: What the entry means; without it, as before.
            spec_ref: A pointer to the spec that governs this; without it, as before.
            fence: The token of a lock in the same project.
            retry: Another policy than conflicts after 1, 2, 4 … 32 s, transient errors five times.

        Raises:
            Escalated: Trying again did not help; what was to be written is kept as a dead letter.
        """
        intent = Update(self, key, change, writer, semantics, spec_ref, fence)
        # One after the other: among the tasks of a process, nobody has to be refused and to come back later.
        turn = self._updating.setdefault(place(key).entry, asyncio.Lock())
        async with turn:
            return await (retry or self.retrying()).run(intent.attempt)

    def retrying(self, **options: Any) -> Retry:
        """The retry policy for functions that write here: a decorator, or `await store.retrying().run(function)`.

        When it gives up, the last write that failed is kept as a dead letter. Options are those of `Retry`.

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
        ttl: int = 30,
        wait: float | None = None,
        producer: str | None = None,
        consumer_hints: tuple[str, ...] = (),
    ) -> Lock:
        """A lock, to be held with `async with`; it renews itself, and comes free by itself when its holder dies.

        Args:
            key: Where it is kept.
            writer: Who holds it.
            ttl: After how many seconds without a sign of its holder it comes free.
            wait: How many seconds to wait for it; None for as long as it takes, 0 not at all.
            producer: As in `Semantics`.
            consumer_hints: As in `Semantics`.

        Example:
            async with store.lock("tenant/acme/project/web/locks/sync", writer="harvester:sync") as lock:
                await store.put(…, fence=lock.fence)
        """
        semantics = Semantics(rules.LOCK, producer, consumer_hints, ttl)
        return Lock(self, self._engine, self._writer, place(key), rules.writer_name(writer), semantics, wait)

    def checkpoint(
        self,
        key: str,
        *,
        writer: str,
        order: Callable[[Any], Any] | None = None,
        semantics: Semantics | None = None,
    ) -> Checkpoint:
        """How far a workflow has come: `resume` where it is, `advance` it, and never back.

        Args:
            key: Where it is kept.
            writer: Who advances it.
            order: What of a position tells which comes first; without it, positions are compared as they are.
            semantics: Another meaning than a plain checkpoint.
        """
        return Checkpoint(self, place(key).key, rules.writer_name(writer), order, semantics or Semantics("checkpoint"))

    def flags(self, tenant: str, project: str, defaults: Mapping[str, Any] | None = None) -> Flags:
        """The feature flags of a project; one that is not set has its default."""
        return Flags(self, keys.tenant_id(tenant), keys.project_id(project), defaults or {})

    def index_version(self, key: str, *, writer: str | None = None) -> IndexVersion:
        """Which version of an index is the active one; whoever watches it hears of the next."""
        return IndexVersion(self, place(key).key, None if writer is None else rules.writer_name(writer))

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
        """The identifier that `shorten` made a part of."""
        entry = await self.get(keys.key_of(tenant, project, "identifiers", part))
        return None if entry is None else str(entry.value)

    def _prepared(self, operation: Put | Delete, number: int) -> Change:
        try:
            match operation:
                case Put():
                    return self._putting(operation)
                case Delete():
                    return planning.deleting(operation)
        except ValueTooLarge as error:
            raise ValueTooLarge(error.size, error.limit, f"operations[{number}]: {error}") from None
        except InvalidInput as error:
            raise type(error)(f"operations[{number}]: {error}") from None
        raise InvalidArgument(f"operations[{number}]: each is a Put or a Delete, not {type(operation).__name__}")

    def _putting(self, asked: Put) -> Change:
        change = planning.putting(asked)
        assert change.semantics is not None
        if change.semantics.purpose not in self._purposes:
            raise InvalidArgument(
                f"semantics.purpose: {change.semantics.purpose!r} is none of {', '.join(sorted(self._purposes))}; "
                "SemanticStore(kv, purposes=[…]), or `keyloft serve --purposes …`, registers one of your own"
            )
        return change

    # Expiry

    async def sweep(self) -> int:
        """Put aside what has expired, each with its audit record, and remove what was kept long enough.

        Returns how many entries expired. Readers never see them either way.
        """
        await self.dead_letters.save()
        expired = 0
        while True:
            [due] = await self._writer.read(Expired(_SEMANTIC, limits.SWEEP_SLICE))
            if not due:
                return expired
            rest = [record for record in due if not keys.is_entry(record.key)]
            entries = [record for record in due if keys.is_entry(record.key)]
            swept = await asyncio.gather(*[self._writer.expire(record) for record in entries])
            expired += sum(swept)
            removed = 0
            if rest:
                done = await self._writer.commit(Batch(tuple(Purge(_SEMANTIC, one.key, one.version) for one in rest)))
                assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
                removed = sum(done.found)
            if len(due) < limits.SWEEP_SLICE or not removed + sum(swept):
                return expired

    async def _sweep_regularly(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.sweep()
            except Closed:
                return
            except KeyloftError as error:
                logger.warning("[KV] sweeping failed (%s), next try in %g s: %s", error.code, seconds, error)
            except Exception:
                logger.exception("[KV] sweeping failed unexpectedly, next try in %g s", seconds)
            self.signals.look()


class EnvelopeList(LazyList[Envelope]):
    """Entries on request: iterate them with `async for`, or `await` them all."""

    what = "entries"

    def __init__(self, pages: Pages, *, values: bool) -> None:
        self._pages = pages
        self._values = values

    async def __aiter__(self) -> AsyncIterator[Envelope]:
        async for page in self._pages:
            for record in page:
                try:
                    entry = envelope_of(record, value=self._values)
                except Undecodable as error:
                    logger.error("[KV] a list leaves out what it can't read: %s", error)
                else:
                    yield entry


def _shown(change: records.Change) -> Envelope | None:
    return None if change.record is None else envelope_of(change.record)


def _milliseconds(name: str, seconds: float) -> int:
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf or seconds > limits.LONGEST_EXPIRY_SECONDS:
        raise InvalidArgument(f"{name} is a number of seconds above 0")
    return max(1, round(seconds * 1000))
