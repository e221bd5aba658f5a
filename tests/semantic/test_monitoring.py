"""Log lines, counters and alerts of the store, none of which shows a value."""

import logging
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

import keyloft
from keyloft import ManualClock, Store, Unreachable
from keyloft.semantic import (
    Alert,
    FailedWrite,
    Intent,
    Semantics,
    SemanticStore,
    Signals,
    StaleFence,
    VersionConflict,
    monitoring,
)
from tests.semantic.unreliable_network import PROJECT, behind_network, until

KEY = f"{PROJECT}/docs/cursor"
CURSOR = Semantics("cursor", "harvester", ("search", "ops"), 60)
PUT = Intent.put(KEY, 1, expected_version=0, writer="w", semantics=CURSOR)
SECRET = "a-secret-value"


class AlertClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fields(record: logging.LogRecord, *names: str) -> list[Any]:
    return [record.__dict__[name] for name in names]


FIELDS = ("directive", "key", "semantics.purpose", "requestId", "version")


class TestLogLines:
    @pytest.fixture(autouse=True)
    def _all_lines(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "keyloft.semantic")

    async def test_each_change_is_logged_at_info(self, store: SemanticStore, caplog: pytest.LogCaptureFixture) -> None:
        entry = await store.put(
            KEY, SECRET, expected_version=0, writer="agent:sync", semantics=CURSOR, request_id="run-1"
        )
        await store.delete(KEY, expected_version="*", writer="agent:tidy")
        restored = await store.restore(KEY, writer="service")
        put, delete, restore = caplog.records
        assert {record.levelno for record in caplog.records} == {logging.INFO}
        assert fields(put, *FIELDS) == ["sync", KEY, "cursor", "run-1", entry.version]
        assert fields(delete, "operation", *FIELDS[:3]) == ["semantic_delete", "tidy", KEY, "cursor"]
        assert fields(restore, *FIELDS) == ["service", KEY, "cursor", None, restored.version]
        assert f"[KV] put: key={KEY} directive=sync purpose=cursor requestId=run-1" in put.getMessage()
        assert SECRET not in caplog.text

    async def test_a_conflict_is_logged_at_warn_with_its_correlation_id(
        self, store: SemanticStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        entry = await store.put(KEY, SECRET, expected_version=0, writer="a:b", semantics=CURSOR)
        with pytest.raises(VersionConflict) as caught:
            await store.put(KEY, SECRET * 2, expected_version=0, writer="agent:late", semantics=CURSOR)
        [line] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert fields(line, *FIELDS) == ["late", KEY, "cursor", None, entry.version]
        correlation_id = caught.value.correlation_id
        assert fields(line, "correlationId", "error_code", "reason") == [correlation_id, "VERSION_CONFLICT", "version"]
        assert str(correlation_id) in line.getMessage()
        [audited] = [record async for record in store.audit(KEY) if record.action == "conflict"]
        assert audited.correlation_id == correlation_id
        assert SECRET not in caplog.text + str(caught.value)

    async def test_a_conflict_of_a_request_is_correlated_by_its_id(
        self, store: SemanticStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(VersionConflict) as caught:
            await store.put(KEY, 1, expected_version=7, writer="a", semantics=CURSOR, request_id="run-2")
        [line] = caplog.records
        assert fields(line, "correlationId", "requestId", "version") == ["run-2", "run-2", None]
        assert caught.value.correlation_id == "run-2"

    async def test_an_expiry_is_logged_with_its_semantics(
        self, store: SemanticStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        entry = await store.put(KEY, SECRET, expected_version=0, writer="a:b", semantics=CURSOR, request_id="r")
        clock.advance(60)
        assert await store.sweep() == 1
        line = caplog.records[-1]
        assert line.levelno == logging.INFO
        assert fields(line, *FIELDS) == ["b", KEY, "cursor", "r", entry.version]
        assert fields(line, "semantics.producer", "semantics.consumerHints", "semantics.ttlSeconds") == [
            "harvester",
            ["search", "ops"],
            60,
        ]
        assert "producer=harvester consumerHints=search,ops ttlSeconds=60" in line.getMessage()
        assert SECRET not in caplog.text

    async def test_a_batch_is_logged_key_by_key(self, store: SemanticStore, caplog: pytest.LogCaptureFixture) -> None:
        await store.batch(
            [
                Intent.put(f"{KEY}/{number}", number, expected_version=0, writer="w", semantics=CURSOR)
                for number in range(3)
            ]
        )
        assert [record.__dict__["key"] for record in caplog.records] == [f"{KEY}/{number}" for number in range(3)]

    async def test_a_repeated_request_is_not_logged_as_another_change(
        self, store: SemanticStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            await store.put(KEY, 1, expected_version=0, writer="w", semantics=CURSOR, request_id="r")
        assert len(caplog.records) == 1
        assert store.signals.counts == {("success", "cursor"): 1}


async def test_outcomes_are_counted_by_purpose(store: SemanticStore, clock: ManualClock) -> None:
    entry = await store.put(KEY, 1, expected_version=0, writer="w", semantics=CURSOR)
    await store.put(KEY, 2, expected_version=entry.version, writer="w", semantics=CURSOR)
    with pytest.raises(VersionConflict):
        await store.put(KEY, 3, expected_version=0, writer="w", semantics=CURSOR)
    with pytest.raises(StaleFence):
        await store.put(KEY, 3, expected_version="*", writer="w", semantics=CURSOR, fence=1)
    with pytest.raises(VersionConflict):
        await store.delete(KEY, expected_version=1, writer="w")
    await store.put(f"{KEY}/flag", 1, expected_version=0, writer="w", semantics=Semantics("feature_flag"))
    clock.advance(60)
    await store.put(KEY, 4, expected_version=0, writer="w", semantics=CURSOR)  # over what has expired
    clock.advance(60)
    await store.sweep()
    assert store.signals.counts == {
        ("success", "cursor"): 3,
        ("success", "feature_flag"): 1,
        ("conflict", "cursor"): 3,
        ("expiry", "cursor"): 2,
    }


class TestConflictRate:
    def signals(self) -> tuple[Signals, AlertClock, list[Alert]]:
        alerts: list[Alert] = []
        seconds = AlertClock()
        return Signals(alerts.append, seconds=seconds), seconds, alerts

    def write(self, signals: Signals, *, conflict: bool) -> None:
        if conflict:
            signals.conflict(PUT, FailedWrite(PUT.key, 1, None, "version"), None, "c")
        else:
            signals.success(PUT, CURSOR, None, 1)

    def run(self, signals: Signals, seconds: AlertClock, lasting: float, every: float, conflicts: int) -> None:
        """Write for so many seconds; so many of ten writes meet a conflict."""
        ends = seconds.now + lasting
        number = 0
        while seconds.now < ends:
            self.write(signals, conflict=number * conflicts % 10 < conflicts)
            number += 1
            seconds.now += every

    @pytest.mark.parametrize("every", [0.1, 1, 3.3, 4.9, 5.5])
    def test_a_rate_that_stays_high_raises_one_alert_and_a_low_one_clears_it(self, every: float) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 180, every, 5)
        assert [(alert.name, alert.is_raised) for alert in alerts] == [("conflict_rate", True)]
        assert "conflict_rate" in signals.alerts
        assert "more than 10%" in alerts[0].message
        self.run(signals, seconds, 180, every, 0)
        assert [alert.is_raised for alert in alerts] == [True, False]
        assert signals.alerts == {}

    def test_a_short_burst_raises_nothing(self) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 120, 1, 0)
        self.run(signals, seconds, 20, 1, 10)
        self.run(signals, seconds, 300, 1, 0)
        assert alerts == []

    def test_nothing_is_raised_before_the_window_is_over(self) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 59, 1, 10)
        signals.check_alerts()
        assert alerts == []

    def test_a_tenth_is_not_too_much(self) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 600, 0.5, 1)
        assert alerts == []

    @pytest.mark.parametrize(("per_minute", "minutes"), [(6, 2.5), (3, 5), (1, 17), (0.25, 65), (1 / 6, 70)])
    def test_a_slow_workflow_that_always_conflicts_raises_one_alert_and_a_successful_one_clears_it(
        self, per_minute: float, minutes: float
    ) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, minutes * 60, 60 / per_minute, 10)
        assert [(alert.name, alert.is_raised) for alert in alerts] == [("conflict_rate", True)]
        self.run(signals, seconds, 2 * minutes * 60, 60 / per_minute, 10)
        assert len(alerts) == 1
        self.run(signals, seconds, 2 * minutes * 60, 60 / per_minute, 0)
        assert [alert.is_raised for alert in alerts] == [True, False]

    @pytest.mark.parametrize("every", [2, 10, 60, 240])
    @pytest.mark.parametrize("conflicts", [1, 2])
    @pytest.mark.parametrize("before", [1, 4, 9, 30])
    def test_one_or_two_conflicts_among_few_writes_raise_nothing(
        self, every: float, conflicts: int, before: int
    ) -> None:
        signals, seconds, alerts = self.signals()
        for number in range(60):
            self.write(signals, conflict=before <= number < before + conflicts)
            seconds.now += every
            signals.check_alerts()
        assert alerts == []

    def test_less_than_ten_writes_in_an_hour_say_nothing(self) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 10 * 3600, 600, 10)
        assert alerts == []

    def test_a_burst_of_conflicts_among_rare_writes_raises_nothing(self) -> None:
        signals, seconds, alerts = self.signals()
        for _ in range(3):
            self.run(signals, seconds, 3600, 600, 0)
            self.run(signals, seconds, 20, 1, 10)
            for _ in range(200):
                seconds.now += 10
                signals.check_alerts()
        assert alerts == []

    @pytest.mark.parametrize(("every", "clears_within"), [(1, 120), (10, 240), (60, 1280)])
    def test_a_slow_alert_is_cleared_when_writes_end(self, every: float, clears_within: float) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 3600, every, 10)
        assert [alert.is_raised for alert in alerts] == [True]
        seconds.now += clears_within
        signals.check_alerts()
        assert [alert.is_raised for alert in alerts] == [True, False]

    def test_its_memory_does_not_grow_with_the_writes(self, caplog: pytest.LogCaptureFixture) -> None:
        signals, seconds, _ = self.signals()
        caplog.set_level(logging.CRITICAL, "keyloft")  # what pytest captures would grow
        tracemalloc.start()
        try:
            self.run(signals, seconds, 2 * 3600, 1, 5)
            before, _ = tracemalloc.get_traced_memory()
            self.run(signals, seconds, 4 * 3600, 1, 5)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 20_000

    def test_an_alert_is_cleared_when_writes_end(self) -> None:
        signals, seconds, alerts = self.signals()
        self.run(signals, seconds, 180, 1, 10)
        seconds.now += 120
        signals.check_alerts()
        assert [alert.is_raised for alert in alerts] == [True, False]

    def test_a_later_time_of_conflicts_raises_it_again(self) -> None:
        signals, seconds, alerts = self.signals()
        for conflicts in (10, 0, 10):
            self.run(signals, seconds, 180, 1, conflicts)
        assert [alert.is_raised for alert in alerts] == [True, False, True]


class TestOutage:
    async def test_an_outage_over_five_minutes_raises_an_alert_that_the_next_answer_clears(
        self, kv: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "keyloft.semantic")
        network, through = behind_network(kv)
        alerts: list[Alert] = []
        seconds = AlertClock()
        signals = Signals(alerts.append, seconds=seconds)
        async with SemanticStore(through, sweep_every=None, signals=signals) as store:
            network.is_down = True
            for elapsed in (0, 299, 300):
                seconds.now = 1000 + elapsed
                with pytest.raises(Unreachable):
                    await store.get(KEY)
            assert alerts == []
            seconds.now += 1
            for _ in range(2):
                with pytest.raises(Unreachable):
                    await store.get(KEY)
            assert [(alert.name, alert.is_raised) for alert in alerts] == [("storage_outage", True)]
            assert "300 s" in alerts[0].message
            assert signals.counts["failure", ""] == 5
            network.is_down = False
            await store.get(KEY)
            assert [alert.is_raised for alert in alerts] == [True, False]
            assert signals.alerts == {}
        logged = [
            (r.levelno, r.__dict__["alert"], r.__dict__["is_raised"]) for r in caplog.records if "alert" in vars(r)
        ]
        assert logged == [(logging.ERROR, "storage_outage", True), (logging.INFO, "storage_outage", False)]

    async def test_an_answer_in_between_restarts_the_five_minutes(self) -> None:
        seconds = AlertClock()
        signals = Signals(seconds=seconds)
        for _ in range(3):
            signals.failure()
            seconds.now += 200
            signals.answered()
        signals.failure()
        seconds.now += 200
        signals.check_alerts()
        assert signals.alerts == {}

    async def test_the_sweeper_alone_notices_an_outage_and_its_end(self) -> None:
        network, kv = behind_network(await keyloft.open())
        seconds = AlertClock()
        signals = Signals(seconds=seconds)
        async with kv, SemanticStore(kv, sweep_every=0.01, signals=signals):
            network.is_down = True

            async def has_failed() -> bool:
                return signals.counts["failure", ""] > 0

            async def is_out() -> bool:
                return "storage_outage" in signals.alerts

            async def is_back() -> bool:
                return not signals.alerts

            await until(has_failed)
            seconds.now += 301
            await until(is_out)
            network.is_down = False
            await until(is_back)


async def test_a_callback_that_fails_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(alert: Alert) -> None:
        raise ZeroDivisionError

    seconds = AlertClock()
    signals = Signals(fail, seconds=seconds)
    signals.failure()
    seconds.now += 301
    signals.check_alerts()
    assert "storage_outage" in signals.alerts
    assert "the callback for alerts failed" in caplog.text
    signals.answered()
    assert signals.alerts == {}


async def test_a_store_calls_the_callback_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    alerts: list[Alert] = []
    seconds = AlertClock()
    monkeypatch.setattr(monitoring, "time", SimpleNamespace(monotonic=seconds))
    async with keyloft.open() as kv, SemanticStore(kv, on_alert=alerts.append) as store:
        assert store.signals.alerts == {}
        store.signals.failure()
        seconds.now += 301
        store.signals.check_alerts()
        store.signals.answered()
    assert [(alert.name, alert.is_raised) for alert in alerts] == [("storage_outage", True), ("storage_outage", False)]
