"""What was measured and how it is compared: figures, ratios, verdicts against a bar."""

import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct

RATE = "rate"
CPU = "cpu"
PERCENTS = (50, 95, 99)


class Figure(Struct, frozen=True):
    """One number, round by round."""

    name: str
    unit: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class Reached(Struct, frozen=True):
    """What one arm reached: how many operations per second, and how long one took."""

    name: str
    figures: dict[str, Figure]
    """Keyed by `rate`, `p50`, `p95`, `p99` and, for a serving process, `cpu`."""
    kept: str = ""
    """What happens to an acknowledged write if power fails."""

    @property
    def rate(self) -> Figure:
        return self.figures[RATE]


class Verdict(Struct, frozen=True):
    """A figure compared with its bar, a lower or an upper bound."""

    name: str
    unit: str
    rounds: tuple[float, ...]
    median: float
    bar: float
    at_least: bool

    @property
    def ok(self) -> bool:
        return self.median >= self.bar if self.at_least else self.median <= self.bar


class Row(Struct, frozen=True):
    """One row of a benchmark: a question, and the figures that answer it."""

    title: str
    arms: tuple[Reached, ...] = ()
    base: str | None = None
    """The arm to which the others are shown as ratios."""
    figures: tuple[Figure, ...] = ()
    """Figures that belong to no arm."""
    verdicts: tuple[Verdict, ...] = ()
    absent: dict[str, str] = {}
    """Arms that could not take part, and why."""


def ratio(subject: Figure, against: Figure) -> Figure:
    """How many times as much the subject reached, round by round, so that noise common to both cancels out."""
    ratios = tuple(one / other for one, other in zip(subject.rounds, against.rounds, strict=True))
    return Figure(f"{subject.name} : {against.name}", "x", ratios)


def compare(subject: Figure, against: Figure, at_least: float) -> Verdict:
    return reaches(ratio(subject, against), at_least)


def reaches(figure: Figure, at_least: float) -> Verdict:
    return Verdict(figure.name, figure.unit, figure.rounds, figure.median, at_least, at_least=True)


def within(figure: Figure, at_most: float) -> Verdict:
    return Verdict(figure.name, figure.unit, figure.rounds, figure.median, at_most, at_least=False)


def of_rates(found: Mapping[str, Reached], subject: str, bars: Mapping[str, float]) -> tuple[Verdict, ...]:
    """The subject's rate against other arms' rates, each with its bar; an arm that took no part has no verdict."""
    return tuple(
        compare(found[subject].rate, found[name].rate, bar)
        for name, bar in bars.items()
        if name in found and subject in found
    )


def percentile(sample: Sequence[float], percent: float) -> float:
    ordered = sorted(sample)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def number(amount: float) -> str:
    """A number with about three digits."""
    if amount >= 100:
        return f"{amount:,.0f}"
    if amount >= 10:
        return f"{amount:.1f}"
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"
