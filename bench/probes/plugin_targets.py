"""The plugin service against its targets for latency, lists, bursts and clean-up."""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from nats.aio.client import Client

import keyloft
from bench.arms.nats.keyloft_service import fill
from bench.arms.nats.requests import Exchange, clients, exchange_at_once, matches
from bench.harness.children import child
from bench.harness.contest import IN_FLIGHT, same
from bench.harness.data import GROUP, fresh_pair, key_of, stored_pairs, value_of
from bench.harness.figures import Figure, Row, Verdict, compare, percentile, reaches, within
from bench.probes.plugin_model import Model, Planned
from keyloft.plugins.store import BotDatabase
from keyloft.server.nats_process import NatsServer

PLUGINS = 10
EXPIRED = 10_000
HUNDRED = 100
_TIMEOUT_SECONDS = 0.1
_LIST_TIMEOUT_SECONDS = 0.5
"""Clients of a bot give up after this time."""
_A_WHILE = 1.0


class Trial:
    """A service, ten plugins with a connection each, and counts of failed and late requests."""

    def __init__(self, connected: Sequence[Client], stored: int, rounds: int, share: float) -> None:
        self._clients = connected
        self._rounds = rounds
        self._share = share
        self._model = Model(stored)
        self._stored = stored
        self._chances = random.Random(5)
        self._asked = 0
        self._failed = 0
        self._late = 0

    async def latency(self) -> Row:
        """One request at a time, of one plugin."""
        sets, gets, deletes = [], [], []
        for _ in range(self._rounds):
            indexes = self._chances.sample(range(self._stored), self._share_of(400))
            sets.append(await self._ask([[self._model.set(index) for index in indexes]]))
            gets.append(await self._ask([[self._model.get(index) for index in indexes]]))
            deletes.append(await self._ask([[self._model.delete(index) for index in indexes]]))
            await self._ask([[self._model.set(index) for index in indexes]], in_flight=IN_FLIGHT)
        return Row(
            "latency, one request at a time",
            verdicts=(
                *_quick("set", sets, {50: 5, 95: 10, 99: 20}),
                *_quick("get", gets, {50: 5, 95: 10, 99: 15}),
                *_quick("delete", deletes, {50: 5, 95: 10, 99: 25}),
                *self._errors(),
            ),
        )

    async def lists(self) -> Row:
        """One list at a time, of plugins with as many keys as are listed."""
        sizes = (100, 1000, 10_000)
        for size in sizes:
            await self._ask([[self._model.set(index, f"list-{size}") for index in range(size)]], in_flight=IN_FLIGHT)
        done: dict[int, list[Exchange]] = {size: [] for size in sizes}
        for _ in range(self._rounds):
            for size in sizes:
                plan = [self._model.list(f"list-{size}", size) for _ in range(self._share_of(100))]
                done[size].append(await self._ask([plan], limit=_LIST_TIMEOUT_SECONDS))
        return Row(
            "lists, one request at a time",
            verdicts=(
                *_quick("list of 100 keys", done[100], {50: 10}),
                *_quick("list of 1,000 keys", done[1000], {95: 50}),
                *_quick("list of 10,000 keys", done[10_000], {99: 100}),
                *self._errors(),
            ),
        )

    async def plugins(self) -> Row:
        """Ten plugins at once, each with one request in flight."""
        everything, sets, gets, mixed = [], [], [], []
        for _ in range(self._rounds):
            everything.append(await self._ask(self._of_each_plugin(200, self._anything)))
            sets.append(await self._ask(self._of_each_plugin(200, self._model.set)))
            gets.append(await self._ask(self._of_each_plugin(400, self._model.get)))
            mixed.append(await self._ask(self._of_each_plugin(300, self._mixed)))
        return Row(
            f"{PLUGINS} plugins at once, one request each in flight",
            verdicts=(
                _fast("5 get : 3 set : 1 delete : 1 list of 100", everything, 1000),
                *_quick("the same", everything, {50: 5, 95: 10, 99: 25}),
                _fast("set", sets, 1000),
                _fast("get", gets, 2000),
                _fast("70 % get, 30 % set", mixed, 1500),
                *self._errors(),
            ),
        )

    async def bursts(self, seconds: float) -> Row:
        """A second's worth as fast as it goes, on one connection; then the same for longer."""
        everywhere = range(self._stored)
        sets, gets = [], []
        for _ in range(self._rounds):
            sets.append(await self._ask([self._plan(5000, everywhere, self._model.set)], in_flight=IN_FLIGHT))
            gets.append(await self._ask([self._plan(10_000, everywhere, self._model.get)], in_flight=IN_FLIGHT))
        many_sets, many_gets = (int(max(one.rate for one in done) * seconds) for done in (sets, gets))
        long_sets = await self._ask([self._plan(many_sets, everywhere, self._model.set)], in_flight=IN_FLIGHT)
        long_gets = await self._ask([self._plan(many_gets, everywhere, self._model.get)], in_flight=IN_FLIGHT)
        return Row(
            f"bursts and sustained load, {IN_FLIGHT} in flight",
            verdicts=(
                _fast("burst of 5,000 sets", sets, 5000),
                _fast("burst of 10,000 gets", gets, 10_000),
                _fast(f"sets for {long_sets.seconds:.0f} s", [long_sets], 500),
                _fast(f"gets for {long_gets.seconds:.0f} s", [long_gets], 1000),
                *self._errors(),
            ),
        )

    async def operations(self) -> Row:
        """Increments beside sets, and many keys of one request beside as many gets, on one connection."""
        group = range(GROUP)
        sets, increments, gets, many = [], [], [], []
        await self._ask([[self._model.increment(index) for index in group]], in_flight=IN_FLIGHT)
        for _ in range(self._rounds):
            sets.append(await self._ask([self._plan(5000, group, self._model.set)], in_flight=IN_FLIGHT))
            increments.append(await self._ask([self._plan(5000, group, self._model.increment)], in_flight=IN_FLIGHT))
            gets.append(await self._ask([self._plan(500, group, self._model.get)]))
            many.append(await self._ask([[self._hundred() for _ in range(50)]]))
        return Row(
            "increments, and 100 keys at once",
            verdicts=(
                compare(_rates(f"incr, {IN_FLIGHT} in flight", increments), _rates("set", sets), 0.9),
                compare(_rates("keys of get_many, one request at a time", many, HUNDRED), _rates("get", gets), 20),
                *self._errors(),
            ),
        )

    def _hundred(self) -> Planned:
        return self._model.get_many(self._chances.sample(range(GROUP), HUNDRED))

    async def _ask(
        self, plans: Sequence[Sequence[Planned]], *, in_flight: int = 1, limit: float = _TIMEOUT_SECONDS
    ) -> Exchange:
        asks = [[ask for ask, _ in plan] for plan in plans]
        done = await exchange_at_once(self._clients[: len(plans)], asks, in_flight)
        expected = [fields for plan in plans for _, fields in plan]
        self._asked += len(expected)
        self._failed += sum(not matches(reply, **fields) for reply, fields in zip(done.replies, expected, strict=True))
        self._late += sum(latency > limit for latency in done.latencies)
        return done

    def _errors(self) -> tuple[Verdict, Verdict]:
        failed = Figure(f"wrong or no reply, of {self._asked:,} requests", "%", (100 * self._failed / self._asked,))
        late = Figure("later than clients wait", "%", (100 * self._late / self._asked,))
        return within(failed, 0), within(late, 0.1)

    def _share_of(self, operations: int) -> int:
        return max(1, int(operations * self._share))

    def _of_each_plugin(self, operations: int, make: Callable[[int], Planned]) -> list[list[Planned]]:
        groups = [range(number * GROUP, (number + 1) * GROUP) for number in range(PLUGINS)]
        return [self._plan(self._share_of(operations), group, make) for group in groups]

    def _plan(self, operations: int, indexes: range, make: Callable[[int], Planned]) -> list[Planned]:
        return [make(self._chances.choice(indexes)) for _ in range(operations)]

    def _anything(self, index: int) -> Planned:
        drawn = self._chances.randrange(10)
        if drawn < 5:
            return self._model.get(index)
        if drawn < 8:
            return self._model.set(index)
        return self._model.delete(index) if drawn == 8 else self._model.list(key_of(index)[0], 100)

    def _mixed(self, index: int) -> Planned:
        return self._model.get(index) if self._chances.random() < 0.7 else self._model.set(index)


@asynccontextmanager
async def trying(folder: Path, stored: int, rounds: int, share: float) -> AsyncIterator[Trial]:
    """A service whose write-ahead log has its full size, as in production."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        async with (
            NatsServer() as server,
            child("bench.arms.nats.keyloft_service", server.url, Path(own) / "keyloft.db", stored),
            clients(server.url, PLUGINS) as connected,
        ):
            yield Trial(connected, stored, rounds, share)


async def cleaning_up(folder: Path, stored: int, rounds: int) -> Row:
    """`kv_cleanup_expired`, which the service calls every five minutes, among keys that do not expire."""
    clock = keyloft.ManualClock()
    chances = random.Random(6)
    seconds = []
    with tempfile.TemporaryDirectory(dir=folder) as own:
        db = BotDatabase(Path(own) / "keyloft.db", clock=clock)
        await fill(db, stored_pairs(stored))
        for _ in range(rounds):
            due = chances.sample(range(stored), EXPIRED)
            await fill(db, [fresh_pair(index) for index in due], expire_in=1000)
            clock.advance(2)
            # Let the checkpoint of these writes end: it is not the clean-up's.
            await asyncio.sleep(_A_WHILE)
            began = time.perf_counter()
            same(await db.kv_cleanup_expired(), EXPIRED)
            seconds.append(time.perf_counter() - began)
            await fill(db, [(key_of(index), value_of(index)) for index in due])
        await db.close()
    took = Figure(f"clean-up of {EXPIRED:,} expired keys", "s", tuple(seconds))
    return Row(f"clean-up among {stored:,} keys", verdicts=(within(took, 0.2),))


def _quick(name: str, done: Sequence[Exchange], most_ms: dict[int, float]) -> list[Verdict]:
    """Percentiles of the latencies, round by round, beside the most milliseconds that they may be."""
    return [
        within(
            Figure(f"{name}, p{percent}", "ms", tuple(percentile(one.latencies, percent) * 1000 for one in done)), most
        )
        for percent, most in most_ms.items()
    ]


def _rates(name: str, done: Sequence[Exchange], each: int = 1) -> Figure:
    return Figure(name, "/s", tuple(each * one.rate for one in done))


def _fast(name: str, done: Sequence[Exchange], at_least: float) -> Verdict:
    return reaches(Figure(name, "/s", tuple(one.rate for one in done)), at_least)
