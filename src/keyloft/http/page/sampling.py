"""Reads the counters of a service every few seconds, so that the admin page can show rates, latencies and charts."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Latest
from keyloft.errors import KeyloftError
from keyloft.http.page.service import ServiceParts
from keyloft.nats.meters import ServiceMeters
from keyloft.plugins.rules import OPERATIONS
from keyloft.semantic.keys import OPERATIONS as SEMANTIC_OPERATIONS

logger = logging.getLogger(__name__)

_BOUNDS: Final = limits.LATENCY_BOUNDS


class InterfaceSample(Struct, frozen=True, gc=False):
    """The counters of one interface at a moment."""

    requests: int
    errors: int
    buckets: tuple[int, ...]
    """How many requests took how long, as a histogram has it."""


class ServiceSample(Struct, frozen=True, gc=False):
    """The counters of a service at a moment."""

    at: float
    version: int | None
    """The version counter of the database; None if it could not be read."""
    plugins: InterfaceSample
    semantic: InterfaceSample


class RateSampler:
    """The last readings of a service's counters."""

    def __init__(self, service: ServiceParts, engine: Callable[[], Engine | None]) -> None:
        self._service = service
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self.samples: deque[ServiceSample] = deque(maxlen=limits.PAGE_SAMPLES + 1)
        self._owners: deque[tuple[float, dict[str, int]]] = deque(maxlen=limits.PAGE_RATE_SAMPLES + 1)
        self.readings = 0
        """How many there were."""

    def start(self) -> None:
        """Read from now on, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name="keyloft page counters")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self.read()
            except Exception:
                logger.exception("the counters for the admin page can't be read")
            await asyncio.sleep(limits.PAGE_SAMPLE_SECONDS)

    async def read(self) -> None:
        """Read the counters once."""
        engine, version = self._engine(), None
        if engine is not None:
            try:
                async with asyncio.timeout(limits.HEALTH_SECONDS):
                    [version] = await engine.read(Latest())
            except (KeyloftError, TimeoutError):
                version = None  # the health page says what is wrong
        service, now = self._service, monotonic()
        plugins = _sample(service.meters, OPERATIONS)
        self.samples.append(ServiceSample(now, version, plugins, _sample(service.tenants, SEMANTIC_OPERATIONS)))
        self._owners.append((now, {name: requests_of(service.meters, name) for name in service.meters.owners}))
        self.readings += 1

    # What the readings show

    def plugin_rate(self, plugin: str) -> float | None:
        """How many requests a plugin sent a second, over the last minute."""
        if len(self._owners) < 2:
            return None
        (began, first), (ended, last) = self._owners[0], self._owners[-1]
        return (last.get(plugin, 0) - first.get(plugin, 0)) / (ended - began)

    def commits(self) -> list[float | None]:
        """How many commits the database made a second, by any process, between each two readings."""
        return self._rates(lambda sample: sample.version)

    def requests(self, of: Callable[[ServiceSample], InterfaceSample]) -> list[float | None]:
        """The same for the requests of an interface."""
        return self._rates(lambda sample: of(sample).requests)

    def errors(self, of: Callable[[ServiceSample], InterfaceSample]) -> list[float | None]:
        """The same for requests that were refused or failed."""
        return self._rates(lambda sample: of(sample).errors)

    def latencies(self, of: Callable[[ServiceSample], InterfaceSample], share: float) -> list[float | None]:
        """Within how many seconds this share of the requests was carried out, between each two readings."""
        samples = list(self.samples)
        return [quantile(of(before).buckets, of(after).buckets, share) for before, after in pairwise(samples)]

    def latency(self, of: Callable[[ServiceSample], InterfaceSample], share: float) -> float | None:
        """The same over the last minute."""
        if len(self.samples) < 2:
            return None
        first = self.samples[max(0, len(self.samples) - 1 - limits.PAGE_RATE_SAMPLES)]
        return quantile(of(first).buckets, of(self.samples[-1]).buckets, share)

    def _rates(self, counted: Callable[[ServiceSample], int | None]) -> list[float | None]:
        samples, rates = list(self.samples), []
        for before, after in pairwise(samples):
            first, last = counted(before), counted(after)
            known = first is not None and last is not None and last >= first
            rates.append((last - first) / (after.at - before.at) if known else None)  # type: ignore[operator]
        return rates


def recent(rates: Sequence[float | None]) -> float | None:
    """The mean rate of the last minute."""
    last = [each for each in rates[-limits.PAGE_RATE_SAMPLES :] if each is not None]
    return sum(last) / len(last) if last else None


def requests_of(meters: ServiceMeters, owner: str) -> int:
    """How many requests of an owner were carried out."""
    meter = meters.owners.get(owner)
    return 0 if meter is None else sum([timing.count for timing in meter.durations.values()])


def quantile(before: Sequence[int], after: Sequence[int], share: float) -> float | None:
    """What a share of the requests between two readings of a histogram took at most; None if there were none."""
    counts = [last - first for first, last in zip(before, after, strict=True)]
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    low = 0.0
    for bound, inside in zip(_BOUNDS, counts, strict=False):
        if inside and wanted <= inside:
            return low + (bound - low) * wanted / inside
        wanted -= inside
        low = bound
    return low


def _sample(meters: ServiceMeters, operations: Sequence[str]) -> InterfaceSample:
    buckets = [0] * (len(_BOUNDS) + 1)
    for operation in operations:
        for at, inside in enumerate(meters.histogram(operation).buckets):
            buckets[at] += inside
    errors = sum([meter.errors.total() for meter in meters.owners.values()])
    return InterfaceSample(sum(buckets), errors, tuple(buckets))
