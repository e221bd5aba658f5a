"""Keeps everything in memory: for caches, for tests, and as the plainest example of an engine."""

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice
from typing import Any

from msgspec.structs import astuple, replace

from keyloft.clock import Clock
from keyloft.core import records
from keyloft.core.engine import Watch
from keyloft.core.records import Batch, Committed, Conflict, Key, Page, Record, Space
from keyloft.engines.commit.settle import PutRow, SetExpiry, Write, deciding, settle
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.watches import Notifier
from keyloft.errors import Closed, KeyloftError


class MemoryEngine:
    """An engine whose data ends with its process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tables = {space: _SortedRecords() for space in Space}
        self._version = 0
        self._notifier = Notifier(self, clock)
        self.location = "memory"
        self.is_closed = False
        self._iteration = LoopIteration()

    async def read(self, *asks: records.Ask) -> list[Any]:
        now = await self._now()
        return [self._answer(ask, now) for ask in asks]

    async def commit(self, batch: Batch) -> Committed | Conflict:
        now = await self._now()
        current = {
            address: record
            for address in deciding([batch])
            if (record := self._tables[address[0]].records.get(address[1])) is not None
        }
        settled = settle([batch], current, self._version, now)
        [verdict] = settled.verdicts
        if isinstance(verdict, KeyloftError):
            raise verdict
        self._version = settled.version
        for (space, key), write in settled.writes.items():
            self._tables[space].apply(key, write, now)
        self._notifier.committed(settled.writes, settled.version)
        return verdict

    def watch(self, *asks: records.Get | records.Scan) -> Watch:
        self._check_open()
        return self._notifier.watch(asks, lambda: self._version)

    async def aclose(self) -> None:
        self.is_closed = True
        self._notifier.close()

    async def _now(self) -> int:
        """The time, once this caller may read or write."""
        self._check_open()
        if self._iteration.enter():
            await asyncio.sleep(0)
            self._iteration.enter()
            self._check_open()
        return self._clock.now()

    def _check_open(self) -> None:
        if self.is_closed:
            raise Closed

    def _answer(self, ask: records.Ask, now: int) -> Record | Page | list[Record] | list[records.Used] | int | None:
        if isinstance(ask, records.Latest):
            return self._version
        if isinstance(ask, records.Now):
            return now
        if isinstance(ask, records.Usage):
            return _usage(self._tables[Space.PLUGINS].records.values(), now)
        table = self._tables[ask.space]
        match ask:
            case records.Get():
                record = table.records.get(ask.key)
                return record if record is None or ask.include_expired or record.is_alive(now) else None
            case records.Scan():
                return table.scan(ask, now)
            case records.Count():
                return sum(record.is_alive(now) for record in table.between(ask.start, ask.end))
            case records.Expired():
                due = (record for record in table.records.values() if not record.is_alive(now))
                first = nsmallest(ask.limit, due, key=lambda record: record.expires_at or 0)
                return [replace(record, value=b"") for record in first]


def _usage(stored: Iterable[Record], now: int) -> list[records.Used]:
    sizes: dict[str, list[int]] = {}
    for record in stored:
        if record.is_alive(now):
            sizes.setdefault(record.key[0], []).append(len(record.value))
    return [records.Used(plugin, len(found), sum(found)) for plugin, found in sorted(sizes.items())]


class _SortedRecords:
    """The records of one space, and their keys in order."""

    def __init__(self) -> None:
        self.records: dict[Key, Record] = {}
        self._keys: list[Key] = []

    def between(self, start: Key, end: Key, *, after: bool = False, reverse: bool = False) -> Iterable[Record]:
        first = bisect_right(self._keys, start) if after else bisect_left(self._keys, start)
        positions = range(first, bisect_left(self._keys, end))
        return (self.records[self._keys[at]] for at in (reversed(positions) if reverse else positions))

    def scan(self, ask: records.Scan, now: int) -> Page:
        records = self.between(ask.start, ask.end, after=ask.after, reverse=ask.reverse)
        found = list(islice((record for record in records if record.is_alive(now)), ask.limit))
        if not found:
            return Page()
        keys, values, encodings, versions, expiries, _, updates = zip(*map(astuple, found), strict=True)
        if ask.keys_only:
            values = (b"",) * len(found)
        return Page(keys, values, encodings, versions, expiries, updates if ask.space is Space.SEMANTIC else ())

    def apply(self, key: Key, write: Write, now: int) -> None:
        old = self.records.get(key)
        if isinstance(write, PutRow):
            record = write.record
            if old is None:
                insort(self._keys, key)
            elif not write.is_new_entry and old.is_alive(now):
                record = replace(record, created_at=old.created_at)
            self.records[key] = record
        elif isinstance(write, SetExpiry) and old is not None:
            self.records[key] = replace(old, expires_at=write.expires_at)
        elif old is not None:
            del self.records[key], self._keys[bisect_left(self._keys, key)]
