"""Writes docs/benchmarks/all.md and the measured parts of other documents, and draws the charts.

A measured part stands between `<!-- measured NAME -->` and `<!-- /measured -->`; the rest of such a page is written by
hand. docs/benchmarks/all.md is written as a whole. All figures are those of bench/results.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.harness.figures import Row, number
from bench.pages import charts, report, tables
from bench.pages.charts import Bar, LineSeries, Panel
from bench.pages.report import Results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
CHARTS = "docs/benchmarks"
PAGES = ("docs/benchmarks.md", "docs/api/DATABASE_KV_API.md", "README.md")
ALL_FIGURES = "docs/benchmarks/all.md"
NOT_YET = "*Not measured yet.*"
BENCHMARKS = {
    "peers": "Peers",
    "embedded": "Embedded store",
    "nats": "Plugin service over NATS",
    "http": "The HTTP API",
    "floods": "Floods by hostile plugins and tenants",
    "postgres": "PostgreSQL",
    "engines": "Clusters that lose nodes",
    "semantic": "Semantic store",
    "move": "Export, import, copy, backup and restore",
}
"""The headings of docs/benchmarks/all.md, by benchmark."""

_PART = re.compile(r"(<!-- measured (\S+) -->\n).*?(<!-- /measured -->)", re.DOTALL)

READS = ("get", "get-64", "get_many", "list", "get-large")
WRITES = ("set", "set-64", "check-and-set", "set-relaxed", "set-relaxed-64", "set-large")
SERVED = ("service-get", "service-get-64", "service-set", "service-set-64")
SHOWN = ("get", "set-64", "list", "set")
"""What the README's chart has: two that win and two that are hard."""
SHORT = ("get", "get_many", "list", "set", "set-64", "check-and-set", "set-relaxed", "service-get-64", "service-set-64")
"""What the README's table has; and whatever is lost."""
GROWN = {
    "growth-get": "get",
    "growth-list": "list of 1,000",
    "growth-set": "durable set",
    "growth-set-64": "durable set, 64 concurrent",
    "growth-sweep": "sweep of 500",
}
KNOWN = dict.fromkeys(READS + WRITES, "Deno KV") | dict.fromkeys(SERVED, "Valkey, appendfsync always")


def results_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def write(report_line: Callable[[str], object], root: Path = ROOT, results: Path = RESULTS) -> None:
    """Render all that has been measured so far."""
    found = {path.stem: report.load(path) for path in sorted(results.glob("*.json"))}
    drawn = _charts(found["peers"].rows) if "peers" in found else {}
    (root / CHARTS).mkdir(parents=True, exist_ok=True)
    for name, chart in drawn.items():
        (root / CHARTS / f"{name}.svg").write_text(chart)
        report_line(f"drew {CHARTS}/{name}.svg\n")
    (root / ALL_FIGURES).write_text(all_figures(found))
    report_line(f"wrote {ALL_FIGURES}\n")
    for page in PAGES:
        path = root / page
        path.write_text(filled(path.read_text(), parts(found, drawn, page)))
        report_line(f"wrote {page}\n")


def filled(page: str, measured: Mapping[str, str]) -> str:
    """The page with its measured parts replaced.

    Raises:
        KeyError: The page names a part that there is not.
    """
    return _PART.sub(lambda found: f"{found[1]}{measured[found[2]]}\n{found[3]}", page)


def parts(found: Mapping[str, Results], drawn: Mapping[str, str], page: str) -> dict[str, str]:
    """The measured parts by name."""
    peers = found["peers"].rows if "peers" in found else {}
    arms = list(
        dict.fromkeys(name for row in peers.values() for name in (*[arm.name for arm in row.arms], *row.absent))
    )
    made = {"peers-bars": tables.bars(peers.values()) if peers else NOT_YET}
    made["peers-reads"] = tables.matrix(peers, READS, arms) if peers else NOT_YET
    made["peers-writes"] = tables.matrix(peers, WRITES, arms) if peers else NOT_YET
    made["peers-services"] = tables.matrix(peers, SERVED, arms) if peers else NOT_YET
    made["growth"] = _growth(peers) or NOT_YET
    made["plugin-latency"] = _latency(found["nats"]) if "nats" in found else NOT_YET
    made["short"] = tables.best(peers, SHORT, KNOWN) if peers else NOT_YET
    made["machine-short"] = _machine(found["peers"].machine) if peers else NOT_YET
    for name in ("short", "embedded", "services", "growth", "size", "load-set", "load-get"):
        folder = CHARTS if page == "README.md" else Path(CHARTS).name
        made[f"chart-{name}"] = f"![{_alt(name)}]({folder}/{name}.svg)" if name in drawn else NOT_YET
    return made


def _alt(name: str) -> str:
    return {
        "short": "Operations per second of Keyloft and its peers",
        "embedded": "Operations per second of embedded stores",
        "services": "Operations per second of services",
        "growth": "How long an operation takes in stores of different sizes",
        "size": "Bytes per key in the file and in memory",
        "load-set": "Throughput against the p99 of a set",
        "load-get": "Throughput against the p99 of a get",
    }[name]


def all_figures(found: Mapping[str, Results]) -> str:
    """The page with every figure that was measured."""
    parts = [
        "# All figures",
        "Every figure that `scripts/bench` measured, benchmark by benchmark. `scripts/bench report` writes this page; "
        "[the summary](../benchmarks.md) says how it was measured, and what the figures mean.",
    ]
    for name, heading in BENCHMARKS.items():
        parts.append(f"## {heading}")
        if name not in found:
            parts.append(NOT_YET)
            continue
        results = found[name]
        parts.append("\n".join(f"- {note}" for note in results.notes))
        parts.append(tables.table(["", ""], [[what, text] for what, text in results.machine.items()], texts=(0, 1)))
        if name == "peers":
            compared = [results.rows[row] for row in READS + WRITES + SERVED if row in results.rows]
            parts += ["### Acknowledged writes if power fails", _kept(results.rows)]
            parts += ["### Rows in which a peer is faster, or a limit more than twice as fast", tables.losses(compared)]
        parts += [tables.of_row(row) for row in results.rows.values()]
    return "\n\n".join(parts) + "\n"


def _machine(machine: Mapping[str, str]) -> str:
    shown = [f"{name} {machine[name]}" for name in ("cpu", "memory", "system", "disk", "python") if name in machine]
    return f"Measured on {machine.get('measured', 'an unknown date')}: {', '.join(shown)}."


def _latency(results: Results) -> str:
    """How long the plugin service takes, beside its targets."""
    verdicts = [one for name in ("latency", "lists") if name in results.rows for one in results.rows[name].verdicts]
    lines = [
        [one.name, f"{number(one.bar)} ms", f"{number(one.median)} ms", report.spread(one.rounds)]
        for one in verdicts
        if one.unit == "ms"
    ]
    figures = tables.table(["", "target, at most", "measured", "lowest … highest"], lines)
    return f"{figures}\n\n{_machine(results.machine)}"


def _kept(rows: Mapping[str, Row]) -> str:
    """What becomes of an acknowledged write, by arm and task."""
    kept: dict[tuple[str, str], None] = {}
    for name in WRITES + SERVED:
        for reached in rows[name].arms if name in rows else ():
            kind = "relaxed" if "relaxed" in name or not reached.kept.startswith(tables.ON_DISK) else "durable"
            if reached.kept:
                kept[(f"{reached.name}, {kind}", reached.kept)] = None
    return tables.table(["", "an acknowledged write, if power fails"], [list(pair) for pair in kept], texts=(0, 1))


def _growth(rows: Mapping[str, Row]) -> str:
    """Microseconds of each operation, and bytes, by size."""
    timed = [name for name in GROWN if name in rows]
    if not timed:
        return ""
    sizes_by_name = {figure.name: figure for figure in rows["growth-size"].figures} if "growth-size" in rows else {}
    lines = []
    for reached in rows[timed[0]].arms:
        line = [reached.name]
        for name in timed:
            found = next((other for other in rows[name].arms if other.name == reached.name), None)
            line.append(tables.DASH if found is None else number(found.figures["p50"].median * 1000))
        for what in ("file", "memory"):
            size_figure = sizes_by_name.get(f"{reached.name}, {what}")
            line.append(tables.DASH if size_figure is None else number(size_figure.median))
        lines.append(line)
    head = ["", *[f"{GROWN[name]}, µs" for name in timed], "file, bytes per key", "memory, MB"]
    return tables.table(head, lines)


def _charts(rows: Mapping[str, Row]) -> dict[str, str]:
    drawn = {
        "short": _bars("Keyloft and its peers", rows, SHOWN),
        "embedded": _bars("Embedded stores", rows, READS + WRITES),
        "services": _bars("Services", rows, SERVED),
        "growth": _grown(rows),
        "size": _sizes(rows),
        "load-set": _loaded("Sets under load", rows.get("load-set")),
        "load-get": _loaded("Gets under load", rows.get("load-get")),
    }
    return {name: chart for name, chart in drawn.items() if chart}


def _bars(title: str, rows: Mapping[str, Row], names: tuple[str, ...]) -> str:
    panels = []
    for name in names:
        row = rows.get(name)
        if row is not None and row.arms:
            base = tables.arm_of(row, row.base)
            made = []
            for reached in row.arms:
                rounds, less = reached.rate.rounds, base is not None and tables.keeps_less(reached, base)
                label = reached.name + (tables.LESS if less else "")
                made.append(Bar(label, reached.rate.median, min(rounds), max(rounds), _kind(reached.name)))
            panels.append(Panel(row.title, tuple(made)))
    return charts.bars(title, panels) if panels else ""


def _kind(name: str) -> str:
    if tables.LIMIT in name:
        return "limit"
    return "keyloft" if name.startswith("Keyloft") else "peer"


def _grown(rows: Mapping[str, Row]) -> str:
    series = [
        LineSeries(
            label, tuple((_size(reached.name), reached.figures["p50"].median * 1000) for reached in rows[name].arms)
        )
        for name, label in GROWN.items()
        if name in rows
    ]
    subtitle = "median time of one operation in stores of different sizes; both scales are logarithmic"
    return charts.lines("Growth", subtitle, "keys in the store", "µs", series) if series else ""


def _sizes(rows: Mapping[str, Row]) -> str:
    if "growth-size" not in rows:
        return ""
    series = []
    for what, label in (("file", "in the file"), ("memory per key", "in memory")):
        figures = [figure for figure in rows["growth-size"].figures if figure.name.endswith(f", {what}")]
        points = tuple((_size(figure.name), figure.median) for figure in figures if figure.median > 0)
        if points:
            series.append(LineSeries(label, points))
    subtitle = "in the file, and in the memory of a process that has read up to 100,000 of the keys; both logarithmic"
    return charts.lines("Bytes per key", subtitle, "keys in the store", "bytes", series)


def _size(name: str) -> int:
    return int(name.split(" ")[0].replace(",", ""))


def _loaded(title: str, row: Row | None) -> str:
    if row is None:
        return ""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for reached in row.arms:
        callers, _, meanwhile = reached.name.partition(" callers, ")
        points.setdefault(meanwhile, []).append((reached.rate.median, reached.figures["p99"].median, callers))
    series = [
        LineSeries(meanwhile, tuple((x, y) for x, y, _ in found), tuple(note for _, _, note in found))
        for meanwhile, found in points.items()
    ]
    subtitle = "each point: so many concurrent callers, and what else goes on; right and low is better; logarithmic"
    return charts.lines(title, subtitle, "operations per second", "p99, ms", series)
