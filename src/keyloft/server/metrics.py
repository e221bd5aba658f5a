"""The metrics of a service, as Prometheus reads them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import Usage, Used
from keyloft.errors import KeyloftError
from keyloft.plugins.meters import BOUNDS, OTHER, Meters
from keyloft.plugins.store import BotDatabase
from keyloft.plugins.wire import OPERATIONS
from keyloft.semantic.monitoring import ALERTS, Signals

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)


class _Counted(Struct, frozen=True):
    """A copy of all counters, which a thread can format while the service goes on counting."""

    durations: Mapping[str, Sequence[tuple[str, Sequence[int], float]]]
    """By operation: each plugin's buckets and seconds."""
    errors: Sequence[tuple[str, str, int]]
    cleanups: tuple[Sequence[int], float]
    cleaned: int
    used: Sequence[Used] | None
    semantic: Sequence[tuple[str, str, int]]
    """Of the semantic store: outcome, purpose, how often."""
    alerts: Sequence[str]


class Metrics:
    """A service's meters and what is stored, in Prometheus' text format."""

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        meters: Meters,
        db: BotDatabase,
        signals: Signals | None = None,
        *,
        prefix: str,
        usage_every: float = 60.0,
        usage_seconds: float = 5.0,
    ) -> None:
        """Args:
        meters: The counters of the plugin service.
        db: Its keys and bytes are counted.
        signals: The counters and alerts of the semantic store.
        prefix: What the names of the metrics begin with.
        usage_every: Counting keys reads the whole table, so the result is kept for so many seconds.
        usage_seconds: If counting takes longer, the previous result is shown.
        """
        self._meters = meters
        self._db = db
        self._signals = signals or Signals()
        self._prefix = prefix
        self._usage_every = usage_every
        self._usage_seconds = usage_seconds
        self._used: Sequence[Used] | None = None
        self._counted_at = -usage_every
        self._counting: asyncio.Task[None] | None = None

    async def render(self) -> bytes:
        """The metrics as they are now.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        await self._count()
        # A thousand plugins have 60,000 lines: too many for the event loop.
        return await asyncio.to_thread(_write, self._prefix, self._snapshot())

    async def aclose(self) -> None:
        """Stop counting; the database can be closed after this."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    async def _count(self) -> None:
        """Count keys and bytes again, if the last count is too old."""
        if self._counting is None:
            if time.monotonic() - self._counted_at < self._usage_every:
                return
            self._counting = asyncio.create_task(self._read_usage(), name="keyloft usage")
        await asyncio.wait([self._counting], timeout=self._usage_seconds)

    async def _read_usage(self) -> None:
        try:
            [self._used] = await (await self._db.engine()).read(Usage())
        except KeyloftError as error:
            logger.warning("keys and bytes could not be counted: %s", error)
            self._used = None
        finally:
            self._counted_at = time.monotonic()
            self._counting = None

    def _snapshot(self) -> _Counted:
        plugins = self._meters.plugins
        return _Counted(
            {
                operation: [
                    (name, tuple(meter.durations[operation].buckets), meter.durations[operation].seconds)
                    for name, meter in plugins.items()
                    if operation in meter.durations
                ]
                for operation in OPERATIONS
            },
            [(name, code, times) for name, meter in plugins.items() for code, times in meter.errors.items()],
            (tuple(self._meters.cleanups.buckets), self._meters.cleanups.seconds),
            self._meters.cleaned,
            None if self._used is None else _bounded(self._used, plugins),
            [(outcome, purpose, times) for (outcome, purpose), times in self._signals.counts.items()],
            list(self._signals.alerts),
        )


def _bounded(used: Sequence[Used], known: Iterable[str]) -> list[Used]:
    """Usage by plugin, with the plugins beyond the limit of labels added up; those with requests have labels first."""
    labels = set(known)
    entries: Counter[str] = Counter()
    value_bytes: Counter[str] = Counter()
    for plugin in used:
        has_label = plugin.plugin in labels or len(labels) < limits.PLUGIN_LABELS
        label = plugin.plugin if has_label else OTHER
        labels.add(label)
        entries[label] += plugin.entries
        value_bytes[label] += plugin.value_bytes
    return [Used(label, entries[label], value_bytes[label]) for label in entries]


def _write(prefix: str, counted: _Counted) -> bytes:
    # Imported here to save 2 MB in a service that is not scraped.
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import Collector

    class _Families(Collector):
        def collect(self) -> Iterator["Metric"]:
            return chain(_families(f"{prefix}_kv", counted), _semantic_families(f"{prefix}_semantic", counted))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families())
    return generate_latest(registry)


def _families(prefix: str, counted: _Counted) -> Iterator["Metric"]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for operation, plugins in counted.durations.items():
        total = CounterMetricFamily(f"{prefix}_{operation}", f"{operation} operations carried out", labels=["plugin"])
        for name, buckets, _ in plugins:
            total.add_metric([name], sum(buckets))
        yield total
        duration = HistogramMetricFamily(
            f"{prefix}_{operation}_duration_seconds", f"How long a {operation} took", labels=["plugin"]
        )
        for name, buckets, seconds in plugins:
            duration.add_metric([name], _cumulated(buckets), seconds)
        yield duration
    errors = CounterMetricFamily(f"{prefix}_errors", "Requests refused or failed", labels=["plugin", "error_code"])
    for name, code, times in counted.errors:
        errors.add_metric([name, code], times)
    yield errors
    if counted.used is not None:
        keys = GaugeMetricFamily(f"{prefix}_keys_total", "Keys that are stored", labels=["plugin"])
        size = GaugeMetricFamily(f"{prefix}_storage_bytes", "What their values take", labels=["plugin"])
        for plugin in counted.used:
            keys.add_metric([plugin.plugin], plugin.entries)
            size.add_metric([plugin.plugin], plugin.value_bytes)
        yield keys
        yield size
    cleanup = HistogramMetricFamily(f"{prefix}_cleanup_duration_seconds", "How long removing expired keys took")
    cleanup.add_metric([], _cumulated(counted.cleanups[0]), counted.cleanups[1])
    yield cleanup
    yield CounterMetricFamily(f"{prefix}_cleanup_deleted", "Expired keys that were removed", value=counted.cleaned)


def _semantic_families(prefix: str, counted: _Counted) -> Iterator["Metric"]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    total = CounterMetricFamily(
        f"{prefix}_operations",
        "Writes that succeeded or met conflicts, entries that expired, failures of the database",
        labels=["outcome", "purpose"],
    )
    for outcome, purpose, times in counted.semantic:
        total.add_metric([outcome, purpose], times)
    yield total
    alert = GaugeMetricFamily(f"{prefix}_alert", "1 while an alert is raised", labels=["alert"])
    for name in ALERTS:
        alert.add_metric([name], float(name in counted.alerts))
    yield alert


def _cumulated(buckets: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [str(bound) for bound in BOUNDS] + ["+Inf"]
    return list(zip(bounds, accumulate(map(float, buckets)), strict=True))
