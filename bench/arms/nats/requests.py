"""Sends requests with a stock nats-py client, a fixed number in flight, and keeps the replies for their check."""

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
from bench.harness.race import freeze_objects

Ask: TypeAlias = tuple[str, bytes]
"""A subject and a payload."""

KEYLOFT_SUBJECTS = "db.kv"
_TIMEOUT_SECONDS = 30.0


class Exchange(Struct, frozen=True):
    """Replies and times of requests, in their order."""

    seconds: float
    latencies: list[float]
    replies: list[bytes]
    """Empty where no reply arrived."""

    @property
    def rate(self) -> float:
        return len(self.replies) / self.seconds


def getting(key: Key, prefix: str = KEYLOFT_SUBJECTS) -> Ask:
    return f"{prefix}.{key[0]}.get", msgspec.json.encode({"key": key[1]})


def setting(key: Key, value: Value, prefix: str = KEYLOFT_SUBJECTS) -> Ask:
    return f"{prefix}.{key[0]}.set", msgspec.json.encode({"key": key[1], "value": value})


def deleting(key: Key) -> Ask:
    return f"{KEYLOFT_SUBJECTS}.{key[0]}.delete", msgspec.json.encode({"key": key[1]})


def incrementing(key: Key) -> Ask:
    return f"{KEYLOFT_SUBJECTS}.{key[0]}.incr", msgspec.json.encode({"key": key[1]})


def getting_many(plugin: str, names: Sequence[str]) -> Ask:
    return f"{KEYLOFT_SUBJECTS}.{plugin}.get_many", msgspec.json.encode({"keys": names})


def listing(plugin: str, limit: int) -> Ask:
    return f"{KEYLOFT_SUBJECTS}.{plugin}.list", msgspec.json.encode({"limit": limit})


def matches(reply: bytes, **expected: Any) -> bool:
    """Whether a reply has these fields and reports no failure."""
    if not reply:
        return False
    fields: dict[str, Any] = msgspec.json.decode(reply)
    return fields.get("success", True) is True and all(fields.get(name) == value for name, value in expected.items())


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
    """Let each client send its requests, `in_flight` of them at a time."""
    workers = []
    kept: list[tuple[list[float], list[bytes]]] = []
    for client, own in zip(clients, asks, strict=True):
        latencies, replies = [0.0] * len(own), [b""] * len(own)
        kept.append((latencies, replies))
        todo = iter(enumerate(own))
        workers += [_work(client, todo, latencies, replies) for _ in range(in_flight)]
    freeze_objects()
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
            replies[number] = (await client.request(subject, data, timeout=_TIMEOUT_SECONDS)).data
        latencies[number] = time.perf_counter() - began
