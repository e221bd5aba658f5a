"""Logging in to the admin page: sessions end, forms are of one session, and other sites are kept out."""

import pytest

from keyloft import limits
from keyloft.http.page.sessions import SessionTable
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import admin_token
from tests.http.api import ADMIN_TOKEN, scoped_token
from tests.http.page.pages import form_token, running_page


def test_a_session_ends_after_its_time_and_when_no_one_uses_it() -> None:
    now, token = 0.0, admin_token(ADMIN_TOKEN)
    table = SessionTable(ValidTokens((token,)), lambda: now)
    name, session = table.begin(token)
    now += limits.PAGE_IDLE_SECONDS
    assert table.find(name) is session
    now += limits.PAGE_IDLE_SECONDS + 1
    assert table.find(name) is None
    name, _ = table.begin(token)
    for _ in range(int(limits.PAGE_SESSION_SECONDS / limits.PAGE_IDLE_SECONDS)):
        now += limits.PAGE_IDLE_SECONDS
        assert table.find(name) is not None
    now += 1
    assert table.find(name) is None
    assert len(table) == 0


def test_sessions_are_bounded_and_the_longest_unused_one_goes() -> None:
    token = admin_token(ADMIN_TOKEN)
    table = SessionTable(ValidTokens((token,)))
    first, second = table.begin(token)[0], table.begin(token)[0]
    assert table.find(first) is not None
    for _ in range(limits.PAGE_SESSIONS - 1):
        table.begin(token)
    assert len(table) == limits.PAGE_SESSIONS
    assert table.find(second) is None
    assert table.find(first) is not None


def test_a_session_ends_with_its_token() -> None:
    token = admin_token(ADMIN_TOKEN)
    name, _ = SessionTable(ValidTokens((token,))).begin(token)
    revoked = SessionTable(ValidTokens((admin_token("another"),)))
    other, _ = revoked.begin(token)
    assert revoked.find(other) is None
    assert revoked.find(name) is None


def test_a_code_logs_in_once_and_for_a_minute() -> None:
    now, token = 0.0, admin_token(ADMIN_TOKEN)
    table = SessionTable(ValidTokens((token,)), lambda: now)
    code = table.new_code(token)
    assert (table.take_code(code), table.take_code(code), table.take_code("other")) == (token, None, None)
    late = table.new_code(token)
    now += limits.PAGE_CODE_SECONDS + 1
    assert table.take_code(late) is None
    first = table.new_code(token)
    for _ in range(limits.PAGE_CODES):
        table.new_code(token)
    assert table.take_code(first) is None


async def test_a_token_logs_in_by_form_and_logs_out() -> None:
    async with running_page() as page, page.client(None) as client:
        shown = await client.get("/page/plugins?q=a")
        assert (shown.status_code, shown.headers["location"]) == (303, "/page/login?next=/page/plugins%3Fq%3Da")
        login = await client.get(shown.headers["location"])
        fields = {"form_token": form_token(login.text), "next": "/page/plugins?q=a", "token": "wrong"}
        refused = await client.post("/page/login", data=fields)
        assert refused.status_code == 401
        assert "this token is not valid" in refused.text
        assert "wrong" not in refused.text
        done = await client.post("/page/login", data={**fields, "token": ADMIN_TOKEN})
        assert (done.status_code, done.headers["location"]) == (303, "/page/plugins?q=a")
        cookie = done.headers.get_list("set-cookie")[0]
        assert cookie.startswith("keyloft-session-")
        assert {"HttpOnly", "SameSite=Strict", "Path=/page"} <= set(cookie.split("; "))
        view = await client.get("/page/plugins")
        assert view.status_code == 200
        assert "default-src 'none'" in view.headers["content-security-policy"]
        assert "unsafe" not in view.headers["content-security-policy"]
        assert "form_token" in view.text
        assert (await client.post("/page/logout", data={"form_token": form_token(view.text)})).status_code == 303
        assert (await client.get("/page/plugins")).status_code == 303


@pytest.mark.parametrize(
    "where",
    [
        "https://evil.example/",
        "//evil.example",
        "/page\\evil",
        "/pages",
        "/page//evil",
        "/v1",
        "/page/../v1",
        "/page/%2e%2e/v1",
    ],
)
async def test_a_log_in_leads_nowhere_else(where: str) -> None:
    async with running_page() as page, page.client(None) as client:
        login = await client.get("/page/login", params={"next": where})
        fields = {"form_token": form_token(login.text), "next": where, "token": ADMIN_TOKEN}
        assert (await client.post("/page/login", data=fields)).headers["location"] == "/page"


async def test_forms_of_another_session_or_site_are_refused() -> None:
    async with running_page() as page, page.client() as client, page.client() as other:
        await page.kv.set(("a",), "secret-value")
        foreign = form_token((await other.get("/page/tuples/entry?key=a")).text)
        mine = form_token((await client.get("/page/tuples/entry?key=a")).text)
        assert mine != foreign
        path = "/page/tuples/entry"
        for data in ({"key": "a"}, {"key": "a", "form_token": ""}, {"key": "a", "form_token": foreign}):
            refused = await client.post(path, data=data)
            assert (refused.status_code, "secret-value" in refused.text) == (403, False)
        data = {"key": "a", "form_token": mine}
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"host": "evil.example"},
        ):
            refused = await client.post(path, data=data, headers=headers)
            assert (refused.status_code in (403, 421), "secret-value" in refused.text) == (True, False)
        login = await client.post("/page/login", data={"token": ADMIN_TOKEN, "form_token": mine})
        assert login.status_code == 403
        assert "secret-value" in (await client.post(path, data=data)).text


async def test_a_token_in_the_address_of_a_link_on_another_site_does_not_log_in() -> None:
    async with running_page() as page, page.client(None) as client:
        for site in ("cross-site", "same-site"):  # the same site is also another port of this host
            answer = await client.get("/", params={"token": ADMIN_TOKEN}, headers={"sec-fetch-site": site})
            assert (answer.status_code, answer.headers.get("set-cookie")) == (303, None)


async def test_a_wrong_token_stays_in_no_address() -> None:
    async with running_page() as page, page.client(token=None) as client:
        refused = await client.get("/?token=kl_mistyped")
        assert (refused.status_code, refused.headers["location"]) == (303, "/page/login?wrong=token")
        shown = await client.get(refused.headers["location"])
        assert (shown.status_code, "this token is not valid" in shown.text) == (401, True)
        assert "kl_mistyped" not in shown.text


async def test_a_look_at_a_link_does_not_use_it_up() -> None:
    async with running_page() as page, page.client(None) as client:
        made = await client.post("/page/code", headers={"authorization": f"Bearer {ADMIN_TOKEN}"})
        path = made.json()["path"]
        assert (await client.head(path)).headers.get("set-cookie") is None
        assert (await client.get(path)).headers["set-cookie"].startswith("keyloft-session-")
        assert (await client.head("/page/tuples")).status_code == 200


@pytest.mark.parametrize("cookie", ['"x\\012Set-Cookie: a=b"', '"x; Domain=evil.example"', '"\\351"', "x" * 5000])
async def test_a_cookie_that_another_port_has_set_is_not_repeated(cookie: str) -> None:
    async with running_page() as page, page.client(None) as client:
        name = f"keyloft-login-{page.url.rpartition(':')[2]}"
        answer = await client.get("/page/login", headers={"cookie": f"{name}={cookie}"})
        assert answer.status_code == 200
        [given] = answer.headers.get_list("set-cookie")
        assert given == f"{name}={form_token(answer.text)}; Path=/page; HttpOnly; SameSite=Strict"
        assert len(form_token(answer.text)) == 43


async def test_cookies_in_two_headers_are_none() -> None:
    async with running_page() as page, page.client() as client:
        headers = [("cookie", f"{name}={value}") for name, value in client.cookies.items()] + [("cookie", "a=b")]
        client.cookies.clear()
        for path, status in (("/page", 303), ("/page/login", 200), ("/page/none", 404)):
            answer = await client.get(path, headers=headers)
            assert (answer.status_code, "default-src" in answer.headers["content-security-policy"]) == (status, True)


async def test_every_answer_keeps_other_sites_and_scripts_out() -> None:
    async with running_page() as page, page.client(None) as client:
        asked = ("/", "/page", "/page/login", "/page/none", "/page/static/page.js", "/page/events", "/?token=wrong")
        answers = [await client.get(path) for path in asked]
        answers += [await client.post("/page/tuples"), await client.get("/page", headers={"host": "evil.example"})]
        assert [answer.status_code for answer in answers] == [303, 303, 200, 404, 200, 200, 303, 405, 421]
        for answer in answers:
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert answers[-2].headers["allow"] == "GET, HEAD"


async def test_the_cookie_of_the_page_opens_nothing_of_the_api() -> None:
    async with running_page() as page, page.client() as client:
        assert (await client.get("/v1/info")).status_code == 401


async def test_a_token_with_read_scopes_changes_nothing() -> None:
    reader = scoped_token("reads-all", "read:kv", "read:tenant/*", "read:plugin/*")
    async with running_page(reader) as page, page.client("reads-all") as client:
        await page.store.flags("acme", "web").set("new-ui", True, writer="console:x")
        view = await client.get("/page/project/flags?tenant=acme&project=web")
        assert "read-only" in view.text
        assert "Switch" not in view.text
        fields = {"tenant": "acme", "project": "web", "name": "new-ui", "to": "off", "version": "1"}
        refused = await client.post("/page/project/flag", data={**fields, "form_token": form_token(view.text)})
        assert refused.status_code == 403
        assert "may not write" in refused.text
        for path in ("/page/settings", "/page/health"):
            assert (await client.get(path)).status_code == 403
        assert await page.store.flags("acme", "web").get("new-ui") is True


async def test_a_page_that_is_read_only_refuses_changes_of_every_token() -> None:
    async with running_page(is_read_only=True) as page, page.client() as client:
        await page.store.flags("acme", "web").set("new-ui", True, writer="console:x")
        view = await client.get("/page/project/flags?tenant=acme&project=web")
        assert "Switch" not in view.text
        fields = {"tenant": "acme", "project": "web", "name": "new-ui", "to": "off", "version": "1"}
        refused = await client.post("/page/project/flag", data={**fields, "form_token": form_token(view.text)})
        assert (refused.status_code, "read-only" in refused.text) == (403, True)
        await page.kv.set(("a",), "shown")
        shown = await client.post("/page/tuples/entry", data={"key": "a", "form_token": form_token(view.text)})
        assert "shown" in shown.text
