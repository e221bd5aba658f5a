"""After a failover of PostgreSQL, the new primary is used, whatever the old one still answers."""

import asyncio
import logging
import re
from collections import Counter

import pytest

import keyloft
from keyloft import admin, migrations
from keyloft.cli.doctor.database import examine
from keyloft.core.schema import REVISION
from keyloft.engines import inspect_database
from keyloft.engines.postgres.engine import PostgresEngine
from keyloft.limits import VERSION_JUMP
from tests.support.postgres_cluster import cluster
from tools.postgres import TIMEOUT_SECONDS, query
from tools.process_family import until

# Servers are promoted, killed and waited for in the event loop.
pytestmark = [pytest.mark.slow, pytest.mark.blocks_the_loop]


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
                # Once it is acknowledged, no client reads from the old primary, nor decides by what is stored there.
                assert (await kv.get(("k",))).value == "the new primary has this"
                [refused] = (await kv.atomic().check(("k",), 1).set(("k",), 1).commit()).conflicts
                assert refused.value == "the new primary has this"
                await kv.set(("other",), 1)
                assert (await fresh.get(("other",))).value == 1
            [servers_found] = [found for found in await examine(servers.url()) if found.code == "servers"]
            assert servers_found.severity == "problem"
            assert "two hosts can be written" in servers_found.what
            assert "two hosts can be written" in caplog.text
            assert await asyncio.to_thread(migrations.current_revision, servers.url()) == REVISION
            assert "its connections are dropped" in caplog.text
            until(lambda: third.caught_up_with(new))
            new.kill()
            # A standby that has followed the new primary is enough to know that the old one is none.
            with pytest.raises(
                keyloft.Unreachable,
                match=r"no host of .* is its primary: .*/a is .* 1; .*/b .*; .*/c is .* 2$",
            ):
                await inspect_database(servers.url(), patience=TIMEOUT_SECONDS)
            new.start()
            await kv.set(("other",), 2)
            health = kv.engine.health()
            assert health is not None
            assert (health.timeline, health.failovers, health.unknown_commits) == (2, 1, 0)


async def test_versions_jump_once_on_a_new_timeline_and_lost_ones_are_known_as_lost() -> None:
    with cluster() as servers:
        old, new = servers.nodes
        async with keyloft.open(servers.url()) as kv, keyloft.open(servers.url()) as rival:
            kept = await kv.set(("kept",), 1)
            until(lambda: new.caught_up_with(old))
            new.follow(None)
            lost = await kv.set(("kept",), "lost")
            await kv.set(("lost",), 1)
            everything, keys = kv.watch(prefix=()), kv.watch(("kept",), ("lost",))
            assert [entry.value for entry in await anext(keys)] == ["lost", 1]
            old.kill()
            new.promote()
            # A watch that has reported what is lost says so, also before the first commit on the new timeline.
            assert [entry.value for entry in await anext(keys)] == [1, None]
            with pytest.raises(keyloft.HistoryGone):
                await anext(everything)
            assert (await kv.get(("kept",))).versionstamp == kept
            stamps = await asyncio.gather(kv.set(("one",), 1), rival.set(("two",), 1), rival.set(("three",), 1))
            assert kept < lost < VERSION_JUMP < min(stamps) <= max(stamps) < VERSION_JUMP + 10
            assert not (await kv.atomic().check(("kept",), lost).set(("kept",), 2).commit()).ok
            assert (await kv.atomic().check(("kept",), kept).set(("kept",), 2).commit()).ok
            for since in (lost, VERSION_JUMP):
                with pytest.raises(keyloft.HistoryGone, match=r"replaced.*list the entries, then watch again"):
                    await anext(kv.watch(prefix=(), since=since))
            changed = await anext(kv.watch(prefix=(), since=kept))
            assert {entry.key[0] for entry in changed} == {"one", "two", "three", "kept"}
        assert (await admin.check(servers.url())).findings == ()


async def test_a_former_primary_that_comes_back_is_refused_by_who_has_seen_the_new_one() -> None:
    """The new primary can't be reached meanwhile, and no other host can tell."""
    with cluster() as servers:
        old, new = servers.nodes
        async with keyloft.open(servers.url(), patience=3) as kv:
            await kv.set(("k",), "both have this")
            until(lambda: new.caught_up_with(old))
            old.kill()
            new.promote()
            await kv.set(("k",), "the new primary has this")
            new.kill()
            old.start()
            async with keyloft.open(servers.url(old)) as lost:
                await lost.set(("k",), "will be lost")
                calls = kv.get(("k",)), kv.list(prefix=()), kv.set(("k",), 1), kv.delete(("k",))
                for refused in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(refused, keyloft.Unreachable)
                    # It names the host that must not run.
                    assert re.search(r"timeline 2 was seen: \S+/a is a primary on timeline 1; ", str(refused))
                assert [entry.value for entry in await lost.list(prefix=())] == ["will be lost"]
            new.start()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                assert (await kv.get(("k",))).value == "the new primary has this"
                await kv.set(("k",), "again")
            assert [entry.value for entry in await kv.list(prefix=())] == ["again"]


async def test_a_former_primary_that_was_taken_for_the_primary_is_left_for_the_new_one() -> None:
    """A process that starts while it reaches the former primary alone can't know better, until the new one answers."""
    with cluster() as servers:
        old, new = servers.nodes
        async with keyloft.open(servers.url()) as kv:
            await kv.set(("k",), "both have this")
            until(lambda: new.caught_up_with(old))
            old.kill()
            new.promote()
            await kv.set(("k",), "the new primary has this")
        with new.stopped():
            old.start()
            misled = await keyloft.open(servers.url(), patience=3)
            lost = [await misled.set(("k",), "will be lost"), await misled.set(("lost",), 1)]
            watch = misled.watch(prefix=())
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while watch.reported_to is None:  # it starts at the former primary
                    await misled.get(("other",))
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while (found := await misled.get(("k",))).value == "will be lost":
                    await asyncio.sleep(0.05)
            assert found.value == "the new primary has this"
            assert not (await misled.get(("lost",))).exists
            # Neither a check nor a watch takes a version of the former primary for one of the new one.
            for stamp in lost:
                assert not (await misled.atomic().check(("k",), stamp).set(("k",), 1).commit()).ok
            with pytest.raises(keyloft.HistoryGone):
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await anext(watch)
            assert await misled.set(("k",), "after") > VERSION_JUMP > max(lost)
            # It does not go back, although the former primary still runs.
            new.kill()
            with pytest.raises(keyloft.Unreachable, match="timeline 2 was seen"):
                await misled.get(("k",))
        finally:
            await misled.aclose()
        async with keyloft.open(servers.url(old)) as kv:
            assert (await kv.get(("k",))).value == "will be lost"


async def test_standbys_show_a_callers_own_writes_and_answer_while_there_is_no_primary() -> None:
    with cluster(2) as servers:
        primary, one, two = servers.nodes
        async with keyloft.open(servers.url(), reads="standby", max_lag=60) as kv, keyloft.open(servers.url()) as other:
            for number in range(50):
                await kv.set(("k",), number)
                assert (await kv.get(("k",))).value == number
                await kv.set(("many", number), number)
                assert len(await kv.list(prefix=("many",))) == number + 1
            until(lambda: one.caught_up_with(primary) and two.caught_up_with(primary))
            # A busy machine may keep the news of the standbys from the store for a while.
            answered: Counter[str] = Counter()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while answered != {one.host: 10, two.host: 10}:
                    before = reads_by_host(kv)
                    for _ in range(20):
                        assert (await kv.get(("k",))).value == 49
                    answered = reads_by_host(kv) - before
            # Gets that are made together share a statement, so one standby answers all of them.
            answered.clear()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while answered not in ({one.host: 20}, {two.host: 20}):
                    before = reads_by_host(kv)
                    await asyncio.gather(*[kv.get(("k",)) for _ in range(20)])
                    answered = reads_by_host(kv) - before
            # What a standby has shown, the other one shows, too, or does not answer.
            two.follow(None)
            await other.set(("k",), "new")
            until(lambda: one.caught_up_with(primary))
            seen = [(await kv.get(("k",))).value for _ in range(10)]
            assert seen == sorted(seen, key=str), "a read went back in time"
            assert seen[-1] == "new"
            # A watch begins at the primary; what is read after it is not older.
            watch = kv.watch(prefix=("w",))
            assert not (await kv.get(("w", 1))).exists
            await other.set(("w", 1), 1)
            assert [entry.value for entry in await anext(watch)] == [1]
            assert (await kv.get(("w", 1))).value == 1
            until(lambda: one.caught_up_with(primary))
            with primary.stopped(), two.stopped():
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    assert (await kv.get(("k",))).value == "new"
                    assert [entry.value for entry in await kv.list(prefix=("w",))] == [1]
            await kv.set(("k",), "after")
            roles: list[tuple[str, str | None]] = []
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while [role for role, _ in roles] != ["primary", "standby", "standby"] or roles[1][1] != "async":
                    assert (await kv.get(("k",))).value == "after"
                    health = kv.engine.health()
                    assert health is not None
                    roles = [(host.role, host.sync_state) for host in health.hosts]
        # As after a dump of another cluster was restored here.
        query(primary.url, "UPDATE keyloft_version_counter SET timeline = 9")
        until(lambda: one.caught_up_with(primary))
        async with keyloft.open(servers.url()) as kv:
            assert await kv.set(("k",), "restored") > VERSION_JUMP


async def test_a_store_can_be_opened_and_read_while_there_is_no_primary() -> None:
    with cluster(2) as servers:
        primary, one, two = servers.nodes
        async with keyloft.open(servers.url()) as kv:
            await kv.set(("k",), "old")
            until(lambda: one.caught_up_with(primary) and two.caught_up_with(primary))
            two.follow(None)
            await kv.set(("k",), "new")
            until(lambda: one.caught_up_with(primary))
        with primary.stopped():
            async with asyncio.timeout(TIMEOUT_SECONDS):
                kv = await keyloft.open(servers.url(), reads="standby")
                # Not from the standby that is behind the other one, whichever has its turn.
                assert {(await kv.get(("k",))).value for _ in range(10)} == {"new"}
                assert [entry.value for entry in await kv.list(prefix=())] == ["new"]
            with pytest.raises(keyloft.Unreachable):
                await keyloft.open(servers.url(), patience=2)
            writing = asyncio.create_task(kv.set(("k",), "after"))
        try:
            await writing  # as soon as there is a primary
            assert (await kv.get(("k",))).value == "after"
            assert isinstance(kv.engine, PostgresEngine)
            assert kv.engine.server.has_function
        finally:
            await kv.aclose()
        with primary.stopped():
            two.kill()
            query(one.url, "SELECT 1")
            async with asyncio.timeout(TIMEOUT_SECONDS), keyloft.open(servers.url(), reads="standby") as kv:
                assert (await kv.get(("k",))).value == "after"


def reads_by_host(kv: keyloft.Store) -> Counter[str]:
    health = kv.engine.health()
    assert health is not None
    return Counter({host.name: host.reads for host in health.hosts})
