"""Shows how far long work is, to whoever sits at a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from keyloft.cli.terminal import is_for_people
from keyloft.upkeep import Progress


@contextmanager
def progress(what: str, unit: str = "") -> Iterator[Progress]:
    """A bar on the standard error output, moved by whoever calls what is given; in a pipe there is none."""
    if not is_for_people(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
