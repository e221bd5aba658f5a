"""Sends requests with a stock nats-py client, so many in flight, and keeps the replies for their check."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeAlias

import msgspec
import nats
from msgspec import Struct
from nats.aio.client import Client

from bench.harness.data import Key, Value
from bench.harness.race import set_aside

Ask: TypeAlias = tuple[str, bytes]
"""A subject and what is sent to it."""

OURS = "db.kv"
_PATIENCE_SECONDS = 30.0


class Exchange(Struct, frozen=True):
    """What came of a number of requests, in their order."""

    seconds: float
    latencies: list[float]
    replies: list[bytes]
    """Empty where none came."""

    @property
    def rate(self) -> float:
        return len(self.replies) / self.seconds


def getting(key: Key, prefix: str = OURS) -> Ask:
    return f"{prefix}.{key[0]}.get", msgspec.json.encode({"key": key[1]})


def setting(key: Key, value: Value, prefix: str = OURS) -> Ask:
    return f"{prefix}.{key[0]}.set", msgspec.json.encode({"key": key[1], "value": value})


def deleting(key: Key) -> Ask:
    return f"{OURS}.{key[0]}.delete", msgspec.json.encode({"key": key[1]})


def listing(plugin: str, limit: int) -> Ask:
    return f"{OURS}.{plugin}.list", msgspec.json.encode({"limit": limit})


def says(reply: bytes, **expected: Any) -> bool:
    """Whether a reply has these fields, and tells of no failure."""
    if not reply:
        return False
    told: dict[str, Any] = msgspec.json.decode(reply)
    return told.get("success", True) is True and all(told.get(name) == value for name, value in expected.items())


@asynccontextmanager
async def clients(address: str, number: int) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as closing:
        opened = []
        for _ in range(number):
            client = await nats.connect(address)
            closing.push_async_callback(client.close)
            opened.append(client)
        yield opened


async def exchange(client: Client, asks: Sequence[Ask], in_flight: int) -> Exchange:
    return await exchange_at_once([client], [asks], in_flight)


async def exchange_at_once(clients: Sequence[Client], asks: Sequence[Sequence[Ask]], in_flight: int) -> Exchange:
    """Let each client send its own requests, so many in flight each."""
    workers = []
    kept: list[tuple[list[float], list[bytes]]] = []
    for client, own in zip(clients, asks, strict=True):
        latencies, replies = [0.0] * len(own), [b""] * len(own)
        kept.append((latencies, replies))
        todo = iter(enumerate(own))
        workers += [_work(client, todo, latencies, replies) for _ in range(in_flight)]
    set_aside()
    began = time.perf_counter()
    await asyncio.gather(*workers)
    seconds = time.perf_counter() - began
    return Exchange(
        seconds,
        [latency for latencies, _ in kept for latency in latencies],
        [reply for _, replies in kept for reply in replies],
    )


async def _work(client: Client, todo: Iterator[tuple[int, Ask]], latencies: list[float], replies: list[bytes]) -> None:
    for number, (subject, data) in todo:
        began = time.perf_counter()
        # If there is no reply, the check will find out.
        with suppress(nats.errors.Error):
            replies[number] = (await client.request(subject, data, timeout=_PATIENCE_SECONDS)).data
        latencies[number] = time.perf_counter() - began
