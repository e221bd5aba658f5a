"""Tortures a cluster for minutes, and reports what clients saw: `scripts/torture [MINUTES] [--engine NAME]`."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.withstand.faults import Arena, etcd_arena, postgres_arena
from tests.withstand.run import ClusterTrial, MadeFault, Workload, tried
from tools import etcd, patroni
from tools.machines import NO_NAMESPACES, can_cut

_MOST_WORKERS = 6
"""Clients join while a fault lasts, up to so many."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/torture", description="Kills, freezes and cuts nodes under load.")
    parser.add_argument("minutes", nargs="?", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--engine", choices=["postgres", "etcd"], default="postgres")
    parser.add_argument("--workers", type=int, default=3, help="processes that use the store (default: 3)")
    parser.add_argument("--reads", choices=["primary", "standby"], help="where gets go, on PostgreSQL")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(1 << 32)), help="chooses the faults")
    parser.add_argument("--only", metavar="FAULT", action="append", help="make no other faults than this one")
    parser.add_argument("--report", type=Path, help="a file for the report, beside standard output")
    parser.add_argument("--keep", type=Path, help="an empty folder in which the histories stay")
    given = parser.parse_args()
    if (
        reason := patroni.missing()
        if given.engine == "postgres"
        else None
        if etcd.is_installed()
        else etcd.NOT_INSTALLED
    ):
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    cuts = can_cut()
    if not cuts:
        _say(NO_NAMESPACES)
    options: dict[str, Any] = {"patience": 60.0, **({"reads": given.reads} if given.reads else {})}
    troubles: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        histories: Path = given.keep or folder / "histories"
        histories.mkdir(exist_ok=True, parents=True)
        is_postgres = given.engine == "postgres"
        with postgres_arena(cuts=cuts) if is_postgres else etcd_arena(folder, cuts=cuts) as arena:
            _say(f"the cluster runs; seed {given.seed}")
            torment = _torment(arena, given.minutes * 60, random.Random(given.seed), given.only, troubles)
            trial = tried(arena, histories, torment, workers=given.workers, seed=given.seed, options=options)
    text = report(given.engine, given.seed, trial, troubles)
    if given.report:
        given.report.write_text(text)
    sys.stdout.write(text)
    return 1 if trial.findings.faults else 0


def _torment(
    arena: Arena, seconds: float, chance: random.Random, only: list[str] | None, troubles: list[str]
) -> Callable[[Workload], None]:
    """Makes faults for so long; `troubles` gets those after which the cluster did not become whole in time."""

    def make_faults(load: Workload) -> None:
        end = time.monotonic() + seconds
        names = only or [*arena.faults, "a client freezes", "a client dies"]
        waiting: list[str] = []
        while time.monotonic() < end:
            # All of them in some order, then all again in another one: a short run meets each.
            waiting = waiting or chance.sample(names, len(names))
            name, lasting = waiting.pop(), chance.uniform(1, 25)
            _say(f"{name}, for {lasting:.0f} s")
            try:
                if name == "a client freezes":
                    load.suffer_frozen_client(chance.randrange(len(load.workers)), min(lasting, 8))
                elif name == "a client dies":
                    # Not the first one: it has the machine that can be cut off.
                    load.suffer_killed_client(chance.randrange(1, len(load.workers)))
                else:
                    joins = load.join if len(load.workers) < _MOST_WORKERS else lambda: None
                    load.suffer(name, arena.faults[name], lasting, arena.wait_until_whole, meanwhile=joins)
            except (RuntimeError, OSError) as error:
                # What clients saw until then is judged all the same.
                troubles.append(f"{name}: {str(error).splitlines()[0]}")
                _say(troubles[-1])
                arena.wait_until_whole()
            time.sleep(chance.uniform(0.5, 3))

    return make_faults


def report(engine: str, seed: str, trial: ClusterTrial, troubles: Sequence[str] = ()) -> str:
    """The report, as a page of Markdown."""
    findings = trial.findings
    lines = [
        f"# {engine}, {trial.seconds / 60:.1f} minutes, {len(trial.faults)} faults, seed {seed}",
        "",
        "| Fault | times | longest without writes | longest without reads |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(fault.name for fault in trial.faults):
        made = [fault for fault in trial.faults if fault.name == name]
        lines.append(f"| {name} | {len(made)} | {_longest(made, 'writes_out')} | {_longest(made, 'reads_out')} |")
    lines += [
        "",
        f"- {findings.acknowledged:,} writes acknowledged, {findings.reads:,} reads, {findings.unknown} outcomes "
        f"unknown, {findings.failed} calls failed, {findings.abandoned} writes cancelled, or of clients that died",
        f"- {len(findings.lost)} lost, {len(findings.doubled)} doubled, {len(findings.stale)} keys with stale reads",
        f"- a read was at most {findings.staleness:.1f} s older than a write acknowledged before",
        f"- {len(findings.versions)} versions given twice or out of order",
        f"- {len(findings.locks)} writes under a lock that another holder had",
        f"- {len(findings.watches)} changes that watches missed or reported backwards",
        f"- {len(findings.sessions)} reads older than what their client had seen",
        f"- {len(troubles)} times the cluster did not become whole in a minute by itself",
        *[f"    {trouble}" for trouble in troubles],
        *[f"- {name}: {times} callers" for name, times in sorted(trial.errors.items())],
        "",
        *[f"    {fault}" for fault in findings.faults[:50]],
    ]
    return "\n".join(lines).rstrip() + "\n"


def _longest(made: Sequence[MadeFault], field: str) -> str:
    return f"{max(getattr(fault, field) for fault in made):.1f} s"


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


if __name__ == "__main__":
    sys.exit(main())
