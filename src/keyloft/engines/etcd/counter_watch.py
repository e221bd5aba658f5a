"""Follows the version counter, and keys beside it, by etcd's own watch."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.engines.etcd import messages
from keyloft.engines.etcd.cluster import EtcdCluster, EtcdMember
from keyloft.engines.etcd.layout import StoreState, counter_key, unpack_state
from keyloft.engines.etcd.messages import WatchCreateRequest, WatchRequest


async def puts(
    cluster: EtcdCluster, member: EtcdMember, start: bytes, end: bytes = b""
) -> AsyncGenerator[Sequence[Any] | None, None]:
    """The writes of a key, or of a range of keys, in their order; None once the watch has begun.

    The writes of one transaction come together. The watch ends when the member ends.

    Raises:
        Failure: The connection is lost.
    """
    call = member.calls["Watch"](metadata=await cluster.metadata(member, limits.ETCD_TRY_SECONDS))
    try:
        watch = WatchCreateRequest(key=start, range_end=end, filters=[messages.NO_DELETE])
        await call.write(WatchRequest(create_request=watch))
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.created:
                yield None
            if response.canceled:
                return
            if response.events:
                yield [event.kv for event in response.events]
    finally:
        call.cancel()


async def counters(cluster: EtcdCluster, member: EtcdMember) -> AsyncGenerator[tuple[int, StoreState] | None, None]:
    """The counter as each commit leaves it, and its revision; None once the watch has begun.

    The watch ends when the member ends.

    Raises:
        Failure: The connection is lost.
        DatabaseError: The counter is not Keyloft's.
    """
    async with contextlib.aclosing(puts(cluster, member, counter_key(cluster.address.prefix))) as found:
        async for written in found:
            if written is None:
                yield None
            else:
                for kv in written:
                    yield kv.mod_revision, unpack_state(cluster.name, kv.value)
