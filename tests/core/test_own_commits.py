"""An update notes the commits that its function makes."""

import asyncio

from keyloft.core.own_commits import note_commit, own_commits


async def test_the_commits_of_a_function_and_of_its_tasks_are_noted() -> None:
    async def commit(version: int) -> None:
        note_commit(version)

    note_commit(1)
    with own_commits() as outer:
        note_commit(2)
        with own_commits() as inner:
            await asyncio.create_task(commit(3))
    note_commit(4)
    assert (outer, inner) == ({2, 3}, {3})


async def test_a_task_that_outlives_the_function_takes_no_memory_for_its_commits() -> None:
    has_ended = asyncio.Event()

    async def commit_for_a_long_time() -> None:
        await has_ended.wait()
        for version in range(100):
            note_commit(version)

    with own_commits() as own:
        task = asyncio.create_task(commit_for_a_long_time())
    has_ended.set()
    await task
    assert not own
