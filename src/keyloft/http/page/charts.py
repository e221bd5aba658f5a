"""Small charts of the admin page: lines up to now, as SVG that needs neither script nor inline style."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from keyloft import limits

_WIDTH: Final = 360
_HEIGHT: Final = 64
_EDGE: Final = 3


def chart(lines: Sequence[Sequence[float | None]], label: str) -> Markup:
    """A chart of some lines over the same time, which ends now; a point without a figure is left out.

    Args:
        lines: The figures of each line, oldest first, one for each reading.
        label: What it shows, for those who don't see it.
    """
    most = max([figure for line in lines for figure in line if figure is not None], default=0.0)
    drawn = Markup("").join([_drawn(line, number, most or 1.0) for number, line in enumerate(lines, 1)])
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<line class="ground" x1="0" y1="{}" x2="{}" y2="{}"></line>{}</svg>'
    ).format(_WIDTH, _HEIGHT, label, _HEIGHT - 1, _WIDTH, _HEIGHT - 1, drawn)


def _drawn(line: Sequence[float | None], number: int, most: float) -> Markup:
    """One line, with the area below it for the first of a chart."""
    step = _WIDTH / (max(len(line), limits.PAGE_FEWEST_SAMPLES) - 1)
    begin = _WIDTH - step * (len(line) - 1)
    points = [
        (begin + step * at, _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * figure / most)
        for at, figure in enumerate(line)
        if figure is not None
    ]
    if len(points) < 2:
        return Markup("")
    along = " ".join([f"{x:.1f},{y:.1f}" for x, y in points])
    drawn = Markup('<polyline class="line line-{}" points="{}"></polyline>').format(number, along)
    if number == 1:
        below = f"{points[0][0]:.1f},{_HEIGHT} {along} {points[-1][0]:.1f},{_HEIGHT}"
        drawn = Markup('<polygon class="area" points="{}"></polygon>').format(below) + drawn
    return drawn
