"""Opens databases as a user without special rights, and prints how that went.

    python -m tests.faults.children.other_user DATABASE...

A line of JSON per path or URL: the class, code and message of the error, or null if a write succeeded (with ?mode=ro:
a read).
"""

import asyncio
import json
import os
import sys

import keyloft

_UNPRIVILEGED_ID = 65534


async def use(path: str) -> list[str] | None:
    try:
        async with keyloft.open(path) as kv:
            await (kv.get(("used",)) if "?mode=ro" in path else kv.set(("used",), True))
    except keyloft.KeyloftError as error:
        return [type(error).__name__, error.code, str(error)]
    return None


if __name__ == "__main__":
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(_UNPRIVILEGED_ID)
        os.setuid(_UNPRIVILEGED_ID)
    for file in sys.argv[1:]:
        sys.stdout.write(json.dumps(asyncio.run(use(file))) + "\n")
        sys.stdout.flush()
