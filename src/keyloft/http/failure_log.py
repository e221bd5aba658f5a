"""Logs requests and watches over HTTP that failed, a bounded number of lines a second."""

import logging

from keyloft import limits
from keyloft.errors import KeyloftError
from keyloft.nats.log_rate import LogRate

logger = logging.getLogger(__name__)


class FailureLog:
    """Logs a line for each failure. In a flood, such as refusals of an overloaded service, the rest is only counted."""

    def __init__(self) -> None:
        self._rate = LogRate(limits.LOG_LINES_PER_SECOND, _left_out)

    def failed(self, what: str, error: KeyloftError) -> None:
        """Log that a request or a watch has failed."""
        if self._rate.allows():
            logger.error("%s over HTTP failed: %s: %s", what, error.code, error)

    def close(self) -> None:
        """Log how many lines were left out."""
        self._rate.close()


def _left_out(lines: int) -> None:
    logger.error("%d further requests and watches over HTTP failed within this second", lines)
