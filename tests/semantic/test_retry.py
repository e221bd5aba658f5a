"""The retry policy: how often, after which pauses, and what is never tried again."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import keyloft
from keyloft import CommitUnknown, InvalidArgument, KeyloftError, Store, Unreachable
from keyloft.errors import Busy, CannotOpen, DiskFull, NotPermitted, ReadOnly, Stalled, TimedOut
from keyloft.semantic import Escalated, Retry, Semantics, SemanticStore, StaleFence, VersionConflict
from tests.semantic.unreliable_network import PROJECT, behind_network

KEY = f"{PROJECT}/docs/cursor"
CURSOR = Semantics("cursor")


class Pauses:
    """Takes the place of sleeping, and may do something meanwhile."""

    def __init__(self, meanwhile: Callable[[int], Awaitable[object]] | None = None) -> None:
        self.taken: list[float] = []
        self._meanwhile = meanwhile

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        if self._meanwhile is not None:
            await self._meanwhile(len(self.taken))


def failing(error: Exception, times: float = float("inf")) -> Callable[[], Awaitable[int]]:
    """A function that fails so often, then returns how often it was called."""
    calls = itertools.count(1)

    async def function() -> int:
        if (call := next(calls)) <= times:
            raise error
        return call

    return function


class TestPauses:
    async def test_conflicts_are_tried_again_after_1_to_32_seconds_then_escalated(self) -> None:
        pauses = Pauses()
        conflict = VersionConflict("no")
        with pytest.raises(Escalated, match="7 attempts") as caught:
            await Retry(sleep=pauses).run(failing(conflict))
        assert pauses.taken == [1, 2, 4, 8, 16, 32]
        assert caught.value.__cause__ is conflict

    async def test_the_last_attempt_counts(self) -> None:
        assert await Retry(sleep=Pauses()).run(failing(VersionConflict("no"), 6)) == 7
        assert await Retry(sleep=Pauses()).run(failing(Busy("no"), 4)) == 5

    @pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
    async def test_transient_errors_have_five_attempts_with_pauses_that_differ(
        self, chance: float, share: float
    ) -> None:
        pauses = Pauses()
        with pytest.raises(Escalated, match="5 attempts"):
            await Retry(sleep=pauses, chance=lambda: chance).run(failing(Unreachable("away")))
        assert pauses.taken == [share * pause for pause in (0.5, 1, 2, 4)]

    async def test_pauses_are_random_by_themselves(self) -> None:
        seen = set()
        for _ in range(5):
            pauses = Pauses()
            with pytest.raises(Escalated):
                await Retry(sleep=pauses).run(failing(Unreachable("away")))
            seen.add(tuple(pauses.taken))
            assert all(
                longest / 2 <= pause <= longest for pause, longest in zip(pauses.taken, (0.5, 1, 2, 4), strict=True)
            )
        assert len(seen) == 5

    async def test_a_transient_pause_is_never_longer_than_8_seconds(self) -> None:
        pauses = Pauses()
        with pytest.raises(Escalated):
            await Retry(sleep=pauses, transient_attempts=8, chance=lambda: 1.0).run(failing(Unreachable("away")))
        assert max(pauses.taken) == pauses.taken[-1] == 8

    @pytest.mark.parametrize(
        "error",
        [Unreachable("x"), CommitUnknown("x"), Stalled("x"), Busy("x"), DiskFull("x"), TimedOut("x"), TimeoutError()],
        ids=lambda error: type(error).__name__,
    )
    async def test_what_may_pass_is_tried_again(self, error: Exception) -> None:
        assert await Retry(sleep=Pauses()).run(failing(error, 1)) == 2

    @pytest.mark.parametrize(
        "error",
        [
            InvalidArgument("x"),
            StaleFence("x"),
            ReadOnly("x"),
            CannotOpen("x"),
            NotPermitted("x"),
            keyloft.Closed(),
            PermissionError(),
            KeyError(),
            asyncio.CancelledError(),
        ],
        ids=lambda error: type(error).__name__,
    )
    async def test_what_trying_again_does_not_help_is_raised_at_once(self, error: Exception) -> None:
        pauses = Pauses()
        with pytest.raises(type(error)):
            await Retry(sleep=pauses).run(failing(error))
        assert pauses.taken == []

    async def test_a_decorated_function_keeps_its_name_arguments_and_result(self) -> None:
        calls: list[tuple[int, str]] = []

        @Retry(sleep=Pauses())
        async def advance(step: int, *, by: str) -> str:
            calls.append((step, by))
            if len(calls) < 3:
                raise VersionConflict("no")
            return f"{step} by {by}"

        assert await advance(3, by="me") == "3 by me"
        assert calls == [(3, "me")] * 3
        assert advance.__name__ == "advance"

    @pytest.mark.parametrize("attempts", [0, -1, True, 1.5])
    async def test_a_number_of_attempts_that_is_none_is_refused(self, attempts: Any) -> None:
        with pytest.raises(InvalidArgument):
            Retry(transient_attempts=attempts)


class TestUpdate:
    async def test_an_update_changes_what_is_there(self, store: SemanticStore) -> None:
        first = await store.update(KEY, lambda value: [value], writer="a", semantics=CURSOR, spec_ref="adr-1")
        assert first.value == [None]

        async def more(value: Any) -> Any:
            return [*value, 2]

        second = await store.update(KEY, more, writer="b:more")
        assert second.value == [None, 2]
        assert (second.semantics, second.spec_ref, second.last_writer) == (CURSOR, "adr-1", "b:more")

    async def test_an_update_of_nothing_needs_semantics(self, store: SemanticStore) -> None:
        with pytest.raises(InvalidArgument, match="semantics"):
            await store.update(KEY, lambda value: 1, writer="w")

    async def test_one_that_changes_the_value_in_place_and_returns_none_is_refused(self, store: SemanticStore) -> None:
        await store.update(KEY, lambda _: {"names": []}, writer="w", semantics=CURSOR)
        with pytest.raises(InvalidArgument, match=r"^change: .*in place and returned None"):
            await store.update(KEY, lambda value: value["names"].append("alice"), writer="w")
        entry = await store.get(KEY)
        assert entry is not None
        assert entry.value == {"names": []}
        assert (await store.update(KEY, lambda _: None, writer="w")).value is None, "None is a value like any other"

    async def test_an_update_inside_the_function_of_another_one_of_the_key_is_refused(
        self, store: SemanticStore
    ) -> None:
        async def nested(value: int) -> int:
            await store.update(f"{KEY}-2", lambda _: 2, writer="w", semantics=CURSOR)
            return int((await store.update(KEY, lambda inner: inner + 1, writer="w")).value)

        await store.put(KEY, 0, expected_version=0, writer="w", semantics=CURSOR)
        async with asyncio.timeout(20):
            with pytest.raises(InvalidArgument, match=r"^change: .*already updates .*return the new value"):
                await store.update(KEY, nested, writer="w")
            assert (await store.update(KEY, lambda value: value + 5, writer="w")).value == 5

    async def test_a_task_that_its_function_awaits_is_refused_as_well(self, store: SemanticStore) -> None:
        async def nested(value: int) -> int:
            [entry] = await asyncio.gather(store.update(KEY, lambda inner: inner + 1, writer="w"))
            return int(entry.value)

        await store.put(KEY, 0, expected_version=0, writer="w", semantics=CURSOR)
        async with asyncio.timeout(20):
            with pytest.raises(InvalidArgument, match=r"^change: .*already updates .*return the new value"):
                await store.update(KEY, nested, writer="w")
            assert (await store.update(KEY, lambda value: value + 5, writer="w")).value == 5

    async def test_a_task_that_goes_on_after_its_function_may_update_the_key(self, store: SemanticStore) -> None:
        began: list[asyncio.Task[Any]] = []

        def start(value: int) -> int:
            began.append(asyncio.create_task(store.update(KEY, lambda inner: inner + 1, writer="w")))
            return value + 10

        await store.put(KEY, 0, expected_version=0, writer="w", semantics=CURSOR)
        async with asyncio.timeout(20):
            assert (await store.update(KEY, start, writer="w")).value == 10
            assert (await began[0]).value == 11

    async def test_functions_that_update_each_others_keys_do_not_wait_for_each_other(
        self, store: SemanticStore
    ) -> None:
        keys = (f"{KEY}-a", f"{KEY}-b")
        both_began = asyncio.Barrier(2)

        async def update(own: str, other: str) -> None:
            is_first = True

            async def change(value: int) -> int:
                nonlocal is_first
                if is_first:
                    is_first = False
                    await both_began.wait()
                    await store.update(other, lambda value: value + 1, writer="w", retry=retry)
                return value + 100

            await store.update(own, change, writer="w", retry=retry)

        retry = store.retrying(conflict_pauses=[0.0] * 10)
        for key in keys:
            await store.put(key, 0, expected_version=0, writer="w", semantics=CURSOR)
        async with asyncio.timeout(20):
            await asyncio.gather(update(*keys), update(*reversed(keys)))
        entries = [await store.get(key) for key in keys]
        assert [entry and entry.value for entry in entries] == [101, 101]

    async def test_updates_at_once_lose_nothing(self, store: SemanticStore) -> None:
        async def add(number: int) -> None:
            await store.update(
                KEY,
                lambda value: [*(value or []), number],
                writer=f"w{number}",
                semantics=CURSOR,
                retry=store.retrying(conflict_pauses=[0.0] * 100),
            )

        await asyncio.gather(*[add(number) for number in range(12)])
        entry = await store.get(KEY)
        assert entry is not None
        assert sorted(entry.value) == [*range(12)]

    async def test_an_update_reads_again_after_a_conflict(self, store: SemanticStore) -> None:
        async def interfere(pause: int) -> None:
            if pause < 3:
                await store.put(KEY, 10 * pause, expected_version="*", writer="rival", semantics=CURSOR)

        async def change(value: int) -> int:
            seen.append(value)
            if len(seen) < 3:
                await interfere(len(seen))
            return value + 1

        seen: list[int] = []
        pauses = Pauses()
        await store.put(KEY, 0, expected_version=0, writer="w", semantics=CURSOR)
        entry = await store.update(KEY, change, writer="w", retry=store.retrying(sleep=pauses))
        assert (entry.value, seen, pauses.taken) == (21, [0, 10, 20], [1, 2])

    async def test_an_update_whose_answer_was_lost_is_made_once(self, kv: Store) -> None:
        network, through = behind_network(kv)
        async with SemanticStore(through, audit_key="k", sweep_every=None) as store:
            await store.update(KEY, lambda value: 1, writer="w", semantics=CURSOR)
            network.loses_answers = 1
            calls: list[int] = []

            def add(value: int) -> int:
                calls.append(value)
                return value + 1

            entry = await store.update(KEY, add, writer="w", retry=store.retrying(sleep=Pauses()))
            assert calls == [1]
            assert entry.value == 2
            assert entry == await store.get(KEY)
            assert [record.action async for record in store.audit(KEY)] == ["put", "put"]

    async def test_an_update_whose_answer_was_lost_is_made_once_though_others_write_on(self, kv: Store) -> None:
        network, through = behind_network(kv)

        async def overwrite(pause: int) -> None:
            await rival.update(KEY, lambda value: value + 100, writer="rival")

        async with (
            SemanticStore(through, audit_key="k", sweep_every=None) as store,
            SemanticStore(kv, audit_key="k", sweep_every=None) as rival,
        ):
            await store.update(KEY, lambda value: 1, writer="w", semantics=CURSOR)
            network.loses_answers = 1
            entry = await store.update(
                KEY, lambda value: value + 1, writer="w", retry=store.retrying(sleep=Pauses(overwrite))
            )
            assert entry.value == 2
            current = await store.get(KEY)
            assert current is not None
            assert current.value == 102

    async def test_a_function_s_own_error_ends_the_update(self, store: SemanticStore) -> None:
        def fail(value: Any) -> Any:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await store.update(KEY, fail, writer="w", semantics=CURSOR)
        assert await store.get(KEY) is None

    async def test_a_stale_fence_ends_the_update_at_once(self, store: SemanticStore) -> None:
        pauses = Pauses()
        with pytest.raises(StaleFence):
            await store.update(
                KEY, lambda value: 1, writer="w", semantics=CURSOR, fence=1, retry=store.retrying(sleep=pauses)
            )
        assert pauses.taken == []

    async def test_what_an_update_makes_keeps_to_the_rules(self, store: SemanticStore) -> None:
        with pytest.raises(KeyloftError):
            await store.update(KEY, lambda value: {1, 2}, writer="w", semantics=CURSOR)
        with pytest.raises(InvalidArgument):
            await store.update(KEY, lambda value: 1, writer="", semantics=CURSOR)
        assert await store.get(KEY) is None


async def test_tasks_of_one_process_update_one_after_the_other(store: SemanticStore) -> None:
    pauses = Pauses()
    await asyncio.gather(
        *[
            store.update(KEY, lambda n: (n or 0) + 1, writer="w", semantics=CURSOR, retry=store.retrying(sleep=pauses))
            for _ in range(20)
        ]
    )
    entry = await store.get(KEY)
    assert entry is not None
    assert entry.value == 20
    assert pauses.taken == []


async def test_a_stale_request_is_not_tried_again(store: SemanticStore) -> None:
    async def put(value: int) -> None:
        await store.put(KEY, value, expected_version="*", writer="w", semantics=CURSOR, request_id="r")

    await put(1)
    pauses = Pauses()
    with pytest.raises(VersionConflict, match="request id"):
        await store.retrying(sleep=pauses).run(lambda: put(2))
    assert pauses.taken == []


def test_only_coroutine_functions_are_retried() -> None:
    with pytest.raises(InvalidArgument, match="async def"):
        Retry()(lambda: None)  # type: ignore[arg-type, return-value]
