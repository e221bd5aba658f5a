"""The process that `keyloft serve` becomes: the service, without what only a command line needs (9 MB)."""

import os
import sys
from typing import Final, NoReturn

from keyloft.server import app
from keyloft.server.complaints import complain, exit_code, explained
from keyloft.server.config import SETTINGS, Flags, check_service, load

_FLAGS: Final = {"config": "--config"} | {name: setting.flag for name, setting in SETTINGS.items()}


def become(flags: Flags) -> NoReturn:
    """Turn this process into the service; its pid stays the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *[f"-W{option}" for option in sys.warnoptions], "-m", "keyloft.server"]
    for name, value in flags.items():
        if value is not None:
            command += [_FLAGS[name], value]
    os.execv(sys.executable, command)


def main() -> int:
    try:
        names = {flag: name for name, flag in _FLAGS.items()}
        settings = load({names[flag]: value for flag, value in zip(sys.argv[1::2], sys.argv[2::2], strict=True)})
        check_service(settings)
        app.run(settings)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        complain(explained(error))
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
