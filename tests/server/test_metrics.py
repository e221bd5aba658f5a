"""The metrics of a service."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keyloft import limits
from keyloft.nats.connection import connect
from keyloft.nats.meters import OTHER, ServiceMeters
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from keyloft.plugins.meters import Meters
from keyloft.plugins.rules import OPERATIONS
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic.monitoring import Signals
from keyloft.server.metrics import Metrics


@pytest.fixture
async def db() -> AsyncIterator[BotDatabase]:
    db = BotDatabase(":memory:")
    yield db
    await db.close()


@pytest.fixture
async def usage(db: BotDatabase) -> AsyncIterator[PluginUsage]:
    async with PluginUsage(db) as usage:
        yield usage


def sample(text: str, name: str) -> dict[str, float]:
    """The samples of a metric, by their labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def shown(meters: Meters, usage: PluginUsage, tenants: ServiceMeters | None = None) -> str:
    """What a scrape shows once the plugins are counted."""
    await usage.count_all()
    return (await Metrics(meters, usage, Signals(), tenants, prefix="rosey").render()).decode()


async def test_the_metrics_have_the_names_of_the_prd(db: BotDatabase, usage: PluginUsage) -> None:
    meters = Meters()
    for operation in OPERATIONS:
        meters.of("trivia").durations[operation].add(0.002)
        meters.of("quotes").durations[operation].add(7)
    meters.of("trivia").errors["VALUE_TOO_LARGE"] += 3
    meters.cleanups.add(0.02)
    meters.cleaned = 42
    await db.kv_set("trivia", "score", 100)
    await db.kv_set("trivia", "name", "bob")
    text = await shown(meters, usage)
    for operation in OPERATIONS:
        assert sample(text, f"rosey_kv_{operation}_total") == {'plugin="trivia"': 1, 'plugin="quotes"': 1}
        assert sample(text, f"rosey_kv_{operation}_duration_seconds_count") == {"": 2}
        assert sample(text, f"rosey_kv_{operation}_duration_seconds_sum") == {"": 7.002}
        buckets = sample(text, f"rosey_kv_{operation}_duration_seconds_bucket")
        assert buckets['le="0.001"'] == 0
        assert buckets['le="0.0025"'] == 1
        assert buckets['le="5.0"'] == 1
        assert buckets['le="+Inf"'] == 2
    assert sample(text, "rosey_kv_errors_total") == {'plugin="trivia",error_code="VALUE_TOO_LARGE"': 3}
    assert sample(text, "rosey_kv_dropped_total") == {'plugin="other"': 0}
    assert sample(text, "rosey_kv_keys_total") == {'plugin="trivia"': 2}
    assert sample(text, "rosey_kv_storage_bytes") == {'plugin="trivia"': 8}
    assert sample(text, "rosey_kv_cleanup_duration_seconds_count") == {"": 1}
    assert sample(text, "rosey_kv_cleanup_deleted_total") == {"": 42}
    assert "# TYPE rosey_kv_set_duration_seconds histogram" in text
    assert "# TYPE rosey_kv_keys_total gauge" in text


async def test_the_semantic_service_has_counters_too(usage: PluginUsage) -> None:
    tenants = ServiceMeters()
    tenants.of("acme").durations["put"].add(0.002)
    tenants.of("acme").durations["get"].add(0.002)
    tenants.of("acme").errors["BUSY"] += 2
    tenants.of("acme").dropped += 5
    text = await shown(Meters(), usage, tenants)
    assert sample(text, "rosey_semantic_requests_total") == {'tenant="acme"': 2}
    assert sample(text, "rosey_semantic_errors_total") == {'tenant="acme",error_code="BUSY"': 2}
    assert sample(text, "rosey_semantic_dropped_total") == {'tenant="acme"': 5}
    assert sample(text, "rosey_semantic_duration_seconds_count")['operation="put"'] == 1
    assert sample(text, "rosey_semantic_duration_seconds_count")['operation="list"'] == 0


async def test_watches_and_requests_that_travel_together_are_counted(
    db: BotDatabase, usage: PluginUsage, nats_url: str
) -> None:
    tenants = ServiceMeters()
    connection = await connect(nats_url, name="metrics")
    async with (
        DatabaseService(connection, db, prefixes=["metrics.kv"]) as service,
        await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="metrics.kv") as client,
    ):
        requests = [{"op": "set", "key": "k", "value": 1}, {"op": "get", "key": "k"}, {"op": "get", "key": ""}]
        await client.request("many", {"requests": requests})
        async with client.kv.watch("k") as changes:
            await client.kv.set("k", 2)
            await anext(changes)
            text = await shown(service.meters, usage, tenants)
            assert sample(text, "rosey_kv_leases") == {"": 1}
            assert sample(text, "rosey_kv_events_total")['plugin="trivia"'] >= 1
            assert sample(text, "rosey_kv_many_requests_total") == {'plugin="trivia"': 3}
            assert sample(text, "rosey_semantic_leases") == {"": 0}
            assert sample(text, "rosey_semantic_events_total") == {'tenant="other"': 0}
        async with asyncio.timeout(30):
            while service.meters.leases:
                await asyncio.sleep(0.005)
    await connection.close()


async def test_prometheus_reads_the_metrics(usage: PluginUsage) -> None:
    meters, name = Meters(), 'a "name"\\ with\nlines'
    for seconds in (0.0001, 0.3, 9):
        meters.of(name).durations["set"].add(seconds)
    meters.of(name).errors["BUSY"] += 7
    families = {family.name: family for family in text_string_to_metric_families(await shown(meters, usage))}
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
    [counted] = families["rosey_kv_set"].samples
    assert (counted.name, counted.labels, counted.value) == ("rosey_kv_set_total", {"plugin": name}, 3)
    [errors] = families["rosey_kv_errors"].samples
    assert (errors.labels, errors.value) == ({"plugin": name, "error_code": "BUSY"}, 7)
    durations = families["rosey_kv_set_duration_seconds"]
    assert durations.documentation == "Duration of a set"
    found = {(one.name.rpartition("_")[2], one.labels.get("le")): one.value for one in durations.samples}
    assert found["bucket", "0.0005"] == 1
    assert found["bucket", "0.5"] == 2
    assert found["bucket", "+Inf"] == found["count", None] == 3
    assert found["sum", None] == pytest.approx(9.3001)
    assert len(found) == len(limits.LATENCY_BOUNDS) + 3


async def test_the_prefix_is_the_operators(usage: PluginUsage) -> None:
    text = (await Metrics(Meters(), usage, prefix="mybot").render()).decode()
    assert "# TYPE mybot_kv_set_total counter" in text
    assert "rosey" not in text


async def test_a_database_that_fails_leaves_the_other_metrics(
    db: BotDatabase, usage: PluginUsage, caplog: pytest.LogCaptureFixture
) -> None:
    await db.close()
    text = (await Metrics(Meters(), usage, prefix="p").render()).decode()
    assert "p_kv_set_total" in text
    assert "p_kv_keys_total" not in text
    assert "could not be counted" in caplog.text


async def test_a_slow_count_does_not_hold_up_a_scrape(
    db: BotDatabase, usage: PluginUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.kv_set("a", "k", 1)
    engine = await db.engine()
    read = engine.read

    async def stalled(*asks: Any) -> Any:
        await release.wait()
        return await read(*asks)

    release = asyncio.Event()
    monkeypatch.setattr(engine, "read", stalled)
    metrics = Metrics(Meters(), usage, prefix="p")
    assert sample((await metrics.render()).decode(), "p_kv_keys_total") == {}
    release.set()
    assert await usage.all(patience=30)
    assert sample((await metrics.render()).decode(), "p_kv_keys_total") == {'plugin="a"': 1}


async def test_a_thousand_plugins_have_labels_and_few_series(db: BotDatabase, usage: PluginUsage) -> None:
    meters = Meters()
    for number in range(limits.PLUGIN_LABELS + 5):
        for operation in OPERATIONS:
            meters.of(f"asks-{number:04}").durations[operation].add(0.001)
    # One is known to the meters, «other» is a real plugin, and two are beyond the limit.
    for plugin in ("asks-0001", OTHER, "stores-1", "stores-2"):
        await db.kv_set(plugin, "k", 1)
    text = await shown(meters, usage)
    assert len(sample(text, "rosey_kv_get_total")) == limits.PLUGIN_LABELS + 1
    assert sample(text, "rosey_kv_get_total")['plugin="other"'] == 5
    assert sample(text, "rosey_kv_keys_total") == {'plugin="asks-0001"': 1, 'plugin="other"': 3}
    assert (
        len([line for line in text.splitlines() if not line.startswith("#")])
        < (len(OPERATIONS) + 1) * limits.PLUGIN_LABELS
    )
