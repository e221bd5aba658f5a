"""Publishes for the watches of a service's clients: follows the stored leases, and takes over those of dead instances.

`docs/adr/0014-watches-over-nats.md` says why.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError

from keyloft import limits
from keyloft.core.engine import Engine, Watch, write
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import NO_LIMIT, Batch, Check, Committed, Delete, Get, Purge, Record, Scan
from keyloft.errors import Closed, DatabaseError, HistoryGone, KeyloftError, QuotaExceeded
from keyloft.nats.connection import cancel
from keyloft.nats.instance import PublishingInstance
from keyloft.nats.intake import Intake
from keyloft.nats.leases import (
    SPACE,
    Lease,
    LeaseRows,
    PublishedProgress,
    read_lease,
    read_progress,
    stored,
    watched_bytes,
)
from keyloft.nats.meters import ServiceMeters
from keyloft.nats.publications import Publication, Watchable

logger = logging.getLogger(__name__)


class KnownLease(Struct, frozen=True):
    """A lease, as this instance has last seen it."""

    lease: Lease
    version: int
    """The version of its row."""


class EventPublisher:
    """Publishes for the leases that name this instance. It follows the stored leases for as long as there are some."""

    def __init__(
        self, nats: Nats, engine: Engine, intake: Intake, watchable: Watchable, service: str, meters: ServiceMeters
    ) -> None:
        self.rows = LeaseRows(service)
        self.instance = PublishingInstance(nats, engine, self.rows)
        self.leases: dict[bytes, KnownLease] = {}
        """All stored leases, by row."""
        self.lease_count: Counter[str] = Counter()
        """How many leases each owner has."""
        self.lease_bytes: Counter[str] = Counter()
        """How many bytes the leases of each owner take."""
        self._beginning: dict[bytes, tuple[str, int]] = {}
        """By row, owner and size of the leases that are about to be stored; both counters include them."""
        self._engine = engine
        self._intake = intake
        self._meters = meters
        self._watchable = watchable
        self._known = 0
        """The version up to which the stored leases are known."""
        self._alive: set[str] = set()
        """The instances that are alive."""
        self._progress: set[str] = set()
        """The instances whose progress is stored."""
        self._publications: dict[bytes, Publication] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._orphans: set[bytes] = set()
        """The leases whose instance is dead."""
        self._due = asyncio.Event()
        """Set when there are leases to take over, or rows to remove."""
        self._expired: list[Purge] = []
        """The rows of leases that have ended, to be removed."""
        self._wanted = asyncio.Event()
        """Set while clients ask for leases: then the leases must be followed even if there is none yet."""
        self._requests = 0
        """How many clients ask for leases now."""
        self._is_following = asyncio.Event()
        """Set when all stored leases are known."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="keyloft event publisher")

    async def aclose(self) -> None:
        """Stop publishing; other instances go on at once."""
        task, self._task = self._task, None
        if task is not None:
            await cancel(task)
            with contextlib.suppress(KeyloftError, TimeoutError):
                async with asyncio.timeout(limits.HEARTBEAT_SECONDS):
                    await self.instance.leave()

    @contextlib.asynccontextmanager
    async def beginning(self, row: bytes, owner: str, keys: Sequence[str] | None) -> AsyncIterator[None]:
        """A block in which a lease is stored: this instance can publish for it, and its owner has room for it.

        The lease counts from the beginning of the block: otherwise, leases that begin together would exceed the bounds.

        Raises:
            QuotaExceeded: Its owner has too many leases, or they watch too many keys.
        """
        self._requests += 1
        self._wanted.set()
        try:
            await self._is_following.wait()
            await self.instance.join()
            with self._room_for(row, owner, watched_bytes(keys)):
                yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._wanted.clear()

    @contextlib.contextmanager
    def _room_for(self, row: bytes, owner: str, size: int) -> Iterator[None]:
        if self.lease_count[owner] >= limits.OWNER_LEASES:
            raise QuotaExceeded(f"{owner} has {limits.OWNER_LEASES:,} watches already: end some of them")
        if self.lease_bytes[owner] + size > limits.OWNER_LEASE_BYTES:
            rule = f"may take {limits.OWNER_LEASE_BYTES:,} bytes in all: watch a prefix, or end some watches"
            raise QuotaExceeded(f"the keys of {owner}'s watches {rule}")
        self._beginning[row] = owner, size
        self._count(owner, size)
        try:
            yield
        finally:
            if self._beginning.pop(row, None) is not None:  # the lease was not stored
                self._uncount(owner, size)

    def know(self, row: bytes, lease: Lease, version: int) -> None:
        """Take note of a lease that this instance has stored."""
        self._put(row, KnownLease(lease, version))

    # Following the stored leases

    async def _run(self) -> None:
        has_failed = False
        while True:
            try:
                [page] = await self._engine.read(Scan(SPACE, *self.rows.all, 1, keys_only=True))
                has_failed = False
                if page or self._wanted.is_set():
                    await self._follow()
                # Wait also after `_follow`: while there are heartbeats and no leases, it ends at once, and each time it
                # makes some commits.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), limits.LEASE_CHECK_SECONDS)
            except Closed:
                return
            except Exception as error:
                # A database may be away for hours: then the repetitions are for debugging only.
                level, has_failed = logging.DEBUG if has_failed else logging.WARNING, True
                is_unexpected = not isinstance(error, KeyloftError)
                logger.log(level, "[KV] no events of watches, trying again: %s", error, exc_info=is_unexpected)
                await asyncio.sleep(limits.LEASE_CHECK_SECONDS)

    async def _follow(self) -> None:
        """Publish for as long as there are leases."""
        scan = Scan(SPACE, *self.rows.all, NO_LIMIT)
        watch = self._engine.watch(scan)
        applying: asyncio.Task[None] | None = None
        try:
            async for page in Pages(self._engine, scan, PageSize()):
                for record in page:
                    self._apply(record.key, record)
                    self._known = max(self._known, record.version)
            applying = asyncio.create_task(self._apply_changes(watch), name="keyloft leases")
            applying.add_done_callback(lambda _: self._due.set())
            await self._serve(applying)
        finally:
            # The instance joins again under a new id, with which the publications of these leases are new runs.
            self.instance.lapse()
            self._is_following.clear()
            if applying is not None:
                await cancel(applying)
            await watch.aclose()
            for row in list(self._publications):
                self._stop(row)
            counts = (self.lease_count, self.lease_bytes)
            for known in (self.leases, *counts, self._alive, self._progress, self._orphans):
                known.clear()
            for owner, size in self._beginning.values():
                self._count(owner, size)
            self._meters.leases = 0

    async def _serve(self, applying: "asyncio.Task[None]") -> None:
        loop = asyncio.get_running_loop()
        next_heartbeat = 0.0
        while not applying.done():
            if loop.time() >= next_heartbeat:
                next_heartbeat = loop.time() + limits.HEARTBEAT_SECONDS / limits.HEARTBEATS
                await self._heartbeat()
            self._is_following.set()
            self._due.clear()
            await self._take_over(next_heartbeat)
            await self._tidy_up()
            if not self.leases and not self._wanted.is_set():
                self._is_following.clear()  # requests for a lease wait from now on, until `_follow` runs again
                await self.instance.leave()
                await self._tidy_up()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), max(0.0, next_heartbeat - loop.time()))
        await applying

    async def _heartbeat(self) -> None:
        try:
            if self.instance.is_alive:
                reached = [publication.reached for publication in self._publications.values()]
                sent = PublishedProgress(min(reached), self._known) if reached else PublishedProgress()
                await self.instance.heartbeat(sent)
            else:
                for row in list(self._publications):
                    self._stop(row)
                await self.instance.join()
                self._find_orphans()
        except (DatabaseError, NatsError, TimeoutError) as error:
            logger.warning("[KV] this service may not publish for watches, others will: %s", error)

    async def _apply_changes(self, watch: Watch) -> None:
        async for changes in watch:
            for change in changes:
                self._apply(change.key, change.record)
            self._known = max(self._known, watch.reported_to or 0)

    def _apply(self, row: bytes, record: Record | None) -> None:
        if self.rows.is_lease(row):
            self._apply_lease(row, record)
            return
        instance = self.rows.instance(row)
        known = self._alive if self.rows.is_heartbeat(row) else self._progress
        if record is not None:
            known.add(instance)
        elif instance in known:
            known.discard(instance)
            self._find_orphans()

    def _apply_lease(self, row: bytes, record: Record | None) -> None:
        if record is None:
            if (known := self.leases.get(row)) is not None:
                self._forget(row)
                self._expired.append(Purge(SPACE, row, known.version))
                self._due.set()
            return
        try:
            self._put(row, KnownLease(read_lease(record.value), record.version))
        except Exception as error:  # a damaged row must not end the others
            logger.error("[KV] a watch can't be served: %s", error)

    def _put(self, row: bytes, known: KnownLease) -> None:
        owner = self._watchable.owner(known.lease.names)
        if (before := self.leases.get(row)) is not None:
            if before.version > known.version:
                return
            self.lease_bytes[owner] -= before.lease.size
        elif (counted := self._beginning.pop(row, None)) is not None:
            self.lease_bytes[owner] -= counted[1]
        else:
            self.lease_count[owner] += 1
        self.leases[row] = known
        self._meters.leases = len(self.leases)
        self.lease_bytes[owner] += known.lease.size
        self._publish(row, known.lease)

    def _forget(self, row: bytes) -> None:
        self._stop(row)
        self._orphans.discard(row)
        known = self.leases.pop(row)
        self._meters.leases = len(self.leases)
        self._uncount(self._watchable.owner(known.lease.names), known.lease.size)

    def _count(self, owner: str, size: int) -> None:
        self.lease_count[owner] += 1
        self.lease_bytes[owner] += size

    def _uncount(self, owner: str, size: int) -> None:
        self.lease_bytes[owner] -= size
        self.lease_count[owner] -= 1
        if not self.lease_count[owner]:
            del self.lease_count[owner], self.lease_bytes[owner]

    # Publishing

    def _publish(self, row: bytes, lease: Lease) -> None:
        """Begin or end publishing for a lease, as its row says."""
        running = self._publications.get(row)
        if lease.publisher != self.instance.id:
            self._stop(row)
            if lease.publisher not in self._alive:
                self._orphans.add(row)
                self._due.set()
            return
        self._orphans.discard(row)
        if running is not None and running.lease.run == lease.run and lease.gone is None:
            running.renewed()
            return
        self._stop(row)
        if lease.run and lease.gone is None and self.instance.is_alive:
            self._publications[row] = Publication(
                lease, self._engine, self._intake, self.instance, self._watchable, partial(self._failed, row)
            )

    def _stop(self, row: bytes) -> None:
        if (running := self._publications.pop(row, None)) is not None:
            self._run_task(running.aclose())

    def _failed(self, row: bytes, publication: Publication, gone: HistoryGone) -> None:
        publication.tell(gone)
        self._run_task(self._note_gone(row, publication.lease, str(gone)))

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _note_gone(self, row: bytes, lease: Lease, reason: str) -> None:
        """Store the reason, so that the next renewal reports it, too: the event may be lost."""
        [record] = await self._engine.read(Get(SPACE, row))
        if record is not None and read_lease(record.value).run == lease.run:
            gone = stored(row, replace(lease, gone=reason), expire_at=record.expires_at)
            await self._engine.commit(Batch((gone,), (Check(SPACE, row, record.version),)))

    # Taking over

    def _find_orphans(self) -> None:
        """Find the leases whose instance is dead."""
        mine = self.instance.id
        for row, known in self.leases.items():
            if known.lease.publisher != mine and known.lease.publisher not in self._alive:
                self._orphans.add(row)
        self._due.set()

    async def _take_over(self, until: float) -> None:
        """Take over leases until a time of the event loop: then a heartbeat is due.

        To take over 10,000 leases may take longer than a heartbeat lasts. Without a heartbeat in between, this instance
        would count as dead by then, and its new leases would be orphans again.
        """
        time = asyncio.get_running_loop().time
        while self._orphans and self.instance.is_alive and time() < until:
            rows = list(itertools.islice(self._orphans, limits.TAKE_OVER_LEASES))
            # A lease that another instance takes over first is reported as a change of its row.
            self._orphans.difference_update(rows)
            records = await self._engine.read(*[Get(SPACE, row) for row in rows])
            while found := [record for record in records if record is not None]:
                done = await self._engine.commit(await self._claim(found))
                if isinstance(done, Committed):
                    break
                failed = {failure.check.key for failure in done.failed}
                records = [one for one in found if not failed & {one.key, self._heartbeat_of(one)}]

    def _heartbeat_of(self, record: Record) -> bytes:
        return self.rows.heartbeat(read_lease(record.value).publisher)

    async def _claim(self, records: Sequence[Record]) -> Batch:
        """Make this instance the publisher of leases, if they are as they were read, and their instances are dead."""
        leases = [read_lease(record.value) for record in records]
        dead = sorted({lease.publisher for lease in leases})
        found = await self._engine.read(*[Get(SPACE, self.rows.progress(instance)) for instance in dead])
        progress = {
            instance: PublishedProgress() if record is None else read_progress(record.value)
            for instance, record in zip(dead, found, strict=True)
        }
        mutations, checks = [], [Check(SPACE, self.rows.heartbeat(instance), None) for instance in dead]
        for record, lease in zip(records, leases, strict=True):
            published = progress[lease.publisher]
            since = max(lease.since, published.reached) if record.version <= published.known else lease.since
            run = lease.run + 1 if lease.run else 0
            mine = replace(lease, publisher=self.instance.id, since=since, run=run)
            mutations.append(stored(record.key, mine, expire_at=record.expires_at))
            checks.append(Check(SPACE, record.key, record.version))
        return Batch(tuple(mutations), tuple(checks))

    async def _tidy_up(self) -> None:
        """Remove leases that have expired, and the progress of dead instances whose leases are taken over."""
        expired, self._expired = self._expired, []
        if expired:
            await write(self._engine, *expired)
        in_use = {known.lease.publisher for known in self.leases.values()} if self._progress else set()
        for instance in self._progress - self._alive - in_use - {self.instance.id}:
            batch = Batch(
                (Delete(SPACE, self.rows.progress(instance)),), (Check(SPACE, self.rows.heartbeat(instance), None),)
            )
            await self._engine.commit(batch)
