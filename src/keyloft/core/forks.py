"""Refuses objects that were opened before a fork: two processes must not share a connection, a thread or a lock."""

import os
import weakref
from contextlib import ExitStack
from threading import RLock
from typing import Any


class ProcessBound:
    """What only the process that opened it may use, until it is closed."""

    fork_lock: Any = None
    """A lock that a fork takes first, so that the child inherits no half-made commit; None if there is none."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        """Why it can't be used any more."""
        _opened.add(self)

    @property
    def is_closed(self) -> bool:
        return self.refusal is not None


_opened: "weakref.WeakSet[ProcessBound]" = weakref.WeakSet()


_forking: "list[ExitStack]" = []
"""What was locked for the fork that is under way."""
_one_fork = RLock()


def _lock_for_fork() -> None:
    """Wait until no thread is committing to a file. SQLite remembers the locks of its process in memory.

    A child that inherited the lock of a commit could never write to the same file itself.
    """
    locked = ExitStack()
    locked.enter_context(_one_fork)
    _forking.append(locked)
    for opened in [*_opened]:
        if opened.refusal is None and opened.fork_lock is not None:
            locked.enter_context(opened.fork_lock)


def _unlock_after_fork() -> None:
    if _forking:
        _forking.pop().close()


def _forget_after_fork() -> None:
    """Two processes must not share a connection: its locks would not hold, and replies would reach the wrong one."""
    for opened in _opened:
        opened.refusal = "this store was opened before a fork: open it again in this process"
    _unlock_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock_for_fork, after_in_parent=_unlock_after_fork, after_in_child=_forget_after_fork)
