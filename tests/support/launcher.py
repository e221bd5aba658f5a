"""Runs a copy of the fork server's process in place of this one: same streams, folder, environment and exit code.

It runs without `site`, and imports as little as it can: it is started for each command of a document.
"""

import json
import os
import signal
import socket
import sys

_, address, entry, *arguments = sys.argv
module, _, function = entry.partition(":")
program = f"import sys, {module}; sys.exit({module}.{function}())"
with socket.socket(socket.AF_UNIX) as status:
    status.connect(address)
    socket.send_fds(status, [b"\n"], [0, 1, 2])
    request = {
        "arguments": [*(("-c", program) if function else ("-m", module)), *arguments],
        "folder": os.getcwd(),  # noqa: PTH109 (pathlib would be the most of what is imported here)
        "environment": dict(os.environ),
        "at_terminal": False,
        "finalizes": False,
    }
    status.sendall(json.dumps(request).encode() + b"\n")
    with status.makefile("rb") as lines:
        pid = int(lines.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _: os.kill(pid, got))
        code = int(lines.readline())
sys.exit(code if code >= 0 else 128 - code)
