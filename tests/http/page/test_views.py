"""The views of the admin page: what they show, page by page, and what they hide."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.health import HostHealth, ServerHealth
from keyloft.http.page import formatting
from keyloft.http.page.overview import OverviewViews
from keyloft.http.page.plugin_views import stored_plugins
from keyloft.http.page.rendering import PageRenderer
from keyloft.http.page.sampling import RateSampler, quantile
from keyloft.http.page.service import ShownSetting
from keyloft.http.page.sessions import PageSession
from keyloft.http.page.values import show
from keyloft.http.page.views import Visit
from keyloft.http.requests import HttpRequest
from keyloft.http.tokens import PUBLIC, admin_token
from keyloft.semantic import Semantics
from keyloft.semantic.monitoring import Alert
from keyloft.server.config import SETTINGS, Config
from keyloft.server.http_service import HttpService
from keyloft.server.shown_settings import SECRETS, shown_settings
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, StillPages, scoped_token
from tests.http.page.pages import form_token, links, rows, running_page
from tests.support.postgres_cluster import cluster
from tools.postgres import query


async def all_rows(client: Any, address: str) -> list[list[str]]:
    """The rows of each page of a table, by its links to the next page."""
    pages = []
    while True:
        answer = await client.get(address)
        assert answer.status_code == 200, answer.text
        pages.append(rows(answer.text))
        following = [link for link in links(answer.text) if "after=" in link or "before=" in link]
        if not following:
            return pages
        address = following[0]


async def test_keys_are_a_tree_with_pages_and_a_search() -> None:
    async with running_page() as page, page.client() as client:
        for number in range(250):
            await page.kv.set(("orders", number, "lines", 1), number)
            await page.kv.set(("users", f"u{number:03}"), number)
        await page.kv.set(("users",), "an entry with keys below")
        top = await client.get("/page/tuples")
        assert rows(top.text) == ["orders/", "users/"]
        assert "/page/tuples/entry?key=users" in links(top.text)
        pages = await all_rows(client, "/page/tuples?q=orders/")
        assert [len(one) for one in pages] == [100, 100, 50]
        assert [name for one in pages for name in one] == [f"={number}/" for number in range(250)]
        assert rows((await client.get("/page/tuples?q=users/u24")).text) == [f"u24{digit}" for digit in range(10)]
        assert rows((await client.get("/page/tuples?q=orders/=42")).text) == ["=42/"]
        assert "No key begins with" in (await client.get("/page/tuples?q=nothing")).text
        broken = await client.get("/page/tuples?q=a//b")
        assert (broken.status_code, "no empty parts" in broken.text) == (422, True)


async def test_named_stores_are_offered_and_shown() -> None:
    async with running_page() as page, page.client() as client:
        for name in ("shop", "mail", "Zoo"):
            await page.context.store(name).set(("a", 1), 1)
        top = (await client.get("/page/tuples")).text
        assert [name for name in ("Zoo", "mail", "shop") if f"<option>{name}</option>" in top] == [
            "Zoo",
            "mail",
            "shop",
        ]
        assert rows(top) == []
        assert rows((await client.get("/page/tuples?store=shop")).text) == ["a/"]


async def test_a_token_sees_what_is_in_its_scopes() -> None:
    scoped = scoped_token("of-users", "read:kv/users", "read:plugin/trivia", "read:tenant/acme")
    async with running_page(scoped) as page, page.client("of-users") as client:
        await page.kv.set(("users", "alice"), 1)
        await page.kv.set(("secret-folder", "a"), 1)
        for plugin in ("trivia", "quotes"):
            await page.db.kv_set(plugin, "a", 1)
        for tenant in ("acme", "zeta"):
            meaning = Semantics("config")
            key = f"tenant/{tenant}/project/web/a"
            await page.store.put(key, 1, expected_version=0, writer="ops:x", semantics=meaning)
        top = await client.get("/page/tuples")
        assert ("users/" in top.text, "secret-folder" in top.text) == (True, False)
        assert rows((await client.get("/page/tuples?q=users/")).text) == ["alice"]
        for path in (
            "/page/tuples?q=secret-folder/",
            "/page/tuples/entry?key=secret-folder/a",
            "/page/plugin?name=quotes",
            "/page/plugin/entry?name=quotes&key=a",
            "/page/project?tenant=zeta&project=web",
            "/page/project/audit?tenant=zeta&project=web",
        ):
            assert (await client.get(path)).status_code == 403, path
        assert rows((await client.get("/page/plugins")).text) == ["trivia"]
        assert rows((await client.get("/page/projects")).text) == ["acme / web"]


async def test_a_token_for_the_status_sees_all_but_values() -> None:
    watcher = scoped_token("watcher", "status:kv", "status:plugin/*", "status:tenant/acme")
    async with running_page(watcher) as page, page.client("watcher") as client:
        await page.kv.set(("users", "alice"), "secret-value")
        await page.db.kv_set("trivia", "a", "secret-value")
        await page.store.flags("acme", "web").set("new-ui", True, writer="console:x")
        for path, fields in (
            ("/page/tuples/entry", {"key": "users/alice"}),
            ("/page/plugin/entry", {"name": "trivia", "key": "a"}),
            ("/page/project/entry", {"tenant": "acme", "project": "web", "path": "flags/new-ui"}),
        ):
            view = await client.get(path, params=fields)
            assert (view.status_code, "may not see values" in view.text) == (200, True)
            refused = await client.post(path, data={**fields, "form_token": form_token(view.text)})
            assert (refused.status_code, "secret-value" in refused.text) == (403, False)
        flags = (await client.get("/page/project/flags?tenant=acme&project=web")).text
        assert ("new-ui" in flags, ">on<" in flags) == (True, False)
        bearer = {"authorization": "Bearer watcher"}
        assert (await client.get("/v1/kv/users/alice", headers=bearer)).status_code == 403
        assert (await client.get("/v1/kv?prefix=users&keys=true", headers=bearer)).status_code == 403


async def test_plugins_are_listed_by_name_however_many_keys_they_have() -> None:
    async with running_page() as page, page.client() as client:
        names = [f"plugin-{number:03}" for number in range(230)]
        for name in names:
            await page.db.kv_set(name, "a", 1)
        await page.db.kv_set_many("plugin-100", {f"k{number}": 1 for number in range(300)})
        await page.db.kv_set("quiz", "k", 1)
        engine = await page.db.engine()
        for begins, after, limit in (
            ("", "", 1000),
            ("plugin-1", "", 1000),
            ("", "plugin-099", 7),
            ("q", "plugin-200", 5),
        ):
            expected = [name for name in [*names, "quiz"] if name.startswith(begins) and name > after][:limit]
            assert await stored_plugins(engine, begins, after, limit) == expected
        pages = await all_rows(client, "/page/plugins?q=plugin-")
        assert [len(one) for one in pages] == [100, 100, 30]
        assert [name for one in pages for name in one] == names
        one = await client.get("/page/plugin?name=plugin-100")
        assert "301" in one.text
        assert [len(each) for each in await all_rows(client, "/page/plugin?name=plugin-100")] == [100, 100, 100, 1]
        assert rows((await client.get("/page/plugin?name=plugin-100&q=k29")).text)[0] == "k29"


async def test_projects_and_their_entries_are_found_by_purpose() -> None:
    async with running_page() as page, page.client() as client:
        for number in range(120):
            for purpose in ("checkpoint", "config"):
                key = f"tenant/acme/project/web/{purpose}/{number:03}"
                await page.store.put(key, 1, expected_version=0, writer="w:x", semantics=Semantics(purpose))
        for tenant in ("acme-labs", "acme", "b"):
            key = f"tenant/{tenant}/project/ops/a"
            await page.store.put(key, 1, expected_version=0, writer="w:x", semantics=Semantics("config"))
        listed = rows((await client.get("/page/projects")).text)
        assert sorted(listed) == ["acme / ops", "acme / web", "acme-labs / ops", "b / ops"]
        assert rows((await client.get("/page/projects?q=acme-")).text) == ["acme-labs / ops"]
        base = "/page/project?tenant=acme&project=web"
        found = await all_rows(client, f"{base}&purpose=config")
        assert [name for one in found for name in one] == [f"config/{number:03}" for number in range(120)]
        assert [len(one) for one in await all_rows(client, base)] == [100, 100, 40]
        trail = await all_rows(client, "/page/project/audit?tenant=acme&project=web&path=checkpoint/")
        assert [name for one in trail for name in one] == [f"checkpoint/{number:03}" for number in range(119, -1, -1)]
        no_one = await client.get("/page/project/audit?tenant=acme&project=web&writer=other")
        assert "No record fits" in no_one.text


async def test_pages_of_projects_go_on_over_all_tenants_of_a_token() -> None:
    token = scoped_token("two", "read:tenant/a", "write:tenant/a", "read:tenant/a-b")
    async with running_page(token) as page, page.client("two") as client:
        wanted = [("a-b", f"p{number}") for number in range(2)] + [("a", f"p{number:03}") for number in range(101)]
        for tenant, project in wanted:
            await page.store.flags(tenant, project).set("x", True, writer="console:x")
        first = (await client.get("/page/projects")).text
        [following] = [link for link in links(first) if "after=" in link]
        second = (await client.get(following)).text
        assert rows(first) + rows(second) == [f"{tenant} / {project}" for tenant, project in wanted]


async def test_a_value_is_shown_to_one_who_asks_and_that_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    async with running_page() as page, page.client() as client:
        await page.kv.set(("users", "alice"), {"password": "tuple-secret"})
        await page.db.kv_set("trivia", "answer", "plugin-secret")
        key = "tenant/acme/project/web/docs/delta"
        meaning = Semantics("checkpoint")
        await page.store.put(key, "entry-secret", expected_version=0, writer="w:x", semantics=meaning)
        for path, fields, secret, line in (
            ("/page/tuples/entry", {"key": "users/alice"}, "tuple-secret", "users/alice"),
            ("/page/plugin/entry", {"name": "trivia", "key": "answer"}, "plugin-secret", "plugin trivia answer"),
            (
                "/page/project/entry",
                {"tenant": "acme", "project": "web", "path": "docs/delta"},
                "entry-secret",
                key,
            ),
        ):
            hidden = await client.get(path, params=fields)
            assert (hidden.status_code, secret in hidden.text) == (200, False)
            caplog.clear()
            with caplog.at_level(logging.INFO, "keyloft.audit"):
                asked = await client.post(path, data={**fields, "form_token": form_token(hidden.text)})
            assert secret in asked.text
            assert [record.getMessage() for record in caplog.records] == [f"token admin: admin page: show value {line}"]
            gone = await client.get(path, params={**fields, "key": "none", "path": "none"})
            assert gone.status_code == 404


async def events(
    client: Any, view: str, wanted: int, after_first: Callable[[], Awaitable[Any]] | None = None
) -> list[Any]:
    """The views that an open page gets, until there are so many."""
    found: list[Any] = []
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        client.stream("GET", "/page/events", params={"view": view}) as stream,
    ):
        assert stream.headers["content-type"] == "text/event-stream"
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == wanted:
                    return found
                if len(found) == 1 and after_first is not None:
                    await after_first()
    return found


async def test_an_open_page_gets_what_has_changed_without_values_and_forms() -> None:
    async with running_page() as page, page.client() as client:
        await page.kv.set(("users", "alice"), "secret-value")

        async def change() -> None:
            await page.kv.set(("users", "bob"), "secret-value")

        first, second = await events(client, "/page/tuples?q=users/", 2, change)
        assert (rows(first), rows(second)) == (["alice"], ["alice", "bob"])
        for text in (first, second, *await events(client, "/page/tuples/entry?key=users/alice", 1)):
            assert not any(word in text for word in ("secret-value", "form_token", "<script"))


async def test_an_open_page_whose_session_has_ended_learns_so_at_once() -> None:
    async with running_page() as page, page.client(None) as client:
        assert await events(client, "/page", 1) == [{}]
        async with client.stream("GET", "/page/events") as stream:
            assert "event: ended" in [line async for line in stream.aiter_lines()]


async def test_the_overview_shows_rates_and_charts() -> None:
    async with running_page() as page, page.client() as client:
        text = (await client.get("/page")).text
        assert text.count('role="img"') == 5
        assert "connected" in text
        assert "nats://127.0.0.1:4222" in text
        assert (await client.get("/page/health")).status_code == 200


async def test_the_overview_does_not_count_plugins_that_are_added_up_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "USAGE_PLUGINS", 2)
    async with running_page() as page, page.client() as client:
        for plugin, shown in (("a", "1"), ("b", "2"), ("c", "more than 2"), ("d", "more than 2")):
            await page.db.kv_set(plugin, "k", 10)
            assert page.context.service is not None
            await page.context.service.usage.count_all()
            assert f"<dt>Plugins</dt><dd>{shown}</dd>" in (await client.get("/page")).text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-0.4, "now"), (-1, "1 second ago"), (-59.9, "59 seconds ago"), (-61, "1 minute ago"), (7200, "in 2 hours"),
     (-3 * 86_400, "3 days ago"), (-90 * 86_400, "3 months ago"), (3 * 365 * 86_400, "in 3 years")],
)  # fmt: skip
def test_times_are_relative_with_the_exact_one_beside(seconds: float, text: str) -> None:
    now = datetime(2026, 11, 17, 12, tzinfo=UTC)
    html = formatting.when(now + timedelta(seconds=seconds), now)
    assert html.endswith(f">{text}</time>")
    assert "UTC" in html
    assert formatting.when(None) == "–"
    assert str(formatting.when(2**62)).startswith('<time datetime="9999-')


def test_numbers_have_units() -> None:
    assert [formatting.size(number) for number in (0, 1, 999, 1500, 2_500_000, 7 * 10**9, 3 * 10**13)] == [
        "0 bytes", "1 byte", "999 bytes", "1.5 kB", "2.5 MB", "7 GB", "30 TB"
    ]  # fmt: skip
    assert [formatting.duration(number) for number in (0.00002, 0.0123, 2.5)] == ["20 µs", "12.3 ms", "2.5 s"]
    assert [formatting.rate(number) for number in (0.0, 0.25, 1234.5, None)] == ["0 /s", "0.25 /s", "1,234 /s", "–"]


def test_a_latency_is_read_from_what_a_histogram_counted_meanwhile() -> None:
    none = [0] * (len(limits.LATENCY_BOUNDS) + 1)
    assert quantile(none, none, 0.5) is None
    some = [10, 0, 0, 10, *none[4:]]
    assert quantile(none, some, 0.5) == pytest.approx(0.0005)
    assert quantile(none, some, 1.0) == pytest.approx(0.005)
    assert quantile(some, some, 0.5) is None
    assert quantile(none, [*none[:-1], 3], 0.5) == limits.LATENCY_BOUNDS[-1]


def test_values_are_shown_as_a_person_reads_them() -> None:
    assert show(b'{"a":[1]}', 0).text == '{\n  "a": [\n    1\n  ]\n}'
    assert show(b"\x00\x01hello", 1).text.startswith("000000  00 01 68")
    assert show((7).to_bytes(8, "little"), 2).text in ("7", str(7 << 56))
    long = show(b'"' + b"x" * 2 * limits.PAGE_VALUE_BYTES + b'"', 0)
    assert (long.is_cut, len(long.text)) == (True, limits.PAGE_VALUE_BYTES)
    assert show(b"not json", 0).text == "not json"


def test_settings_are_shown_without_secrets() -> None:
    secret = "hunter2hunter2hunter2"
    config = Config(
        database=f"postgresql://user:{secret}@db/kv",
        nats=(f"nats://user:{secret}@nats:4222",),
        nats_user="user",
        http_token=secret,
        nats_password=secret,
        nats_token=secret,
        audit_key=secret,
    )
    found: dict[str, ShownSetting] = {setting.name: setting for setting in shown_settings(config)}
    assert found.keys() == SETTINGS.keys()
    assert secret not in repr(found)
    assert all("set" in found[name].value for name in SECRETS)
    assert found["nats"].value == "nats://nats:4222"
    assert {name for name in SETTINGS if any(word in name for word in ("password", "token", "key"))} - SECRETS == {
        "http_tokens", "http_make_token", "http_key", "nats_key", "quota_keys"
    }  # fmt: skip


def test_no_request_compiles_a_template() -> None:
    templates = PageRenderer(is_read_only=False).templates
    assert templates.cache is not None
    assert {name for _, name in templates.cache.keys()} == {*templates.list_templates()}


async def test_replicas_and_alerts_are_shown() -> None:
    hosts = (
        HostHealth(name="db1:5432", role="primary", timeline=3),
        HostHealth(name="db2:5432", role="standby", timeline=3, lag=0.25, reads=7),
        HostHealth(name="db3:5432", role="unreachable"),
    )
    servers = ServerHealth(host="db1:5432", timeline=3, synchronous="", hosts=hosts, failovers=2, unknown_commits=1)
    async with running_page() as page:
        assert page.context.service is not None
        view = OverviewViews(page.context, page.context.service, RateSampler(page.context.service, lambda: None))
        session = PageSession(admin_token(ADMIN_TOKEN), 0.0)
        scope = {"method": "GET", "headers": [], "path": "/page", "query_string": b""}
        request = HttpRequest(scope, None, None, PUBLIC)  # type: ignore[arg-type]
        visit = Visit(request, session, is_read_only=False)
        alert = Alert("storage_outage", True, "the database has been failing for more than 300 s")
        for handler, texts in (
            (view.overview, ["db2:5432", "250 ms behind"]),
            (view.health, ["unreachable", "Failovers: 2"]),
        ):
            shown_view = await handler(visit)
            values = {**shown_view.values, "servers": servers, "alerts": [alert]}
            html = PageRenderer(is_read_only=False).page(replace(shown_view, values=values), visit).body.decode()
            assert [text for text in (*texts, "storage_outage", alert.message) if text not in html] == []


@pytest.mark.slow
@pytest.mark.blocks_the_loop
async def test_the_servers_of_a_real_cluster_are_shown_with_what_they_are_to_the_primary() -> None:
    with cluster() as servers:
        primary, standby = servers.nodes
        query(primary.url, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        query(primary.url, "SELECT pg_reload_conf()")
        async with running_page(url=servers.url()) as page, page.client() as client:

            async def shows(path: str, *texts: str) -> None:
                async with asyncio.timeout(LONGEST_SECONDS):
                    while not all([text in (html := (await client.get(path)).text) for text in texts]):
                        await page.db.kv_set("trivia", "k", 1)
                assert 'role="alert"' not in html

            await shows("/page", standby.host, ", sync", " behind")
            await shows("/page/health", primary.host, '>standby</td><td data-label="Replication">sync</td>')
            query(primary.url, "ALTER SYSTEM SET synchronous_standby_names = ''")
            query(primary.url, "SELECT pg_reload_conf()")
            standby.kill()
            await shows("/page", "<dt>Unreachable</dt>")


async def test_a_service_can_be_without_a_page() -> None:
    async with running_page() as page:
        assert page.context.service is not None
        for mode, expected in (("off", False), ("full", True), ("read-only", True)):
            config = Config(http_page=mode, http_token="a-token-of-this-test", http="off")  # type: ignore[arg-type]
            assert HttpService(config, StillPages(), page.context.service, page.context.meters).has_page is expected
