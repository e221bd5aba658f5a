"""How many examples random tests try: `KEYLOFT_EXAMPLES=4` tries four times as many as a usual run."""

import os
from typing import Any, Final

from hypothesis import settings

TIMES: Final = int(os.environ.get("KEYLOFT_EXAMPLES") or 1)


def examples(usual: int, **options: Any) -> settings:
    """Hypothesis's settings for so many examples in a usual run."""
    return settings(max_examples=usual * TIMES, **options)


def rounds(usual: int) -> range:
    """The rounds of a loop that does the same many times to meet whatever timing there is."""
    return range(usual * TIMES)
