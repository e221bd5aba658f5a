"""Batches that are written as they are submitted: their verdict is reported at once."""

import logging
from collections.abc import Callable
from typing import Final

from keyloft.core.engine import Submission, Verdict

logger = logging.getLogger(__name__)


class _Written:
    def withdraw(self) -> bool:
        return False


WRITTEN: Final[Submission] = _Written()
"""A batch that was written as it was submitted."""


def report(done: Callable[[Verdict], None], verdict: Verdict) -> None:
    """Call `done`; what it raises is logged, and harms no one else."""
    try:
        done(verdict)
    except Exception:
        logger.exception("a callback for the outcome of a write failed")
