"""Keeps count of what each plugin stores, without a read of the whole table, and holds plugins to their quotas.

All plugins are counted round after round (`counting.py`). Every round counts again, so an error lasts for one round:
expiries and writes of other processes are counted a minute later.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Final

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.records import Used
from keyloft.errors import KeyloftError, QuotaExceeded
from keyloft.nats.meters import OTHER
from keyloft.plugins.counting import CountingWalk, KeyGrowth, PluginCount
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.store import BotDatabase

logger = logging.getLogger(__name__)

_BEGINNING: Final = ("", "")


class PluginUsage(AsyncClosing):
    """What each plugin stores. Plugins are counted only while scrapes, or writes under a quota, ask for it.

    Example:
        reservation = await usage.reserve("trivia", [growth(key, old, len(value))])
        …                                               # commit the write
        reservation.committed(done.version)             # or reservation.release(), if it failed
    """

    every = limits.USAGE_EVERY_SECONDS
    """Seconds between the beginnings of two rounds, unless a round takes longer."""
    fresh = limits.USAGE_FRESH_SECONDS
    """A write is refused only by a count that is no older than this many seconds; an older count is repeated first."""

    def __init__(self, db: BotDatabase, quotas: Quotas | None = None) -> None:
        """Args:
        db: Where plugins store; the caller closes it after this.
        quotas: How much they may store.
        """
        self.quotas = quotas or Quotas()
        self._db = db
        self._counts: dict[str, PluginCount] = {}
        self._rest = Used(OTHER, 0, 0)
        """What all plugins beyond the first USAGE_PLUGINS store together."""
        self._reserved: dict[str, _Reserved] = {}
        self._walks: list[CountingWalk] = []
        self._recounts: dict[str, asyncio.Task[PluginCount]] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._wanted_until = 0.0
        self._is_complete = asyncio.Event()
        """Set while the counts of all plugins are known."""

    async def aclose(self) -> None:
        """Stop counting; the database can be closed after this."""
        tasks = [*self._recounts.values(), *([] if self._rounds is None else [self._rounds])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What is stored

    async def all(self, patience: float = limits.USAGE_PATIENCE_SECONDS) -> Sequence[Used] | None:
        """What all plugins store, a minute old at most; None if the first round has not ended after this many seconds.

        Plugins beyond the first 10,000 are added up as `other`.
        """
        self._count_for_a_while()
        try:
            async with asyncio.timeout(patience):
                await self._is_complete.wait()
        except TimeoutError:
            return None
        rest = [self._rest] if self._rest.entries else []
        return [count.used(plugin) for plugin, count in self._counts.items() if count.keys] + rest

    @property
    def has_others(self) -> bool:
        """Whether the last of `all` stands for several plugins."""
        return self._rest.entries > 0

    async def of(self, plugin: str) -> Used:
        """What one plugin stores, a minute old at most, this service's own writes included.

        Raises:
            DatabaseError: It can't be counted.
        """
        self._count_for_a_while()
        count = self._counts.get(plugin)
        if count is None or monotonic() - count.began > self.every + count.seconds:
            count = await self._recount(plugin)
        return count.used(plugin)

    def known(self, plugins: Iterable[str]) -> dict[str, Used]:
        """What some plugins store, as far as they are counted yet; from now on, all plugins are counted for a while."""
        self._count_for_a_while()
        return {plugin: self._counts[plugin].used(plugin) for plugin in plugins if plugin in self._counts}

    # Quotas

    async def reserve(self, plugin: str, growths: Sequence[KeyGrowth]) -> "Reservation":
        """Reserve room for a write until its outcome is known. A write that adds nothing always has room.

        Waits only while the plugin is counted, or while writes are under way that, with this one, exceed the quota.

        Args:
            plugin: Whose write it is.
            growths: The growth of each key that it writes.

        Raises:
            QuotaExceeded: The plugin would store more than it may.
            DatabaseError: What the plugin stores can't be counted.
        """
        keys, size = sum([one.keys for one in growths]), sum([one.bytes for one in growths])
        quota = self.quotas.of(plugin)
        if quota is not None and (keys > 0 or size > 0):
            self._count_for_a_while()
            await self._until_room(plugin, quota, keys, size)
        reserved = self._reserved.get(plugin)
        if reserved is None:
            reserved = self._reserved[plugin] = _Reserved()
        reserved.add(keys, size)
        return Reservation(self, plugin, growths)

    def apply(self, plugin: str, growths: Sequence[KeyGrowth], version: int) -> None:
        """Count a write that was committed as this version."""
        count = self._counts.get(plugin)
        for one in growths:
            if one.keys or one.bytes:
                if count is not None and count.lacks(one.key, version):
                    count.add(one.keys, one.bytes)
                for walk in self._walks:
                    walk.wrote(plugin, one, version)

    def release(self, plugin: str, growths: Sequence[KeyGrowth]) -> None:
        """Give back what was reserved for a write."""
        reserved = self._reserved[plugin]
        keys, size = sum([one.keys for one in growths]), sum([one.bytes for one in growths])
        reserved.remove(keys, size)
        if not reserved.writes:
            del self._reserved[plugin]

    async def _until_room(self, plugin: str, quota: Quota, keys: int, size: int) -> None:
        count, is_recounted = self._counts.get(plugin), False
        while True:
            if count is None:
                count, is_recounted = await self._recount(plugin), True
            reserved = self._reserved.get(plugin)
            if (excess := _excess(quota, count, keys, size)) is not None:
                if reserved is not None and reserved.shrinking:
                    await reserved.next_release()  # a delete that was sent before this write makes room for it
                    count = self._counts.get(plugin, count)
                    continue
                age, longest = monotonic() - count.began, max(self.fresh, limits.USAGE_RECOUNT_PAUSE * count.seconds)
                if is_recounted or age <= longest:
                    raise excess
                count = None  # entries may have expired since
                continue
            if reserved is None or _excess(quota, count, keys, size, reserved) is None:
                return
            await reserved.next_release()
            count = self._counts.get(plugin, count)

    # Counting

    def _count_for_a_while(self) -> None:
        """Count for some minutes from now on."""
        self._wanted_until = monotonic() + limits.USAGE_WANTED_SECONDS
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._count_rounds(), name="keyloft usage")

    async def _count_rounds(self) -> None:
        reading = 0.0
        while monotonic() < self._wanted_until:
            began, pause = monotonic(), self.every
            # Spread over the time until the next round, except the first round, because a scrape waits for it.
            least, most = limits.USAGE_PAUSES
            spread = min(max(pause / max(reading, 1e-6) - 1, least), most) if self._is_complete.is_set() else 1
            try:
                reading = await self.count_all(pause=spread)
            except KeyloftError as error:
                logger.warning("the plugins' keys could not be counted: %s", error)
                self._forget()
                pause = min(pause, limits.USAGE_RETRY_SECONDS)
            except Exception:
                logger.exception("counting the plugins' keys failed unexpectedly")
                self._forget()
            await asyncio.sleep(max(0.0, began + pause - monotonic()))
        self._forget()

    def _forget(self) -> None:
        self._is_complete.clear()
        self._counts.clear()

    async def count_all(self, *, pause: float = 0) -> float:
        """Count all plugins once; returns how many seconds it read.

        Args:
            pause: After each slice, counting pauses for this many times as long as the slice took.

        Raises:
            DatabaseError: The database can't be read.
        """
        began, reading, rest = monotonic(), 0.0, Used(OTHER, 0, 0)
        engine = await self._db.engine()
        walk = CountingWalk(_BEGINNING)
        self._walks.append(walk)
        try:
            while not walk.is_done:
                for plugin, count in (await walk.step(engine)).items():
                    known = self._counts.get(plugin)
                    if known is not None or len(self._counts) < limits.USAGE_PLUGINS:
                        if known is None or known.began < count.began:
                            self._counts[plugin] = count
                    else:
                        rest = Used(OTHER, rest.entries + count.keys, rest.value_bytes + count.bytes)
                reading += walk.seconds
                await asyncio.sleep(pause * walk.seconds)
        finally:
            self._walks.remove(walk)
        self._counts = {plugin: count for plugin, count in self._counts.items() if count.began >= began}
        self._rest = rest
        self._is_complete.set()
        return reading

    async def _recount(self, plugin: str) -> PluginCount:
        """Count one plugin now; callers at the same time share a count."""
        counting = self._recounts.get(plugin)
        if counting is None:
            counting = asyncio.create_task(self._count_one(plugin), name="keyloft usage")
            self._recounts[plugin] = counting
            # If all callers are cancelled, asyncio would report the exception as one that was never retrieved.
            counting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(counting)

    async def _count_one(self, plugin: str) -> PluginCount:
        walk = CountingWalk((plugin, ""))
        self._walks.append(walk)
        try:
            engine = await self._db.engine()
            while True:
                finished = await walk.step(engine)
                if plugin in finished:
                    break
                await asyncio.sleep(walk.seconds)
            if plugin not in self._counts and len(self._counts) >= limits.USAGE_PLUGINS:
                del self._counts[next(iter(self._counts))]
            count = self._counts[plugin] = finished[plugin]
        finally:
            self._walks.remove(walk)
            del self._recounts[plugin]
        return count


class Reservation:
    """Room for a write that is under way. Call one of the two methods, once, when its outcome is known."""

    __slots__ = ("_growths", "_plugin", "_usage")

    def __init__(self, usage: PluginUsage, plugin: str, growths: Sequence[KeyGrowth]) -> None:
        self._usage = usage
        self._plugin = plugin
        self._growths = growths

    def committed(self, version: int) -> None:
        """Count the write, which was committed as this version."""
        self._usage.apply(self._plugin, self._growths, version)
        self._usage.release(self._plugin, self._growths)

    def release(self) -> None:
        """Give the room back, because the write failed. If it was made after all, it is counted within a minute."""
        self._usage.release(self._plugin, self._growths)


class _Reserved:
    """What the writes of a plugin that are under way may add to what it stores."""

    __slots__ = ("_waiting", "bytes", "keys", "shrinking", "writes")

    def __init__(self) -> None:
        self.keys = self.bytes = self.writes = 0
        self.shrinking = 0
        """How many of these writes make room."""
        self._waiting: list[asyncio.Future[None]] = []

    def add(self, keys: int, size: int) -> None:
        self.keys += max(keys, 0)
        self.bytes += max(size, 0)
        self.shrinking += keys < 0 or size < 0
        self.writes += 1

    def remove(self, keys: int, size: int) -> None:
        self.keys -= max(keys, 0)
        self.bytes -= max(size, 0)
        self.shrinking -= keys < 0 or size < 0
        self.writes -= 1
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def next_release(self) -> "asyncio.Future[None]":
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(released)
        return released


def _excess(
    quota: Quota, count: PluginCount, keys: int, size: int, reserved: _Reserved | None = None
) -> QuotaExceeded | None:
    """The error of a write for which a plugin has no room, or None."""
    for measure, grows, used, more, limit in (
        ("keys", keys, count.keys, 0 if reserved is None else reserved.keys, quota.keys),
        ("bytes", size, count.bytes, 0 if reserved is None else reserved.bytes, quota.bytes),
    ):
        if limit is not None and grows > 0 and used + more + grows > limit:
            message = f"quota: expected at most {limit:,} {measure} in all, got {used + grows:,} with this write"
            return QuotaExceeded(
                f"{message}: delete some entries first, or ask the operator for more", used + grows, limit
            )
    return None
