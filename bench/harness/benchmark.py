"""What a benchmark is: what the figures depend on, and rows to be measured by name."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from bench.harness.figures import Row


class Benchmark(Struct, frozen=True):
    """A benchmark that is ready to run."""

    rows: dict[str, Callable[[], Row]]
    """What there is to measure, by name, in the order in which it is measured."""
    notes: list[str]
    """What a reader must know to read the figures."""
    about: dict[str, str] = {}
    """What the figures depend on, beside what all benchmarks have in common."""


Preparing: TypeAlias = Callable[[bool, Path, ExitStack], Benchmark]
"""Each benchmark has one, `prepared`: told whether to be quick, which folder is its own, and what ends with it."""
