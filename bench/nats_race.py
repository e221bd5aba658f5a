"""Gets and sets over NATS, against an echo that does nothing and against handlers over an ORM."""

import asyncio
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct
from nats.aio.client import Client

from bench import plans
from bench.children import Child, child
from bench.data import Pair, key_of, value_of
from bench.harness import Figure, Row, Verdict, compare, within
from bench.nats_driver import OURS, Ask, clients, exchange, getting, says, setting
from bench.nats_echo import echo_of
from bench.nats_service import filled
from bench.plans import same
from keyloft.server.nats_server import NatsServer

Operation: TypeAlias = Literal["get", "set"]

IN_FLIGHT = 64
_OPERATIONS = 4000
_OPERATIONS_OF_ORM = 192
"""Of a round: a tenth of a second for one, a fifth and more for the other."""

# As long as ours: the length of a subject is a part of the request.
_ECHO = "ec.kv"
_ORM = "or.kv"

_REST_SECONDS = 0.1
"""Time to finish what a round leaves behind, such as taking in the log: it counts to the round's CPU time, and is not
to fall into the next one's turn."""

_Plan: TypeAlias = list[Pair]
"""The keys to read and what is stored there, or the keys to write and what is new."""


class _Server(Struct, frozen=True):
    """One contestant: a child that serves under a prefix of its own."""

    name: str
    prefix: str
    process: Child
    operations: int
    """How many a round has."""
    echo: bytes | None = None
    """What it replies to everything, if it does nothing else."""


class _Rounds(Struct, frozen=True):
    rates: Figure
    cpu: Figure


class Race:
    """The contestants on one NATS server, and the client that asks them in turns."""

    def __init__(self, client: Client, servers: list[_Server], stored: int, rounds: int) -> None:
        self._client = client
        self._servers = servers
        self._stored = stored
        self._rounds = rounds

    async def gets(self) -> Row:
        def plan(chances: random.Random, operations: int) -> _Plan:
            indexes = [chances.randrange(self._stored) for _ in range(operations)]
            return [(key_of(index), value_of(index)) for index in indexes]

        echo, ours, orm = await self._run(plan, lambda prefix, pair: getting(pair[0], prefix))
        return _row(f"get, {self._stored:,} keys", echo, ours, orm, at_least=0.75, cpu_at_most=1.65, over_orm=20)

    async def sets(self) -> Row:
        plan = plans.writes(self._stored, plans.as_tuple)
        echo, ours, orm = await self._run(plan, lambda prefix, pair: setting(*pair, prefix), writes=True)
        return _row(
            f"set, {self._stored:,} keys, synchronous=FULL",
            echo,
            ours,
            orm,
            at_least=0.45,
            cpu_at_most=3.2,
            over_orm=25,
        )

    async def _run(
        self,
        plan: Callable[[random.Random, int], _Plan],
        ask: Callable[[str, Pair], Ask],
        *,
        writes: bool = False,
    ) -> list[_Rounds]:
        """Rounds in which each contestant has its turn, in an order that chance decides; the first one warms up."""
        rates: dict[str, list[float]] = {server.name: [] for server in self._servers}
        cpu: dict[str, list[float]] = {server.name: [] for server in self._servers}
        chances = random.Random(1)
        for number in range(self._rounds + 1):
            for server in chances.sample(self._servers, len(self._servers)):
                pairs = plan(chances, server.operations)
                asks = [ask(server.prefix, pair) for pair in pairs]
                before = server.process.cpu_seconds()
                done = await exchange(self._client, asks, IN_FLIGHT)
                await asyncio.sleep(_REST_SECONDS)
                used = server.process.cpu_seconds() - before
                await self._check(server, pairs, done.replies, writes)
                if number > 0:
                    rates[server.name].append(done.rate)
                    cpu[server.name].append(used / server.operations * 1e6)
        return [
            _Rounds(
                Figure(server.name, "/s", tuple(rates[server.name])),
                Figure(f"{server.name}, CPU per request", "µs", tuple(cpu[server.name])),
            )
            for server in self._servers
        ]

    async def _check(self, server: _Server, pairs: _Plan, replies: list[bytes], writes: bool) -> None:
        """Raises unless every reply is right and, after sets, every value is there: nobody wins by doing nothing."""
        if server.echo is not None:
            same(replies, [server.echo] * len(pairs))
            return
        if writes:
            same([reply for reply in replies if not says(reply, success=True)], [])
            asks = [getting(key, server.prefix) for key, _ in pairs]
            replies = (await exchange(self._client, asks, IN_FLIGHT)).replies
        read = zip(replies, pairs, strict=True)
        same([reply for reply, (_, value) in read if not says(reply, exists=True, value=value)], [])


@asynccontextmanager
async def racing(operation: Operation, folder: Path, stored: int, rounds: int, share: float) -> AsyncIterator[Race]:
    async with AsyncExitStack() as closing:
        own = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        server = await closing.enter_async_context(NatsServer())
        path, to_fill = own / "keyloft.db", stored
        if operation == "get":
            # Closed once it is full, so that the keys lie in the file. To be written to, the service itself fills it,
            # so that the log has its full length: while it grows, each sync costs about twice as much on ext4.
            await filled(path, stored)
            to_fill = 0
        ours = await closing.enter_async_context(child("bench.nats_service", server.url, path, to_fill))
        [client] = await closing.enter_async_context(clients(server.url, 1))
        size = await _reply_size(client, operation)
        echo = await closing.enter_async_context(child("bench.nats_echo", server.url, _ECHO, size))
        orm = await closing.enter_async_context(child("bench.nats_handlers", server.url, _ORM, own / "orm.db", stored))
        operations, of_orm = int(_OPERATIONS * share), max(IN_FLIGHT, int(_OPERATIONS_OF_ORM * share))
        servers = [
            _Server("nats-py echo", _ECHO, echo, operations, echo_of(size)),
            _Server("keyloft", OURS, ours, operations),
            _Server("handlers over SQLAlchemy", _ORM, orm, of_orm),
        ]
        yield Race(client, servers, stored, rounds)


async def _reply_size(client: Client, operation: Operation) -> int:
    """How long a usual reply of ours is: the echo's has the same length."""
    pairs = [(key_of(index), value_of(index)) for index in range(0, 10_000, 100)]
    asks = [getting(key) if operation == "get" else setting(key, value) for key, value in pairs]
    done = await exchange(client, asks, IN_FLIGHT)
    return int(statistics.median(len(reply) for reply in done.replies))


def _row(
    title: str, echo: _Rounds, ours: _Rounds, orm: _Rounds, *, at_least: float, cpu_at_most: float, over_orm: float
) -> Row:
    times = tuple(one / other for one, other in zip(ours.cpu.rounds, echo.cpu.rounds, strict=True))
    verdicts: tuple[Verdict, ...] = (
        compare(ours.rates, echo.rates, at_least=at_least),
        within(Figure("CPU per request, keyloft : nats-py echo", "x", times), cpu_at_most),
        compare(ours.rates, orm.rates, at_least=over_orm),
    )
    figures = tuple(figure for rounds in (echo, ours, orm) for figure in (rounds.rates, rounds.cpu))
    return Row(f"{title}, {IN_FLIGHT} in flight", figures, verdicts)
