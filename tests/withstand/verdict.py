"""What a history proves: what was lost, made twice, read too late, or held twice, and for how long calls failed."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from msgspec import Struct

from tests.withstand.history import Entered
from tests.withstand.linearizability import COUNTER, NEVER, REGISTER, KeyCall, KeyModel, first_misfit

_WRITES = ("set", "swap", "sum", "put")
_MODELS: dict[str, KeyModel[Any]] = {"register": REGISTER, "counter": COUNTER}


class Findings(Struct, frozen=True, kw_only=True):
    """What was counted, and what was found to be wrong, one line each."""

    acknowledged: int
    reads: int
    unknown: int
    """Writes whose callers got CommitUnknown, or another error that does not say."""
    abandoned: int
    """Writes whose clients died meanwhile, or that were cancelled because a lock was lost."""
    failed: int
    lost: list[str]
    """Acknowledged, and not there in the end."""
    doubled: list[str]
    """Made more often than asked for."""
    stale: list[str]
    """No order of the calls of a key explains what was seen."""
    staleness: float
    """The longest time for which a newer value of a register had been acknowledged when an older one was read."""
    versions: list[str]
    """Given twice, or not growing with time."""
    locks: list[str]
    """Written under an older fence after a newer one."""
    watches: list[str]
    """Missed, or reported backwards."""
    sessions: list[str]
    """A client that reads from standbys saw something older than it had seen, or written, before."""

    @property
    def faults(self) -> list[str]:
        found = (self.lost, self.doubled, self.stale, self.versions, self.locks, self.watches, self.sessions)
        return [fault for each in found for fault in each]


def judge(history: Sequence[Entered], *, reads_from_standbys: bool = False) -> Findings:
    """Judge a whole history, up to the entries of what is stored in the end.

    Args:
        history: Of all workers.
        reads_from_standbys: Gets may then be older than the newest state, but not than what their worker has seen.
    """
    writes = [one for one in history if one.does in _WRITES]
    done = [one for one in writes if one.outcome == "done"]
    linear = [one for one in history if not (reads_from_standbys and one.does == "get" and one.worker != "end")]
    lost, doubled = _own(history)
    _count(history, lost, doubled)
    return Findings(
        acknowledged=len(done),
        reads=sum(one.does == "get" and one.outcome == "done" for one in history),
        unknown=sum(one.outcome == "unknown" and one.error is not None for one in writes),
        abandoned=sum(one.outcome == "unknown" and one.error is None for one in writes),
        failed=sum(one.outcome == "failed" for one in history),
        lost=lost,
        doubled=doubled,
        stale=_stale(linear),
        staleness=_staleness(history),
        versions=_versions([one for one in done if one.kind != "lock"]),
        locks=_locks([one for one in done if one.kind == "lock"]),
        watches=_watches([one for one in history if one.kind == "watch"]),
        sessions=_sessions(history),
    )


def longest_gap(moments: Iterable[float], start: float, end: float) -> float:
    """The longest time between two of these moments, from start to end."""
    inside = [start, *sorted(moment for moment in moments if start < moment < end), end]
    return max(later - earlier for earlier, later in pairwise(inside))


def successes(history: Sequence[Entered], *, reads: bool) -> list[float]:
    """When calls succeeded that read, or that wrote."""
    return [
        one.ended
        for one in history
        if one.outcome == "done" and ((one.does == "get") if reads else one.does in _WRITES)
    ]


def _own(history: Sequence[Entered]) -> tuple[list[str], list[str]]:
    stored = {one.key: one.version for one in history if one.kind == "own" and one.does == "get"}
    acknowledged = [one for one in history if one.kind == "own" and one.does == "set" and one.outcome == "done"]
    lost = [f"{one.key} is lost" for one in acknowledged if one.key not in stored]
    doubled = [
        f"{one.key} was acknowledged with version {one.version}, and has {stored[one.key]}"
        for one in acknowledged
        if stored.get(one.key, one.version) != one.version
    ]
    failed = [one for one in history if one.kind == "own" and one.does == "set" and one.outcome == "failed"]
    doubled += [f"{one.key} was refused, and is stored" for one in failed if one.key in stored]
    return lost, doubled


def _count(history: Sequence[Entered], lost: list[str], doubled: list[str]) -> None:
    for key, calls in _by_key(history, "counter").items():
        sums = [one for one in calls if one.does == "sum"]
        least = sum(one.outcome == "done" for one in sums)
        most = least + sum(one.outcome == "unknown" for one in sums)
        for total in [one.seen for one in calls if one.worker == "end"]:
            if total < least:
                lost.append(f"counter {key} is {total}; {least} sums were acknowledged")
            if total > most:
                doubled.append(f"counter {key} is {total}; at most {most} sums were made")


def _stale(history: Sequence[Entered]) -> list[str]:
    found = []
    for kind, model in _MODELS.items():
        for key, calls in _by_key(history, kind).items():
            misfit = first_misfit(model, [_call(one) for one in calls if one.outcome != "failed"])
            if misfit is not None:
                found.append(f"{kind} {key}: no order of calls explains {misfit}")
    return found


def _staleness(history: Sequence[Entered]) -> float:
    longest = 0.0
    for calls in _by_key(history, "register").values():
        seen = [one for one in calls if one.outcome == "done" and one.version is not None]
        written = sorted([one for one in seen if one.does in _WRITES], key=lambda one: one.version or 0)
        # From each version on: when the first of the newer ones was acknowledged.
        acknowledged = list(accumulate([one.ended for one in reversed(written)], min))[::-1]
        versions = [one.version or 0 for one in written]
        for one in seen:
            newer = bisect_right(versions, one.version or 0)
            if one.does == "get" and newer < len(versions):
                longest = max(longest, one.began - acknowledged[newer])
    return longest


def _call(one: Entered) -> KeyCall:
    given = tuple(one.given) if isinstance(one.given, list) else one.given
    return KeyCall(one.began, NEVER if one.outcome == "unknown" else one.ended, one.does, given, one.seen)


def _by_key(history: Sequence[Entered], kind: str) -> dict[str, list[Entered]]:
    found = defaultdict(list)
    for one in history:
        if one.kind == kind:
            found[one.key].append(one)
    return found


def _versions(done: Sequence[Entered]) -> list[str]:
    found = []
    with_version = [one for one in done if one.version is not None]
    owners: dict[int, Entered] = {}
    for one in with_version:
        assert one.version is not None
        if (other := owners.setdefault(one.version, one)) is not one:
            found.append(f"version {one.version} was given to {other.kind} {other.given} and to {one.kind} {one.given}")
    ended = sorted(with_version, key=lambda one: one.ended)
    newest, following = 0, 0
    for one in sorted(with_version, key=lambda one: one.began):
        while ended[following].ended < one.began:
            newest = max(newest, ended[following].version or 0)
            following += 1
        if (one.version or 0) <= newest:
            found.append(f"version {one.version} was given after {newest} was acknowledged")
    return found


def _locks(done: Sequence[Entered]) -> list[str]:
    in_order = sorted(done, key=lambda one: one.version or 0)
    return [
        f"{later.worker} wrote version {later.version} under fence {later.fence}, "
        f"after {earlier.worker} under fence {earlier.fence}"
        for earlier, later in pairwise(in_order)
        if (later.fence or 0) < (earlier.fence or 0)
    ]


def _watches(seen: Sequence[Entered]) -> list[str]:
    found = []
    newest: dict[tuple[str, str], int] = {}
    for one in seen:
        if one.does == "missed":
            found.append(f"{one.worker} was not informed of the last value of register {one.key}")
        at = (one.worker, one.key)
        if one.version is not None:
            if one.version < newest.get(at, 0) and one.does == "watch":
                found.append(f"{one.worker}: register {one.key} went back from {newest[at]} to {one.version}")
            newest[at] = max(newest.get(at, 0), one.version)
    return found


def _sessions(history: Sequence[Entered]) -> list[str]:
    """Read your own writes, and never back in time: per worker and register, for calls one after the other.

    What the worker's watch has reported counts as read.
    """
    found = []
    by_session = defaultdict(list)
    for one in history:
        if one.kind in ("register", "watch") and one.outcome == "done" and one.version is not None:
            by_session[one.worker, one.key].append(one)
    for (worker, key), calls in by_session.items():
        ended = sorted(calls, key=lambda one: one.ended)
        newest, following = 0, 0
        for one in sorted(calls, key=lambda one: one.began):
            while ended[following].ended < one.began:
                newest = max(newest, ended[following].version or 0)
                following += 1
            if one.does == "get" and (one.version or 0) < newest:
                found.append(f"{worker} read version {one.version} of register {key} after version {newest}")
    return found
