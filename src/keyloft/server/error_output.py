"""What a command that fails writes to standard error, in one line, and its exit code."""

import os
import sys
from collections.abc import Callable

from keyloft.core.extras import EXTRAS, not_installed
from keyloft.core.files import OUT_OF_SPACE
from keyloft.errors import InvalidInput, KeyloftError


def print_error(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"keyloft: {text}\n")


def describe(error: Exception, extra: str | None = None) -> str:
    """What went wrong, in one line; if a package is missing, `extra` names the extra to install."""
    match error:
        case InvalidInput():
            return str(error)
        case KeyloftError():
            return f"{error.code}: {error}"
        case ModuleNotFoundError() if (package := str(error.name).partition(".")[0]) in EXTRAS:
            return not_installed(package, extra)
        case FileNotFoundError():
            return f"there is no file {error.filename}"
        case OSError() if error.strerror and error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        case OSError() if error.errno in OUT_OF_SPACE:
            return "no space is left where the output is written"  # full disks of databases and files have named errors
        case OSError():
            return error.strerror or str(error)
    return f"failed unexpectedly: {type(error).__name__}: {error}\nKEYLOFT_DEBUG=1 shows the traceback"


def report(error: Exception, spelled: Callable[[str], str] = str, *, extra: str | None = None) -> int:
    """Print what went wrong, and return the exit code: 2 for a wrong call, 1 for a failure.

    With KEYLOFT_DEBUG, raise the error instead.

    Args:
        error: What went wrong.
        spelled: Replaces names of arguments in the message by the options that the user has typed.
        extra: Which extra to install where a package is missing, instead of that package's own.
    """
    if os.environ.get("KEYLOFT_DEBUG"):
        raise error
    print_error(spelled(describe(error, extra)))
    return 2 if isinstance(error, (InvalidInput, FileNotFoundError)) else 1
