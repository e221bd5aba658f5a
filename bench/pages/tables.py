"""Makes Markdown tables of results: arms, operations by store, bars, and rows where a peer is faster."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from bench.harness.figures import CPU, PERCENTS, Figure, Reached, Row, number, ratio
from bench.pages.report import spread

DASH = "–"
LESS = " †"
"""Marks arms that acknowledge a write before it is on disk, in rows where others wait for the disk."""
ON_DISK = "on disk"
LIMIT = "(the limit)"
"""Part of the names of arms that are not peers, but the most that can be reached."""


def table(head: Sequence[str], lines: Iterable[Sequence[str]], texts: Collection[int] = (0,)) -> str:
    """A Markdown table; `texts` are the columns aligned left, all others are numbers."""
    rule = ["---" if column in texts else "--:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def of_row(row: Row) -> str:
    """All results of one row."""
    parts = [f"### {row.title}"]
    if row.arms:
        parts.append(_of_arms(row))
    if row.figures:
        lines = [[figure.name, _amount(figure)] for figure in row.figures]
        parts.append(table(["", "median (lowest … highest)"], lines))
    if row.verdicts:
        parts.append(bars([row]))
    return "\n\n".join(parts)


def _of_arms(row: Row) -> str:
    base = arm_of(row, row.base)
    with_cpu = any(CPU in reached.figures for reached in row.arms)
    with_kept = any(reached.kept for reached in row.arms)
    head = ["", "per second", *[f"p{percent}, ms" for percent in PERCENTS]]
    head += ["CPU, µs"] * with_cpu + [f": {row.base}"] * (base is not None) + ["if power fails"] * with_kept
    lines = []
    for reached in row.arms:
        line = [reached.name, f"{number(reached.rate.median)} {spread(reached.rate.rounds)}".strip()]
        line += [_median(reached.figures.get(f"p{percent}")) for percent in PERCENTS]
        line += [_median(reached.figures.get(CPU))] * with_cpu
        line += [_times(reached, base)] * (base is not None) + [reached.kept] * with_kept
        lines.append(line)
    for name, why in row.absent.items():
        lines.append([name, f"{DASH} ({why})", *[""] * (len(head) - 2)])
    texts = (0, len(head) - 1) if with_kept else (0,)
    return table(head, lines, texts)


def bars(rows: Iterable[Row]) -> str:
    """Each bar beside what was reached."""
    lines = []
    for row in rows:
        for verdict in row.verdicts:
            sign = "≥" if verdict.at_least else "≤"
            reached = f"{number(verdict.median)} {_unit(verdict.unit)} {spread(verdict.rounds)}".strip()
            bar = f"{sign} {number(verdict.bar)} {_unit(verdict.unit)}".strip()
            lines.append([row.title, verdict.name, bar, reached, "ok" if verdict.ok else "**MISS**"])
    return table(["", "", "bar", "reached", ""], lines, texts=(0, 1, 4))


def matrix(rows: Mapping[str, Row], names: Sequence[str], arms: Sequence[str]) -> str:
    """Operations per second by store and row; bold: more than the base; a dash: not measured."""
    chosen = [rows[name] for name in names if name in rows]
    lines = []
    for arm in arms:
        cells = [_cell(row, arm) for row in chosen]
        if any(cell != DASH for cell in cells):
            lines.append([arm, *cells])
    return table(["per second", *[row.title for row in chosen]], lines)


def _cell(row: Row, arm: str) -> str:
    reached, base = arm_of(row, arm), arm_of(row, row.base)
    if reached is None:
        return row.absent.get(arm, DASH)
    shown = number(reached.rate.median)
    if base is None:
        return shown
    better = reached.rate.median > base.rate.median
    return (f"**{shown}**" if better else shown) + (LESS if keeps_less(reached, base) else "")


def losses(rows: Iterable[Row]) -> str:
    """Rows in which a peer reaches more than the base, or a limit more than twice as much."""
    lines = []
    for row in rows:
        base = arm_of(row, row.base)
        for reached in row.arms if base is not None else ():
            assert base is not None
            times = ratio(reached.rate, base.rate)
            if times.median > (2 if LIMIT in reached.name else 1) and not reached.name.startswith(base.name):
                lines.append(
                    [row.title, reached.name, f"{number(times.median)} × {spread(times.rounds)}", reached.kept]
                )
    return table(["", "store", "times Keyloft's rate", "if power fails"], lines, texts=(0, 1, 3))


def best(rows: Mapping[str, Row], names: Collection[str], known: Mapping[str, str]) -> str:
    """One line per row: Keyloft, the fastest peer with the same durability, and the best known peer.

    Args:
        rows: Results by row name.
        names: Rows that are always shown; others only where Keyloft is slower.
        known: The best known peer of each row.
    """
    lines = []
    for name, best_known in known.items():
        row = rows.get(name)
        base = arm_of(row, row.base) if row else None
        if row is None or base is None:
            continue
        peers = [reached for reached in row.arms if _is_peer(reached, base)]
        fastest = max(peers, key=lambda reached: reached.rate.median)
        if name not in names and ratio(base.rate, fastest.rate).median >= 1:
            continue
        other = arm_of(row, best_known)
        lines.append(
            [
                row.title,
                f"{number(base.rate.median)} /s",
                fastest.name,
                _keyloft_to(base, fastest),
                f"{other.name}: {_keyloft_to(base, other)}" if other and other is not fastest else "",
            ]
        )
    return table(["", "Keyloft", "fastest peer", "Keyloft : peer", "best known peer"], lines, texts=(0, 2, 4))


def keeps_less(reached: Reached, base: Reached) -> bool:
    """Whether it acknowledges writes before they are on disk, and the base does not."""
    return base.kept.startswith(ON_DISK) and not reached.kept.startswith(ON_DISK)


def _is_peer(reached: Reached, base: Reached) -> bool:
    is_keyloft = reached.name.startswith(base.name)
    return not keeps_less(reached, base) and LIMIT not in reached.name and not is_keyloft


def _keyloft_to(base: Reached, other: Reached) -> str:
    times = ratio(base.rate, other.rate).median
    shown = f"{number(times)} ×"
    return shown if times >= 1 else f"**{shown}**"


def arm_of(row: Row, name: str | None) -> Reached | None:
    return next((reached for reached in row.arms if reached.name == name), None)


def _times(reached: Reached, base: Reached | None) -> str:
    return "" if base is None or reached is base else f"{number(ratio(reached.rate, base.rate).median)} ×"


def _median(figure: Figure | None) -> str:
    return DASH if figure is None else number(figure.median)


def _amount(figure: Figure) -> str:
    return f"{number(figure.median)} {_unit(figure.unit)} {spread(figure.rounds)}".strip()


def _unit(unit: str) -> str:
    return "×" if unit == "x" else unit
