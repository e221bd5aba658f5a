"""The metrics of a service, as Prometheus reads them."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.records import Usage, Used
from keyloft.errors import KeyloftError
from keyloft.plugins.meters import OTHER, Meters
from keyloft.plugins.store import BotDatabase
from keyloft.plugins.wire import OPERATIONS
from keyloft.semantic.monitoring import ALERTS, Signals

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)


class _Family(NamedTuple):
    """A metric: a copy of its counters, which a thread can format while the service goes on counting."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """Without the prefix."""
    description: str
    labels: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Any]]
    """The values of the labels, and a number; of a histogram the buckets and the seconds."""


class Metrics(AsyncClosing):
    """A service's meters and what is stored, in Prometheus' text format."""

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"

    usage_every = limits.USAGE_EVERY_SECONDS
    """Counting keys reads the whole table, so the result is kept for so many seconds."""
    usage_seconds = limits.USAGE_SECONDS
    """If counting takes longer, the previous result is shown."""

    def __init__(self, meters: Meters, db: BotDatabase, signals: Signals | None = None, *, prefix: str) -> None:
        """Args:
        meters: The counters of the plugin service.
        db: Its keys and bytes are counted.
        signals: The counters and alerts of the semantic store.
        prefix: What the names of the metrics begin with.
        """
        self._meters = meters
        self._db = db
        self._signals = signals or Signals()
        self._prefix = prefix
        self._used: Sequence[Used] | None = None
        self._counted_at: float | None = None
        self._counting: asyncio.Task[None] | None = None

    async def render(self) -> bytes:
        """The metrics as they are now.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        await self._count()
        # A thousand plugins have 60,000 lines: too many for the event loop.
        return await asyncio.to_thread(_write, self._prefix, list(self._families()))

    async def aclose(self) -> None:
        """Stop counting; the database can be closed after this."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    async def _count(self) -> None:
        """Count keys and bytes again, if the last count is too old."""
        if self._counting is None:
            if self._counted_at is not None and time.monotonic() - self._counted_at < self.usage_every:
                return
            self._counting = asyncio.create_task(self._read_usage(), name="keyloft usage")
        await asyncio.wait([self._counting], timeout=self.usage_seconds)

    async def _read_usage(self) -> None:
        try:
            [self._used] = await (await self._db.engine()).read(Usage())
        except KeyloftError as error:
            logger.warning("keys and bytes could not be counted: %s", error)
            self._used = None
        finally:
            self._counted_at = time.monotonic()
            self._counting = None

    def _families(self) -> Iterator[_Family]:
        meters, signals = self._meters.plugins.items(), self._signals
        for operation in OPERATIONS:
            done = [([name], one.durations[operation].copied()) for name, one in meters if operation in one.durations]
            total = [(label, sum(buckets)) for label, (buckets, _) in done]
            yield _Family("counter", f"kv_{operation}", f"{operation} operations carried out", ["plugin"], total)
            yield _Family(
                "histogram", f"kv_{operation}_duration_seconds", f"Duration of a {operation}", ["plugin"], done
            )
        errors = [([name, code], times) for name, meter in meters for code, times in meter.errors.items()]
        yield _Family("counter", "kv_errors", "Requests refused or failed", ["plugin", "error_code"], errors)
        if self._used is not None:
            used = _bounded(self._used, self._meters.plugins)
            entries = [([one.plugin], one.entries) for one in used]
            yield _Family("gauge", "kv_keys_total", "Keys that are stored", ["plugin"], entries)
            size = [([one.plugin], one.value_bytes) for one in used]
            yield _Family("gauge", "kv_storage_bytes", "What their values take", ["plugin"], size)
        cleanups = [((), self._meters.cleanups.copied())]
        yield _Family("histogram", "kv_cleanup_duration_seconds", "Duration of a removal of expired keys", (), cleanups)
        yield _Family(
            "counter", "kv_cleanup_deleted", "Expired keys that were removed", (), [((), self._meters.cleaned)]
        )
        outcomes = "Writes that succeeded or met conflicts, entries that expired, failures of the database"
        yield _Family("counter", "semantic_operations", outcomes, ["outcome", "purpose"], list(signals.counts.items()))
        alerts = [([name], float(name in signals.alerts)) for name in ALERTS]
        yield _Family("gauge", "semantic_alert", "1 while an alert is raised", ["alert"], alerts)


def _bounded(used: Sequence[Used], known: Iterable[str]) -> list[Used]:
    """Usage by plugin, with the plugins beyond the limit of labels added up; those with requests have labels first."""
    labels = set(known)
    added: dict[str, Used] = {}
    for one in used:
        label = one.plugin if one.plugin in labels or len(labels) < limits.PLUGIN_LABELS else OTHER
        labels.add(label)
        before = added.get(label, Used(label, 0, 0))
        added[label] = Used(label, before.entries + one.entries, before.value_bytes + one.value_bytes)
    return list(added.values())


def _write(prefix: str, families: Iterable[_Family]) -> bytes:
    # Imported here to save 2 MB in a service that is not scraped.
    from prometheus_client.exposition import generate_latest
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector

    kinds: Any = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    bounds = [*map(str, limits.LATENCY_BOUNDS), "+Inf"]

    class _Families(Collector):
        def collect(self) -> Iterator["Metric"]:
            for family in families:
                metric = kinds[family.kind](f"{prefix}_{family.name}", family.description, labels=family.labels)
                for labels, counted in family.rows:
                    if family.kind == "histogram":
                        buckets, seconds = counted
                        cumulated = zip(bounds, accumulate(map(float, buckets)), strict=True)
                        metric.add_metric(labels, list(cumulated), seconds)
                    else:
                        metric.add_metric(labels, counted)
                yield metric

    return generate_latest(_Families())
