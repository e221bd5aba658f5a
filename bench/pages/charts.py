"""Draws bars and lines as SVG files that are readable on light and dark pages."""

import math
from collections.abc import Sequence
from html import escape

from msgspec import Struct

_FONT = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
_STYLE = """
.page{fill:#ffffff;stroke:#d0d7de} .text{fill:#1f2328} .soft{fill:#59636e} .grid{stroke:#d8dee4;stroke-width:1}
.keyloft{fill:#0969da} .peer{fill:#8c959f} .limit{fill:#d4a72c} .whisker{stroke:#1f2328;stroke-width:1}
@media (prefers-color-scheme:dark){
.page{fill:#0d1117;stroke:#30363d} .text{fill:#e6edf3} .soft{fill:#9198a1} .grid{stroke:#2a313c}
.keyloft{fill:#4493f8} .peer{fill:#6e7681} .limit{fill:#bb8009} .whisker{stroke:#e6edf3}}
"""
# Okabe and Ito's colours: distinguishable with colour blindness, on light and on dark.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_CHARACTER_WIDTH = 6.2
"""Upper bound of the average width of a character in a label, in pixels."""
_ROW = 19
_PADDING = 16


class Bar(Struct, frozen=True):
    """One bar."""

    label: str
    value: float
    low: float
    high: float
    kind: str = "peer"
    """`keyloft`, `peer` or `limit`."""


class Panel(Struct, frozen=True):
    """Bars that are compared with each other."""

    title: str
    bars: tuple[Bar, ...]


class LineSeries(Struct, frozen=True):
    """Points that belong together."""

    label: str
    points: tuple[tuple[float, float], ...]
    notes: tuple[str, ...] = ()
    """A note beside each point."""


def bars(title: str, panels: Sequence[Panel], columns: int = 2, width: int = 960) -> str:
    """Panels of horizontal bars, longest first; each has a logarithmic scale of its own."""
    panel_width = (width - _PADDING * (columns + 1)) / columns
    drawn, top = [], 68.0
    for first in range(0, len(panels), columns):
        in_row = panels[first : first + columns]
        for column, panel in enumerate(in_row):
            drawn.append(_panel(panel, _PADDING + column * (panel_width + _PADDING), top, panel_width))
        top += max(len(panel.bars) for panel in in_row) * _ROW + 62
    subtitle = "operations per second, median of the rounds (line: lowest to highest); more is better; log scale"
    if any("†" in bar.label for panel in panels for bar in panel.bars):
        subtitle += "; † acknowledged before it is on disk"
    return _page(title, subtitle, width, top + 4, drawn)


def _panel(panel: Panel, left: float, top: float, width: float) -> str:
    label_width = min(width * 0.55, max(len(bar.label) for bar in panel.bars) * _CHARACTER_WIDTH + 8)
    value_width = 62
    begin, room = left + label_width, width - label_width - value_width
    least, most = (
        10 ** math.floor(math.log10(min(bar.low for bar in panel.bars)) - 1e-9),
        max(b.high for b in panel.bars),
    )
    scale = _Scale(least, most, begin, begin + room)
    bottom = top + 16 + len(panel.bars) * _ROW
    drawn = [_text(left, top + 4, panel.title, "text", 13, bold=True)]
    for tick in scale.ticks():
        x = scale.at(tick)
        drawn.append(f'<line class="grid" x1="{x:.1f}" y1="{top + 12:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        drawn.append(_text(x, bottom + 12, short(tick), "soft", 10, anchor="middle"))
    for number, bar in enumerate(sorted(panel.bars, key=lambda bar: -bar.value)):
        y = top + 16 + number * _ROW
        end = scale.at(bar.value)
        middle = y + _ROW / 2 - 1.5
        drawn.append(
            _text(begin - 6, y + 11.5, bar.label, "text" if bar.kind == "keyloft" else "soft", 11, anchor="end")
        )
        drawn.append(
            f'<rect class="{bar.kind}" x="{begin:.1f}" y="{y + 1:.1f}" width="{max(1.0, end - begin):.1f}" '
            f'height="{_ROW - 5}" rx="2"/>'
        )
        drawn.append(
            f'<line class="whisker" x1="{scale.at(bar.low):.1f}" y1="{middle:.1f}" x2="{scale.at(bar.high):.1f}" '
            f'y2="{middle:.1f}"/>'
        )
        drawn.append(_text(max(end, scale.at(bar.high)) + 5, y + 11.5, short(bar.value), "text", 11))
    return "\n".join(drawn)


def lines(title: str, subtitle: str, x_label: str, y_label: str, series: Sequence[LineSeries], width: int = 760) -> str:
    """Lines on logarithmic scales, each labelled at its end."""
    height = 400
    label_width = max(len(line.label) for line in series) * _CHARACTER_WIDTH + 20
    left, right, top, bottom = 70.0, width - label_width - _PADDING, 82.0, height - 50.0
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    across = _Scale(min(xs), max(xs), left, right)
    up = _Scale(min(ys) / 1.15, max(ys) * 1.15, bottom, top)
    drawn = []
    for tick in across.ticks():
        x = across.at(tick)
        drawn.append(f'<line class="grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        drawn.append(_text(x, bottom + 16, short(tick), "soft", 11, anchor="middle"))
    for tick in up.ticks():
        y = up.at(tick)
        drawn.append(f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
        drawn.append(_text(left - 8, y + 4, short(tick), "soft", 11, anchor="end"))
    drawn.append(_text((left + right) / 2, bottom + 36, x_label, "soft", 12, anchor="middle"))
    drawn.append(_text(left - 54, top - 10, y_label, "soft", 12))
    ends = apart([up.at(line.points[-1][1]) for line in series], 16)
    for line, colour, label_y in zip(series, _COLOURS, ends, strict=False):
        points = [(across.at(x), up.at(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        for (x, y), note in zip(points, line.notes, strict=False):
            drawn.append(
                f'<text x="{x - 5:.1f}" y="{y - 7:.1f}" font-size="10" text-anchor="end" fill="{colour}">'
                f"{escape(note)}</text>"
            )
        x, y = points[-1]
        drawn.append(
            f'<polyline points="{x + 5:.1f},{y:.1f} {right + 8:.1f},{label_y:.1f}" fill="none" stroke="{colour}" '
            'stroke-width="1" stroke-dasharray="2 2"/>'
        )
        drawn.append(f'<rect x="{right + 8:.1f}" y="{label_y - 5:.1f}" width="6" height="10" fill="{colour}"/>')
        drawn.append(_text(right + 18, label_y + 4, line.label, "text", 11))
    return _page(title, subtitle, width, height, drawn)


def apart(positions: Sequence[float], distance: float) -> list[float]:
    """The same positions in the same order, moved as little as needed so that no two are closer than the distance."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = [positions[index] for index in order]
    for _ in range(200):
        for one in range(len(moved) - 1):
            missing = distance - (moved[one + 1] - moved[one])
            if missing > 1e-6:
                moved[one] -= missing / 2
                moved[one + 1] += missing / 2
    found = [0.0] * len(positions)
    for index, position in zip(order, moved, strict=True):
        found[index] = position
    return found


def short(amount: float) -> str:
    """As a tick: 1.2k, 34k, 5M."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if amount >= size * 0.9995:
            return f"{_digits(amount / size)}{suffix}"
    return _digits(amount)


def _digits(amount: float) -> str:
    return f"{amount:.0f}" if amount >= 99.5 else f"{amount:.3g}" if amount < 0.1 else f"{amount:.2g}"


class _Scale:
    """A logarithmic scale between two positions."""

    def __init__(self, least: float, most: float, begin: float, end: float) -> None:
        self._low = math.log10(least)
        self._high = max(math.log10(most), self._low + 1e-3)
        self._begin = begin
        self._end = end

    def at(self, amount: float) -> float:
        share = (math.log10(amount) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Powers of ten; where there are fewer than three, also twice and five times of them."""
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            ticks = [step * 10**power for power in powers for step in steps]
            shown = [tick for tick in ticks if self._low - 1e-9 <= math.log10(tick) <= self._high + 1e-9]
            if len(shown) >= 3:
                break
        return shown


def _text(x: float, y: float, text: str, kind: str, size: int, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


def _page(title: str, subtitle: str, width: float, height: float, drawn: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}" style="{_FONT}">\n<style>{_STYLE}</style>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="6"/>\n'
    )
    titles = _text(_PADDING, 24, title, "text", 16, bold=True) + "\n" + _text(_PADDING, 41, subtitle, "soft", 11)
    return f"{head}{titles}\n" + "\n".join(drawn) + "\n</svg>\n"
