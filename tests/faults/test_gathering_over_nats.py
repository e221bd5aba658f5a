"""A service is killed while calls of one client travel together: no get overtakes a set, and no value goes astray."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keyloft.errors import DatabaseError, Unanswered
from keyloft.plugins import DatabaseClient
from tests.support.nats import private_server

from .children import child

pytestmark = pytest.mark.slow

_PREFIX = "faults.kv"
_CALLERS = 32
_ROUNDS = 150
"""How many rounds of calls each service answers before it is killed."""


class Caller:
    """Sets and gets one key, together with all others, and checks what it reads."""

    def __init__(self, client: DatabaseClient, number: int) -> None:
        self._kv = client.kv
        self._key = f"k{number}"
        self._begun = self._acknowledged = 0
        self.answered = 0

    async def _set(self) -> None:
        self._begun = number = self._begun + 1
        await self._kv.set(self._key, [self._key, number])
        self._acknowledged = number

    async def _get(self) -> None:
        earliest, latest = self._acknowledged, self._begun
        key, number = await self._kv.get(self._key, [self._key, 0])
        assert key == self._key
        assert earliest <= number <= latest
        self.answered += 1

    async def call(self, action: str) -> None:
        """Set, get, or begin a get right after a set."""
        if action == "get":
            done: Sequence[Any] = await asyncio.gather(self._get(), return_exceptions=True)
        elif action == "set":
            done = await asyncio.gather(self._set(), return_exceptions=True)
        else:
            begun = self._begun + 1
            # `gather` makes the first step of the set before that of the get.
            done = await asyncio.gather(self._set(), self._kv.get(self._key), return_exceptions=True)
            was_set, found = done
            if was_set is None and not isinstance(found, BaseException):
                assert found == [self._key, begun]
        for failed in done:
            if isinstance(failed, BaseException) and not isinstance(failed, Unanswered | DatabaseError):
                raise failed


async def test_a_get_shows_the_sets_before_it_though_services_are_killed(tmp_path: Path) -> None:
    rng = random.Random(7)
    arguments = str(tmp_path / "bot.db"), _PREFIX, "30"
    async with (
        private_server() as server,
        await DatabaseClient.connect(server.url, plugin_name="trivia", prefix=_PREFIX, timeout=1) as client,
    ):
        callers = [Caller(client, number) for number in range(_CALLERS)]

        async def calls() -> None:
            for _ in range(_ROUNDS):
                # All alike in most rounds: then the service answers them in short parts.
                action = rng.choice(["get", "set", "both", "mixed"])
                each = [rng.choice(["get", "set", "both"]) if action == "mixed" else action for _ in callers]
                await asyncio.gather(*[caller.call(one) for caller, one in zip(callers, each, strict=True)])

        for _ in range(3):
            async with child("plugin_service", arguments[0], server.url, *arguments[1:]) as service:
                assert await service.line() == "ready"
                await calls()
                last = asyncio.ensure_future(calls())
                await asyncio.sleep(rng.random() / 20)  # at any moment of a round
                service.kill()
                await service.ended()
                last.cancel()
                await asyncio.wait([last])
                assert last.cancelled() or last.result() is None
        assert client.sender is not None
        assert client.sender.has_many
        assert all(caller.answered for caller in callers)
