"""Signals for a process and all of its children, such as those of a PostgreSQL server."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_SECONDS: Final = 60.0


def kill_family(parent: int) -> None:
    """SIGKILL, for a process and each of its children: not one more instruction. Returns when all have ended."""
    family = stop_family(parent)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: all(state.startswith("Z") for pid, (_, state) in processes().items() if pid in family))


def stop_family(parent: int) -> list[int]:
    """SIGSTOP, for a process and each of its children; returns their ids."""
    # The parent first: a child that starts after its children were listed would be missed.
    os.kill(parent, signal.SIGSTOP)
    until(lambda: processes().get(parent, (0, "Z"))[1][0] in "TZ")
    family = [parent, *(pid for pid, (of, _) in processes().items() if of == parent)]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return family


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the state of each process there is."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    return {int(pid): (int(parent), state) for pid, parent, state in map(str.split, table.splitlines())}


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "this never comes true"
        time.sleep(0.005)
