"""The command `keyloft`: its sub-commands, what they print, and their exit codes.

0: done. 1: it failed, there is no such key, or a check found something. 2: a wrong argument or setting, or an input
file that does not exist. 130: interrupted. Results go to standard output, all else to standard error.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from keyloft.server.error_output import report


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"] and threading.current_thread() is threading.main_thread():
        # A service that is stopped before it has started has nothing to finish.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _open_closed_streams()
    try:
        from keyloft.cli.app import all_commands
    except ModuleNotFoundError as error:
        sys.exit(report(error, extra="server" if given[:1] == ["serve"] else None))
    except KeyboardInterrupt:
        sys.exit(130)
    all_commands(given, prog_name="keyloft")
    sys.exit(0)


def _open_closed_streams() -> None:
    """Replace a stream that the caller has closed, as with `>&-`, by one that reads and writes nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8", closefd=False))
