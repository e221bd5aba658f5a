"""Tells the other instances of a service that this one is alive, and how far it has published."""

import asyncio

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import Batch, Check, Committed, Delete, Mutation, Set
from keyloft.core.values import Encoding
from keyloft.nats.leases import SPACE, LeaseRows, Progress, new_id, stored


class Membership:
    """This instance: alive while its beat is stored, by its own clock a little shorter.

    An instance whose beat was late, or whose connection to NATS was lost, is over: what it sent last may not have
    arrived. It begins again under another id.
    """

    def __init__(self, nats: Nats, engine: Engine, rows: LeaseRows) -> None:
        self._nats = nats
        self._engine = engine
        self._rows = rows
        self.instance = ""
        """Its id; empty until it has joined."""
        self._sampled = Progress()
        """How far NATS has everything."""
        self._version = 0
        self._until = 0.0
        self._reconnects = -1
        self._joining = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether no other instance can have taken over what this one publishes."""
        return (
            asyncio.get_running_loop().time() < self._until
            and self._nats.is_connected
            and self._nats.stats["reconnects"] == self._reconnects
        )

    async def join(self) -> None:
        """Make sure that this instance is alive; it gets a new id if it was not."""
        async with self._joining:
            if self.is_alive:
                return
            mutations: list[Mutation]
            instance, reconnects = new_id(), self._nats.stats["reconnects"]
            began = asyncio.get_running_loop().time()
            mutations = [self._beat(instance), stored(self._rows.progress(instance), Progress())]
            if self.instance:
                mutations.append(Delete(SPACE, self._rows.beat(self.instance)))
            done = await write(self._engine, *mutations)
            self.instance, self._reconnects, self._version = instance, reconnects, done.version
            self._sampled = Progress()
            self._until = began + limits.BEAT_SECONDS

    async def beat(self, sample: Progress) -> None:
        """Stay alive. What the sample before this one says is stored: NATS has confirmed by now that it has all that.

        Args:
            sample: How far everything is handed to NATS now.
        """
        if not self.is_alive:
            return
        began, progress = asyncio.get_running_loop().time(), self._sampled
        rows, instance = self._rows, self.instance
        batch = Batch(
            (self._beat(instance), stored(rows.progress(instance), progress)),
            (Check(SPACE, rows.beat(instance), self._version),),
        )
        done = await self._engine.commit(batch)
        if instance != self.instance:
            return
        if not isinstance(done, Committed):
            self.lapse()
            return
        self._version, self._until = done.version, began + limits.BEAT_SECONDS
        # Twice: the ping of a plain client of nats-py may overtake what is in its buffer.
        for _ in range(2):
            await self._nats.flush(round(limits.BEAT_SECONDS))
        self._sampled = sample

    def lapse(self) -> None:
        """Publish nothing more under this id."""
        self._until = 0.0

    async def leave(self) -> None:
        """Let others take over at once; the progress stays for them."""
        self.lapse()
        if instance := self.instance:
            self.instance = ""
            await write(self._engine, Delete(SPACE, self._rows.beat(instance)))

    def _beat(self, instance: str) -> Set:
        return Set(SPACE, self._rows.beat(instance), b"", Encoding.BYTES, round(1000 * limits.BEAT_SECONDS))
