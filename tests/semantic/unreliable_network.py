"""An engine behind a network that loses answers, or is down; and how long tests wait for what happens by itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from keyloft import Store
from keyloft.core.engine import Engine, LogWatch, Submission, Verdict, Watch
from keyloft.core.health import ServerHealth
from keyloft.core.records import Batch, Committed, Conflict, Get, Scan
from keyloft.errors import CommitUnknown, Unreachable

PROJECT = "tenant/acme/project/web"
PATIENCE_SECONDS = 10.0


class Network:
    """Leads to an engine. What it breaks stays whole behind it: a commit whose answer got lost was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.location = f"a network before {engine.location}"
        self.loses_answers = 0
        """So many further commits are made without an answer."""
        self.is_down = False
        self.breaks_after_loss = False
        """Whether it is down once it has lost an answer."""
        self.commits = 0

    async def read(self, *asks: Any) -> list[Any]:
        self._pass()
        answers: list[Any] = await self._engine.read(*asks)
        return answers

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self._pass()
        self.commits += 1
        done = await self._engine.commit(batch)
        if self.loses_answers and isinstance(done, Committed):
            self.loses_answers -= 1
            self.is_down = self.breaks_after_loss
            raise CommitUnknown("the answer got lost")
        return done

    def health(self) -> ServerHealth | None:
        return self._engine.health()

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        self._pass()
        return self._engine.submit(batch, done)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        return self._engine.watch(*asks, since=since)

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        return self._engine.follow(*asks, woken=woken, since=since)

    @property
    def is_closed(self) -> bool:
        return self._engine.is_closed

    @property
    def reads_at_once(self) -> bool:
        return False

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _pass(self) -> None:
        if self.is_down:
            raise Unreachable("the network is down")


def behind_network(kv: Store) -> tuple[Network, Store]:
    """The same database, by way of a network."""
    network = Network(kv.engine)
    return network, Store(network)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that nothing announces."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await is_so():
            await asyncio.sleep(0.005)
