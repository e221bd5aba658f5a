"""Each kind of damage that a cluster can do shows in the verdict on a history."""

from pathlib import Path
from typing import Any

import pytest

from tests.withstand.history import Entered, Recorder, read_history
from tests.withstand.verdict import Findings, judge, longest_gap


def entered(kind: str, does: str, at: float, **what: Any) -> Entered:
    fields: dict[str, Any] = {"worker": "w0", "key": "k"} | what
    return Entered(kind=kind, does=does, began=at, ended=at + 0.5, **fields)


SOUND = [
    entered("register", "set", 1, given="a", version=10),
    entered("register", "get", 2, seen="a", version=10),
    entered("counter", "sum", 3, given=1, version=11),
    entered("counter", "sum", 4, given=1, outcome="unknown", error="CommitUnknown: …"),
    entered("own", "set", 4.2, key="q", given="q", outcome="unknown"),
    entered("own", "set", 4.4, key="r", given="r", outcome="failed", error="Unreachable: …"),
    entered("counter", "get", 5, seen=1, worker="end"),
    entered("own", "set", 6, key="o", given="o", version=12),
    entered("own", "get", 7, key="o", seen="o", version=12, worker="end"),
    entered("lock", "put", 8, given=13, fence=13, version=14),
    entered("lock", "put", 9, given=15, fence=15, version=16, worker="w1"),
    entered("watch", "watch", 10, version=10),
]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    findings = judge(SOUND)
    assert findings.faults == []
    assert (findings.acknowledged, findings.reads, findings.unknown, findings.abandoned) == (5, 3, 1, 1)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (entered("own", "set", 20, key="p", given="p", version=20), "lost"),
        (entered("counter", "get", 20, seen=0, worker="end"), "lost"),
        (entered("counter", "get", 20, seen=3, worker="end"), "doubled"),
        (entered("own", "set", 20, key="o", given="o", version=20), "doubled"),
        (entered("own", "get", 20, key="r", seen="r", version=20, worker="end"), "doubled"),
        (entered("register", "get", 20, seen=0), "stale"),
        (entered("register", "set", 20, given="b", version=12), "versions"),
        (entered("register", "set", 20, given="b", version=9), "versions"),
        (entered("lock", "put", 20, given=13, fence=13, version=20), "locks"),
        (entered("watch", "missed", 20), "watches"),
        (entered("watch", "watch", 20, version=9), "watches"),
        (entered("register", "get", 20, seen="a", version=9), "sessions"),
    ],
)
def test_damage_is_found(damage: Entered, field: str) -> None:
    findings: Findings = judge([*SOUND, damage])
    assert getattr(findings, field)


def test_an_old_value_from_a_standby_is_stale_only_for_a_client_that_has_seen_a_newer_one() -> None:
    older = [
        entered("register", "set", 20, given="b", version=20),
        entered("register", "get", 21, seen="a", version=10, worker="w1"),
    ]
    assert judge([*SOUND, *older]).stale
    assert judge([*SOUND, *older]).staleness == 0.5
    assert judge([*SOUND, *older], reads_from_standbys=True).faults == []
    own = entered("register", "get", 21, seen="a", version=10)
    assert judge([*SOUND, *older, own], reads_from_standbys=True).sessions


def test_what_a_watch_has_reported_counts_as_seen() -> None:
    newer = [
        entered("register", "set", 20, given="b", version=20, worker="w1"),
        entered("watch", "watch", 21, version=20),
    ]
    older = entered("register", "get", 22, seen="a", version=10)
    assert judge([*SOUND, *newer], reads_from_standbys=True).faults == []
    assert judge([*SOUND, *newer, older], reads_from_standbys=True).sessions


def test_a_write_whose_worker_died_may_have_been_made(tmp_path: Path) -> None:
    with Recorder(tmp_path / "w0.jsonl", "w0") as recorder:
        with recorder.call("own", "a", "set", "a") as call:
            call.version = 7
        with recorder.call("own", "a", "get") as call:
            call.seen = "a"
        with recorder.call("own", "b", "set", "b"):
            pass  # the worker dies before it enters the end
    lines = (tmp_path / "w0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "w0.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:-10])
    history = read_history(tmp_path)
    assert [(one.key, one.does, one.outcome) for one in history] == [
        ("a", "set", "done"),
        ("a", "get", "done"),
        ("b", "set", "unknown"),
    ]


def test_an_outage_is_the_longest_time_between_two_successes() -> None:
    assert longest_gap([1, 2, 7, 8], 0, 10) == 5
    assert longest_gap([1, 2], 0, 10) == 8
