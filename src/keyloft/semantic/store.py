"""The semantic store: compare-and-set on entries that say who wrote them, why, for whom and until when."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine
from keyloft.core.lazy import ClosableSource, SourceList, check_limit
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import Get, Scan
from keyloft.core.sweeper import sweep_regularly
from keyloft.errors import InvalidArgument, Undecodable
from keyloft.semantic import keys, rules
from keyloft.semantic.audit import AuditTrail, configured_hasher
from keyloft.semantic.commits import Committer
from keyloft.semantic.dead_letters import DeadLetters
from keyloft.semantic.entry_watches import EntryWatch, watch_entries, watch_entry
from keyloft.semantic.envelope import Envelope, Semantics, envelope_of, read_entry
from keyloft.semantic.flags import Flags
from keyloft.semantic.held_locks import HeldLocks, StoredLocks
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.keys import SPACE
from keyloft.semantic.monitoring import Alert, Signals
from keyloft.semantic.planning import Retention
from keyloft.semantic.workflows import Workflows
from keyloft.semantic.writes import Written
from keyloft.tuples.named import ScopedEngine, whole_database
from keyloft.tuples.store import Store

logger = logging.getLogger(__name__)


def check_not_scoped(kv: Store) -> None:
    """Refuse a scoped store: its prefix would have no effect on the semantic store.

    Raises:
        InvalidArgument: The store is scoped.
    """
    if isinstance(kv.engine, ScopedEngine):
        raise InvalidArgument(
            "kv: a semantic store has no prefix, and this store is scoped to one: pass the store that it was made of"
        )


class SemanticStore(AsyncClosing, Workflows):
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
        kv: An open store, which the caller closes. The tuple store and the semantic store share no keys. A database
            has one semantic store, also if `kv` is a named store.
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
        check_not_scoped(kv)
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
        self._committer = Committer(whole_database(kv.engine), self.signals, retention, configured_hasher(audit_key))
        self.dead_letters = DeadLetters(self._committer)
        """Writes that were given up: to be listed, retried or dropped."""
        super().__init__(self.dead_letters, StoredLocks(self._committer))
        self._page_size = PageSize()
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
        await self._committer.background.finish()
        await self.dead_letters.save_last()
        self._committer.is_closed = True

    # Reading

    async def get(self, key: str) -> Envelope | None:
        """The entry at a key, or None."""
        entry_key = keys.parse(key)
        [record] = await self._committer.read(Get(SPACE, entry_key.entry))
        if record is None:
            return None
        stored = read_entry(record)
        self._committer.remember_entry(entry_key, stored, record.version)
        return envelope_of(record, key, stored=stored)

    def list(
        self, prefix: str, *, values: bool = False, limit: int | None = None, after: str | None = None
    ) -> "EnvelopeList":
        """The entries whose keys begin with a text, in the order of their keys: await it, or use `async for`.

        Args:
            prefix: A whole tenant and project, and the beginning of a path: `tenant/acme/project/web/docs/`.
            values: Whether to show values. Without them, a list can be shown to readers who may not see values.
            limit: How many to return at most.
            after: Only entries after this key: the last key of a list continues it.
        """
        start, end = keys.parse_prefix(prefix).entries
        scan = Scan(SPACE, start, end, check_limit(limit), times=True)
        if after is not None and (last := keys.parse(after, "after").entry) >= start:
            scan = replace(scan, start=last, end=max(end, last), after=True)
        return EnvelopeList(self._committer, scan, self._page_size, values=values)

    def watch(self, key: str) -> EntryWatch[Envelope | None]:
        return watch_entry(self.engine, key)

    def changes(self, prefix: str) -> EntryWatch[dict[str, Envelope | None]]:
        return watch_entries(self.engine, prefix)

    def locks(
        self, project: str, *, values: bool = False, limit: int | None = None, after: int | None = None
    ) -> HeldLocks:
        """The locks of a project that are held, in the order of their fencing tokens: await it, or use `async for`.

        Args:
            project: `tenant/<tenant>/project/<project>`.
            values: Whether to show values: of a `Lock`, its writer, host and process.
            limit: How many to return at most.
            after: Only locks whose token is larger than this one.
        """
        rules.check_number(after, "after", "the fencing token of a lock", 2**63 - 1)
        within = keys.parse_project(project)
        return HeldLocks(self._committer, within, values=values, limit=check_limit(limit), after=after)

    def check_key(self, key: object, argument: str = "key") -> str:
        return keys.parse(key, argument).key

    def audit(
        self, about: str, *, after: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> AuditTrail:
        """The audit records of a key, or of a project, in the order of what happened: await it, or use `async for`.

        Args:
            about: A key, or `tenant/<tenant>/project/<project>`.
            after: Only records after the one with this `sequence`.
            limit: How many to return at most.
            reverse: The last one first.
        """
        most = check_limit(limit)
        rules.check_number(after, "after", "the sequence of an audit record", 2**63 - 1)
        within = keys.parse_prefix(about, "about")
        key = keys.parse(about, "about") if within.path else None
        return AuditTrail(self._committer, within.project, key, after=after, limit=most, reverse=reverse)

    # Writing

    async def _carry_out(self, request: WriteRequest) -> Written:
        return await self._committer.carry_out(request)

    def check_intent(self, intent: Intent) -> None:
        keys.parse(intent.key)
        if intent.semantics is not None and intent.semantics.purpose not in self._purposes:
            raise InvalidArgument(
                f"semantics.purpose: expected one of {', '.join(sorted(self._purposes))}, "
                f"got {intent.semantics.purpose!r}; SemanticStore(kv, purposes=[…]), "
                "or `keyloft serve --purposes …`, registers another one"
            )

    # Built on reading and writing

    def flags(self, tenant: str, project: str, defaults: Mapping[str, Any] | None = None) -> Flags:
        """The feature flags of a project; a flag that is not set has its default."""
        return Flags(self, f"{keys.checked_project(tenant, project).prefix}flags/", defaults or {})

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


class EnvelopeList(SourceList[Envelope]):
    """Entries of a project, read as needed: iterate them with `async for`, or `await` them all."""

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
