"""How a function of this package reports how far it is."""

from collections.abc import Callable
from typing import TypeAlias

from keyloft.core.maintenance import Progress as StageProgress

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a stage, how much of it is done, and how much there is to do; None if that is not known."""


def stage(progress: Progress | None, name: str) -> StageProgress:
    """Report one stage. Where an engine does not know the total, it reports what is done as the total."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(name, done, total if total > done else None)

    return report
