"""Runs a benchmark by its name: `scripts/bench embedded|nats|postgres|semantic [--quick]`."""

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench import embedded, on_postgres, over_nats, report, semantic

_RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures Keyloft against its peers.")
    parser.add_argument("benchmark", choices=["embedded", "nats", "postgres", "semantic"])
    parser.add_argument("--quick", action="store_true", help="fewer keys and rounds: a look, not a measurement")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the databases go; a real disk (default: here)")
    parser.add_argument("--only", metavar="ROW", action="append", help="measure this row alone, and save nothing")
    given = parser.parse_args()
    # Like Ctrl-C: children end, and temporary files go.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))

    scale: embedded.Scale | over_nats.Scale | on_postgres.Scale | semantic.Scale
    match given.benchmark:
        case "nats":
            scale = over_nats.QUICK if given.quick else over_nats.FULL
        case "postgres":
            scale = on_postgres.QUICK if given.quick else on_postgres.FULL
        case "semantic":
            scale = semantic.QUICK if given.quick else semantic.FULL
        case _:
            scale = embedded.QUICK if given.quick else embedded.FULL
    notes = [f"{scale.stored:,} keys, {scale.rounds} interleaved rounds after a warm-up; median (lowest … highest)"]
    if given.quick:
        notes.append("--quick: too few keys and rounds to hold a bar against; nothing is saved")
    began = time.monotonic()
    rows = []
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=given.dir.absolute(), prefix=".bench-")))
        about = report.machine(given.dir.absolute())
        match scale:
            case over_nats.Scale():
                about |= over_nats.software()
                notes.append(
                    f"from «fsync» on, what the service was designed to reach: {scale.target_rounds} rounds, "
                    "and no warm-up"
                )
                measures = over_nats.rows(scale, folder)
            case on_postgres.Scale():
                server = closing.enter_context(on_postgres.serving(folder))
                about |= server.software()
                notes.append(
                    "asyncpg pool: create_pool(url) as it is by default, ten connections; a release resets the "
                    "connection, which is a trip to the server of its own"
                )
                measures = closing.enter_context(on_postgres.rows(scale, folder, server))
            case semantic.Scale():
                server = closing.enter_context(on_postgres.serving(folder))
                about |= server.software()
                notes += semantic.NOTES
                measures = semantic.rows(scale, folder, server, closing)
            case embedded.Scale():
                measures = embedded.rows(scale, folder)
        wanted = given.only or list(measures)
        if unknown := set(wanted) - set(measures):
            parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(measures)}")
        report.show_head(about, notes)
        for name in wanted:
            row = measures[name]()
            report.show(row)
            rows.append(row)
    missed = [verdict for row in rows for verdict in row.verdicts if not verdict.ok]
    print(f"\n{len(missed)} bars missed; {time.monotonic() - began:.0f} s")
    if not given.quick and not given.only:
        saved = _RESULTS / f"{given.benchmark}.json"
        report.save(saved, about, notes, rows)
        print(f"saved to {saved}")
    return 1 if given.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
