"""Runs the checks of `keyloft doctor`, each within its time."""

import asyncio
import os
from collections.abc import Awaitable, Sequence

from keyloft.admin import Finding
from keyloft.errors import KeyloftError


async def bounded(name: str, check: Awaitable[Sequence[Finding]], seconds: float) -> Sequence[Finding]:
    """What a check finds. One that fails or takes too long is a problem of its own, and never ends the others."""
    try:
        async with asyncio.timeout(seconds):
            return await check
    except TimeoutError:
        return [Finding("problem", name, f"no result within {seconds:g} s", cure="see whether a disk or server hangs")]
    except KeyloftError as error:
        return [Finding("problem", name, f"{error.code}: {error}", cure="correct what the message names")]
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        # Not its message, which may hold a password.
        what = f"the check itself failed unexpectedly: {type(error).__name__}"
        return [Finding("problem", name, what, cure="KEYLOFT_DEBUG=1 shows where")]
