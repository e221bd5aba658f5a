"""Follows the version counter by etcd's own watch."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import grpc  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.engines.etcd.cluster import EtcdCluster, EtcdMember
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.layout import StoreState, counter_key, unpack_counter
from keyloft.engines.etcd.messages import WatchCreateRequest, WatchRequest
from keyloft.errors import KeyloftError

logger = logging.getLogger(__name__)


async def counters(cluster: EtcdCluster, member: EtcdMember) -> AsyncGenerator[tuple[int, StoreState] | None, None]:
    """The counter as each commit leaves it, and its revision; None once the watch has begun.

    It ends when the member does.

    Raises:
        Failure: The connection is lost.
        DatabaseError: The counter is not Keyloft's.
    """
    key = counter_key(cluster.address.prefix)
    call = member.calls["Watch"](metadata=await cluster.metadata(member, limits.ETCD_TRY_SECONDS))
    try:
        await call.write(WatchRequest(create_request=WatchCreateRequest(key=key)))
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.created:
                yield None
            if response.canceled:
                return
            for event in response.events:
                if event.kv.value:
                    yield event.kv.mod_revision, unpack_counter(cluster.name, event.kv.value)
    finally:
        call.cancel()


class SeenCounter:
    """The counter as it was last seen: while it is watched, one that waits need not read it."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster
        self._time = asyncio.get_running_loop().time
        self._member: EtcdMember | None = None
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self.is_live = False
        """Whether each commit is reported, once `counter` is known."""
        self.counter: StoreState | None = None
        self.revision = 0
        self.at = 0.0
        """When it was seen, by the event loop's time."""

    def follow(self) -> None:
        """Begin to watch, unless that has begun."""
        if self._task is None or self._task.done() or self._member is not self._cluster.member:
            self.stop()
            self._member = self._cluster.member
            self._task = asyncio.create_task(self._follow(self._member), name="keyloft turns")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self.is_live = None, False

    def saw(self, revision: int, counter: StoreState) -> None:
        """The counter was read, or reported."""
        if revision > self.revision:
            self.revision, self.at = revision, self._time()
            self._moved.set()
        if revision == self.revision:
            self.counter = counter

    async def moves(self, seconds: float) -> None:
        """Wait for the next commit, so long at most."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moved.wait()

    async def _follow(self, member: EtcdMember) -> None:
        try:
            async with contextlib.aclosing(counters(self._cluster, member)) as moves:
                async for move in moves:
                    if move is None:
                        # What was committed before the watch began is not reported by it: that is to be read.
                        self.is_live, self.counter = True, None
                    else:
                        self.saw(*move)
        except (Failure, KeyloftError) as error:
            logger.debug("%s: a watch of the counter was interrupted: %s", self._cluster.name, type(error).__name__)
        finally:
            if self._task is asyncio.current_task():
                self.is_live = False

    async def aclose(self) -> None:
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
