"""The process of `keyloft serve`: the service, without the modules of the command line (9 MB)."""

import os
import signal
import sys
from typing import Any

# If the signal arrives before the service runs, there is nothing to finish. Later, the service handles it.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

from keyloft.server.error_output import report  # noqa: E402


def _import_nats() -> None:
    """Import nats-py without aiohttp, which takes 10 MB and which nats-py needs only for WebSockets."""
    hidden: dict[str, Any] = sys.modules  # None in place of a module lets its import fail
    hidden["aiohttp"] = None
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del hidden["aiohttp"]


def main() -> int:
    try:
        _import_nats()
        from keyloft.server import app  # here, since it needs packages of extras
        from keyloft.server.config import check_service, from_arguments, load

        settings = load(from_arguments(sys.argv[1:]))
        check_service(settings)
        app.run(settings, os._exit)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, extra="server")  # which has all packages: not one missing package after another
    return 0


if __name__ == "__main__":
    sys.exit(main())
