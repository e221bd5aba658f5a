"""Uses stores and closes them while its interpreter ends, as the finalizers of objects do that are left at that time.

    python -m tests.faults.children.finalized FILE

Answers with what each call in `__del__` returned or raised.
"""

import os
import sys
import warnings
from collections.abc import Callable

import keyloft
from keyloft.semantic import SyncSemanticStore
from keyloft.tuples.sync.loop_side import LoopSide


class ClosesAtExit:
    """Leaves the closing of its stores to `__del__`."""

    def __init__(self, path: str) -> None:
        self.kv = keyloft.open_sync(path)
        self.untouched = keyloft.open_sync(path)
        self.workflows = SyncSemanticStore(self.kv)
        self.watched = keyloft.open_sync(path)
        self.watch = self.watched.watch(("k",))
        next(self.watch)
        store, self.loop = LoopSide(lambda: keyloft.open().__aenter__(), "a server").opened()
        self.served = keyloft.SyncStore(store, self.loop)
        self.kv.set(("k",), 1)  # its background work begins now, and goes on while the interpreter ends

    def __del__(self) -> None:
        assert sys.is_finalizing()
        self._report("get", lambda: self.kv.get(("k",)).value)
        self._report("set", lambda: self.kv.set(("k",), 2) > 0)
        self._report("first write", lambda: self.untouched.set(("k",), 3) > 0)
        self._report("list", lambda: [entry.value for entry in self.kv.list(())])
        self._report("event loop", lambda: self.served.get(("k",)))
        for owned in (self.served, self.workflows, self.watch, self.watched, self.untouched, self.kv):
            self._report("close", owned.close)
        self._report("closed", lambda: self.kv.get(("k",)))
        self._report("warns", lambda: self.loop.refusal is None)

    def _report(self, name: str, call: Callable[[], object]) -> None:
        try:
            outcome = call()
        except keyloft.KeyloftError as error:
            outcome = error.code
        os.write(1, f"{name} {outcome}\n".encode())


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of stores that were not closed: which object is finalized first is left open
    left = ClosesAtExit(sys.argv[1])
