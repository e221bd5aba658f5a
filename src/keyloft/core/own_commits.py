"""Notes the commits that the function of an update makes, to tell them from commits of other callers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final


class _Notes:
    """The versions of the commits that one call of a function makes."""

    __slots__ = ("is_wanted", "versions")

    def __init__(self) -> None:
        self.versions = set[int]()
        self.is_wanted = True
        """False once the function has returned: tasks that it began may go on, and their commits must not add up."""


_noted: Final[ContextVar[_Notes | None]] = ContextVar("keyloft_own_commits", default=None)


@contextmanager
def own_commits() -> Iterator[set[int]]:
    """Yields a set, to which the version of each commit is added that is made within the block.

    Commits of tasks that begin within the block count, but only until it ends.
    """
    outer, notes = _noted.get(), _Notes()
    _noted.set(notes)
    try:
        yield notes.versions
    finally:
        _noted.set(outer)
        notes.is_wanted = False
        if outer is not None and outer.is_wanted:
            outer.versions |= notes.versions


def note_commit(version: int) -> None:
    """Note the version of a commit, if it is made within a block of `own_commits`."""
    if (notes := _noted.get()) is not None and notes.is_wanted:
        notes.versions.add(version)
