"""What happens at a fork: the child may not use what was opened before, and registered functions clean up there.

Two processes must not share a connection, a thread or a lock.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import Any

from keyloft import limits


class ProcessBound:
    """The base of an object that only the process that opened it may use, until it is closed."""

    fork_lock: Any = None
    """A lock that a fork takes first, so that the child inherits no half-made commit; None if there is none."""
    fork_locks_of_loop: Sequence[Any] = ()
    """Locks that a fork takes for the same reason, and for which an event loop may have to wait meanwhile."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        """Why the object can't be used any more."""
        with no_fork:
            _opened.add(self)

    @property
    def is_closed(self) -> bool:
        return self.refusal is not None


_opened: "weakref.WeakSet[ProcessBound]" = weakref.WeakSet()


_forking: "list[ExitStack]" = []
"""The locks that were taken for the fork that is under way."""
_cleanups: "list[Callable[[], None]]" = []
no_fork = RLock()
"""Held during a fork, and while something is opened that a child would inherit."""


def call_in_children(clean_up: Callable[[], None]) -> None:
    """Have a function called in every child, before the child's own code runs."""
    _cleanups.append(clean_up)


def _lock_for_fork() -> None:
    """Wait until no thread commits to a file, for a limited time: a commit may be waiting for another process.

    A child that inherits a commit under way can't open that file.
    """
    locked = ExitStack()
    locked.enter_context(no_fork)
    _forking.append(locked)
    in_use = [opened for opened in _opened if opened.refusal is None]
    waits = [(opened.fork_lock, limits.FORK_SECONDS) for opened in in_use if opened.fork_lock is not None]
    # Last, so that no event loop waits while this thread waits for the others.
    waits += [(lock, limits.FORK_SECONDS_OF_LOOP) for opened in in_use for lock in opened.fork_locks_of_loop]
    for lock, seconds in waits:
        if lock.acquire(timeout=seconds):
            locked.callback(lock.release)


def _unlock_after_fork() -> None:
    if _forking:
        _forking.pop().close()


def _forget_after_fork() -> None:
    """Refuse calls of what the parent has opened: locks would not hold, and replies would reach the wrong process."""
    for opened in _opened:
        opened.refusal = "this store was opened before a fork: open it again in this process"
    _unlock_after_fork()
    for clean_up in _cleanups:
        clean_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock_for_fork, after_in_parent=_unlock_after_fork, after_in_child=_forget_after_fork)
