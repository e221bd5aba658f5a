"""Which host is used, and how far standbys are behind, by what the hosts answer."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

import keyloft
from keyloft.core.urls import DatabaseUrl
from keyloft.engines.postgres.host_state import HostState
from keyloft.engines.postgres.hosts import HostChoice
from keyloft.engines.postgres.lag import LagMeter
from keyloft.errors import CannotOpen, Unreachable


class KeptConnection:
    """Takes the place of a connection, which is only kept and closed here."""

    def __init__(self) -> None:
        self.closed = False

    def is_closed(self) -> bool:
        return self.closed

    def terminate(self) -> None:
        self.closed = True


def primary(name: str, timeline: int, **more: Any) -> HostState:
    return HostState(name=name, is_writable=True, timeline=timeline, cluster=7, **more)


def standby(name: str, timeline: int, **more: Any) -> HostState:
    return HostState(name=name, is_standby=True, timeline=timeline, cluster=7, **more)


def silent(name: str) -> HostState:
    return HostState(name=name, error=Unreachable(f"{name} does not answer"))


class Answers:
    """What the hosts a, b and c answer."""

    def __init__(self, *states: HostState) -> None:
        self.states = {state.name: state for state in states}
        self.choice = HostChoice("PostgreSQL at a,b,c/app", [{"host": name} for name in self.states], self._ask)

    async def _ask(self, host: Mapping[str, Any], connection: Any) -> tuple[Any, HostState]:
        state = self.states[host["host"]]
        if state.error is not None:
            raise state.error
        return KeptConnection(), state

    def now(self, *states: HostState) -> None:
        self.states |= {state.name: state for state in states}
        self.choice.failed()

    async def chosen(self) -> str:
        name = (await self.choice.find())["host"]
        self.choice.accept(KeptConnection(), self.states[name])
        return str(name)


async def test_the_highest_timeline_is_chosen_and_the_one_in_use_among_equals() -> None:
    hosts = Answers(primary("a", 1), primary("b", 2), standby("c", 1))
    assert await hosts.chosen() == "b"
    hosts.now(primary("a", 2))
    assert await hosts.chosen() == "b"
    hosts.now(primary("a", 3), silent("b"))
    assert await hosts.chosen() == "a"
    assert hosts.choice.failovers == 1


@pytest.mark.parametrize("is_standby", [True, False], ids=["standby", "read-only"])
async def test_a_former_primary_is_refused_while_another_host_knows_better(is_standby: bool) -> None:
    hosts = Answers(primary("a", 1), HostState(name="b", is_standby=is_standby, timeline=2, cluster=7), silent("c"))
    with pytest.raises(Unreachable, match=r"a is a primary on timeline 1; b is .* on timeline 2; c does not answer"):
        await hosts.chosen()


async def test_a_former_primary_is_refused_after_the_new_one_has_gone_silent() -> None:
    hosts = Answers(primary("a", 1), primary("b", 2), silent("c"))
    assert await hosts.chosen() == "b"
    hosts.now(silent("b"))
    with pytest.raises(Unreachable, match="timeline 2 was seen"):
        await hosts.chosen()


async def test_hosts_that_do_not_replicate_each_other_are_refused() -> None:
    hosts = Answers(primary("a", 1), HostState(name="b", is_writable=True, timeline=5, cluster=8), silent("c"))
    with pytest.raises(CannotOpen, match="different clusters"):
        await hosts.chosen()


async def test_another_cluster_that_appears_later_is_passed_over() -> None:
    hosts = Answers(primary("a", 1), silent("b"), silent("c"))
    assert await hosts.chosen() == "a"
    hosts.now(HostState(name="b", is_writable=True, timeline=5, cluster=8))
    assert await hosts.chosen() == "a"


def test_the_lag_is_the_time_since_the_primary_showed_what_the_standby_shows() -> None:
    meter = LagMeter()

    def measured(at: float, version: int | None, *shown: int) -> list[float]:
        states = [standby(name, 1, version=one, asked_at=at) for name, one in zip("bc", shown, strict=False)]
        asked = None if version is None else primary("a", 1, version=version, asked_at=at)
        return list(meter.measure(asked, states).values())

    assert measured(10.0, 5, 5, 4) == [0.0, math.inf]
    assert measured(12.0, 9, 9, 5) == [0.0, 2.0]
    assert measured(14.0, 9, 9, 8) == [0.0, 4.0]
    assert measured(16.0, 9, 9, 9) == [0.0, 0.0]
    # Nothing is committed while there is no primary; a standby may have got more than the primary showed last.
    assert measured(88.0, None, 11, 8) == [0.0, 6.0]
    assert measured(90.0, None, 11, 8) == [0.0, 6.0]
    # A new primary lacks what a standby of the former one shows.
    assert measured(92.0, 8, 11, 8) == [math.inf, 0.0]


async def test_options_that_say_where_to_read_are_kept_from_the_driver() -> None:
    for query, left in {
        "reads=standby": "",
        "reads=standby&sslmode=disable": "?sslmode=disable",
        "sslmode=disable&max_lag=2&reads=standby": "?sslmode=disable",
        "sslmode=disable&max_lag=2&application_name=bot": "?sslmode=disable&application_name=bot",
    }.items():
        address = DatabaseUrl.parse(f"postgresql://me@db/app?{query}").postgres
        assert address is not None
        assert address.dsn == f"postgresql://me@db/app{left}"
    for wrong in ({"reads": "nearest"}, {"max_lag": 0}, {"max_lag": True}):
        with pytest.raises(keyloft.InvalidInput, match=f"^{next(iter(wrong))}: expected"):
            await keyloft.open(**wrong)
