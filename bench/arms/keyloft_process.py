"""Keyloft's stores as a process that reads laps of operations: `python -m bench.arms.keyloft_process KIND WHERE TASK`.

KIND is `tuples` or `semantic`; WHERE is a file, or the URL of a database, which is used on uvloop; TASK is `reads`,
`writes`, `relaxed`, `standby`: reads from standbys, or `beside N`: reads beside so many tasks that write. It uses
public names only, so that it runs on the `keyloft` of another commit, which comes first in PYTHONPATH.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import uvloop

import keyloft
from bench.harness.processes import READY
from bench.harness.race import timed
from keyloft.semantic import Semantics, SemanticStore

_Key: TypeAlias = Sequence[str]
_Pair: TypeAlias = tuple[_Key, Any]

_PROJECT = "tenant/acme/project/bench"
_CURSOR = Semantics("cursor", producer="bench", ttl_seconds=86_400)
_WRITER = "bench:writer"


class TupleCalls:
    """Operations on the tuple store, which answer with what is compared with the plan."""

    def __init__(self, kv: keyloft.Store) -> None:
        self._kv = kv

    async def fill(self, pairs: Sequence[_Pair]) -> None:
        await self._kv.set_many([(tuple(key), value) for key, value in pairs])

    async def get(self, key: _Key) -> Any:
        return (await self._kv.get(tuple(key))).value

    async def get_after_others(self, key: _Key) -> Any:
        """A get after which other tasks run, as in a server; gets alone would leave the writers no time."""
        entry = await self._kv.get(tuple(key))
        await asyncio.sleep(0)
        return entry.value

    async def write_until(self, over: asyncio.Event, number: int) -> None:
        while not over.is_set():
            await self._kv.set(("beside", number), number)

    async def get_many(self, keys: Sequence[_Key]) -> Sequence[Any]:
        return [entry.value for entry in await self._kv.get_many([tuple(key) for key in keys])]

    async def list(self, group: str) -> Sequence[Any]:
        return [(entry.key, entry.value) async for entry in self._kv.list(prefix=(group,))]

    async def set(self, pair: _Pair) -> None:
        await self._kv.set(tuple(pair[0]), pair[1])

    async def swap(self, pair: _Pair) -> bool:
        key = tuple(pair[0])
        done = await self._kv.atomic().check(await self._kv.get(key)).set(key, pair[1]).commit()
        return bool(done.ok)

    async def sum(self, key: _Key) -> bool:
        done = await self._kv.atomic().sum(("counters", *key), 1).commit()
        return bool(done.ok)

    async def aclose(self) -> None:
        await self._kv.aclose()


class SemanticCalls:
    """The same operations on the semantic store: each write leaves an audit record."""

    def __init__(self, kv: keyloft.Store) -> None:
        self._kv = kv
        self._store = SemanticStore(kv, sweep_every=None)

    async def fill(self, pairs: Sequence[_Pair]) -> None:
        await asyncio.gather(*[self.set(pair) for pair in pairs])

    async def get(self, key: _Key) -> Any:
        entry = await self._store.get("/".join([_PROJECT, *key]))
        return None if entry is None else entry.value

    async def list(self, group: str) -> Sequence[Any]:
        found = self._store.list(f"{_PROJECT}/{group}/", values=True)
        return [(entry.key.split("/")[-2:], entry.value) async for entry in found]

    async def set(self, pair: _Pair) -> None:
        path = "/".join([_PROJECT, *pair[0]])
        await self._store.put(path, pair[1], expected_version="*", writer=_WRITER, semantics=_CURSOR)

    async def swap(self, pair: _Pair) -> bool:
        path = "/".join([_PROJECT, *pair[0]])
        entry = await self._store.get(path)
        version = 0 if entry is None else entry.version
        await self._store.put(path, pair[1], expected_version=version, writer=_WRITER, semantics=_CURSOR)
        return True

    async def aclose(self) -> None:
        await self._store.aclose()
        await self._kv.aclose()


async def _serve(kind: str, where: str, task: str) -> None:
    durability: Literal["full", "relaxed"] = "relaxed" if task == "relaxed" else "full"
    writers = int(task.removeprefix("beside ")) if task.startswith("beside") else 0
    make = {"tuples": TupleCalls, "semantic": SemanticCalls}[kind]

    async def opened() -> Any:
        options: dict[str, Any] = {"reads": "standby"} if task == "standby" else {}
        return make(await keyloft.open(where, durability=durability, sweep_every=None, **options))

    store = await opened()
    is_full = False
    print(READY, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        lap = msgspec.json.decode(line)
        if lap["operation"] != "fill" and not is_full:
            is_full = True
            if task == "reads":
                # So that the keys are in the file, not in its write-ahead log.
                await store.aclose()
                store = await opened()
        over = asyncio.Event()
        count = 0 if lap["operation"] == "fill" else writers
        writing = [asyncio.create_task(store.write_until(over, number)) for number in range(count)]
        operation = "get_after_others" if writers and lap["operation"] == "get" else lap["operation"]
        done = await timed(getattr(store, operation), lap["asks"], lap["workers"])
        over.set()
        await asyncio.gather(*writing)
        answer = {"took": done.took, "seconds": done.seconds, "answers": done.answers}
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    await store.aclose()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if "://" in sys.argv[2] else None) as runner:
        runner.run(_serve(*sys.argv[1:]))
