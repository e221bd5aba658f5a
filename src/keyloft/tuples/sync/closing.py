"""Closes a synchronous store: first its store, then what runs it."""

from keyloft.core.driving import Driver
from keyloft.errors import Closed
from keyloft.tuples.store import Store


def close_store(store: Store, driver: Driver) -> None:
    """Close both; a second call does nothing."""
    try:
        driver.run(store.aclose())
    except Closed:
        return  # the event loop has ended, or belongs to the parent process
    driver.close()
