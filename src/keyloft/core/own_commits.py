"""Notes the commits that a caller's function makes, so that an update can tell them from commits of other callers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final


class _Notes:
    """The versions of commits, as long as they are wanted."""

    __slots__ = ("is_wanted", "versions")

    def __init__(self) -> None:
        self.versions = set[int]()
        self.is_wanted = True
        """Afterwards, a task that began in the context may still run, for as long as the process does."""


_noted: Final[ContextVar[_Notes | None]] = ContextVar("keyloft_own_commits", default=None)


@contextmanager
def own_commits() -> Iterator[set[int]]:
    """Yields a set that gets the versions of the commits made in this context, and in tasks that begin in it.

    Commits that such tasks make later are not noted.
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
    """Note a commit, if a function is called whose commits are wanted."""
    if (notes := _noted.get()) is not None and notes.is_wanted:
        notes.versions.add(version)
