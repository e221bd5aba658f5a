"""The part of the synchronous semantic store that is not generated: where it runs, and its end."""

from typing import Any

from keyloft.core.closing import SyncClosing
from keyloft.core.driving import Driven
from keyloft.semantic import rules
from keyloft.semantic.monitoring import Signals
from keyloft.semantic.store import SemanticStore, check_not_scoped
from keyloft.tuples.sync.store import SyncStore


class SyncSemanticBase(SyncClosing, Driven[SemanticStore]):
    """A semantic store on the event loop beside a synchronous store."""

    def __init__(self, kv: SyncStore, **options: Any) -> None:
        """Args:
        kv: An open store, as `keyloft.open_sync` returns it, which the caller closes.
        options: Those of `SemanticStore`.
        """
        if not isinstance(kv, SyncStore):
            raise rules.wrong("kv", "an open store, as in `with keyloft.open_sync(…) as kv`", kv)
        check_not_scoped(kv._inner)
        store, loop = kv.on_a_loop()
        self._kv = kv  # keeps the store from being closed as garbage
        super().__init__(loop.call(SemanticStore, store, **options), loop)

    @property
    def signals(self) -> Signals:
        """Counters and alerts."""
        return self._inner.signals

    def close(self) -> None:
        """End the sweeps and refuse further calls. The caller closes the store below. A second call does nothing."""
        if not self._driver.is_closed:
            self._run(self._inner.aclose())
