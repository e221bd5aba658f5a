"""The lines of a plugin service's log, and how many there are."""

import logging

import pytest

from keyloft.nats import log_rate
from keyloft.plugins import logs
from keyloft.plugins.logs import OperationLog


class LogClock:
    """A clock for the log, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> LogClock:
    seconds = LogClock()
    monkeypatch.setattr(logs, "time", seconds)
    monkeypatch.setattr(log_rate, "time", seconds)
    return seconds


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, seconds: LogClock) -> OperationLog:
    caplog.set_level(logging.DEBUG)
    return OperationLog(logging.getLogger("tests.plugins.logs"))


def test_an_operation_has_a_line_and_fields(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    log.operation("get", "trivia", "score", 0.0032, hit=True)
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == "[KV] get: plugin=trivia key=score hit=true latency_ms=3.2"
    fields = {"operation": "kv_get", "plugin": "trivia", "key": "score", "hit": True, "latency_ms": 3.2}
    assert fields.items() <= record.__dict__.items()


@pytest.mark.parametrize(
    "key", ["two words", "score hit=true", "line\nbreak", "\x1b[2J", "\x9b31m", "\u202egpj", "=", "'"], ids=ascii
)
def test_a_key_that_could_mislead_a_reader_is_quoted(
    log: OperationLog, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    log.operation("get", "trivia", key, 0.0032, hit=False)
    [record] = caplog.records
    assert record.getMessage() == f"[KV] get: plugin=trivia key={key!r} hit=false latency_ms=3.2"
    assert record.getMessage().isprintable()
    assert record.__dict__["key"] == key


def test_a_list_has_no_key(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    log.operation("list", "trivia", "", 0.0032, count=7)
    assert caplog.messages == ["[KV] list: plugin=trivia count=7 latency_ms=3.2"]


def test_a_line_without_details_has_no_gap(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    log.operation("usage", "trivia", "", 0.0032)
    assert caplog.messages == ["[KV] usage: plugin=trivia latency_ms=3.2"]


def test_a_reason_has_no_raw_control_characters(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    log.refusal("set", "trivia", "k", "VALIDATION_ERROR", "unknown field \x1b[2J")
    log.unexpected(ValueError("\u202e"))
    assert all(message.isprintable() for message in caplog.messages)


def test_a_set_is_logged_with_its_size_and_ttl(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    log.operation("set", "trivia", "score", 0.001, size=3, ttl=None)
    log.operation("set", "trivia", "score", 0.001, size=3, ttl=60)
    assert [record.__dict__["ttl"] for record in caplog.records] == [None, 60]
    assert "size=3 ttl=null" in caplog.text
    assert "size=3 ttl=60" in caplog.text


def test_a_slow_operation_is_a_warning(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    log.operation("set", "trivia", "score", 0.1, size=3)
    log.operation("set", "trivia", "score", 0.1001, size=3)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.WARNING]
    assert "slow set" in caplog.text


def test_above_a_thousand_a_second_one_in_a_hundred_is_logged(
    log: OperationLog, caplog: pytest.LogCaptureFixture, seconds: LogClock
) -> None:
    for _ in range(5000):
        log.operation("get", "trivia", "k", 0.001, hit=False)
    assert len(caplog.records) == 1000 + 40
    caplog.clear()
    seconds.now += 1
    for _ in range(500):
        log.operation("get", "trivia", "k", 0.001, hit=False)
    assert len(caplog.records) == 5, "the second before was busy"
    caplog.clear()
    seconds.now += 1
    for _ in range(500):
        log.operation("get", "trivia", "k", 0.001, hit=False)
    assert len(caplog.records) == 500


def test_a_flood_of_errors_is_no_flood_of_lines(
    log: OperationLog, caplog: pytest.LogCaptureFixture, seconds: LogClock
) -> None:
    for _ in range(1000):
        log.refusal("set", "trivia", "k", "BUSY", "too many")
    for _ in range(1000):
        log.operation("set", "trivia", "k", 0.5, size=3)
    assert len(caplog.records) == 20
    seconds.now += 1
    log.refusal("set", "trivia", "k", "BUSY", "too many")
    assert "1980 more requests failed or were slow" in caplog.text
    assert len(caplog.records) == 22


def test_what_was_left_out_is_announced_at_close(log: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        log.refusal("set", "trivia", "k", "BUSY", "locked")
    log.close()
    log.close()
    assert caplog.messages[20:] == ["[KV] 30 more requests failed or were slow within a second"]
