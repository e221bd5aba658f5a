"""Arms for etcd: Keyloft on it, in one or several processes, and its own API with one request per call."""

from collections.abc import Awaitable
from itertools import count
from typing import Any

import grpc  # type: ignore[import-untyped,unused-ignore]
import msgspec

import keyloft
from bench.arms import keyloft_file
from bench.arms.commits import ROOT
from bench.arms.postgres.processes import StoreProcesses, sharing
from bench.harness.contest import IN_FLIGHT, Contestant, Entrant, StoreSetup
from bench.harness.data import Key, Pair, Value, joined
from keyloft.engines.etcd.messages import METHODS, PutRequest, RangeRequest, path
from tools.etcd import Node, url_of

ON_DISK = "on disk of two of three nodes"
PUTS = f"etcd: one Put per set, {IN_FLIGHT} concurrent"
AWAITED_PUTS = "etcd: one Put per set, each awaited"
"""As a lone program sets: etcd can't gather its requests."""
RANGES = f"etcd: one Range per get, {IN_FLIGHT} concurrent"
AWAITED_RANGES = "etcd: one Range per get, each awaited"
_prefixes = (f"bench{number}" for number in count(1))


def store(nodes: list[Node]) -> Entrant:
    """Keyloft in this process, under a prefix of its own."""

    async def enter(setup: StoreSetup) -> keyloft_file.Keyloft:
        kv = await keyloft.open(url_of(nodes, next(_prefixes)), sweep_every=None)
        for pairs in setup.chunks(500):
            await kv.set_many(pairs)
        return keyloft_file.Keyloft(kv)

    return Entrant(keyloft_file.NAME, enter, keyloft_file.EVERYTHING, durable=ON_DISK)


class EtcdRequests(Contestant):
    """A Put for each set and a Range for each get, over one connection."""

    def __init__(self, node: Node, prefix: str) -> None:
        self._prefix = prefix
        self._channel = grpc.aio.insecure_channel(node.client)
        self._put = self._channel.unary_unary("/etcdserverpb.KV/Put", request_serializer=PutRequest.SerializeToString)
        self._range = self._channel.unary_unary(
            path("Range"),
            request_serializer=RangeRequest.SerializeToString,
            response_deserializer=METHODS["Range"][2].FromString,
        )

    def shaped(self, key: Key) -> Any:
        return f"{self._prefix}/{joined(key)}".encode()

    async def set(self, pair: tuple[bytes, Value]) -> None:
        key, value = pair
        await self._put(PutRequest(key=key, value=msgspec.json.encode(value)))

    async def get(self, key: bytes) -> Value:
        found = await self._range(RangeRequest(key=key))
        value: Value = msgspec.json.decode(found.kvs[0].value)
        return value

    async def fill(self, pairs: list[Pair]) -> None:
        await self.lap("set", pairs, IN_FLIGHT)

    def close(self) -> Awaitable[None]:
        closing: Awaitable[None] = self._channel.close()
        return closing


def requests(nodes: list[Node], name: str) -> Entrant:
    """etcd's own API, used the ordinary way."""

    async def enter(setup: StoreSetup) -> EtcdRequests:
        contestant = EtcdRequests(nodes[0], next(_prefixes))
        for pairs in setup.chunks():
            await contestant.fill(pairs)
        return contestant

    return Entrant(name, enter, frozenset({"get", "set"}), durable=ON_DISK)


def processes(name: str, nodes: list[Node], number: int) -> Entrant:
    """So many processes with Keyloft, which write under one prefix."""

    async def enter(setup: StoreSetup) -> StoreProcesses:
        return await sharing(url_of(nodes, next(_prefixes)), ROOT / "src", setup, number)

    return Entrant(name, enter, frozenset({"get", "set", "swap", "sum"}), durable=ON_DISK)
