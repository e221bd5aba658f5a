"""Arms for Keyloft without an event loop: `keyloft.open_sync` on a file, in a plain loop and in threads."""

from collections.abc import Callable
from typing import Any, ClassVar

from msgspec.structs import replace

import keyloft
from bench.arms.keyloft_file import EVERYTHING, Entries
from bench.harness.contest import CHUNK, Contestant, Entrant, Operation, StoreSetup, same
from bench.harness.data import Pair

NAME = "Keyloft, synchronous"


class KeyloftSync(Contestant):
    """An open store."""

    inline: ClassVar[bool] = True

    def __init__(self, kv: keyloft.SyncStore) -> None:
        self.kv = kv

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        direct: dict[Operation, Callable[[Any], Any]] = {
            "get": self.kv.get,
            "get_many": self.kv.get_many,
            "set": lambda pair: self.kv.set(*pair),
        }
        return direct.get(operation) or super().call(operation)

    def list(self, group: str) -> Entries:
        return self.kv.list(prefix=(group,)).all()

    def swap(self, pair: Pair) -> None:
        key, value = pair
        same(self.kv.atomic().check(self.kv.get(key)).set(key, value).commit().ok, True)

    def seen(self, operation: Operation, answer: Any) -> Any:
        match operation:
            case "get_many":
                return [entry.value for entry in answer]
            case "list":
                return [(entry.key, entry.value) for entry in answer]
            case _:
                return answer.value

    def close(self) -> None:
        self.kv.close()


class KeyloftInThreads(KeyloftSync):
    """The same store, used by several threads."""

    threaded: ClassVar[bool] = True


def enter(setup: StoreSetup) -> KeyloftSync:
    """Open and fill a file as the arm of `keyloft.open` does, so that both have the same write-ahead log."""
    task, path = setup.task, setup.folder / "keyloft.db"
    durability: Any = "full" if task.durable else "relaxed"
    kv = keyloft.open_sync(path, durability=durability, sweep_every=None)
    for pairs in setup.chunks(100 if task.large else CHUNK):
        kv.set_many(pairs)
    if not task.writes:
        kv.close()
        kv = keyloft.open_sync(path, sweep_every=None)
    return KeyloftSync(kv)


def _enter_threads(setup: StoreSetup) -> KeyloftInThreads:
    return KeyloftInThreads(enter(setup).kv)


ENTRANT = Entrant(
    NAME, enter, EVERYTHING, durable="on disk (WAL, synced, group commit)", relaxed="the newest may be lost (WAL)"
)
IN_THREADS = replace(ENTRANT, enter=_enter_threads)
