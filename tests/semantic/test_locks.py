"""Locks: one holder at a time, which learns at once when it has lost the lock."""

import asyncio
import logging
import time
from contextlib import suppress

import pytest

import keyloft
from keyloft import InvalidArgument, ManualClock, Store
from keyloft.engines.postgres.engine import PostgresEngine
from keyloft.semantic import Lock, LockHeld, LockLost, Semantics, SemanticStore, StaleFence, VersionConflict
from tests.semantic.conftest import ON_DATABASES
from tests.semantic.unreliable_network import PATIENCE_SECONDS, PROJECT, behind_network, until
from tests.support.postgres import IN_MEMORY
from tests.support.postgres_proxy import Message, proxy

KEY = f"{PROJECT}/locks/sync"
WORK = f"{PROJECT}/docs/cursor"
CURSOR = Semantics("cursor")
AT_ONCE_SECONDS = 8.0
"""The next renewal comes after 10 s, and would notice a loss as well; a busy machine takes its time."""


async def is_free(store: SemanticStore) -> bool:
    return await store.get(KEY) is None


async def write(store: SemanticStore, fence: int, key: str = WORK) -> None:
    await store.put(key, "x", expected_version="*", writer="w:work", semantics=CURSOR, fence=fence)


async def take_away(store: SemanticStore) -> None:
    await store.delete(KEY, expected_version="*", writer="operator")


async def take_away_and_wait(store: SemanticStore, key: str = KEY) -> None:
    await store.delete(key, expected_version="*", writer="operator")
    await asyncio.sleep(PATIENCE_SECONDS)


async def hold_until_lost(lock: Lock, entered: asyncio.Event) -> None:
    async with lock:
        entered.set()
        await asyncio.sleep(PATIENCE_SECONDS)


async def actions(store: SemanticStore) -> list[str]:
    return [record.action async for record in store.audit(KEY)]


class TestAcquiring:
    async def test_a_lock_is_there_while_it_is_held_and_gone_after(self, store: SemanticStore) -> None:
        lock = store.lock(KEY, writer="w:sync", ttl=7, producer="harvester", consumer_hints=("ops",))
        async with lock:
            entry = await store.get(KEY)
            assert entry is not None
            assert lock.is_held
            assert entry.fence == lock.fence == entry.version
            assert entry.last_writer == "w:sync"
            assert entry.semantics == Semantics("lock", "harvester", ("ops",), 7)
        assert await is_free(store)
        assert not lock.is_held
        assert not lock.lost.is_set()

    async def test_a_lock_that_is_free_needs_no_wait(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w", wait=0) as lock:
            assert lock.is_held

    async def test_a_lock_that_is_free_is_acquired_however_short_the_wait(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w", wait=1e-9) as lock:
            assert lock.is_held

    @pytest.mark.parametrize("wait", [0, 0.02])
    async def test_a_lock_that_stays_held_is_refused_naming_its_holder(self, store: SemanticStore, wait: float) -> None:
        async with store.lock(KEY, writer="first:job"):
            with pytest.raises(LockHeld, match="first:job"):
                await store.lock(KEY, writer="second", wait=wait).acquire()
        assert await actions(store) == ["put", "delete"], "a waiter leaves no conflicts"

    async def test_a_waiter_gets_it_as_soon_as_it_is_released(self, store: SemanticStore) -> None:
        first, second = store.lock(KEY, writer="first"), store.lock(KEY, writer="second", wait=PATIENCE_SECONDS)
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        fence = first.fence
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await first.release()
        entry = await asyncio.wait_for(waiting, AT_ONCE_SECONDS)
        assert entry.fence is not None
        assert entry.fence > fence
        await second.release()

    async def test_a_waiter_gets_it_at_the_moment_it_expires(self, store: SemanticStore, clock: ManualClock) -> None:
        await store.put(
            KEY, 1, expected_version=0, writer="a dead process", semantics=Semantics("lock", ttl_seconds=30)
        )
        waiting = asyncio.create_task(store.lock(KEY, writer="next", wait=None).acquire())
        clock.advance(29.999)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        clock.advance(0.001)
        await asyncio.wait_for(waiting, AT_ONCE_SECONDS)
        assert await actions(store) == ["put", "expire", "put"]
        waiting.result()

    async def test_fences_grow_through_release_loss_and_expiry(self, store: SemanticStore, clock: ManualClock) -> None:
        fences = []
        for end in ("release", "delete", "expire") * 2:
            lock = store.lock(KEY, writer="w")
            await lock.acquire()
            fences.append(lock.fence)
            if end == "delete":
                await take_away(store)
            elif end == "expire":
                clock.advance(30)
            with suppress(LockLost):
                await lock.release()
        assert fences == sorted(set(fences))

    async def test_a_held_lock_is_not_acquired_again(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w") as lock:
            with pytest.raises(InvalidArgument, match="already"):
                await lock.acquire()
            assert lock.is_held

    async def test_one_object_is_not_for_two_tasks(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="first"):
            shared = store.lock(KEY, writer="second")
            waiting = asyncio.create_task(shared.acquire())
            await asyncio.sleep(0)
            with pytest.raises(InvalidArgument, match="make another Lock"):
                await shared.acquire()
        await asyncio.wait_for(waiting, AT_ONCE_SECONDS)
        await shared.release()

    async def test_what_was_not_acquired_has_no_fence_and_no_release(self, store: SemanticStore) -> None:
        lock = store.lock(KEY, writer="w")
        with pytest.raises(LockLost, match="acquire it first"):
            _ = lock.fence
        with pytest.raises(LockLost, match="acquire it first"):
            await lock.release()

    @pytest.mark.parametrize("wait", [-1, float("nan"), "1", True])
    @IN_MEMORY
    async def test_a_wait_that_is_none_is_refused(self, store: SemanticStore, wait: float) -> None:
        with pytest.raises(InvalidArgument, match="wait"):
            store.lock(KEY, writer="w", wait=wait)

    async def test_two_locks_in_one_task_are_lost_each_on_its_own(self, store: SemanticStore) -> None:
        inner = store.lock(f"{KEY}/inner", writer="w")
        async with store.lock(KEY, writer="w") as outer:
            with pytest.raises(LockLost, match="inner"):
                async with inner:
                    await take_away_and_wait(store, inner.key)
            assert outer.is_held
            await write(store, outer.fence)
        assert await is_free(store)

    async def test_the_loss_of_an_outer_lock_ends_the_inner_body_and_releases_that_lock(
        self, store: SemanticStore
    ) -> None:
        inner = store.lock(f"{KEY}/inner", writer="w")
        with pytest.raises(LockLost, match="locks/sync is lost"):
            async with store.lock(KEY, writer="w"), inner:
                await take_away_and_wait(store)
        assert not inner.lost.is_set()
        assert await store.get(inner.key) is None

    @ON_DATABASES
    @pytest.mark.blocks_the_loop
    async def test_a_holder_that_held_up_the_event_loop_knows_that_its_time_is_over(self, store: SemanticStore) -> None:
        lock = store.lock(KEY, writer="w", ttl=1)
        await lock.acquire()
        assert lock.is_held
        time.sleep(1.1)  # noqa: ASYNC251 (nothing else may run)
        assert not lock.is_held
        with suppress(LockLost):
            await lock.release()

    async def test_what_is_no_lock_is_not_waited_for(self, store: SemanticStore) -> None:
        await store.put(KEY, 1, expected_version=0, writer="w", semantics=CURSOR)
        with pytest.raises(InvalidArgument, match=r"^key: expected a lock at .*, got a "):
            await store.lock(KEY, writer="w").acquire()

    async def test_who_waits_leaves_no_conflicts(self, store: SemanticStore) -> None:
        async def work(number: int) -> None:
            for _ in range(3):
                async with store.lock(KEY, writer=f"w{number}"):
                    await asyncio.sleep(0)

        await asyncio.gather(*[work(number) for number in range(8)])
        assert await actions(store) == ["put", "delete"] * 24
        assert store.signals.counts["conflict", "lock"] == 0

    async def test_a_holder_may_write_to_its_own_lock(self, store: SemanticStore, clock: ManualClock) -> None:
        async with store.lock(KEY, writer="w", ttl=1) as lock:
            renewed = await store.put(
                KEY,
                "progress",
                expected_version="*",
                writer="w",
                semantics=Semantics("lock", ttl_seconds=1),
                fence=lock.fence,
            )
            assert renewed.fence == lock.fence
            clock.advance(0.1)

            async def is_renewed() -> bool:
                entry = await store.get(KEY)
                return entry is not None and entry.expires_at != renewed.expires_at

            await until(is_renewed)
            entry = await store.get(KEY)
            assert lock.is_held
            assert entry is not None
            assert entry.version == renewed.version
        assert await is_free(store)


class TestLosing:
    async def test_a_holder_whose_lock_an_operator_deletes_is_cancelled_at_once(self, store: SemanticStore) -> None:
        lock, entered = store.lock(KEY, writer="w"), asyncio.Event()
        holding = asyncio.create_task(hold_until_lost(lock, entered))
        await entered.wait()
        fence = lock.fence
        await take_away(store)
        with pytest.raises(LockLost, match="expired, or was deleted"):
            await asyncio.wait_for(holding, AT_ONCE_SECONDS)
        assert lock.lost.is_set()
        assert not lock.is_held
        with pytest.raises(StaleFence):
            await write(store, fence)
        assert await store.get(WORK) is None

    async def test_a_holder_whose_lock_is_overwritten_hears_by_whom(self, store: SemanticStore) -> None:
        lock, entered = store.lock(KEY, writer="w"), asyncio.Event()
        holding = asyncio.create_task(hold_until_lost(lock, entered))
        await entered.wait()
        fence = lock.fence
        taken = await store.put(
            KEY, 1, expected_version="*", writer="thief:x", semantics=Semantics("lock", ttl_seconds=30)
        )
        with pytest.raises(LockLost, match="thief:x has it"):
            await asyncio.wait_for(holding, AT_ONCE_SECONDS)
        with pytest.raises(StaleFence):
            await write(store, fence)
        assert taken.fence is not None
        await write(store, taken.fence)
        assert await store.get(KEY) == taken, "the thief's lock stays"

    async def test_a_holder_whose_lock_expires_is_cancelled_at_once(
        self, store: SemanticStore, clock: ManualClock
    ) -> None:
        lock, entered = store.lock(KEY, writer="w"), asyncio.Event()
        holding = asyncio.create_task(hold_until_lost(lock, entered))
        await entered.wait()
        clock.advance(30)
        with pytest.raises(LockLost):
            await asyncio.wait_for(holding, AT_ONCE_SECONDS)
        with pytest.raises(StaleFence):
            await write(store, lock.fence)

    async def test_a_lock_taken_through_another_store_is_lost_as_well(
        self, store: SemanticStore, url: str | None, clock: ManualClock
    ) -> None:
        if url is None:
            pytest.skip("memory belongs to one store")
        lock, entered = store.lock(KEY, writer="w"), asyncio.Event()
        holding = asyncio.create_task(hold_until_lost(lock, entered))
        await entered.wait()
        async with keyloft.open(url, clock=clock) as kv, SemanticStore(kv) as other:
            await take_away(other)
            with pytest.raises(LockLost):
                await asyncio.wait_for(holding, AT_ONCE_SECONDS)
            with pytest.raises(StaleFence):
                await write(other, lock.fence)

    async def test_a_hold_that_could_not_be_renewed_is_over_and_harms_no_later_one(self, clock: ManualClock) -> None:
        network, kv = behind_network(await keyloft.open(clock=clock))
        async with kv, SemanticStore(kv, sweep_every=None) as store:
            lock = store.lock(KEY, writer="w", ttl=1)
            began = asyncio.get_running_loop().time()
            entered = asyncio.Event()
            holding = asyncio.create_task(hold_until_lost(lock, entered))
            await entered.wait()
            network.is_down = True
            with pytest.raises(LockLost, match="could not be renewed in time"):
                await holding
            assert asyncio.get_running_loop().time() - began < AT_ONCE_SECONDS
            network.is_down = False
            clock.advance(1)
            await lock.acquire()
            await asyncio.sleep(0.4)  # a renewal
            assert lock.is_held
            await lock.release()

    async def test_a_lost_lock_is_neither_renewed_nor_watched_any_more(self, store: SemanticStore) -> None:
        lock = store.lock(KEY, writer="w", ttl=1)
        await lock.acquire()
        await take_away(store)
        await asyncio.wait_for(lock.lost.wait(), AT_ONCE_SECONDS)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().endswith(KEY)]
        await lock.acquire()
        assert lock.is_held
        await lock.release()

    async def test_a_lock_renews_itself_beyond_its_ttl(self, store: SemanticStore, clock: ManualClock) -> None:
        async with store.lock(KEY, writer="w", ttl=1) as lock:
            first = await store.get(KEY)
            assert first is not None
            for _ in range(2):
                clock.advance(0.9)
                due = clock.now() + 1000

                async def is_renewed(due: int = due) -> bool:
                    entry = await store.get(KEY)
                    assert entry is not None
                    assert entry.expires_at is not None
                    return round(entry.expires_at.timestamp() * 1000) == due

                await until(is_renewed)
            renewed = await store.get(KEY)
            assert renewed is not None
            assert (renewed.version, renewed.fence) == (first.version, first.fence)
            await write(store, lock.fence)
        assert await actions(store) == ["put", "delete"], "renewing leaves no records"

    async def test_a_late_end_of_the_body_raises_as_well(self, store: SemanticStore) -> None:
        async def take_no_notice() -> None:
            with suppress(asyncio.CancelledError):
                await take_away_and_wait(store)

        with pytest.raises(LockLost):
            async with store.lock(KEY, writer="w"):
                await take_no_notice()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def test_the_body_s_own_error_is_not_hidden_by_the_loss(self, store: SemanticStore) -> None:
        async def fail_when_cancelled() -> None:
            try:
                await take_away_and_wait(store)
            except asyncio.CancelledError:
                raise ZeroDivisionError from None

        with pytest.raises(ZeroDivisionError):
            async with store.lock(KEY, writer="w"):
                await fail_when_cancelled()
        await asyncio.sleep(0)  # nothing of the cancellation is left

    async def test_releasing_a_lost_lock_raises(self, store: SemanticStore) -> None:
        lock = store.lock(KEY, writer="w")
        await lock.acquire()
        await take_away(store)
        with pytest.raises(LockLost):
            await lock.release()

    async def test_closing_the_database_is_a_loss(self, clock: ManualClock) -> None:
        kv = await keyloft.open(clock=clock)
        async with SemanticStore(kv) as store:
            lock = store.lock(KEY, writer="w")
            await lock.acquire()
            await kv.aclose()
            await asyncio.wait_for(lock.lost.wait(), AT_ONCE_SECONDS)

    async def test_loss_is_logged_with_key_and_directive(
        self, store: SemanticStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = store.lock(KEY, writer="agent:tidy-up")
        await lock.acquire()
        await take_away(store)
        await asyncio.wait_for(lock.lost.wait(), AT_ONCE_SECONDS)
        [line] = [r for r in caplog.records if r.getMessage().startswith("[KV] lock lost")]
        assert line.levelno == logging.WARNING
        assert line.__dict__["key"] == KEY
        assert line.__dict__["directive"] == "tidy-up"


class TestFences:
    async def test_a_fence_admits_writes_while_its_lock_is_held(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w") as lock:
            await write(store, lock.fence)
            fence = lock.fence
        with pytest.raises(StaleFence):
            await write(store, fence)

    async def test_the_next_holder_s_writes_pass_and_the_last_one_s_do_not(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w") as lock:
            old = lock.fence
        async with store.lock(KEY, writer="w") as lock:
            await write(store, lock.fence)
            with pytest.raises(StaleFence):
                await write(store, old)

    async def test_invented_fences_are_refused(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w") as lock:
            for fence in (0, lock.fence - 1, lock.fence + 1, 2**63 - 1):
                with pytest.raises(StaleFence):
                    await write(store, fence)

    async def test_a_fence_of_another_project_is_refused(self, kv: Store) -> None:
        async with SemanticStore(kv, sweep_every=None) as store, store.lock(KEY, writer="w") as lock:
            with pytest.raises(StaleFence):
                await write(store, lock.fence, "tenant/acme/project/other/docs/cursor")

    async def test_a_late_delete_is_refused_too(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w") as lock:
            await write(store, lock.fence)
            fence = lock.fence
        with pytest.raises(StaleFence):
            await store.delete(WORK, expected_version="*", writer="w", fence=fence)
        assert await store.get(WORK) is not None


class TestCancelling:
    async def test_a_cancelled_waiter_leaves_no_lock_behind(self, store: SemanticStore) -> None:
        first = store.lock(KEY, writer="first")
        await first.acquire()
        waiting = asyncio.create_task(store.lock(KEY, writer="second").acquire())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await first.release()
        assert await is_free(store)

    async def test_acquiring_cancelled_at_any_point_leaves_no_lock_behind(self, kv: Store) -> None:
        for steps in range(12):
            async with SemanticStore(kv, sweep_every=None) as store:
                acquiring = asyncio.create_task(store.lock(KEY, writer="w").acquire())
                for _ in range(steps):
                    await asyncio.sleep(0)
                acquiring.cancel()
                with suppress(asyncio.CancelledError):
                    await acquiring
                    await take_away(store)  # it was faster
            async with SemanticStore(kv, sweep_every=None) as store:
                assert await is_free(store), steps

    async def test_a_cancelled_holder_releases_and_stays_cancelled(self, store: SemanticStore) -> None:
        lock, entered = store.lock(KEY, writer="w"), asyncio.Event()
        holding = asyncio.create_task(hold_until_lost(lock, entered))
        await entered.wait()
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert holding.cancelled()
        assert await is_free(store)

    async def test_releasing_cancelled_at_any_point_leaves_no_lock_behind(self, kv: Store) -> None:
        async def hold_shortly(store: SemanticStore, leaving: asyncio.Event) -> None:
            async with store.lock(KEY, writer="w"):
                leaving.set()

        for steps in range(8):
            async with SemanticStore(kv, sweep_every=None) as store:
                leaving = asyncio.Event()
                holding = asyncio.create_task(hold_shortly(store, leaving))
                await leaving.wait()
                for _ in range(steps):
                    await asyncio.sleep(0)
                holding.cancel()
                with suppress(asyncio.CancelledError):
                    await holding
            async with SemanticStore(kv, sweep_every=None) as store:
                assert await is_free(store), steps

    async def test_a_timeout_around_a_held_lock_is_a_timeout(self, store: SemanticStore) -> None:
        async def hold() -> None:
            async with asyncio.timeout(None) as timeout, store.lock(KEY, writer="w"):
                timeout.reschedule(asyncio.get_running_loop().time())  # only now is it held
                await asyncio.sleep(PATIENCE_SECONDS)

        with pytest.raises(TimeoutError):
            await hold()
        assert await is_free(store)

    async def test_a_timeout_inside_does_not_end_the_hold(self, store: SemanticStore) -> None:
        async with store.lock(KEY, writer="w") as lock:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(PATIENCE_SECONDS)
            assert lock.is_held
            await write(store, lock.fence)

    async def test_a_loss_inside_a_timeout_is_a_loss(self, store: SemanticStore) -> None:
        with pytest.raises(LockLost):
            async with asyncio.timeout(60), store.lock(KEY, writer="w"), asyncio.timeout(60):
                await take_away_and_wait(store)

    async def test_cancelled_and_lost_at_once_is_cancelled(self, store: SemanticStore) -> None:
        lock, entered = store.lock(KEY, writer="w"), asyncio.Event()
        holding = asyncio.create_task(hold_until_lost(lock, entered))
        await entered.wait()
        watch = store.watch(KEY)
        assert await anext(watch) is not None
        await take_away(store)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert await is_free(store)

    async def test_a_task_that_lost_its_lock_is_a_healthy_task(self, store: SemanticStore) -> None:
        async def lose_then_work() -> str:
            with pytest.raises(LockLost):
                await hold_until_lost(store.lock(KEY, writer="w"), entered)
            async with asyncio.timeout(2):
                await asyncio.sleep(0.01)
            return "done"

        entered = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            working = group.create_task(lose_then_work())
            await entered.wait()
            await take_away(store)
        assert working.result() == "done"


class TestLostAnswers:
    async def test_an_acquisition_whose_answer_was_lost_is_found_again(self, kv: Store) -> None:
        network, through = behind_network(kv)
        async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
            network.loses_answers = 1
            async with store.lock(KEY, writer="w", wait=0) as lock:
                await write(store, lock.fence)
            assert await actions(store) == ["put", "delete"]

    async def test_an_acquisition_whose_answer_was_lost_waits_for_the_database(self, kv: Store) -> None:
        network, through = behind_network(kv)
        network.breaks_after_loss = True
        async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
            network.loses_answers = 1
            acquiring = asyncio.create_task(store.lock(KEY, writer="w", wait=0).acquire())

            async def is_broken() -> bool:
                return network.is_down

            await until(is_broken)
            await asyncio.sleep(0.15)  # it has asked again, and met the network down
            network.is_down = False
            assert (await asyncio.wait_for(acquiring, AT_ONCE_SECONDS)).fence is not None

    async def test_acquiring_survives_a_connection_cut_at_its_commit(self, postgres_url: str) -> None:
        def cut_at_commit(message: Message) -> bool:
            if message.kind != b"C" or not message.body.startswith(b"COMMIT"):
                return True
            cuts.append(message)
            network.lets_answer = lambda message: True
            network.cut()
            return False

        cuts: list[Message] = []
        async with (
            proxy(postgres_url) as (network, url),
            keyloft.open(url, patience=3) as kv,
            SemanticStore(kv, audit_key="k", sweep_every=None) as store,
        ):
            await store.get(KEY)
            engine = kv.engine
            assert isinstance(engine, PostgresEngine)
            engine.server.has_function = False  # then the server answers COMMIT
            network.lets_answer = cut_at_commit
            entry = await asyncio.wait_for(store.lock(KEY, writer="w", ttl=60).acquire(), 30)
            assert cuts
            assert entry.fence is not None
            await write(store, entry.fence)
            assert await actions(store) == ["put"]

    async def test_a_holder_cut_off_from_its_database_is_cancelled_in_time(self, postgres_url: str) -> None:
        async with (
            keyloft.open(postgres_url) as direct,
            SemanticStore(direct, sweep_every=None) as other,
            proxy(postgres_url) as (network, url),
            keyloft.open(url, patience=30) as kv,
            SemanticStore(kv, sweep_every=None) as store,
        ):
            lock, entered = store.lock(KEY, writer="w", ttl=1), asyncio.Event()
            holding = asyncio.create_task(hold_until_lost(lock, entered))
            await entered.wait()
            network.pause()
            with pytest.raises(LockLost):
                await asyncio.wait_for(holding, 20)  # before the database's own patience is over
            network.go_on()
            async with other.lock(KEY, writer="next", wait=20):
                with pytest.raises(StaleFence):
                    await write(other, lock.fence)


@ON_DATABASES
async def test_a_conflict_of_a_close_race_is_no_error(store: SemanticStore) -> None:
    held = 0
    most = 0

    async def work(number: int) -> None:
        nonlocal held, most
        async with store.lock(KEY, writer=f"worker-{number}"):
            held += 1
            most = max(most, held)
            await asyncio.sleep(0)
            held -= 1

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*[work(number) for number in range(20)])
    assert most == 1
    assert await is_free(store)
    with pytest.raises(VersionConflict):
        await store.delete(KEY, expected_version=1, writer="w")
