"""For engines that write a batch as soon as it is submitted, and report its verdict at once."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from keyloft.core.engine import Submission

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Written:
    def withdraw(self) -> bool:
        return False


WRITTEN: Final[Submission] = _Written()
"""The submission of a batch that is written already."""


def report(done: Callable[[T], None], verdict: T) -> None:
    """Call `done`; an exception in it is logged, and harms no other caller."""
    try:
        done(verdict)
    except Exception:
        logger.exception("a callback for the outcome of a write failed")
