"""Writes the measured parts of docs/benchmarks.md and README.md from bench/results, and draws the charts."""

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def results_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def write(tell: Callable[[str], object]) -> None:
    tell("")
