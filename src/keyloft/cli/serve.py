"""The command `serve`: runs the services for plugins and workflows."""

import os
import signal
import sys
from typing import Final, NoReturn

from keyloft.cli.options import Commands, Settings
from keyloft.server.config import SETTINGS, check_service, to_arguments


class ServiceSettings(Settings, frozen=True, kw_only=True):
    """All settings."""

    names = tuple(SETTINGS)


def serve(*, settings: ServiceSettings) -> NoReturn:
    """Run the service, over NATS and HTTP, until Ctrl-C or SIGTERM.

    A setting is taken from its flag, else from the environment, else from the file of --config; else it has its
    default. In that file --log-level is called log_level.

    Example: keyloft serve --database app.db
    """
    check_service(settings.config())
    # This process is replaced by the service, so that the modules of the command line take no memory in it.
    sys.stdout.flush()
    # A signal that arrives meanwhile waits until the service can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    warnings = [f"-W{option}" for option in sys.warnoptions]
    os.execv(sys.executable, [sys.executable, *warnings, "-m", "keyloft.server", *to_arguments(settings.flags)])


COMMANDS: Final[Commands] = (serve,)
