"""The pause between two attempts at an update that lost a race."""

import random

from keyloft import limits
from keyloft.core.driving import pause


async def back_off(attempt: int) -> None:
    """Wait for a random time, which grows with the number of failed attempts, so that callers don't collide again.

    Args:
        attempt: The number of the attempt that failed; the first one is 0.
    """
    shortest, longest = limits.UPDATE_PAUSES
    await pause(random.random() * min(longest, shortest * 2**attempt))
