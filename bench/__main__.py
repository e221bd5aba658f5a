"""Runs a benchmark or all of them, `scripts/bench [NAME] [--quick]`, or renders the pages, `scripts/bench report`.

`scripts/bench commits --against COMMIT` shows what a change made faster or slower, and saves nothing; so does
`scripts/bench postgres --against COMMIT`, which then has rows for it.
"""

import argparse
import importlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.harness import machine
from bench.harness.benchmark import Benchmark
from bench.pages import documents, report

_MODULES = {
    "embedded": "bench.benchmarks.embedded",
    "nats": "bench.benchmarks.nats",
    "postgres": "bench.benchmarks.postgres",
    "engines": "bench.benchmarks.engines",
    "semantic": "bench.benchmarks.semantic",
    "http": "bench.benchmarks.http",
    "floods": "bench.benchmarks.floods",
    "move": "bench.benchmarks.move",
    "peers": "bench.benchmarks.peers",
}
"""Each has `prepared`, a `benchmark.Preparing`; some also take a commit to compare with."""
_COMMITS, _COMMITS_MODULE = "commits", "bench.benchmarks.commits"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures Keyloft against its peers.")
    names = [*_MODULES, _COMMITS, "report"]
    parser.add_argument("benchmark", nargs="?", choices=names, help="if not given, all that compare with peers")
    parser.add_argument(
        "--quick", action="store_true", help="few keys and rounds: shows that it runs, and saves nothing"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the databases go; a real disk (default: here)")
    parser.add_argument("--only", metavar="ROW", action="append", help="measure this row alone, and save nothing")
    parser.add_argument(
        "--against", metavar="COMMIT", help="of `commits` and `postgres`: what to compare with; saves nothing"
    )
    given = parser.parse_args()
    if given.benchmark == "report":
        documents.write(sys.stdout.write)
        return 0
    if given.benchmark is None:
        return _all(given)
    return _one(given, parser)


def _all(given: argparse.Namespace) -> int:
    """Each in a process of its own, so that none inherits the memory of another."""
    options = [*["--quick"] * given.quick, *["--strict"] * given.strict, "--dir", str(given.dir)]
    worst = 0
    for name in _MODULES:
        print(f"\n== {name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", "bench", name, *options], check=False).returncode)
    return worst


def _one(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Like Ctrl-C: children end, and temporary files go.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if given.against is not None and given.benchmark not in (_COMMITS, "postgres"):
        parser.error(f"--against: {given.benchmark} compares with no commit; commits and postgres do")
    prepare: Callable[..., Benchmark] = importlib.import_module(_MODULES.get(given.benchmark, _COMMITS_MODULE)).prepared
    if given.against is not None:
        prepare = partial(prepare, commit=given.against)
    began = time.monotonic()
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=given.dir.absolute(), prefix=".bench-")))
        about = machine.described(given.dir.absolute())
        bench = prepare(given.quick, folder, closing)
        about |= bench.about
        notes = [*bench.notes, *["--quick: too little to hold a bar against; nothing is saved"] * given.quick]
        wanted = _wanted(bench, given.only, parser)
        report.show_head(about, notes)
        rows = {}
        for name in wanted:
            started = time.monotonic()
            rows[name] = bench.rows[name]()
            report.show(rows[name])
            print(f"  [{name}: {time.monotonic() - started:.0f} s]", flush=True)
    missed = sum(not verdict.ok for row in rows.values() for verdict in row.verdicts)
    print(f"\n{missed} bars missed; {time.monotonic() - began:.0f} s")
    if not given.quick and not given.only and given.benchmark != _COMMITS and given.against is None:
        report.save(documents.results_of(given.benchmark), report.Results(about, notes, rows))
        documents.write(sys.stdout.write)
    return 1 if given.strict and missed else 0


def _wanted(bench: Benchmark, only: list[str] | None, parser: argparse.ArgumentParser) -> list[str]:
    wanted = only or list(bench.rows)
    if unknown := set(wanted) - set(bench.rows):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(bench.rows)}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
