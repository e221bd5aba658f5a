"""After a failover of PostgreSQL, the new primary is used, whatever the old one still answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

import keyloft
from tests.support.postgres import until
from tests.support.postgres_cluster import cluster
from tools.postgres import TIMEOUT_SECONDS

pytestmark = pytest.mark.slow


async def becomes_true(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not await is_so():
            await asyncio.sleep(0.02)


async def test_of_two_primaries_the_one_with_the_highest_timeline_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with cluster(2) as servers:
        old, new, third = servers.nodes
        async with keyloft.open(servers.url()) as kv:
            await kv.set(("k",), "both have this")
            until(lambda: new.caught_up_with(old) and third.caught_up_with(old))
            new.promote()
            third.follow(new)
            # The old primary still runs, and is the first host of the URL.
            async with keyloft.open(servers.url()) as fresh, keyloft.open(servers.url(old)) as lost:
                await lost.set(("k",), "will be lost")
                await fresh.set(("k",), "the new primary has this")
                assert (await fresh.get(("k",))).value == "the new primary has this"

                async def is_followed() -> bool:
                    return bool((await kv.get(("k",))).value == "the new primary has this")

                await becomes_true(is_followed)
                await kv.set(("other",), 1)
                assert (await fresh.get(("other",))).value == 1
            assert "two hosts can be written" in caplog.text
            assert "its connections are dropped" in caplog.text
