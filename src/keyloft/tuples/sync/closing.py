"""Closes synchronous stores, with the event loop beside them and the driver that runs them."""

from contextlib import suppress

from keyloft.core.driving import Driver
from keyloft.errors import Closed
from keyloft.tuples.store import Store
from keyloft.tuples.sync.loop_side import LoopSide


def close_store(store: Store, driver: Driver, loop_side: LoopSide | None) -> None:
    """Close the store, its driver and its loop side; a second call does nothing."""
    if loop_side is not None:
        loop_side.close()
    with suppress(Closed):  # the event loop has ended, or belongs to the parent process
        driver.run(store.aclose())
    driver.close()
