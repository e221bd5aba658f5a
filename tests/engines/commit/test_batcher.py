"""How many batches a group takes."""

from keyloft import limits
from keyloft.engines.commit.batcher import GroupPace

CALLERS = 64


class _Groups:
    """Groups of a pace whose time a test decides."""

    def __init__(self) -> None:
        self._now = 100.0
        self.pace = GroupPace(lambda: self._now)

    def commit(self, waiting: int, *, took: float, away: float) -> int:
        """How many of so many batches a group takes, whose callers were away before it."""
        self._now += away
        batches = self.pace.most_batches(waiting)
        self.pace.begins(batches)
        self._now += took
        self.pace.ended()
        return batches

    def idle(self) -> None:
        self.pace.begins(0)


def test_callers_that_are_away_for_longer_than_their_group_took_are_served_in_two_groups_by_turns() -> None:
    groups = _Groups()
    assert groups.commit(CALLERS, took=0.001, away=1.0) == CALLERS, "nothing is known of these callers"
    groups.idle()
    assert groups.commit(CALLERS, took=0.001, away=0.002) == CALLERS // 2
    assert groups.commit(CALLERS // 2, took=0.001, away=0.0) == CALLERS // 2
    assert groups.commit(CALLERS // 2, took=0.001, away=0.0) == CALLERS // 2


def test_on_a_slow_disk_all_callers_are_served_together() -> None:
    groups = _Groups()
    for _ in range(3):
        assert groups.commit(CALLERS, took=0.010, away=0.020) == CALLERS
        groups.idle()


def test_callers_that_come_back_sooner_than_a_group_takes_are_served_together() -> None:
    groups = _Groups()
    for _ in range(3):
        assert groups.commit(CALLERS, took=0.001, away=0.0005) == CALLERS
        groups.idle()


def test_unequal_groups_that_follow_each_other_become_equal() -> None:
    groups = _Groups()
    groups.commit(12, took=0.001, away=0.0)
    assert groups.commit(52, took=0.001, away=0.0) == CALLERS // 2


def test_few_callers_are_served_together() -> None:
    groups = _Groups()
    few = limits.GROUP_WORTH_TWO - 1
    for _ in range(3):
        assert groups.commit(few, took=0.001, away=0.002) == few
        groups.idle()
