"""What a benchmark is: rows that can be measured by name, and what its figures depend on."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from bench.harness.figures import Row


class Benchmark(Struct, frozen=True):
    """A benchmark that is ready to run."""

    rows: dict[str, Callable[[], Row]]
    """The measurements by name, in the order in which they are made."""
    notes: list[str]
    """What a reader must know to read the figures."""
    about: dict[str, str] = {}
    """What the figures depend on, beside what all benchmarks have in common."""


Preparing: TypeAlias = Callable[[bool, Path, ExitStack], Benchmark]
"""The type of each benchmark's `prepared`: takes whether to be quick, a folder, and a stack of what to close."""
