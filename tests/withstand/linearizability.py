"""Checks whether what clients saw of one key could have come from one copy of it, changed at one moment per call.

The search is Wing and Gong's: take any call that may come first, see whether the key's model allows its outcome, and go
on from there; if nothing fits, go back. What is left over after the same calls with the same state is tried only once.

A call whose outcome is unknown may have taken effect at any later time, or never.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

S = TypeVar("S", bound=Hashable)

NEVER: Final = math.inf
"""When a call ended whose outcome is unknown."""


class KeyCall(Struct, frozen=True):
    """What a client asked of one key, and what it was answered."""

    began: float
    ended: float
    """NEVER if the client doesn't know whether it took effect."""
    does: str
    """As the model of the key names it."""
    given: Hashable = None
    seen: Hashable = None

    @property
    def is_unknown(self) -> bool:
        return self.ended == NEVER


class KeyModel(Struct, Generic[S], frozen=True):
    """How a key behaves while only one client uses it."""

    initial: S
    step: "Callable[[S, KeyCall], S | None]"
    """The state after a call; None if the call could not have had this outcome."""
    writes: "Callable[[KeyCall], Hashable | None]"
    """The value that a call writes, if every write has a value of its own; else None."""
    shows: "Callable[[KeyCall], Hashable | None]"
    """The value that was stored before a call that took effect, as far as the call tells."""


def first_misfit(model: KeyModel[S], calls: Sequence[KeyCall]) -> KeyCall | None:
    """The call at which no order explains what was seen; None if there is an order for all of them."""
    pending = sorted(_without_open_ends(model, calls), key=lambda call: call.began)
    count = len(pending)
    must = sum(1 << index for index, call in enumerate(pending) if not call.is_unknown)
    done, state = 0, model.initial
    tried: set[tuple[int, S]] = set()
    path: list[tuple[int, S, int]] = []
    furthest = 0
    at = 0
    while done & must != must:
        first = _first_open(done, count)
        latest = math.inf  # a call that began after another one ended can't come before it
        index, after = max(at, first), None
        for before in range(first, index):
            if not done >> before & 1:
                latest = min(latest, pending[before].ended)
        while index < count and pending[index].began <= latest:
            if not done >> index & 1:
                call = pending[index]
                if not _is_like_an_earlier(pending, done, first, index):
                    after = model.step(state, call)
                    if after is not None and (done | 1 << index, after) not in tried:
                        break
                    after = None
                latest = min(latest, call.ended)
            index += 1
        if after is None:
            if not path:
                return pending[furthest]
            done, state, at = path.pop()
            continue
        path.append((done, state, index + 1))
        done, state, at = done | 1 << index, after, 0
        tried.add((done, state))
        furthest = max(furthest, min(_first_open(done | ~must, count), count - 1))
    return None


def _first_open(done: int, count: int) -> int:
    """The number of calls that are done before the first one that is not: of the lowest bit that is not set."""
    return min((~done & (done + 1)).bit_length() - 1 if ~done else count, count)


def _is_like_an_earlier(pending: Sequence[KeyCall], done: int, first: int, index: int) -> bool:
    """Whether an unknown call that does the same is still open: whichever comes first, the rest is the same."""
    call = pending[index]
    if not call.is_unknown:
        return False
    return any(
        pending[other].is_unknown
        and not done >> other & 1
        and pending[other].does == call.does
        and pending[other].given == call.given
        for other in range(first, index)
    )


def _without_open_ends(model: KeyModel[S], calls: Sequence[KeyCall]) -> list[KeyCall]:
    """Unknown writes that were seen have taken effect before that; of those that were not seen, nothing is known.

    Only where every write has a value of its own. Without this, each unknown write would double what must be tried.
    """
    ends: dict[Hashable, float] = {}  # of each value that was seen: when, at the latest, it was written
    kept = [call for call in calls if not call.is_unknown or model.writes(call) is None]
    unknown = [call for call in calls if call.is_unknown and model.writes(call) is not None]
    fresh = kept
    while fresh:
        for call in fresh:
            if (value := model.shows(call)) is not None:
                ends[value] = min(ends.get(value, NEVER), call.ended)
        fresh = [
            KeyCall(call.began, max(ends[written], call.began), call.does, call.given, call.seen)
            for call in unknown
            if (written := model.writes(call)) in ends
        ]
        kept += fresh
        unknown = [call for call in unknown if model.writes(call) not in ends]
    return kept


# The models of the keys that workers use


def _register_step(state: Hashable, call: KeyCall) -> Hashable | None:
    """A key with unique values: set, get, and swap, which sets if the value is the one that it was given."""
    match call.does:
        case "set":
            return call.given
        case "get":
            return state if call.seen == state else None
        case "swap":
            expected, value = _swapped(call)
            return value if state == expected else None
        case "refused":  # a swap that failed: what it names as stored was there
            return state if call.seen == state and call.given != state else None
    raise AssertionError(call.does)


def _swapped(call: KeyCall) -> tuple[Hashable, Hashable]:
    assert isinstance(call.given, tuple)
    expected, value = call.given
    return expected, value


def _register_writes(call: KeyCall) -> Hashable | None:
    if call.does == "swap":
        return _swapped(call)[1]
    return call.given if call.does == "set" else None


def _register_shows(call: KeyCall) -> Hashable | None:
    if call.does == "swap":
        return _swapped(call)[0]
    return call.seen


ABSENT: Final = 0
"""The value of a register that was never set."""
REGISTER: Final = KeyModel[Hashable](ABSENT, _register_step, _register_writes, _register_shows)


def _counter_step(state: int, call: KeyCall) -> int | None:
    if call.does == "get":
        return state if call.seen == state else None
    assert isinstance(call.given, int)
    total = state + call.given
    return total if call.seen is None or call.seen == total else None


COUNTER: Final = KeyModel[int](0, _counter_step, lambda call: None, lambda call: None)
"""A key that is summed; a sum may see the new total."""
