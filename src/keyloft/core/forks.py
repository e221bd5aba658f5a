"""Refuses objects that were opened before a fork: two processes must not share a connection, a thread or a lock."""

import os
import weakref


class ProcessBound:
    """What only the process that opened it may use, until it is closed."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        """Why it can't be used any more."""
        _opened.add(self)

    @property
    def is_closed(self) -> bool:
        return self.refusal is not None


_opened: "weakref.WeakSet[ProcessBound]" = weakref.WeakSet()


def _forget_after_fork() -> None:
    """Two processes must not share a connection: its locks would not hold, and replies would reach the wrong one."""
    for opened in _opened:
        opened.refusal = "this store was opened before a fork: open it again in this process"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
