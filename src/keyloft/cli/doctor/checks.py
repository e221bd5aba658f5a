"""What the checks of `keyloft doctor` share: how findings are made, and how long a check may take."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final

from keyloft.admin import Finding
from keyloft.errors import KeyloftError

# Each is called with what was examined, what was found, and the cure.
ok: Final = partial(Finding, "ok")
warning: Final = partial(Finding, "warning")
problem: Final = partial(Finding, "problem")
skipped: Final = partial(Finding, "skipped")

STORE_ID: Final = "its id is "
"""What the id of the store follows, in the finding `store`."""


async def bounded(name: str, check: Awaitable[Sequence[Finding]], seconds: float) -> Sequence[Finding]:
    """What a check finds. A check that fails or takes too long is a finding itself, and does not end the others."""
    try:
        async with asyncio.timeout(seconds):
            return await check
    except TimeoutError:
        return [problem(name, f"no result within {seconds:g} s", cure="see whether a disk or server hangs")]
    except KeyloftError as error:
        return [problem(name, f"{error.code}: {error}", cure="correct what the message names")]
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        # Without the error's message, which may hold a password.
        what = f"the check itself failed unexpectedly: {type(error).__name__}"
        return [problem(name, what, cure="KEYLOFT_DEBUG=1 shows where")]
