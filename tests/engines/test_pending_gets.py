"""Callers of a read that failed: who gets the error, and who may try again."""

import asyncio
import logging

import pytest

from keyloft.core.records import Get, Record, Space
from keyloft.engines.pending_gets import PendingGets, fail_late
from keyloft.errors import DatabaseError, DiskFull, Unreachable


def waiting(*seconds: float) -> list[PendingGets]:
    """Callers that have waited for these times."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[list[Record | None]]] = [loop.create_future() for _ in seconds]
    return [
        ([Get(Space.TUPLES, b"k")], future, loop.time() - waited)
        for future, waited in zip(futures, seconds, strict=True)
    ]


def error_of(pending: PendingGets) -> BaseException | None:
    return pending[1].exception() if pending[1].done() else None


async def test_callers_with_time_left_try_again_when_the_server_is_away() -> None:
    pending = waiting(70, 61, 5, 0)
    rest = fail_late(pending, Unreachable("away"), "a server", 60)
    assert [type(error_of(each)) for each in pending[:2]] == [Unreachable, Unreachable]
    assert rest == pending[2:]
    assert not any(future.done() for _, future, _ in rest)


async def test_the_first_caller_never_tries_again() -> None:
    pending = waiting(1, 0)
    assert fail_late(pending, Unreachable("away"), "a server", 60) == pending[1:]


async def test_all_callers_get_an_error_that_would_return_each_its_own() -> None:
    pending = waiting(3, 2, 1)
    assert fail_late(pending, DiskFull("full"), "a server", 60) == ()
    errors = [error_of(each) for each in pending]
    assert {type(error) for error in errors} == {DiskFull}
    assert len({id(error) for error in errors}) == 3


async def test_a_defect_is_logged_and_hides_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    [only] = waiting(0)
    with caplog.at_level(logging.ERROR):
        fail_late([only], ValueError("a secret"), "a server", 60)
    error = error_of(only)
    assert isinstance(error, DatabaseError)
    assert str(error) == "a server: reading failed unexpectedly: ValueError"
    assert "looking up keys failed unexpectedly" in caplog.text


async def test_a_caller_that_is_gone_gets_nothing() -> None:
    pending = waiting(2, 1)
    pending[0][1].cancel()
    fail_late(pending, DiskFull("full"), "a server", 60)
    assert pending[0][1].cancelled()
    assert isinstance(error_of(pending[1]), DiskFull)
