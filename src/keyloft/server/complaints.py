"""What a person at a terminal is told when something goes wrong: one line, and an exit code."""

import sys

from keyloft.errors import InvalidInput, KeyloftError


def complain(text: str) -> None:
    """Tell of a failure."""
    sys.stderr.write(f"keyloft: {text}\n")


def explained(error: Exception) -> str:
    """What went wrong."""
    match error:
        case InvalidInput():
            return str(error)
        case KeyloftError():
            return f"{error.code}: {error}"
        case ModuleNotFoundError():
            return f'{error.name} is not installed: pip install "keyloft[all]", or in a clone pip install ".[all]"'
        case OSError() if error.strerror and error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        case OSError():
            return error.strerror or str(error)
    return f"failed unexpectedly: {type(error).__name__}: {error}\nKEYLOFT_DEBUG=1 shows where"


def exit_code(error: Exception) -> int:
    """2 if it was called in a wrong way, 1 if it failed."""
    return 2 if isinstance(error, InvalidInput) else 1
