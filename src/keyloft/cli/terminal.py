"""What commands print: results to the standard output, everything else to the standard error output.

At a terminal a result is laid out for people; in a pipe, or with --json, it is JSON, one value per line.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import msgspec
import typer

from keyloft import limits
from keyloft.core.json_text import is_deeper, on_any_stack, quotes
from keyloft.core.values import decode_json, encode_json
from keyloft.errors import InvalidArgument, Undecodable

T = TypeVar("T")
Columns: TypeAlias = Mapping[str, Callable[[T], object]]
"""The columns of a table: the title of each, and what it shows of a thing."""
_BETWEEN: Final = 3
"""How much wider a column of a table is than its text."""
_PIECE: Final = 40
"""A text without a space or separator is divided after so many characters."""


class CommandFailed(Exception):
    """Ends a command with its message and exit code 1."""


def say(text: str) -> None:
    """Print a line of a result."""
    sys.stdout.write(f"{text}\n")


def remark(text: str) -> None:
    """Print a remark about the work, to the standard error output."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> NoReturn:
    """End a command with a message and exit code 1."""
    raise CommandFailed(text)


def confirm(question: str) -> None:
    """Ask a question at the terminal, and end the command unless the answer is yes.

    Raises:
        InvalidArgument: There is no terminal to ask at.
    """
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{question} There is no terminal to ask at: pass --yes")
    try:
        if typer.confirm(question, err=True):
            return
        code = 1
    except typer.Abort as aborted:
        remark("")
        code = 130 if isinstance(aborted.__context__, KeyboardInterrupt) else 1
    remark("Nothing was changed.")
    raise typer.Exit(code)


def to_json(value: object) -> str:
    """A value, or a report of `keyloft.admin`, as JSON in one line."""
    if isinstance(value, (msgspec.Struct, tuple)):
        value = on_any_stack(msgspec.to_builtins, value)
    return encode_json(value, limits.LARGEST_VALUE_BYTES, sys.maxsize).decode()


def given_value(text: str, *, is_text: bool) -> Any:
    """The value of an argument: JSON, or text if it does not begin like JSON; `-` reads it from the standard input.

    Raises:
        InvalidArgument: The text begins like an object, an array or a string of JSON, but is not JSON; or an object has
            a name twice, so that one of the two values would be lost.
    """
    text = sys.stdin.read() if text == "-" else text
    if is_text:
        return text
    try:
        content = decode_json(text.encode())
    except (Undecodable, UnicodeEncodeError):
        if text.lstrip().startswith(("{", "[", '"')):
            raise InvalidArgument(f"VALUE is not JSON: {_json_fault(text)}. --text stores it as text") from None
        return text
    if isinstance(content, (dict, list)) and quotes(text.encode()) != quotes(to_json(content).encode()):
        raise InvalidArgument("VALUE: expected each name once in an object, got one twice. --text stores it as text")
    return content


def _json_fault(text: str) -> str:
    """Where a text stops being JSON, without showing the text."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} (line {error.lineno}, column {error.colno})"
    except RecursionError:
        return "it nests too deep"
    return "it contains NaN, Infinity or a lone surrogate"


def is_for_people(stream: Any = None) -> bool:
    """Whether the output goes to a terminal, and not to a program."""
    return bool((stream or sys.stdout).isatty()) and os.environ.get("TERM") != "dumb"


def show_laid_out(value: object) -> None:
    """Print a value as JSON over several lines, in colours unless NO_COLOR is set."""
    text = to_json(value)
    laid_out = on_any_stack(lambda text: msgspec.json.format(text, indent=2), text)
    if os.environ.get("NO_COLOR") or is_deeper(text.encode(), limits.COLOURED_DEPTH):
        say(laid_out)
        return
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print_json(laid_out, indent=2, ensure_ascii=False)


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun: 1 row, 2 rows."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def sized(size: int) -> str:
    """A number of bytes for people."""
    from rich.filesize import decimal

    return decimal(size)


def table(names: Iterable[str], rows: Sequence[Iterable[object]], nothing: str = "") -> None:
    """Print a table for people, with their local time, or the sentence `nothing` if there are no rows."""
    if not rows:
        say(nothing)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    names, console = list(names), Console(highlight=False)
    cells = [[_pieces(name) for name in names], *[[_pieces(content) for content in row] for row in rows]]
    widths = _widths(list(zip(*cells, strict=True)), console.width)
    if widths is None:
        _show_row_by_row(names, rows)
        return
    titles, *lines = [[_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    columns = [Column(title, width=width, no_wrap=True) for title, width in zip(titles, widths, strict=True)]
    shown = Table(*columns, box=box.SIMPLE, header_style="bold", pad_edge=False)
    for line in lines:
        shown.add_row(*map(Text, line))
    console.print(shown)


def _pieces(content: object) -> list[str]:
    """The parts of a cell between which a line may end: a date stays whole, a path is divided after its slashes."""
    ends = r"(?<= )" if isinstance(content, datetime) else r"(?<=[\s/:_-])"
    return [part for piece in re.split(ends, _cell(content)) for part in re.findall(f"(?s).{{1,{_PIECE}}}", piece)]


def _widths(columns: Sequence[Sequence[Sequence[str]]], most: int) -> list[int] | None:
    """How wide the columns are on a terminal: the widest ones are divided; None if that is not enough."""
    least = [max([_width(piece) for cell in column for piece in cell], default=0) for column in columns]
    widths = [min(most, max([_width("".join(cell)) for cell in column], default=0)) for column in columns]
    while sum(widths) + _BETWEEN * len(widths) - 1 > most:
        divisible = [index for index, width in enumerate(widths) if width > least[index]]
        if not divisible:
            return None
        widths[max(divisible, key=lambda index: widths[index])] -= 1
    return widths


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text.rstrip())


def _wrapped(pieces: Sequence[str], width: int) -> str:
    """A cell in lines of at most this width."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and _width(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join([line.rstrip() for line in lines])


def _show_row_by_row(names: Sequence[str], rows: Sequence[Iterable[object]]) -> None:
    """Print a table for a terminal that is too narrow for it: each row as a list of its cells."""
    say("")
    for row in rows:
        [first, *cells] = zip(names, map(_cell, row), strict=True)
        say(": ".join(first))
        for name, cell in cells:
            if cell:
                say(f"  {name}: {cell}")


def _cell(content: object) -> str:
    if content is None:
        return ""
    return f"{content.astimezone():%Y-%m-%d %H:%M:%S}" if isinstance(content, datetime) else str(content).expandtabs()
