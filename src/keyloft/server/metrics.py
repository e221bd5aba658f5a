"""The metrics of a service, as Prometheus reads them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from keyloft import limits
from keyloft.core.health import ServerHealth
from keyloft.core.records import Used
from keyloft.errors import KeyloftError
from keyloft.http.meters import STATUS_CLASSES, UNKNOWN, HttpMeters
from keyloft.nats.meters import OTHER, Histogram, ServiceMeters
from keyloft.plugins.meters import Meters
from keyloft.plugins.rules import OPERATIONS
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic.keys import OPERATIONS as SEMANTIC_OPERATIONS
from keyloft.semantic.monitoring import ALERTS, Signals

_BOUNDS: Final = (*limits.LATENCY_BOUNDS, "+Inf")


class _Family(NamedTuple):
    """A metric and its samples."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """Without the prefix."""
    description: str
    labels: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Any]]
    """The values of the labels, and a number; of a histogram the buckets and the seconds."""


class Metrics:
    """The meters of the services and what is stored, in Prometheus' text format."""

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        meters: Meters,
        usage: PluginUsage,
        signals: Signals | None = None,
        tenants: ServiceMeters | None = None,
        http: HttpMeters | None = None,
        *,
        prefix: str,
        health: Callable[[], ServerHealth | None] = lambda: None,
    ) -> None:
        """Args:
        meters: The counters of the plugin service.
        usage: What plugins store.
        signals: The counters and alerts of the semantic store.
        tenants: The counters of the semantic service.
        http: The counters of HTTP.
        prefix: The beginning of the names of all metrics.
        health: Returns what is known about the servers of the database.
        """
        self._health = health
        self._meters = meters
        self._usage = usage
        self._signals = signals or Signals()
        self._tenants = tenants or ServiceMeters()
        self._http = http or HttpMeters()
        self._prefix = prefix

    async def render(self) -> bytes:
        """The metrics as they are now."""
        text: list[str] = []
        for family in self._families(await self._usage.all()):
            text.append(_text(self._prefix, family))
            await asyncio.sleep(0)  # other tasks run in between: a thousand plugins have 13,000 lines
        return "".join(text).encode(errors="backslashreplace")

    def _families(self, used: Sequence[Used] | None) -> Iterator[_Family]:
        meters, signals = self._meters, self._signals
        for operation in OPERATIONS:
            total = _carried_out(meters, [operation])
            yield _Family("counter", f"kv_{operation}", f"{operation} operations carried out", ["plugin"], total)
            taken: _Samples = [((), meters.histogram(operation).copied())]
            yield _Family("histogram", f"kv_{operation}_duration_seconds", f"Duration of a {operation}", (), taken)
        gathered: _Samples = [([name], meter.gathered) for name, meter in meters.owners.items() if meter.gathered]
        about = "Requests that arrived together with others, in a many"
        yield _Family("counter", "kv_many_requests", about, ["plugin"], gathered or [([OTHER], 0)])
        yield from _watches("kv", "plugin", meters)
        yield from _failures("kv", "plugin", meters)
        if used is not None:
            some = _bounded(used, meters.owners)
            entries = [([one.plugin], one.entries) for one in some]
            yield _Family("gauge", "kv_keys_total", "Keys that are stored", ["plugin"], entries)
            size = [([one.plugin], one.value_bytes) for one in some]
            yield _Family("gauge", "kv_storage_bytes", "What their values take", ["plugin"], size)
        cleanups = [((), meters.cleanups.copied())]
        yield _Family("histogram", "kv_cleanup_duration_seconds", "Duration of a removal of expired keys", (), cleanups)
        yield _Family("counter", "kv_cleanup_deleted", "Expired keys that were removed", (), [((), meters.cleaned)])
        outcomes = "Writes that succeeded or met conflicts, entries that expired, failures of the database"
        yield _Family("counter", "semantic_operations", outcomes, ["outcome", "purpose"], list(signals.counts.items()))
        alerts = [([name], float(name in signals.alerts)) for name in ALERTS]
        yield _Family("gauge", "semantic_alert", "1 while an alert is raised", ["alert"], alerts)
        total = _carried_out(self._tenants, SEMANTIC_OPERATIONS)
        yield _Family("counter", "semantic_requests", "Requests carried out", ["tenant"], total)
        taken = _durations(self._tenants, SEMANTIC_OPERATIONS)
        yield _Family("histogram", "semantic_duration_seconds", "Duration of a request", ["operation"], taken)
        yield from _watches("semantic", "tenant", self._tenants)
        yield from _failures("semantic", "tenant", self._tenants)
        yield from _over_http(self._http)
        yield from _servers(self._health())


_Samples: TypeAlias = list[tuple[Sequence[str], Any]]


def _carried_out(meters: ServiceMeters, operations: Sequence[str]) -> _Samples:
    """How many of some operations each owner had."""
    rows: _Samples = []
    for owner, meter in meters.owners.items():
        if timings := [meter.durations[operation] for operation in operations if operation in meter.durations]:
            rows.append(([owner], sum([timing.count for timing in timings])))
    return rows or [([OTHER], 0)]


def _durations(meters: ServiceMeters, operations: Sequence[str]) -> _Samples:
    return [([operation], meters.histogram(operation).copied()) for operation in operations]


def _watches(interface: str, owner: str, meters: ServiceMeters) -> Iterator[_Family]:
    yield _Family("gauge", f"{interface}_leases", "Watches that clients have", (), [((), meters.leases)])
    events: _Samples = [([name], meter.events) for name, meter in meters.owners.items() if meter.events]
    about = "Messages that were published for watches"
    yield _Family("counter", f"{interface}_events", about, [owner], events or [([OTHER], 0)])


def _failures(interface: str, owner: str, meters: ServiceMeters) -> Iterator[_Family]:
    """Requests that were not carried out. Each counter exists from the start, so that dashboards and alerts find it."""
    owners = meters.owners.items()
    errors: _Samples = [([name, code], times) for name, meter in owners for code, times in meter.errors.items()]
    about = "Requests refused or failed; BUSY: because too much was waiting"
    errors = errors or [([OTHER, KeyloftError.code], 0)]
    yield _Family("counter", f"{interface}_errors", about, [owner, "error_code"], errors)
    dropped: _Samples = [([name], meter.dropped) for name, meter in owners if meter.dropped]
    about = "Messages without a reply subject that were dropped, because too much was waiting"
    yield _Family("counter", f"{interface}_dropped", about, [owner], dropped or [([OTHER], 0)])


def _over_http(meters: HttpMeters) -> Iterator[_Family]:
    """Requests by route. A route has a row for status 2xx from the start, others from their first request on."""
    routes = meters.routes.items()
    answers: _Samples = [
        ([route, status], meter.statuses[at])
        for route, meter in routes
        for at, status in enumerate(STATUS_CLASSES)
        if meter.statuses[at] or status == "2xx"
    ]
    about = "Requests over HTTP that were answered, and watches that ended; none: the client hung up before"
    yield _Family("counter", "http_requests", about, ["route", "status"], answers)
    used: _Samples = [([route], meter.durations.copied()) for route, meter in routes if meter.durations.count]
    used = used or [([UNKNOWN], Histogram().copied())]
    about = "Duration of a request over HTTP, without watches"
    yield _Family("histogram", "http_duration_seconds", about, ["route"], used)
    yield _Family("gauge", "http_connections", "Connections of HTTP clients", (), [((), meters.connections)])
    about = "Connections that were ended or refused, because there were too many"
    yield _Family("counter", "http_refused_connections", about, (), [((), meters.refused_connections)])
    about = "Watches over HTTP, and open admin pages"
    yield _Family("gauge", "http_watches", about, (), [((), meters.watches)])


def _servers(health: ServerHealth | None) -> Iterator[_Family]:
    """The servers of a database, where there are any."""
    if health is None:
        return
    hosts = health.hosts
    roles: _Samples = [([host.name, host.role], 1) for host in hosts]
    yield _Family("gauge", "database_host", "1 for each host of the database and its role", ["host", "role"], roles)
    used: _Samples = [([health.host], 1)] if health.host else []
    yield _Family("gauge", "database_primary", "1 for the host that is written to", ["host"], used)
    yield _Family("gauge", "database_timeline", "The highest timeline seen", (), [((), health.timeline or 0)])
    waits: _Samples = [((), float(bool(health.synchronous)))]
    yield _Family("gauge", "database_synchronous", "1 if commits wait for a standby", (), waits)
    states: _Samples = [([host.name, host.sync_state], 1) for host in hosts if host.sync_state]
    about = "1 for each standby and what it is to the primary: sync, quorum, potential or async"
    yield _Family("gauge", "database_sync_state", about, ["host", "state"], states)
    lags: _Samples = [([host.name], host.lag) for host in hosts if host.lag is not None]
    yield _Family("gauge", "database_lag_seconds", "How far a standby is behind, at most", ["host"], lags)
    reads: _Samples = [([host.name], host.reads) for host in hosts]
    yield _Family("counter", "database_reads", 'Gets and lists answered, with reads="standby"', ["host"], reads)
    yield _Family("counter", "database_failovers", "New timelines met", (), [((), health.failovers)])
    about = "Writes whose outcome is unknown, because the connection was lost"
    yield _Family("counter", "database_unknown_commits", about, (), [((), health.unknown_commits)])


def _bounded(used: Sequence[Used], known: Iterable[str]) -> list[Used]:
    """Usage by plugin. Plugins beyond the limit of labels are added up; those that sent requests get labels first."""
    labels = set(known)
    added: dict[str, Used] = {}
    for one in used:
        label = one.plugin if one.plugin in labels or len(labels) < limits.PLUGIN_LABELS else OTHER
        labels.add(label)
        before = added.get(label, Used(label, 0, 0))
        added[label] = Used(label, before.entries + one.entries, before.value_bytes + one.value_bytes)
    return list(added.values())


def _text(prefix: str, family: _Family) -> str:
    """A metric in the text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats."""
    name = f"{prefix}_{family.name}{'_total' if family.kind == 'counter' else ''}"
    lines = [f"# HELP {name} {family.description}", f"# TYPE {name} {family.kind}"]
    for values, counted in family.rows:
        pairs = [f'{label}="{_escaped(value)}"' for label, value in zip(family.labels, values, strict=True)]
        labels = f"{{{','.join(pairs)}}}" if pairs else ""
        if family.kind != "histogram":
            lines.append(f"{name}{labels} {counted}")
            continue
        buckets, seconds = counted
        for bound, total in zip(_BOUNDS, accumulate(buckets), strict=True):
            within = ",".join([*pairs, f'le="{bound}"'])
            lines.append(f"{name}_bucket{{{within}}} {total}")
        lines += [f"{name}_count{labels} {sum(buckets)}", f"{name}_sum{labels} {seconds}"]
    return "\n".join([*lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
