"""How a function of this package reports how far it is."""

from collections.abc import Callable
from typing import TypeAlias

from keyloft.core.maintenance import Progress as StageProgress

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a stage, how much of it is done, and how much there is to do; None if that is not known."""


def stage(progress: Progress | None, name: str) -> StageProgress:
    """Report that a stage begins, then how far it is. An engine that does not know a total reports what is done."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(name, done, total if total > done else None)

    report(0, 0)
    return report
