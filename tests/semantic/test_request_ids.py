"""Request ids that a workflow can make again."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft import InvalidArgument
from keyloft.semantic import Semantics, SemanticStore, request_id_of, shortened
from tests.semantic.unreliable_network import PROJECT

AT = datetime(2026, 11, 16, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "shown"),
    [
        (AT, "2026-11-16T03:00:00Z/plan"),
        (AT + timedelta(microseconds=1), "2026-11-16T03:00:00.000001Z/plan"),
        (AT.astimezone(timezone(timedelta(hours=-7))), "2026-11-16T03:00:00Z/plan"),
        (datetime.min.replace(tzinfo=UTC), "0001-01-01T00:00:00Z/plan"),
    ],
)
def test_it_is_made_from_a_workflow_and_a_time(at: datetime, shown: str) -> None:
    assert request_id_of("plan", at) == shown


@given(st.datetimes(timezones=st.timezones()), st.datetimes(timezones=st.timezones()))
def test_two_runs_share_an_id_only_if_they_were_planned_for_the_same_moment(one: datetime, other: datetime) -> None:
    def moment(at: datetime) -> datetime | None:
        try:
            return at.astimezone(UTC)
        except OverflowError:
            return None

    if (first := moment(one)) is None or (second := moment(other)) is None:
        return
    assert (request_id_of("w", one) == request_id_of("w", other)) == (first == second)
    assert request_id_of("w", one) != request_id_of("v", one)


async def test_the_longest_one_is_accepted_by_the_store(store: SemanticStore) -> None:
    request_id = request_id_of("w" * 100, AT + timedelta(microseconds=1))
    assert len(request_id) == 128
    for _ in range(2):
        entry = await store.put(
            f"{PROJECT}/x", 1, expected_version=0, writer="w", semantics=Semantics("config"), request_id=request_id
        )
        assert entry.request_id == request_id
    assert request_id_of(shortened("w" * 101), AT)


@pytest.mark.parametrize(
    ("workflow_id", "at", "rule"),
    [
        ("", AT, "^workflow_id: expected a non-empty str$"),
        (7, AT, "^workflow_id: expected a non-empty str, got int$"),
        ("w" * 101, AT, "^workflow_id: expected at most 100 characters, got 101$"),
        ("a\nb", AT, r"^workflow_id: expected no control characters .*U\+000A$"),
        ("\ud800", AT, r"^workflow_id: expected no control characters and no lone surrogates, got U\+D800$"),
        ("plan", datetime(2026, 11, 16), "^at: expected a datetime with a time zone, as"),
        ("plan", AT.timestamp(), "^at: expected a datetime with a time zone, .*, got float$"),
        ("plan", None, "^at: expected a datetime with a time zone, .*, got None$"),
        ("plan", datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "^at: expected a time whose year in UTC"),
    ],
)
def test_what_could_be_no_id_is_refused(workflow_id: Any, at: Any, rule: str) -> None:
    with pytest.raises(InvalidArgument, match=rule):
        request_id_of(workflow_id, at)
