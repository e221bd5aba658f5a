"""Commits a group without holding a lock while the server waits for this process.

Reads the rows that decide something, without a lock, settles the group, and calls the function that compares and
writes. A group of plain sets depends on nothing that is stored, so the call is its only round trip. The same holds for
a group that adds to counters which this process has in its cache (`counter_cache.py`).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Any, NamedTuple

from msgspec.structs import replace

from keyloft import limits
from keyloft.core import schema
from keyloft.core.records import Address, Batch, Committed, Head, Record, Space
from keyloft.core.schema import Row
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.long_batches import divided, is_long
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.commit.purges import rows_to_purge
from keyloft.engines.commit.settle import deciding, unread, with_values
from keyloft.engines.postgres import function, pooled_call
from keyloft.engines.postgres.attempts import Attempted, CommitAttempt, LostRace, by_space, clock_set_back, load_values
from keyloft.engines.postgres.connections import SNAPSHOT, Slot, Transaction
from keyloft.engines.postgres.counter_cache import CounterCache
from keyloft.engines.postgres.drafts import Arrays, Draft, integers, purging_draft, settled_draft
from keyloft.engines.postgres.function import ARGUMENTS, SPACES
from keyloft.engines.postgres.log import READ_VERSION
from keyloft.engines.postgres.long_drafts import LongDraft, can_be_divided
from keyloft.engines.postgres.server import PostgresServer, ServerClock
from keyloft.engines.postgres.tables import LAYOUTS


class ByFunction:
    """Commits groups through the function."""

    def __init__(
        self, server: PostgresServer, history: KeptHistory, clock: ServerClock, wants_changes: Callable[[], bool]
    ) -> None:
        """`wants_changes` says whether an outcome is to list its changes, for watches."""
        self._server = server
        self._history = history
        self._clock = clock
        self._wants_changes = wants_changes
        self._last_at = 0
        """The time of the last commit, as far as known; no later commit has an earlier time."""
        self.counters = CounterCache()
        self._calls: dict[tuple[bool, tuple[str, ...]], str] = {}
        """The statements that call the function: by whether all arrays are text, and the names of the arguments."""

    async def commit(self, slot: Slot, attempt: CommitAttempt) -> Attempted:
        group = attempt.group
        if len(group) == 1 and (expected := rows_to_purge(group[0])):
            attempted = await self._purge(slot, attempt, expected)
            if attempted is not LostRace.CHANGED:
                return attempted
            attempt.completed = None
        if is_long(group[0]) and await can_be_divided(group[0]):
            return await self._commit_long(slot, attempt, group[0])
        wanted = deciding(group)
        draft: Draft | None = None
        if not wanted:
            draft = settled_draft(group, {}, wanted, {}, self._estimated_now())
        elif _can_omit_version(group, wanted):
            if (known := self.counters.find(wanted)) is not None:
                draft = settled_draft(group, known, wanted, {}, self._estimated_now())
                if draft.versions:
                    attempted = await self._commit(slot, attempt, draft)
                    if isinstance(attempted, Outcome):
                        self.counters.confirm()
                    if attempted is not LostRace.CHANGED:
                        return attempted
                    self.counters.refute(wanted)
                    attempt.completed = None
            if (found := await self._read(slot, wanted)) is None:
                return LostRace.CHANGED
            draft = settled_draft(group, found.current, wanted, found.stamps, found.now)
        if draft is None or not draft.versions:
            # A group that commits nothing is answered from what was read, so all of it must be read at one moment.
            async with slot.transaction(SNAPSHOT) if len(by_space(wanted)) > 1 else nullcontext(slot) as at:
                if (moment := await self._read_moment(at, wanted)) is None:
                    return LostRace.CHANGED
                version, found = moment
                draft = settled_draft(group, found.current, wanted, found.stamps, found.now)
                if (shown := unread(draft.settled)) and (draft := await self._with_values(at, draft, shown)) is None:
                    return LostRace.CHANGED
            if not draft.versions:
                return self._outcome(draft, version, draft.read_at)
        return await self._commit(slot, attempt, draft)

    async def _purge(self, slot: Slot, attempt: CommitAttempt, expected: Mapping[Address, Record]) -> Attempted:
        """Commit a batch of Purges, settled from the rows that it expects; they are compared with what is stored."""
        [batch] = attempt.group
        read_at = max(self._estimated_now(), *[record.expires_at or 0 for record in expected.values()])
        if not is_long(batch):
            return await self._commit(slot, attempt, purging_draft(batch, expected, read_at))
        long = LongDraft(read_at)
        for part in divided(batch):
            rows = {(purge.space, purge.key): expected[purge.space, purge.key] for purge in part.mutations}
            long.add(purging_draft(part, rows, read_at))
            await asyncio.sleep(0)
        return await self._commit_settled(slot, attempt, long)

    async def _commit_long(self, slot: Slot, attempt: CommitAttempt, batch: Batch) -> Attempted:
        """Commit a long batch, which is alone in its group: it is read and settled part by part, from one snapshot."""
        long = LongDraft(self._estimated_now())
        async with AsyncExitStack() as stack:
            at: Transaction | None = None
            for part in divided(batch):
                if long.gathered.refuses(part):
                    break
                wanted = deciding([part])
                if wanted and at is None:
                    at = await stack.enter_async_context(slot.transaction(SNAPSHOT))
                    _, long.read_at = await self._counter(at)
                if (draft := await self._settled_part(at, part, wanted, long.read_at)) is None:
                    return LostRace.CHANGED
                long.add(draft)
                await asyncio.sleep(0)
            verdict = long.gathered.verdict
            if not isinstance(verdict, Committed):
                version, _ = await self._counter(at or slot)
                return Outcome([verdict], version, version)
        return await self._commit_settled(slot, attempt, long)

    async def _commit_settled(self, slot: Slot, attempt: CommitAttempt, long: LongDraft) -> Attempted:
        await long.finish()
        attempted = await self._commit(slot, attempt, long)
        self.counters.clear()
        return attempted

    async def _counter(self, at: Slot | Transaction) -> tuple[int, int]:
        """The version counter and the time."""
        version, now = self._server.counter_row(await at.fetch(READ_VERSION, self._server.now()))
        return version, now

    async def _settled_part(
        self, at: Transaction | None, part: Batch, wanted: Mapping[Address, bool], now: int
    ) -> Draft | None:
        """A part of a long batch, settled from the stored rows; None if a row has changed meanwhile."""
        if at is None or not wanted:
            return settled_draft([part], {}, wanted, {}, now)
        if (found := await self._load(at, wanted, now)) is None:
            return None
        draft = settled_draft([part], found.current, wanted, found.stamps, now)
        shown = unread(draft.settled)
        return await self._with_values(at, draft, shown) if shown else draft

    async def _commit(self, slot: Slot, attempt: CommitAttempt, draft: Draft | LongDraft) -> Attempted:
        """Commit a settled group, unless something has changed since it was settled."""
        base, now = await self.call(slot, attempt, draft)
        match base:
            case function.LOCKED | function.CHANGED:
                self._note_time(now)
                return LostRace.LOCKED if base == function.LOCKED else LostRace.CHANGED
            case function.REFUSED:
                self._clock.set(now)
                return LostRace.REFUSED
            case function.CLOCK_SET_BACK:
                raise clock_set_back(self._server.name, now)
            case function.NO_COUNTER:
                raise schema.lost_counter(self._server.name, schema.VERSION_COUNTER_TABLE)
            case function.WRONG_ISOLATION:
                self._server.note_wrong_isolation()
                return LostRace.REFUSED
        self._note_time(now)
        if isinstance(draft, Draft):
            self.counters.note(draft, base, now)
        return self._outcome(draft, base, now)

    def _estimated_now(self) -> int:
        """The server's time, or that of an injected clock; never before the last commit."""
        now = self._server.now()
        return max(self._clock.now() if now is None else now, self._last_at)

    def _note_time(self, now: int) -> None:
        """Remember the server's time, as a commit or a lost race has reported it."""
        self._last_at = now
        if self._server.clock is None:
            self._clock.set(now)

    def _outcome(self, draft: Draft | LongDraft, base: int, now: int) -> Outcome:
        if isinstance(draft, LongDraft):
            return draft.completed(base, now)
        return draft.completed(base, now, with_changes=self._wants_changes())

    async def _read(self, slot: Slot, wanted: Mapping[Address, bool]) -> "_Loaded | None":
        """What is stored at keys of one space, and an estimate of the time; None if a row has changed meanwhile.

        It leaves out the version counter, which takes as long to read as half of the rows. The function compares rows
        and expiries with what was read.
        """
        return await self._load(slot, wanted, self._estimated_now())

    async def _load(self, at: Slot | Transaction, wanted: Mapping[Address, bool], now: int) -> "_Loaded | None":
        """What is stored at some keys, as of a time; None if a row has changed meanwhile."""
        found = _Loaded(now, {}, {})
        for space, keys in by_space(wanted).items():
            layout = LAYOUTS[space]
            found.add(space, await at.fetch(layout.load_heads, *layout.bind_keys(keys)))
        return await self._with_large(at, found, wanted)

    async def _read_moment(
        self, at: Slot | Transaction, wanted: Mapping[Address, bool]
    ) -> "tuple[int, _Loaded] | None":
        """The version counter, the time, and what is stored at some keys; None if a row has changed meanwhile."""
        now = self._server.now()
        version = None
        found = _Loaded(0, {}, {})
        for space, keys in by_space(wanted).items():
            layout = LAYOUTS[space]
            rows = await at.fetch(layout.load_moment, now, *layout.bind_keys(keys))
            counter, moment = self._server.counter_row(rows)[:2]
            if version is None:
                version, now = counter, moment
                found = _Loaded(moment, {}, {})
            found.add(space, [row[2:] for row in rows if row[2] is not None])
        if version is None:  # every batch of the group is refused, so nothing was read
            version, moment = await self._counter(at)
            return version, _Loaded(moment, {}, {})
        complete = await self._with_large(at, found, wanted)
        return None if complete is None else (version, complete)

    async def _with_large(
        self, at: Slot | Transaction, found: "_Loaded", wanted: Mapping[Address, bool]
    ) -> "_Loaded | None":
        """What was loaded, with large values where they are needed; None if one of their rows has changed meanwhile."""
        current = found.current
        large = [address for address, record in current.items() if type(record) is Head and wanted[address]]
        if large:
            values = await load_values(at, large)
            if any([not _is_same(current[address], values.get(address)) for address in large]):
                return None
            current.update(values)
        return found

    async def _with_values(self, at: Slot | Transaction, draft: Draft, shown: Iterable[Address]) -> Draft | None:
        """What was loaded, with the values that Conflicts show; None if one of their rows has changed meanwhile."""
        values = await load_values(at, shown)
        if any([not _is_same(draft.current[address], values.get(address)) for address in shown]):
            return None
        return replace(draft, settled=with_values(draft.settled, values))

    async def call(self, slot: Slot, attempt: CommitAttempt, draft: Draft | LongDraft) -> tuple[int, int]:
        server, rows = self._server, draft.arrays()
        arguments = self._arguments(attempt, draft, rows)
        connection = await slot.connected()
        attempt.completed = lambda base, now: self._outcome(draft, base, now)
        if server.is_pooled:
            answer = await pooled_call.call(connection, server.functions.name_for(rows), arguments)
            if answer is None:
                raise ConnectionError("the answer of a commit got lost")
        else:
            call = draft.has_text, tuple(arguments)
            if (statement := self._calls.get(call)) is None:
                statement = self._calls[call] = server.functions.call(rows, call[1], has_text=call[0])
            [[answer]] = await slot.call(statement, *arguments.values())
        base, now = answer
        return base, now

    def _arguments(
        self, attempt: CommitAttempt, draft: Draft | LongDraft, rows: Mapping[Space, Arrays]
    ) -> dict[str, Any]:
        """The arguments of the function: those of all groups, then those of the kinds of rows that this one has."""
        server = self._server
        names, values = server.transaction_settings()
        numbers = (
            self._clock.now() + round(1000 * limits.POSTGRES_TRY_SECONDS),
            draft.read_at,
            *draft.valid,
            round(1000 * server.lock_seconds),
            round(1000 * server.holding_seconds(attempt.operations)),
            draft.versions,
            self._history.milliseconds,
            self._history.bytes,
        )
        arguments: dict[str, Any] = {
            "commit_id": attempt.commit_id,
            "numbers": integers(numbers),
            "parts": draft.parts(),
        }
        if server.clock is not None:
            arguments["given_clock"] = server.now()
        if (announcer := server.announcer) is not None:
            arguments["announcer"] = announcer
        if names is not None:
            arguments |= {"setting_names": names, "setting_values": values}
        for space, bound in rows.items() if len(rows) == 1 else [(space, rows.get(space, {})) for space in SPACES]:
            for kind, columns in ARGUMENTS[space].items():
                if kind in bound:
                    arguments |= zip(columns, bound[kind], strict=True)
                elif len(rows) > 1:
                    # Groups of several spaces are rare. They bind all arguments, so that they share one statement.
                    arguments |= dict.fromkeys(columns)
        return arguments


class _Loaded(NamedTuple):
    """What is stored at the keys that decide something, expired or not; without keys that have no row."""

    now: int
    """When it was read; entries that expire later are alive."""
    current: dict[Address, Record]
    stamps: dict[Address, str]

    def add(self, space: Space, rows: Sequence[Row]) -> None:
        layout = LAYOUTS[space]
        self.current.update({(space, key): record for key, record in layout.heads(rows).items()})
        self.stamps.update({(space, key): stamp for key, stamp in layout.stamps(rows).items()})


def _can_omit_version(group: Sequence[Batch], wanted: Mapping[Address, bool]) -> bool:
    """Whether to read without the version counter: no check can fail, and one statement reads all keys."""
    return not any([batch.checks for batch in group]) and len(by_space(wanted)) <= 1


def _is_same(one: Record, other: Record | None) -> bool:
    return other is not None and (one.version, one.expires_at) == (other.version, other.expires_at)
