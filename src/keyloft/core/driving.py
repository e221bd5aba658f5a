"""Runs coroutines for callers without an event loop: on the caller's thread, or on a loop in a thread of its own."""

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on this thread. It may give way to other tasks (`asyncio.sleep(0)`), but not wait for one.

    Raises:
        RuntimeError: It waits for something that only an event loop can bring.
    """
    try:
        while work.send(None) is None:
            pass
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine of a synchronous store can't wait for an event loop: pass plain functions to it")
