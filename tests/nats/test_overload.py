"""What is refused because too much is waiting has a line with a count per owner and second, not per request."""

import logging

import pytest

from keyloft import limits
from keyloft.nats.overload import OverloadLog

logger = logging.getLogger("tests.nats.overload")


async def test_an_owner_has_a_line_at_once_and_one_for_all_that_follow(caplog: pytest.LogCaptureFixture) -> None:
    log = OverloadLog(logger, "plugin")
    for _ in range(1000):
        log.add("trivia", 2, 0)
    log.add("quotes", 1, 3)
    assert caplog.messages == ["[KV] refused: plugin=trivia error=BUSY requests=2 too much is waiting"]
    log.close()
    log.close()
    assert caplog.messages[1:] == [
        "[KV] refused: plugin=trivia error=BUSY requests=1998 too much is waiting",
        "[KV] refused: plugin=quotes error=BUSY requests=1 too much is waiting",
        "[KV] dropped 3 published messages of plugin=quotes: too much is waiting",
    ]
    fields = {"operation": "refused", "plugin": "trivia", "error_code": "BUSY", "requests": 1998}
    assert fields.items() <= caplog.records[1].__dict__.items()


async def test_very_many_owners_have_no_more_lines_than_other_refusals(caplog: pytest.LogCaptureFixture) -> None:
    log = OverloadLog(logger, "tenant")
    log.add("first", 1, 0)
    for number in range(1000):
        log.add(f"t{number}", 1, 0)
    log.close()
    assert len(caplog.messages) == 1 + limits.LOG_LINES_PER_SECOND + 1
    assert caplog.messages[-1] == "[KV] refused: 980 other tenants error=BUSY requests=980 too much is waiting"
