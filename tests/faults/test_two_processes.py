"""Two processes share one file: none of them fails, loses a write, or sees versionstamps out of order."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import keyloft

from .children import ChildProcess, child
from .moves import Chain, after, chains, contents_of, made_in

pytestmark = pytest.mark.slow

_COUNT = 40
_ROUNDS = 10


async def answer(peer: ChildProcess) -> Any:
    line = await peer.line()
    assert line, await peer.ended()
    return json.loads(line)


@pytest.fixture
async def peer() -> AsyncIterator[ChildProcess]:
    async with child("peer", "peer") as process:
        assert await answer(process) == {"ready": "peer"}
        yield process


async def ask(peer: ChildProcess, line: str) -> Any:
    peer.tell(line)
    return (await answer(peer))["answer"]


async def test_two_processes_open_a_fresh_file_at_once_and_write_it_without_loss(tmp_path: Path) -> None:
    async with child("peer", "a") as a, child("peer", "b") as b:
        await asyncio.gather(answer(a), answer(b))
        contested = 0
        for number in range(_ROUNDS):
            path = tmp_path / f"{number}.db"
            a.tell(f"race {path} {_COUNT}")
            b.tell(f"race {path} {_COUNT}")
            [of_a, of_b] = [(await answer(process))["answer"] for process in (a, b)]

            stamps = [stamp for side in (of_a, of_b) for kind in side.values() for _, stamp in kind]
            assert len(stamps) == len(set(stamps)) == 6 * _COUNT
            [first_b, last_a] = [min(s for _, s in of_b["sum"]), max(s for _, s in of_a["sum"])]
            contested += first_b < last_a
            # No other process wrote, so in one order of commits no number is left out.
            assert sorted(stamps) == list(range(2, 6 * _COUNT + 2))
            checked = sorted([*of_a["checked"], *of_b["checked"]])
            assert [value for value, _ in checked] == list(range(1, 2 * _COUNT + 1)), "an increment was lost"
            assert [stamp for _, stamp in checked] == sorted(stamp for _, stamp in checked)
            for side in (of_a, of_b):
                for kind in side.values():
                    assert [stamp for _, stamp in kind] == sorted(stamp for _, stamp in kind)

            async with keyloft.open(path) as kv:
                assert (await kv.get(("race", "sum"))).value == 2 * _COUNT
                assert (await kv.get(("race", "checked"))).value == 2 * _COUNT
                for name, side in (("a", of_a), ("b", of_b)):
                    entries = [entry async for entry in kv.list(prefix=("own", name))]
                    assert [(entry.value, entry.versionstamp) for entry in entries] == [*map(tuple, side["own"])]
        assert contested > 0, "they are to write at the same time"


async def test_watch_on_a_key_sees_what_another_process_sets_and_deletes(tmp_path: Path, peer: ChildProcess) -> None:
    path = tmp_path / "watched.db"
    async with keyloft.open(path) as kv, asyncio.timeout(60):
        await ask(peer, f"open {path}")
        watch = kv.watch(("k",), ("other",))
        assert [entry.exists for entry in await anext(watch)] == [False, False]
        versionstamp = await ask(peer, 'set ["k"] 1')
        [entry, other] = await anext(watch)
        assert (entry.value, entry.versionstamp, other.exists) == (1, versionstamp, False)
        await ask(peer, 'set ["elsewhere"] 1')
        assert await ask(peer, 'delete ["k"]') is True
        [entry, _] = await anext(watch)
        assert not entry.exists
        await ask(peer, 'set ["other"] 2')
        [entry, other] = await anext(watch)
        assert (entry.exists, other.value) == (False, 2)
        await ask(peer, "close")


async def test_watch_on_a_prefix_sees_what_another_process_sets_and_deletes(tmp_path: Path, peer: ChildProcess) -> None:
    path = tmp_path / "watched.db"
    async with keyloft.open(path) as kv, asyncio.timeout(60):
        await kv.set(("users", "old"), 0)
        await ask(peer, f"open {path}")
        watch = kv.watch(prefix=("users",))
        pending = asyncio.ensure_future(anext(watch))
        await ask(peer, 'set ["users","new"] 1')
        [entry] = await pending
        assert (entry.key, entry.value) == (("users", "new"), 1)
        await ask(peer, 'set ["elsewhere"] 1')
        await ask(peer, 'delete ["users","old"]')
        [entry] = await anext(watch)
        assert (entry.key, entry.exists) == (("users", "old"), False)
        # A change by each process: both are reported, in one list or in two.
        await kv.set(("users", "here"), 2)
        await ask(peer, 'set ["users","new"] 3')
        seen: dict[Any, Any] = {}
        while len(seen) < 2:
            seen |= {entry.key: entry.value for entry in await anext(watch)}
        assert seen == {("users", "here"): 2, ("users", "new"): 3}
        await ask(peer, "close")


async def test_a_rival_killed_in_the_middle_of_its_writes_does_not_stop_this_process(tmp_path: Path) -> None:
    path = tmp_path / "rival.db"
    async with keyloft.open(path) as kv:
        for attempt in range(4):
            last: dict[Chain, int] = dict.fromkeys(chains(2), 0)
            async with child("writer", path, "2") as rival:
                acknowledged = 0
                async for line in rival.lines():
                    if line.startswith("open"):
                        continue
                    kind, writer, number, _ = line.split()
                    last[Chain(kind, int(writer))] = int(number)
                    await kv.set(("here", attempt), acknowledged)
                    acknowledged += 1
                    if acknowledged == 60:
                        rival.kill()
                assert (await rival.ended())[0] == -9
            async with asyncio.timeout(60):
                newest = await kv.set(("here", "after"), attempt)
            contents, stamps = await contents_of(kv)
            assert max(stamps.values()) == newest
            found = made_in(contents, last)
            assert all(found[chain] >= number for chain, number in last.items())
            others = {key: value for key, value in contents.items() if key[0] != "here"}
            assert others == after(found)
