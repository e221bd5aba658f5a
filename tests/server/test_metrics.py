"""The metrics of a service."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from keyloft import limits
from keyloft.plugins import BotDatabase
from keyloft.plugins.meters import OTHER, Meters
from keyloft.server.metrics import Metrics


@pytest.fixture
async def db() -> AsyncIterator[BotDatabase]:
    db = BotDatabase(":memory:")
    yield db
    await db.close()


def sample(text: str, name: str) -> dict[str, float]:
    """The samples of a metric, by their labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def test_the_metrics_have_the_names_of_the_prd(db: BotDatabase) -> None:
    meters = Meters()
    for operation in ("set", "get", "delete", "list"):
        meters.of("trivia").durations[operation].add(0.002)
        meters.of("trivia").durations[operation].add(7)
    meters.of("trivia").errors["VALUE_TOO_LARGE"] += 3
    meters.cleanups.add(0.02)
    meters.cleaned = 42
    await db.kv_set("trivia", "score", 100)
    await db.kv_set("trivia", "name", "bob")
    text = (await Metrics(meters, db, prefix="rosey").render()).decode()
    for operation in ("set", "get", "delete", "list"):
        assert sample(text, f"rosey_kv_{operation}_total") == {'plugin="trivia"': 2}
        assert sample(text, f"rosey_kv_{operation}_duration_seconds_count") == {'plugin="trivia"': 2}
        assert sample(text, f"rosey_kv_{operation}_duration_seconds_sum") == {'plugin="trivia"': 7.002}
        buckets = sample(text, f"rosey_kv_{operation}_duration_seconds_bucket")
        assert buckets['le="0.001",plugin="trivia"'] == 0
        assert buckets['le="0.0025",plugin="trivia"'] == 1
        assert buckets['le="5.0",plugin="trivia"'] == 1
        assert buckets['le="+Inf",plugin="trivia"'] == 2
    assert sample(text, "rosey_kv_errors_total") == {'error_code="VALUE_TOO_LARGE",plugin="trivia"': 3}
    assert sample(text, "rosey_kv_keys_total") == {'plugin="trivia"': 2}
    assert sample(text, "rosey_kv_storage_bytes") == {'plugin="trivia"': 8}
    assert sample(text, "rosey_kv_cleanup_duration_seconds_count") == {"": 1}
    assert sample(text, "rosey_kv_cleanup_deleted_total") == {"": 42}
    assert "# TYPE rosey_kv_set_duration_seconds histogram" in text
    assert "# TYPE rosey_kv_keys_total gauge" in text


async def test_the_prefix_is_the_operators(db: BotDatabase) -> None:
    text = (await Metrics(Meters(), db, prefix="mybot").render()).decode()
    assert "# TYPE mybot_kv_set_total counter" in text
    assert "rosey" not in text


async def test_what_is_stored_is_counted_once_in_a_while(db: BotDatabase) -> None:
    often, seldom = Metrics(Meters(), db, prefix="p"), Metrics(Meters(), db, prefix="p")
    often.usage_every = 0
    for expected in ({}, {'plugin="a"': 1.0}):
        assert sample((await often.render()).decode(), "p_kv_keys_total") == expected
        assert sample((await seldom.render()).decode(), "p_kv_keys_total") == {}
        await db.kv_set("a", "k", 1)


async def test_scrapes_at_once_count_once(db: BotDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await db.engine()
    read, reads = engine.read, 0

    async def counted(*asks: Any) -> Any:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        return await read(*asks)

    monkeypatch.setattr(engine, "read", counted)
    metrics = Metrics(Meters(), db, prefix="p")
    await asyncio.gather(*[metrics.render() for _ in range(5)])
    assert reads == 1


async def test_a_database_that_fails_leaves_the_other_metrics(
    db: BotDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    await db.close()
    text = (await Metrics(Meters(), db, prefix="p").render()).decode()
    assert "p_kv_set_total" in text
    assert "p_kv_keys_total" not in text
    assert "could not be counted" in caplog.text


async def test_a_slow_count_does_not_hold_up_a_scrape(db: BotDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await db.engine()

    async def stalled(*asks: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "read", stalled)
    async with Metrics(Meters(), db, prefix="p") as metrics:
        metrics.usage_seconds = 0.01
        assert b"p_kv_set_total" in await metrics.render()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "keyloft usage"] == []


async def test_no_more_than_a_thousand_plugins_have_labels(db: BotDatabase) -> None:
    meters = Meters()
    for number in range(limits.PLUGIN_LABELS + 5):
        meters.of(f"asks-{number:04}").durations["get"].add(0.001)
    # One is known to the meters, «other» is a real plugin, and two are beyond the limit.
    for plugin in ("asks-0001", OTHER, "stores-1", "stores-2"):
        await db.kv_set(plugin, "k", 1)
    text = (await Metrics(meters, db, prefix="p").render()).decode()
    assert len(sample(text, "p_kv_get_total")) == limits.PLUGIN_LABELS + 1
    assert sample(text, "p_kv_get_total")['plugin="other"'] == 5
    assert sample(text, "p_kv_keys_total") == {'plugin="asks-0001"': 1, 'plugin="other"': 3}
