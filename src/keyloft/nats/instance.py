"""Reports to the other instances of a service that this one is alive, and up to which version it has published."""

import asyncio

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import Batch, Check, Committed, Delete, Mutation, Set
from keyloft.core.values import Encoding
from keyloft.nats.leases import SPACE, LeaseRows, PublishedProgress, new_id, stored


class PublishingInstance:
    """This instance of a service, which is alive until its heartbeat row expires.

    The instance itself counts from before the row is written, so it stops a little earlier than others notice. After a
    late heartbeat, or a lost connection to NATS, its last messages may be lost: it begins again under another id.
    """

    def __init__(self, nats: Nats, engine: Engine, rows: LeaseRows) -> None:
        self._nats = nats
        self._engine = engine
        self._rows = rows
        self.id = ""
        """Its id; empty until it has joined."""
        self._confirmed = PublishedProgress()
        """The progress up to which NATS has confirmed that it has all events."""
        self._version = 0
        """The version of the heartbeat row."""
        self._until = 0.0
        """Until when the instance counts as alive, by the event loop's time."""
        self._reconnects = -1
        """How many times the connection was restored before it joined."""
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
            mutations = [self._heartbeat(instance), stored(self._rows.progress(instance), PublishedProgress())]
            if self.id:
                mutations.append(Delete(SPACE, self._rows.heartbeat(self.id)))
            done = await write(self._engine, *mutations)
            self.id, self._reconnects, self._version = instance, reconnects, done.version
            self._confirmed = PublishedProgress()
            self._until = began + limits.HEARTBEAT_SECONDS

    async def heartbeat(self, sent: PublishedProgress) -> None:
        """Stay alive: store the heartbeat, and the progress that NATS confirmed after the heartbeat before this one.

        Args:
            sent: The progress up to which all events have been passed to NATS.
        """
        if not self.is_alive:
            return
        began, progress = asyncio.get_running_loop().time(), self._confirmed
        rows, instance = self._rows, self.id
        batch = Batch(
            (self._heartbeat(instance), stored(rows.progress(instance), progress)),
            (Check(SPACE, rows.heartbeat(instance), self._version),),
        )
        done = await self._engine.commit(batch)
        if instance != self.id:
            return
        if not isinstance(done, Committed):
            self.lapse()
            return
        self._version, self._until = done.version, began + limits.HEARTBEAT_SECONDS
        # nats-py sends a ping before what is in its buffer: the first flush sends the buffer, the second waits for it.
        for _ in range(2):
            await self._nats.flush(round(limits.HEARTBEAT_SECONDS))
        self._confirmed = sent

    def lapse(self) -> None:
        """Publish nothing more under this id."""
        self._until = 0.0

    async def leave(self) -> None:
        """Let other instances take over at once; the progress row stays for them."""
        self.lapse()
        if instance := self.id:
            self.id = ""
            await write(self._engine, Delete(SPACE, self._rows.heartbeat(instance)))

    def _heartbeat(self, instance: str) -> Set:
        return Set(SPACE, self._rows.heartbeat(instance), b"", Encoding.BYTES, round(1000 * limits.HEARTBEAT_SECONDS))
