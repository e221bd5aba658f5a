"""A process that is killed loses nothing that it acknowledged, and leaves nothing half done."""

import random
from pathlib import Path

import apsw
import pytest

import keyloft

from .children import ChildProcess, child
from .moves import Chain, Move, after, chains, contents_of, made_in, witness

pytestmark = pytest.mark.slow

_WRITERS = 8
_KILLS = 20


async def acknowledged_until_killed(process: ChildProcess, count: int) -> dict[Move, int]:
    """Kill it once it acknowledged so many moves; returns all that it acknowledged, with their versionstamps."""
    acknowledged = {}
    if count == 0:
        process.kill()
    async for line in process.lines():
        if line == "opening" or line == "open":
            continue
        kind, writer, number, versionstamp = line.split()
        acknowledged[Move(Chain(kind, int(writer)), int(number))] = int(versionstamp)
        if len(acknowledged) == count:
            process.kill()
    return acknowledged


async def test_twenty_kills_lose_nothing_acknowledged_and_leave_nothing_in_part(
    tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "killed.db"
    everyone = chains(_WRITERS)
    made = dict.fromkeys(everyone, 0)
    newest = 0
    total = 0
    for attempt in range(_KILLS):
        count = rng.choice([0, rng.randrange(1, 50), rng.randrange(50, 3000)])
        also = ["checkpointing"] if attempt % 2 else []
        async with child("writer", path, str(_WRITERS), *also) as process:
            assert await process.line() == "opening"
            acknowledged = await acknowledged_until_killed(process, count)
            code, errors = await process.ended()
        assert (code, errors) == (-9, ""), f"kill {attempt}"
        total += len(acknowledged)

        versionstamps = list(acknowledged.values())
        assert len(set(versionstamps)) == len(versionstamps)
        assert all(versionstamp > newest for versionstamp in versionstamps), "a versionstamp was given twice"
        last = dict(made)
        for move in acknowledged:
            assert move.number == last[move.chain] + 1
            last[move.chain] = move.number

        async with keyloft.open(path) as kv:
            contents, stamps = await contents_of(kv)
        found = made_in(contents, everyone)
        for chain in everyone:
            # The move that was under way may have been made; its caller just never heard of it.
            assert found[chain] in (last[chain], last[chain] + 1), (attempt, chain)
        assert contents == after(found), f"kill {attempt}: something is there in part"
        for move, versionstamp in acknowledged.items():
            if found[move.chain] == move.number:
                assert stamps[witness(move)] == versionstamp
        made = found
        newest = max([newest, *versionstamps, *stamps.values()])
    assert total > _KILLS
    connection = apsw.Connection(str(path))
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


async def test_sigterm_without_a_handler_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "terminated.db"
    last = dict.fromkeys(chains(2), 0)
    async with child("writer", path, "2") as process:
        acknowledged = 0
        async for line in process.lines():
            if line.startswith("open"):
                continue
            kind, writer, number, _ = line.split()
            last[Chain(kind, int(writer))] = int(number)
            acknowledged += 1
            if acknowledged == 500:
                process.terminate()
        code, _ = await process.ended()
    assert code == -15
    assert acknowledged >= 500
    async with keyloft.open(path) as kv:
        contents, _ = await contents_of(kv)
    found = made_in(contents, last)
    assert all(found[chain] in (number, number + 1) for chain, number in last.items())
    assert contents == after(found)
