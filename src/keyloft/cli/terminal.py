"""What commands print: results to the standard output, all else to the standard error output.

At a terminal a result is laid out for people; in a pipe, or with --json, it is JSON, one value per line.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn, ParamSpec

import msgspec
import typer

from keyloft import limits
from keyloft.core.values import decode_json, encode_json
from keyloft.errors import InvalidArgument, Undecodable
from keyloft.server.error_output import describe, exit_code, print_error

P = ParamSpec("P")


def told(command: Callable[P, int | None]) -> Callable[P, None]:
    """Make a command end with its exit code, and tell of whatever goes wrong in one line."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            code = _no_reader()
        except Exception as error:
            if os.environ.get("KEYLOFT_DEBUG"):
                raise
            print_error(describe(error))
            code = exit_code(error)
        raise typer.Exit(code)

    return run


def _no_reader() -> int:
    """Whoever read the output has seen enough; Python would report it once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def say(text: str) -> None:
    """Print a line of a result."""
    sys.stdout.write(f"{text}\n")


def remark(text: str) -> None:
    """Tell of what goes on."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> NoReturn:
    """End a command that did not do what it was asked for."""
    print_error(text)
    raise typer.Exit(1)


def confirm(question: str) -> None:
    """Go on only if somebody agrees.

    Raises:
        InvalidArgument: Nobody is there.
    """
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{question} Nobody is here to answer: --yes says so beforehand")
    if not typer.confirm(question, err=True):
        remark("Nothing was changed.")
        raise typer.Exit(1)


def to_json(value: object) -> str:
    """A value as JSON in one line."""
    return encode_json(value, limits.LARGEST_VALUE_BYTES).decode()


def understood(text: str) -> Any:
    """A value as somebody types it: JSON, and whatever is none is text."""
    try:
        return decode_json(text.encode())
    except (Undecodable, UnicodeEncodeError):
        return text


def given_value(text: str, *, is_text: bool) -> Any:
    """The value of an argument; a hyphen reads it from the standard input."""
    text = sys.stdin.read() if text == "-" else text
    return text if is_text else understood(text)


def is_for_people(stream: Any = None) -> bool:
    """Whether somebody looks at the output, and not a program."""
    return bool((stream or sys.stdout).isatty()) and os.environ.get("TERM") != "dumb"


def show_json(value: object, *, as_json: bool) -> None:
    """Print a value: laid out and coloured at a terminal, in one line otherwise."""
    if isinstance(value, (msgspec.Struct, tuple)):
        value = msgspec.to_builtins(value)
    if as_json or not is_for_people():
        say(to_json(value))
        return
    laid_out = msgspec.json.format(to_json(value), indent=2)
    if os.environ.get("NO_COLOR"):
        say(laid_out)
        return
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print_json(laid_out, indent=2, ensure_ascii=False)


def show_result(result: object, sentence: str, *, as_json: bool) -> None:
    """Print a sentence at a terminal, and the result as JSON elsewhere or if asked."""
    if as_json or not is_for_people():
        show_json(result, as_json=True)
    else:
        say(sentence)


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun: 1 row, 2 rows."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def local_time(moment: datetime | None) -> str:
    """A moment for people, in their time zone."""
    return "" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def sized(size: int) -> str:
    """A number of bytes for people."""
    if size < 1000:
        return f"{size} bytes"
    amount = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.95 or unit == "TB":
            break
    return f"{amount:,.1f} {unit}"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(*names, box=box.SIMPLE, header_style="bold")
    for row in rows:
        shown.add_row(*[Text(cell, overflow="fold") for cell in row])
    Console(highlight=False).print(shown if rows else "nothing")
