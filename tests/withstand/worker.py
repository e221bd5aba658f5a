"""Uses a store in every way until it is asked to end, and records what it saw.

    python -m tests.withstand.worker URL NAME FOLDER SEED PAUSE OPTIONS

Each of its tasks pauses for up to PAUSE seconds after a call. OPTIONS are those of `keyloft.open`, as JSON. It says
«ready» once the store is open, ends its load at a line on standard input, says «idle», and at the next line waits until
its watch has seen the last value of each register: then it says «ended».
"""

import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import keyloft
from keyloft import Entry, KeyloftError
from keyloft.semantic import Semantics, SemanticStore
from tests.withstand.history import Recorder
from tests.withstand.linearizability import ABSENT

REGISTERS: Final = 6
COUNTERS: Final = 3
LAST: Final = "last"
"""The value that ends a register's history."""
PROJECT: Final = "tenant/acme/project/web"
_LOCK: Final = f"{PROJECT}/locks/only-one"
_STEPS: Final = f"{PROJECT}/steps"
_LOCK_TTL_SECONDS: Final = 2
_WATCH_SECONDS: Final = 60.0


class ClusterUser:
    """The load of one process."""

    def __init__(self, kv: keyloft.Store, recorder: Recorder, seed: str, pause: float) -> None:
        self._kv, self._recorder, self._pause = kv, recorder, pause
        self._chance = random.Random(seed)
        self._values = 0
        self._known: dict[str, Entry] = {}
        self.last_seen: set[str] = set()

    def _value(self) -> str:
        self._values += 1
        return f"{self._recorder.worker}-{self._values}"

    async def use_register(self) -> None:
        key = str(self._chance.randrange(REGISTERS))
        at = ("register", key)
        known = self._known.get(key)
        match self._chance.randrange(4):
            case 0:
                with self._recorder.call("register", key, "set", self._value()) as call:
                    call.version = await self._kv.set(at, call.given)
            case 1 if known is not None:
                expected, value = _stored(known), self._value()
                with self._recorder.call("register", key, "swap", [expected, value]) as call:
                    done = await self._kv.atomic().check(known).set(at, value).commit()
                    call.version = done.versionstamp
                    if not done.ok:
                        [self._known[key]] = done.conflicts
                        call.does, call.given, call.seen = "refused", expected, _stored(self._known[key])
            case _:
                await self._read(key)

    async def read_register(self) -> None:
        """In a task of its own: it goes on while writes wait."""
        await self._read(str(self._chance.randrange(REGISTERS)))

    async def _read(self, key: str) -> None:
        with self._recorder.call("register", key, "get") as call:
            entry = self._known[key] = await self._kv.get(("register", key))
            call.seen, call.version = _stored(entry), entry.versionstamp

    async def use_counter(self) -> None:
        key = str(self._chance.randrange(COUNTERS))
        at = ("counter", key)
        if self._chance.random() < 0.7:
            with self._recorder.call("counter", key, "sum", 1) as call:
                call.version = (await self._kv.atomic().sum(at, 1).commit()).versionstamp
        else:
            with self._recorder.call("counter", key, "get") as call:
                entry = await self._kv.get(at)
                call.seen = int(entry.value) if entry.exists else 0

    async def use_own(self) -> None:
        """A key that no other worker writes, and that is written once."""
        value = self._value()
        with self._recorder.call("own", value, "set", value) as call:
            call.version = await self._kv.set(("own", value), value)

    async def use_lock(self, store: SemanticStore) -> None:
        lock = store.lock(_LOCK, writer=f"{self._recorder.worker}:work", ttl=_LOCK_TTL_SECONDS, wait=5)
        try:
            async with lock:
                for _ in range(3):
                    with self._recorder.call("lock", _STEPS, "put", lock.fence) as call:
                        envelope = await store.put(
                            _STEPS,
                            self._recorder.worker,
                            expected_version="*",
                            writer=f"{self._recorder.worker}:work",
                            semantics=Semantics("checkpoint"),
                            fence=lock.fence,
                        )
                        call.fence, call.version = lock.fence, envelope.version
                    await asyncio.sleep(self._chance.random() * 0.02)
        except KeyloftError:
            pass  # lost, or held by another worker, or the database is away
        await asyncio.sleep(self._chance.random() * 0.1)

    async def watch(self) -> None:
        """Enters what it sees of the registers; a watch that ends begins again with what is stored."""
        while True:
            try:
                async with self._kv.watch(prefix=("register",)) as watch:
                    for entry in await self._kv.list(prefix=("register",)):
                        self._see(entry, "list")
                    async for changed in watch:
                        for entry in changed:
                            self._see(entry, "watch")
            except KeyloftError as error:
                now = time.monotonic()
                self._recorder.enter(kind="watch", key="", does="ended", began=now, ended=now, error=error.code)
                await asyncio.sleep(0.1)

    def _see(self, entry: Entry, how: str) -> None:
        now, key = time.monotonic(), str(entry.key[1])
        if entry.value == LAST:
            self.last_seen.add(key)
        self._recorder.enter(kind="watch", key=key, does=how, version=entry.versionstamp, began=now, ended=now)

    async def again_and_again(self, use: Callable[[], Awaitable[None]], until: asyncio.Event) -> None:
        while not until.is_set():
            await use()
            await asyncio.sleep(self._chance.random() * self._pause)


def _stored(entry: Entry) -> Any:
    return entry.value if entry.exists else ABSENT


async def main(url: str, name: str, folder: str, seed: str, pause: str, options: str) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    async with AsyncExitStack() as stack:
        recorder = stack.enter_context(Recorder(Path(folder) / f"{name}.jsonl", name))
        kv = await stack.enter_async_context(keyloft.open(url, **json.loads(options)))
        store = await stack.enter_async_context(SemanticStore(kv, audit_key="k"))
        worker = ClusterUser(kv, recorder, seed, float(pause))
        watching = asyncio.create_task(worker.watch())
        say("ready")
        uses = [worker.use_register, worker.use_register, worker.use_register, worker.read_register]
        uses += [worker.use_counter, worker.use_own]
        load = [asyncio.create_task(worker.again_and_again(use, ending)) for use in uses]
        load.append(asyncio.create_task(worker.again_and_again(lambda: worker.use_lock(store), ending)))
        await loop.run_in_executor(None, sys.stdin.readline)
        ending.set()
        await asyncio.gather(*load)
        say("idle")
        await loop.run_in_executor(None, sys.stdin.readline)
        deadline = time.monotonic() + _WATCH_SECONDS
        while len(worker.last_seen) < REGISTERS and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for key in {str(number) for number in range(REGISTERS)} - worker.last_seen:
            now = time.monotonic()
            recorder.enter(kind="watch", key=key, does="missed", began=now, ended=now)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    say("ended")


async def finish(url: str, folder: Path, options: dict[str, Any]) -> None:
    """Ends the histories: writes the last value of each register, and enters all that is stored."""
    with Recorder(folder / "end.jsonl", "end") as recorder:
        await _read_all(url, recorder, options)


async def _read_all(url: str, recorder: Recorder, options: dict[str, Any]) -> None:
    async with keyloft.open(url, **options) as kv:
        for number in range(REGISTERS):
            with recorder.call("register", str(number), "get") as call:
                call.seen = _stored(await kv.get(("register", str(number))))
            with recorder.call("register", str(number), "set", LAST) as call:
                call.version = await kv.set(("register", str(number)), LAST)
        for number in range(COUNTERS):
            with recorder.call("counter", str(number), "get") as call:
                entry = await kv.get(("counter", str(number)))
                call.seen = int(entry.value) if entry.exists else 0
        async for entry in kv.list(prefix=("own",)):
            with recorder.call("own", str(entry.key[1]), "get") as call:
                call.seen, call.version = entry.value, entry.versionstamp


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # the faults are meant
    asyncio.run(main(*sys.argv[1:]))
