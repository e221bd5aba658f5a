"""Prints results at the terminal, and saves and loads them as JSON."""

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.harness.figures import CPU, PERCENTS, Figure, Reached, Row, number, ratio


class Results(Struct, frozen=True):
    """All results of a benchmark."""

    machine: dict[str, str]
    notes: list[str]
    rows: dict[str, Row]


def save(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(_rounded(results)), indent=1).decode()
    # The rounds of a figure on one line: shorter files, and readable differences.
    path.write_text(re.sub(r"\[[\d\s.,e+-]+\]", lambda rounds: " ".join(rounds[0].split()), text) + "\n")


def load(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def show_head(about: dict[str, str], notes: list[str]) -> None:
    for name, text in about.items():
        print(f"{name:>16}  {text}")
    for note in notes:
        print(f"{'note':>16}  {note}")
    print(f"{'':>16}  median (lowest … highest round)")


def show(row: Row) -> None:
    print(f"\n{row.title}")
    base = next((reached for reached in row.arms if reached.name == row.base), None)
    for reached in row.arms:
        print(f"  {_line(reached.rate)}{_latencies(reached)}{_against(reached, base)}{_kept(reached)}")
    for name, why in row.absent.items():
        print(f"  {name:<44}{'-':>10} {why}")
    for figure in row.figures:
        print(f"  {_line(figure)}")
    for verdict in row.verdicts:
        figure = Figure(verdict.name, verdict.unit, verdict.rounds)
        bar = f"{'>=' if verdict.at_least else '<='} {number(verdict.bar)} {verdict.unit}"
        print(f"  {_line(figure)}{bar:<14}{'ok' if verdict.ok else 'MISS'}", flush=True)


def spread(rounds: tuple[float, ...]) -> str:
    return f"({number(min(rounds))} … {number(max(rounds))})" if len(rounds) > 1 else ""


def _line(figure: Figure) -> str:
    return f"{figure.name:<44}{number(figure.median):>10} {figure.unit:<4}{spread(figure.rounds):<24}"


def _latencies(reached: Reached) -> str:
    figures = reached.figures
    shown = " / ".join(number(figures[f"p{percent}"].median) for percent in PERCENTS)
    used = f", CPU {number(figures[CPU].median)} µs" if CPU in figures else ""
    return f"p50/95/99 {shown} ms{used}"


def _against(reached: Reached, base: Reached | None) -> str:
    if base is None or base is reached:
        return ""
    return f"; {number(ratio(reached.rate, base.rate).median)} x"


def _kept(reached: Reached) -> str:
    return f"; {reached.kept}" if reached.kept else ""


def _rounded(results: Results) -> object:
    """Six digits are more than was measured, and keep the files short."""

    def shorter(part: object) -> object:
        if isinstance(part, float):
            return float(f"{part:.6g}")
        if isinstance(part, dict):
            return {name: shorter(value) for name, value in part.items()}
        return [shorter(value) for value in part] if isinstance(part, list | tuple) else part

    return shorter(msgspec.to_builtins(results))
