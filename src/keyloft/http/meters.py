"""Counts HTTP requests by route, and connections, cheaply enough to do it for every request."""

from typing import Final

from keyloft.nats.meters import Histogram

UNKNOWN: Final = "other"
"""The route of requests that no route answers."""

STATUS_CLASSES: Final = ("none", "1xx", "2xx", "3xx", "4xx", "5xx")
"""By the first digit of a status; `none` if the client hung up before it was answered."""


class RouteMeter:
    """The requests for one route."""

    __slots__ = ("durations", "statuses")

    def __init__(self) -> None:
        self.statuses = [0] * len(STATUS_CLASSES)
        """How many were answered with a status of each class."""
        self.durations = Histogram()
        """How long answers took, without watches, and without wrong tokens, which are answered late on purpose."""

    def answered(self, status: int, seconds: float) -> None:
        """Count an answer."""
        self.statuses[status // 100] += 1
        if status != 401:
            self.durations.add(seconds)

    def ended(self, status: int) -> None:
        """Count a watch that has ended, or, with status 0, a client that hung up before it was answered."""
        self.statuses[status // 100] += 1


class HttpMeters:
    """All requests since the service started, by route. Clients can't add routes: what fits none counts as `other`."""

    def __init__(self) -> None:
        self.routes: dict[str, RouteMeter] = {}
        self.connections = 0
        """How many are open."""
        self.refused_connections = 0
        """How many were ended or refused because there were too many."""
        self.watches = 0
        """How many clients watch something, open admin pages included."""
        self.of(UNKNOWN)

    def of(self, route: str) -> RouteMeter:
        """The meter of a route; callers keep it."""
        return self.routes.setdefault(route.replace(":path", ""), RouteMeter())
