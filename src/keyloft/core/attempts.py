"""What happens between two attempts at an update that others were faster with."""

import random

from keyloft import limits
from keyloft.core.driving import pause


async def pause_after(attempt: int) -> None:
    """Wait for a random time, which grows with the number of failed attempts: callers that met must part.

    Args:
        attempt: The number of the attempt that failed; the first one is 0.
    """
    shortest, longest = limits.UPDATE_PAUSES
    await pause(random.random() * min(longest, shortest * 2**attempt))
