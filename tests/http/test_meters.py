"""What is counted of HTTP: requests by route and class of status, their durations, connections and watches."""

import asyncio

from keyloft import limits
from keyloft.http.meters import STATUS_CLASSES, HttpMeters
from keyloft.plugins import BotDatabase
from keyloft.plugins.meters import Meters
from keyloft.plugins.usage import PluginUsage
from keyloft.server.metrics import Metrics
from tests.http.api import running_api
from tests.http.services import until
from tests.support.http import http_client


def counted(meters: HttpMeters) -> dict[str, dict[str, int]]:
    """The answers by route and class of status, those that there were."""
    routes = {
        route: {status: times for status, times in zip(STATUS_CLASSES, meter.statuses, strict=True) if times}
        for route, meter in meters.routes.items()
    }
    return {route: statuses for route, statuses in routes.items() if statuses}


async def test_requests_are_counted_by_route_and_class_of_status() -> None:
    async with running_api() as api:
        for number in range(3):
            await api.put(f"/v1/kv/users/={number}", 1)
        await api.get("/v1/kv/absent")
        await api.get("/v1/db/shop/kv/absent")
        await api.get("/v1/info", token="kl_wrong")
        for number in range(5):
            await api.get(f"/no/such/path/{number}")
        await api.raw(b"nonsense\r\n\r\n")
        meters = api.context.meters
        assert counted(meters) == {
            "/v1/kv/{key}": {"2xx": 3, "4xx": 1},
            "/v1/db/{store}/kv/{key}": {"4xx": 1},
            "/v1/info": {"4xx": 1},
            "other": {"4xx": 6},
        }
        assert meters.routes["/v1/kv/{key}"].durations.count == 4
        assert meters.routes["/v1/info"].durations.count == 0, "refused tokens are answered late on purpose"


async def test_watches_connections_and_clients_that_hang_up_are_counted() -> None:
    async with running_api(connections=4) as api:
        meters = api.context.meters
        async with api.watch("prefix=a") as events:
            await events.next()
            assert meters.watches == 1
            assert counted(meters) == {}
        await until(lambda: counted(meters) == {"/v1/watch": {"2xx": 1}})
        assert (meters.watches, meters.routes["/v1/watch"].durations.count) == (0, 0)
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        head = b"PUT /v1/kv/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        writer.write(head + f"Authorization: {api.client.headers['authorization']}\r\n\r\n1".encode())
        writer.close()
        await until(lambda: meters.routes["/v1/kv/{key}"].statuses[0] == 1)
        idle = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(6)]
        await until(lambda: meters.refused_connections >= 2)
        assert meters.connections <= 4 + 1
        for _, writer in idle:
            writer.transport.abort()


async def test_all_routes_are_shown_to_prometheus_in_a_bounded_number_of_series() -> None:
    async with running_api() as api, BotDatabase(":memory:") as db, PluginUsage(db) as usage:
        metrics = Metrics(Meters(), usage, http=api.context.meters, prefix="p")
        await api.get("/v1/kv/absent")
        lines = (await metrics.render()).decode().splitlines()
        assert 'p_http_requests_total{route="/v1/kv/{key}",status="4xx"} 1' in lines
        assert 'p_http_requests_total{route="/v1/atomic",status="2xx"} 0' in lines
        assert 'p_http_duration_seconds_count{route="/v1/kv/{key}"} 1' in lines
        assert "p_http_connections 1" in lines
        assert "p_http_watches 0" in lines
        assert "p_http_refused_connections_total 0" in lines
        async with http_client(f"http://127.0.0.1:{api.port}") as client:
            for number in range(50):
                await client.request(f"M{number}" if number % 2 else "GET", f"/v1/{number}/x?y={number}")
        shown = [line for line in (await metrics.render()).decode().splitlines() if line.startswith("p_http")]
        most = len(STATUS_CLASSES) + len(limits.LATENCY_BOUNDS) + 3
        assert len(shown) <= most * len(api.context.meters.routes) + 3
        assert len(api.context.meters.routes) < 40
