"""Commits the groups of an engine to etcd, one after the other, and trims the change log now and then."""

import asyncio
import math
from typing import Any

from keyloft import limits
from keyloft.core.records import Batch
from keyloft.core.slices import by_weight
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.long_batches import is_long
from keyloft.engines.commit.outcomes import Outcome, copy, failed, joined
from keyloft.engines.etcd import log
from keyloft.engines.etcd.drafts import check_size
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.followed_commits import FollowedCommits
from keyloft.engines.etcd.group_commit import GroupCommit
from keyloft.engines.etcd.row_cache import RowCache
from keyloft.engines.etcd.transactions import OPERATION_BYTES
from keyloft.engines.etcd.views import RevisionViews
from keyloft.engines.etcd.writer_queue import WriterQueue
from keyloft.errors import CommitUnknown, DatabaseError, KeyloftError


class EtcdWriter:
    """Commits the groups of one engine, one after the other."""

    def __init__(self, views: RevisionViews, history: KeptHistory) -> None:
        self._views = views
        self._cluster = views.cluster
        self._history = history
        self._cache = RowCache()
        self._followed = FollowedCommits(views, self._cache)
        self._queue = WriterQueue(views, self._followed)
        self._loop = asyncio.get_running_loop()
        self._last_version = 0
        self._trimming: asyncio.Task[None] | None = None
        self._trimmed_at = -math.inf

    async def commit(self, group: list[Batch], arrived: list[float]) -> Outcome:
        """Commit a group: in one transaction, or in several if it is large."""
        outcomes: list[Outcome] = []
        first = 0
        for some in by_weight(group, _weight, 1):
            try:
                if is_long(some[0]):
                    await check_size(self._cluster, some[0])
                commit = GroupCommit(self._views, self._queue, self._followed, self._cache, some, arrived[first])
                outcomes.append(await commit.run())
            except DatabaseError as error:
                outcomes.append(failed(some, error, self._last_version))
            except KeyloftError as error:
                outcomes.append(Outcome([copy(error) for _ in some], self._last_version, self._last_version))
            except Exception as error:  # nothing else in this task would catch it, and the callers would wait for ever
                failure = DatabaseError(f"{self._cluster.name}: a write failed unexpectedly: {type(error).__name__}")
                failure.__cause__ = error
                outcomes.append(failed(some, failure, self._last_version))
            first += len(some)
            self._last_version = outcomes[-1].version_after
        outcome = joined(outcomes) if len(outcomes) > 1 else outcomes[0]
        self._trim_after(outcome)
        return outcome

    def cancelled(self, group: list[Batch]) -> Outcome:
        """The outcome of a group whose task was cancelled."""
        unknown = CommitUnknown(
            "the event loop ended during a commit: it may have been made; read the entry to find out"
        )
        return failed(group, unknown, self._last_version)

    async def aclose(self) -> None:
        await self._followed.aclose()
        if self._trimming is not None:
            await asyncio.wait([self._trimming], timeout=limits.ETCD_LAST_TRIM_SECONDS)
            self._trimming.cancel()
            await asyncio.gather(self._trimming, return_exceptions=True)

    def _trim_after(self, outcome: Outcome) -> None:
        """Trim the log now and then, beside the next commits."""
        every = limits.TRIM_EVERY
        is_due = outcome.version_after // every > max(outcome.version_before, 0) // every
        is_idle = self._trimming is None or self._trimming.done()
        time = self._loop.time()
        if is_due and is_idle and time > self._trimmed_at + limits.ETCD_TRIM_SECONDS:
            self._trimmed_at = time
            self._trimming = self._loop.create_task(self._trim(), name="keyloft trimming")

    async def _trim(self) -> None:
        try:
            view, _ = await self._views.fetch()
            await log.trim(view, self._history)
        except (Failure, KeyloftError):
            return  # the next trim will do it


def _weight(batch: Batch) -> float:
    """The share of a transaction that a batch takes."""
    size = batch.size + sum([2 * _key_bytes(one.key) + 4 * OPERATION_BYTES for one in batch.mutations])
    return max(2 * size / limits.ETCD_TXN_BYTES, batch.operations / limits.ETCD_SLICE_OPERATIONS)


def _key_bytes(key: Any) -> int:
    return len(key) if isinstance(key, bytes) else 4 * sum(map(len, key))
