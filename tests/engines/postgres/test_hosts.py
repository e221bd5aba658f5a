"""Which host is used, and how far standbys are behind, by what the hosts answer."""

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import keyloft
from keyloft.core.urls import DatabaseUrl
from keyloft.engines.postgres.host_state import HostState
from keyloft.engines.postgres.hosts import HostChoice
from keyloft.engines.postgres.lag import LagMeter
from keyloft.errors import CannotOpen, Unreachable
from keyloft.limits import VERSION_JUMP


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


async def test_a_standby_that_shows_a_commit_of_a_later_timeline_knows_better() -> None:
    jumped = standby("b", 1, version=VERSION_JUMP + 1, last_commit=2)
    hosts = Answers(primary("a", 1, version=9, last_commit=1), jumped, silent("c"))
    with pytest.raises(Unreachable, match=r"b is a standby on timeline 1 with a commit of timeline 2; c does"):
        await hosts.chosen()


async def test_the_timeline_that_a_dump_has_brought_along_says_nothing_of_the_hosts() -> None:
    hosts = Answers(*[make(name, 1, version=9, last_commit=5) for name, make in (("a", primary), ("b", standby))])
    assert await hosts.chosen() == "a"
    # After the first commit, while the standby has yet to apply it.
    hosts.now(primary("a", 1, version=VERSION_JUMP, last_commit=1))
    assert await hosts.chosen() == "a"
    unknown = Answers(*[make(name, 0, version=9, last_commit=5) for name, make in (("a", primary), ("b", standby))])
    assert await unknown.chosen() == "a"


async def test_standbys_of_another_cluster_are_not_read_from() -> None:
    hosts = Answers(primary("a", 1), standby("b", 1), silent("c"))
    assert await hosts.chosen() == "a"
    hosts.now(HostState(name="c", is_standby=True, timeline=1, cluster=8))
    await hosts.choice.ask_all()
    assert [state.name for state in hosts.choice.standbys] == ["b"]
    assert [host.role for host in hosts.choice.health({}, 0).hosts] == ["primary", "standby", "other cluster"]
    hosts.now(silent("c"))
    await hosts.choice.ask_all()
    assert [host.role for host in hosts.choice.health({}, 0).hosts] == ["primary", "standby", "unreachable"]


async def test_a_standby_that_shows_the_id_of_another_store_keeps_no_one_from_the_primary() -> None:
    """It is behind a restore, which has given the store another id."""
    hosts = Answers(primary("a", 1, store="restored"), standby("b", 1, store="before"), standby("c", 1))
    hosts.choice.store = "restored"
    assert await hosts.chosen() == "a"
    assert [state.name for state in hosts.choice.standbys] == ["c"]
    assert [host.role for host in hosts.choice.health({}, 0).hosts] == ["primary", "other store", "standby"]
    hosts.now(primary("a", 1, store="restored again"))
    with pytest.raises(CannotOpen, match="a holds the store restored again"):
        await hosts.chosen()


async def test_two_names_of_one_server_are_no_two_primaries(caplog: pytest.LogCaptureFixture) -> None:
    """As with two proxies before one cluster. The time of its start tells one server from another."""
    one = datetime(2026, 1, 1, tzinfo=UTC)
    same = primary("a", 2, started=one, last_commit=1), primary("b", 2, started=one, last_commit=1)
    hosts = Answers(*same, standby("c", 2))
    assert await hosts.chosen() == "a"
    hosts.now(HostState(name="c", is_writable=True, timeline=1, cluster=8))
    assert await hosts.chosen() == "a"
    assert [host.role for host in hosts.choice.health({}, 0).hosts] == ["primary", "alias", "other cluster"]
    async with asyncio.timeout(1):
        await hosts.choice.wait_for_readers()  # no former primary can be running
    assert caplog.text == ""
    hosts.now(primary("b", 2, started=one + timedelta(microseconds=1)))
    assert await hosts.chosen() == "a"
    assert "two hosts can be written (a is a primary on timeline 2; b is" in caplog.text
    assert "Keyloft uses a" in caplog.text
    assert [host.role for host in hosts.choice.health({}, 0).hosts] == ["primary", "primary", "other cluster"]


@pytest.mark.parametrize("other", ["silent", "primary", "refuses", "standby"])
async def test_the_first_commit_on_a_timeline_waits_while_a_former_primary_may_be_read_from(other: str) -> None:
    hosts = Answers(primary("a", 1, last_commit=1), standby("b", 1), silent("c"))
    assert await hosts.chosen() == "a"
    refusal = Unreachable("a refuses connections")
    refusal.__cause__ = ConnectionRefusedError()
    refuses = HostState(name="a", error=refusal)
    former = {"silent": silent("a"), "primary": primary("a", 1), "refuses": refuses, "standby": standby("a", 1)}
    hosts.now(former[other], primary("b", 2, last_commit=1), standby("c", 2))
    assert await hosts.chosen() == "b"
    waiting = asyncio.create_task(hosts.choice.wait_for_readers())
    for _ in range(3):
        await asyncio.sleep(0)
    assert waiting.done() == (other in ("refuses", "standby"))
    waiting.cancel()


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
