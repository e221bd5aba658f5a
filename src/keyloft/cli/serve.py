"""The command `serve`: runs the services for plugins and workflows."""

import os
import signal
import sys
from typing import NoReturn

import typer

from keyloft.cli.options import add_commands
from keyloft.server.config import SETTINGS, Flags, check_service, load, to_arguments


def add_to(app: typer.Typer) -> None:
    add_commands(app, SETTINGS, {"serve": serve})


def serve(*, flags: Flags) -> NoReturn:
    """Run the storage services for plugins and workflows, until Ctrl-C or SIGTERM.

    A setting comes from its flag, else from the environment, else from the file of --config, else it has its default.
    In that file --log-level is called log_level.

    Example: keyloft serve --database app.db
    """
    check_service(load(flags))
    # The service becomes this process, so that it does not carry what only a command line needs.
    sys.stdout.flush()
    # A signal that arrives in between waits until the service handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    warnings = [f"-W{option}" for option in sys.warnoptions]
    os.execv(sys.executable, [sys.executable, *warnings, "-m", "keyloft.server", *to_arguments(flags)])
