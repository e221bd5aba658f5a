"""Touches an entry, and stops itself within the commit.

    python -m tests.faults.children.stopped_toucher FILE PLUGIN KEY

It says «ready», and waits for a line with the time of the commit, in milliseconds. It is stopped (SIGSTOP) within the
commit, before COMMIT. Once it goes on, it prints the version of the commit.
"""

import os
import signal
import sys

from keyloft.clock import ManualClock
from keyloft.core.records import Batch, Space, Touch
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.writes import SqliteWriter


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def stop() -> bool:
    os.kill(os.getpid(), signal.SIGSTOP)
    return False


def main(path: str, plugin: str, key: str) -> None:
    file = SqliteFile(path)
    connection = file.open_writer()
    say("ready")
    clock = ManualClock(int(sys.stdin.readline()))
    connection.set_commit_hook(stop)
    writer = SqliteWriter(file, clock, connection, KeptHistory())
    outcome = writer.attempt_alone(Batch((Touch(Space.PLUGINS, (plugin, key), 60_000),)))
    say(str(outcome.version_after))
    connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
