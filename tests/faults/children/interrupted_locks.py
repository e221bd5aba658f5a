"""Is interrupted while it takes locks and waits for events: python -m tests.faults.children.interrupted_locks

A signal's handler raises at random moments. Prints «kept» if no lock is left taken, and no event that was set is lost.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from keyloft.core.waiting import ThreadEvent, ThreadLock, refuse_reentry

_INTERRUPTS = 1000


class Interrupted(BaseException):
    """What the handler raises."""


def _handle(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted


def interrupt(function: Callable[[], None]) -> None:
    """Call a function again and again, until the handler raises."""
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001)
        while True:
            function()
    except Interrupted:
        pass


def take_a_free_lock() -> None:
    lock = ThreadLock()

    def use() -> None:
        with lock, lock:
            pass

    for _ in range(_INTERRUPTS):
        interrupt(use)
        refuse_reentry(lock)  # raises if this thread still has it


def wait_for_the_lock_of_another_thread() -> None:
    lock, is_taken, is_over = ThreadLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_taken.set()
            is_over.wait()

    def use() -> None:
        with lock:
            raise AssertionError("two threads have it")

    holder = threading.Thread(target=hold)
    holder.start()
    is_taken.wait()
    for _ in range(_INTERRUPTS // 10):
        interrupt(use)
    is_over.set()
    holder.join()
    with lock:
        pass


def wait_for_an_event_that_is_set() -> None:
    event = ThreadEvent()
    event.set()
    for _ in range(_INTERRUPTS):
        interrupt(event.block)
        assert event.is_set()


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _handle)
    take_a_free_lock()
    wait_for_the_lock_of_another_thread()
    wait_for_an_event_that_is_set()
    sys.stdout.write("kept\n")
