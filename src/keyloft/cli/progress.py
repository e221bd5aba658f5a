"""Shows how far long work has come, to whoever sits at a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from keyloft.cli.terminal import is_for_people
from keyloft.core.maintenance import Progress


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar while something goes on; nothing in a pipe.

    Args:
        what: What goes on, as in `counting`.
        total: How much there is to do; None if whoever does it tells, or nobody knows.
    """
    if not is_for_people(sys.stderr):
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, shown="")

        def advance(done: int, of: int) -> None:
            # Whoever does not know how much is to come tells of all that is done.
            known = total if total is not None else of if of > done else None
            bar.update(
                task, completed=done, total=known, shown=f"{done:,}" if known is None else f"{done:,} of {known:,}"
            )

        yield advance
