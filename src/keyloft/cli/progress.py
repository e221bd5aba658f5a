"""Shows the progress of long work, at a terminal."""

import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from keyloft.admin import Progress
from keyloft.cli.database import run_quietly
from keyloft.cli.terminal import is_for_people

T = TypeVar("T")


def with_progress(work: Callable[..., Coroutine[Any, Any, T]], *given: Any, is_shown: bool = True, **options: Any) -> T:
    """Run a function of `keyloft.admin`, and show its progress at a terminal."""
    with _shown() if is_shown and is_for_people(sys.stderr) else nullcontext() as progress:
        return run_quietly(work(*given, **options, progress=progress))


@contextmanager
def _shown() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    class KnownTotal(BarColumn):
        """A bar, if there is a total to compare with."""

        def render(self, task: Task) -> ProgressBar:
            return super().render(task) if task.total is not None else Text()  # type: ignore[return-value]

    columns = (TextColumn("{task.description}"), KnownTotal(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None, count="", visible=False)

        def show(stage: str, done: int, total: int | None) -> None:
            nonlocal task
            if bars.tasks[-1].description != stage:
                bars.remove_task(task)
                task = bars.add_task(stage, total=total, count="")
            # A total that becomes known only at the end does not make the bar useful.
            known = None if bars.tasks[-1].total is None and total == done else total
            count = (f"{done:,}" if done else "") if known is None else f"{done:,} of {int(known):,}"
            bars.update(task, completed=done, total=known, count=count)

        yield show
