"""What an examination finds, and how it is shown: a mark and colours at a terminal, a line each in a pipe, or JSON."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any, Final, Literal, TypeAlias, TypeVar

from keyloft.cli.terminal import is_for_people, say
from keyloft.errors import KeyloftError

T = TypeVar("T")
State: TypeAlias = Literal["ok", "warning", "problem", "skipped"]

_MARKS: Final[dict[State, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
    "skipped": ("-", "dim"),
}
_NAME_WIDTH: Final = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried."""

    name: str
    state: State
    seen: str
    advice: str = ""
    """What to do about it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def bounded(name: str, check: Awaitable[Sequence[Finding]], seconds: float) -> Sequence[Finding]:
    """What a check finds. One that fails or takes too long is a problem of its own, and never ends the others."""
    try:
        async with asyncio.timeout(seconds):
            return await check
    except TimeoutError:
        return [Finding(name, "problem", f"no result within {seconds:g} s", "see whether a disk or server hangs")]
    except KeyloftError as error:
        return [Finding(name, "problem", f"{error.code}: {error}", "correct what the message names")]
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        # Not what it says: nobody knows whether that holds a password.
        told = f"the check itself failed unexpectedly: {type(error).__name__}"
        return [Finding(name, "problem", told, "KEYLOFT_DEBUG=1 shows where")]


async def aside(work: Callable[[], T]) -> T:
    """Do what may block in a thread that nobody waits for in the end: a network file system may never answer."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="keyloft doctor", daemon=True).start()
    return await asyncio.wrap_future(future)


def show(findings: Iterable[Finding]) -> None:
    """Print findings as they come."""
    for finding in findings:
        if is_for_people():
            _show_to_people(finding)
        else:
            say(f"{finding.state}: {finding.name}: {finding.seen}{f' -> {finding.advice}' if finding.advice else ''}")


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each kind."""

    def several(state: State) -> str:
        number = sum(finding.state == state for finding in findings)
        return f"{number or 'no'} {state}{'' if number == 1 else 's'}"

    return f"{several('problem')}, {several('warning')}"


def _show_to_people(finding: Finding) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    mark, colour = _MARKS[finding.state]
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(min_width=_NAME_WIDTH)
    row.add_column(overflow="fold")
    row.add_row(Text(mark, style=colour), Text(finding.name, style="bold"), Text(finding.seen))
    if finding.advice:
        row.add_row("", "", Text(finding.advice, style=colour))
    Console(highlight=False).print(row)
