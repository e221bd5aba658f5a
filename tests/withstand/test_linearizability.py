"""The checker accepts what one copy could have shown, and finds what it could not."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.withstand.linearizability import ABSENT, COUNTER, NEVER, REGISTER, KeyCall, KeyModel, first_misfit

SEEDS = st.integers(0, 1 << 32)


@dataclass
class OneCopy:
    """One key and its clients: each call takes effect at a moment between its begin and its end, or is lost."""

    chance: random.Random
    now: float = 0.0
    stored: int = ABSENT
    written: int = 0
    calls: list[KeyCall] = field(default_factory=list)

    def made(self, model: KeyModel[int], clients: int, each: int) -> list[KeyCall]:
        """Clients that call one after the other, all at once, as their moments come."""
        waiting = [(self.chance.random(), client) for client in range(clients) for _ in range(each)]
        moments = sorted(waiting)
        busy_until: dict[int, float] = {}
        for moment, client in moments:
            began = self.chance.uniform(busy_until.get(client, moment - 0.1), moment)
            ended = moment + self.chance.random() / 10
            following = [at for at, other in moments if other == client and at > moment]
            ended = min([ended, *[self.chance.uniform(moment, at) for at in following[:1]]])
            busy_until[client] = ended
            self.calls.append(self._register(began, ended) if model is REGISTER else self._counter(began, ended))
        self.chance.shuffle(self.calls)
        return self.calls

    def _register(self, began: float, ended: float) -> KeyCall:
        if self.chance.random() < 0.5:
            return KeyCall(began, ended, "get", None, self.stored)
        self.written += 1
        is_lost = self.chance.random() < 0.2
        if self.chance.random() < 0.5:
            if not (is_lost and self.chance.random() < 0.5):
                self.stored = self.written
            return KeyCall(began, NEVER if is_lost else ended, "set", self.written)
        expected = self.chance.choice([self.stored, self.chance.randrange(self.written)])
        if expected != self.stored:
            return KeyCall(began, ended, "refused", expected, self.stored)
        if not (is_lost and self.chance.random() < 0.5):
            self.stored = self.written
        return KeyCall(began, NEVER if is_lost else ended, "swap", (expected, self.written))

    def _counter(self, began: float, ended: float) -> KeyCall:
        if self.chance.random() < 0.3:
            return KeyCall(began, ended, "get", None, self.stored)
        amount = self.chance.randrange(1, 3)
        if self.chance.random() < 0.2:
            self.stored += self.chance.choice([0, amount])
            return KeyCall(began, NEVER, "sum", amount)
        self.stored += amount
        return KeyCall(began, ended, "sum", amount, self.stored)


@pytest.mark.parametrize("model", [REGISTER, COUNTER], ids=["register", "counter"])
@examples(60, deadline=None)
@given(seed=SEEDS)
def test_what_one_copy_showed_is_accepted(model: KeyModel[int], seed: int) -> None:
    chance = random.Random(seed)
    assert first_misfit(model, OneCopy(chance).made(model, chance.randrange(1, 6), chance.randrange(1, 12))) is None


@pytest.mark.parametrize("model", [REGISTER, COUNTER], ids=["register", "counter"])
@examples(60, deadline=None)
@given(seed=SEEDS)
def test_a_value_that_no_one_had_written_is_found(model: KeyModel[int], seed: int) -> None:
    chance = random.Random(seed)
    calls = OneCopy(chance).made(model, chance.randrange(1, 6), chance.randrange(2, 12))
    calls.append(KeyCall(0.5, 0.6, "get", None, 1_000_000))
    assert first_misfit(model, calls) is not None


@pytest.mark.parametrize("model", [REGISTER, COUNTER], ids=["register", "counter"])
@examples(60, deadline=None)
@given(seed=SEEDS)
def test_a_lost_or_stale_value_is_found(model: KeyModel[int], seed: int) -> None:
    """At the end, alone, a client reads, writes, and then reads what it read before."""
    chance = random.Random(seed)
    copy = OneCopy(chance)
    calls = copy.made(model, chance.randrange(1, 6), chance.randrange(1, 12))
    before = copy.stored
    calls.append(KeyCall(1.5, 1.6, "get", None, before))  # what is stored was written: no lost write may bring it back
    calls.append(
        KeyCall(2, 3, "set", 1_000_000) if model is REGISTER else KeyCall(2, 3, "sum", 1_000_000, before + 1_000_000)
    )
    calls.append(KeyCall(4, 5, "get", None, before))
    assert first_misfit(model, calls) is not None


@examples(60, deadline=None)
@given(seed=SEEDS)
def test_a_sum_that_was_made_twice_is_found(seed: int) -> None:
    chance = random.Random(seed)
    copy = OneCopy(chance)
    calls = copy.made(COUNTER, chance.randrange(1, 6), chance.randrange(1, 12))
    unknown = sum(call.given for call in calls if call.is_unknown and isinstance(call.given, int))
    calls.append(KeyCall(2, 3, "get", None, copy.stored))
    calls.append(KeyCall(4, 5, "sum", 100, copy.stored + 200 + unknown))
    assert first_misfit(COUNTER, calls) is not None


@pytest.mark.parametrize(
    "calls",
    [
        [KeyCall(0, 1, "set", 1), KeyCall(2, 3, "set", 2), KeyCall(4, 5, "get", None, 1)],
        [KeyCall(0, NEVER, "set", 1), KeyCall(2, 3, "get", None, 1), KeyCall(4, 5, "get", None, ABSENT)],
        [KeyCall(0, 1, "get", None, 1), KeyCall(2, NEVER, "set", 1)],
        [KeyCall(0, 9, "set", 1), KeyCall(1, 2, "get", None, 1), KeyCall(3, 4, "get", None, ABSENT)],
        [KeyCall(0, 1, "set", 1), KeyCall(2, 3, "swap", (1, 2)), KeyCall(2, 3, "swap", (1, 3))],
        [KeyCall(0, 1, "set", 1), KeyCall(2, 3, "refused", 1, 1)],
    ],
    ids=["an older value", "seen, then gone", "seen before it was written", "back in time", "two winners", "no reason"],
)
def test_each_kind_of_fault_is_found(calls: list[KeyCall]) -> None:
    assert first_misfit(REGISTER, calls) is not None


def test_a_lost_reply_may_take_effect_late_or_never() -> None:
    late = [KeyCall(0, NEVER, "set", 1), KeyCall(1, 2, "get", None, ABSENT), KeyCall(3, 4, "get", None, 1)]
    never = [KeyCall(0, NEVER, "set", 1), KeyCall(1, 2, "get", None, ABSENT), KeyCall(3, 4, "get", None, ABSENT)]
    assert first_misfit(REGISTER, late) is None
    assert first_misfit(REGISTER, never) is None


def test_a_long_history_with_many_unknown_sums_is_checked_in_time() -> None:
    calls, total = [], 0
    for number in range(2000):
        if number % 50 == 0:
            calls.append(KeyCall(number, NEVER, "sum", 1))
            total += number % 100 == 0
        total += 1
        calls.append(KeyCall(number + 0.1, number + 0.9, "sum", 1, total))
    assert first_misfit(COUNTER, calls) is None
