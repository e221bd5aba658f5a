"""The admin page in a browser: one service and one browser for all of it."""

import asyncio
import http.server
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import apsw
import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

import keyloft
from keyloft.http.tokens import declaration
from keyloft.semantic import Semantics, SemanticStore
from tests.server.test_serve import Serving
from tests.support.chromium import chromium
from tests.support.fork_server import run
from tests.support.node import installed
from tests.support.ports import free_port
from tools.demo_data import SECRETS, fill, fill_project

pytestmark = [pytest.mark.slow, pytest.mark.blocks_the_loop]

LONGEST_SECONDS = 30.0
TOKENS = {"admin": ["admin"], "reader": ["read:kv", "read:plugin/*", "read:tenant/*"], "guest": ["admin"]}
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
SCREEN: Final[ViewportSize] = {"width": 1280, "height": 720}
"""Of a new page."""
OF_PROJECT = "tenant=acme&project=web"
OF_LAB = "tenant=acme&project=lab"
LAB = "tenant/acme/project/lab/"
"""What tests change: the others may run before or after them."""
VIEWS = {
    "/page": "Stored by plugins",
    "/page/tuples": "users/",
    "/page/tuples?q=users/": "alice/",
    "/page/tuples/entry?key=users/alice": "Show the value",
    "/page/plugins": "trivia",
    "/page/plugin?name=playlist": "playlist-1",
    "/page/plugin/entry?name=trivia&key=round": "Show the value",
    "/page/projects": "acme / web",
    f"/page/project?{OF_PROJECT}": "docs/onedrive/delta",
    f"/page/project?{OF_PROJECT}&purpose=checkpoint": "harvester:sync",
    f"/page/project?{OF_PROJECT}&purpose=cursor": "mail/inbox/position",
    f"/page/project?{OF_PROJECT}&purpose=index_version": "search/index/docs/version",
    f"/page/project/entry?{OF_PROJECT}&path=docs/onedrive/delta": "specs/harvest.md",
    f"/page/project/flags?{OF_PROJECT}": "new-ui",
    f"/page/project/locks?{OF_PROJECT}": "locks/harvest",
    f"/page/project/dead-letters?{OF_PROJECT}": "VERSION_CONFLICT",
    f"/page/project/audit?{OF_PROJECT}": "mailer:poll",
    f"/page/project/flag?{OF_PROJECT}&name=new-ui&to=on": "Switch the flag new-ui on?",
    "/page/health": "well",
    "/page/settings": "--database",
    "/page/tuples?q=none": "No key begins with none",
    "/page/nothing-here": "there is no such page",
}


class PageService:
    """A `keyloft serve` with a page, which can be stopped and started at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "app.db"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.write_tokens(*TOKENS)
        self._serving: Serving | None = None
        self.logs: list[Serving] = []

    def write_tokens(self, *names: str) -> None:
        declared = [declaration(name, f"kl_token-of-{name}", TOKENS[name]) for name in names]
        (self.folder / "tokens.toml").write_text("\n\n".join(declared))

    def start(self) -> None:
        address = self.url.removeprefix("http://")
        flags = ("--http-tokens", "tokens.toml", "--quota-keys", "200", "--http", address)
        self._serving = Serving(self.folder, "--database", str(self.database), "--nats-port", "0", *flags)
        self.logs.append(self._serving)
        until(lambda: self._serving is not None and self._serving.is_ready)

    def stop(self) -> None:
        if self._serving is not None:
            self._serving.process.terminate()
            self._serving.process.wait()
            self._serving = None

    @property
    def log(self) -> str:
        return "".join([each.log for each in self.logs])

    def command(self, *arguments: str) -> None:
        """Run a command of Keyloft: another process, on the same database."""
        done = run(["-m", "keyloft", *arguments, "--database", str(self.database)])
        assert done.returncode == 0, done.stderr


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


async def fill_all(database: Path) -> None:
    """The usual data, and hostile texts wherever someone else than the operator chooses them."""
    await fill(str(database))
    async with keyloft.open(database) as kv:
        await kv.set((HOSTILE, HOSTILE), {HOSTILE: HOSTILE})
        async with SemanticStore(kv, sweep_every=None) as store:
            await fill_project(store, "lab")
            meaning = Semantics("config", producer=HOSTILE, consumer_hints=(HOSTILE,))
            key = "tenant/evil/project/x/a"
            await store.put(
                key,
                HOSTILE,
                expected_version=0,
                writer=HOSTILE,
                semantics=meaning,
                request_id=HOSTILE,
                spec_ref=HOSTILE,
            )
    with apsw.Connection(str(database)) as connection:
        connection.execute(
            "insert into plugin_kv_storage (plugin_name, key, value_json, created_at, updated_at) "
            "values (?, ?, '1', '2026-01-01 00:00:00.000000', '2026-01-01 00:00:00.000000')",
            (HOSTILE, HOSTILE),
        )
    connection.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageService]:
    made = PageService(tmp_path_factory.mktemp("page"))
    asyncio.run(fill_all(made.database))
    made.start()
    yield made
    made.stop()


class BrowserPages:
    """A browser, and pages of it that were used and cleared: to make one takes half a second of a processor."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._cleared: list[Page] = []

    def take(self) -> Page:
        return self._cleared.pop() if self._cleared else self.browser.new_context().new_page()

    def give_back(self, page: Page) -> None:
        """Of what a page can leave behind, the admin page uses cookies alone."""
        if not page.url.startswith("about:"):
            assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
        page.goto("about:blank")
        assert page.viewport_size == SCREEN
        page.context.clear_cookies()
        self._cleared.append(page)


@pytest.fixture(scope="module")
def browser(service: PageService) -> Iterator[BrowserPages]:
    with chromium() as started:
        yield BrowserPages(started)


class BrowserTab:
    """A page of the browser, and all that went wrong or over the network on it."""

    def __init__(self, page: Page, service: PageService) -> None:
        self.page = page
        self.page.set_default_timeout(1000 * LONGEST_SECONDS)
        self.failures: list[str] = []
        self.requests: list[str] = []
        self._url = service.url
        self._listeners: dict[str, Callable[[Any], None]] = {
            "pageerror": lambda error: self.failures.append(str(error)),
            "console": lambda message: self._console(message.type, message.text),
            "dialog": lambda dialog: self.failures.append(dialog.message),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(cast(Any, event), listener)

    def _console(self, kind: str, text: str) -> None:
        if kind == "error" and "status of" not in text:
            self.failures.append(text)

    def close(self) -> None:
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)

    def open(self, path: str) -> str:
        """Go to an address of the page; returns its source."""
        answer = self.page.goto(self._url + path)
        assert answer is not None
        return answer.text()


@contextmanager
def opened(
    browser: BrowserPages, service: PageService, token: str | None = "admin", *, runs_scripts: bool = True
) -> Iterator[BrowserTab]:
    """A page of a browser without cookies; logged in with a token, unless it is None."""
    page = browser.take() if runs_scripts else browser.browser.new_context(java_script_enabled=False).new_page()
    expect.set_options(timeout=1000 * LONGEST_SECONDS)
    tab = BrowserTab(page, service)
    try:
        if token is not None:
            tab.open(f"/?token=kl_token-of-{token}")
        yield tab
        assert tab.failures == []
        assert [url for url in tab.requests if not url.startswith((service.url, "data:"))] == []
    except BaseException:
        page.context.close()
        raise
    tab.close()
    if runs_scripts:
        browser.give_back(page)
    else:
        page.context.close()


def state(page: Page) -> Any:
    return expect(page.locator("#connection"))


def test_values_are_shown_when_asked_for_and_hidden_again(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service) as tab:
        page = tab.page
        for path, secret, line in (
            ("/page/tuples/entry?key=users/alice", SECRETS[0], "show value users/alice"),
            ("/page/plugin/entry?name=trivia&key=round", SECRETS[1], "show value plugin trivia round"),
            (
                f"/page/project/entry?{OF_PROJECT}&path=locks/harvest",
                SECRETS[5],
                "show value tenant/acme/project/web/locks/harvest",
            ),
        ):
            tab.open(path)
            page.get_by_role("button", name="Show the value").click()
            expect(page.get_by_label("The value")).to_contain_text(secret)
            assert f"token admin: admin page: {line}" in service.log
            page.get_by_role("link", name="Hide the value").click()
            expect(page.get_by_role("button", name="Show the value")).to_be_visible()
            assert secret not in page.content()
        assert not any([secret in service.log for secret in SECRETS])


def test_an_open_page_follows_other_processes_unless_it_is_paused(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service) as tab:
        page = tab.page
        tab.open("/page/tuples?q=users/")
        state(page).to_have_text("Live")
        page.get_by_role("link", name="bob/").focus()
        service.command("set", "users/dave", "1")
        expect(page.get_by_role("link", name="dave")).to_be_visible()
        assert page.evaluate("document.activeElement.textContent") == "bob/"
        page.get_by_role("button", name="Pause").click()
        state(page).to_have_text("Paused")
        service.command("delete", "users/dave")
        service.command("set", "users/erin", "1")
        expect(page.get_by_role("button", name="Resume")).to_have_attribute("aria-pressed", "true")
        assert page.get_by_role("link", name="erin").count() == 0
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("link", name="erin")).to_be_visible()
        expect(page.get_by_role("link", name="dave")).to_have_count(0)
        service.command("delete", "users/erin")


def test_flags_are_switched_after_a_confirmation(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service) as tab:
        page = tab.page
        tab.open(f"/page/project/flags?{OF_LAB}")
        page.get_by_role("link", name="Switch new-ui on").click()
        page.get_by_role("link", name="Cancel").click()
        expect(page.get_by_role("row", name="new-ui")).to_contain_text("off")
        page.get_by_role("link", name="Switch new-ui on").click()
        page.get_by_role("button", name="Switch on").click()
        expect(page.get_by_text("The flag new-ui is on.")).to_be_visible()
        expect(page.get_by_role("link", name="Switch new-ui off")).to_be_visible()
        assert f"admin page: switch flag on {LAB}flags/new-ui" in service.log
        tab.open(f"/page/project/audit?{OF_LAB}&writer=admin:admin-page")
        expect(page.get_by_role("row", name="flags/new-ui")).to_contain_text("put")
        # A flag that another person has changed meanwhile is not switched.
        tab.open(f"/page/project/flag?{OF_LAB}&name=new-ui&to=off")
        key = f"{LAB}flags/new-ui"
        more = ("--expected-version", "*", "--writer", "console:x", "--purpose", "feature_flag")
        service.command("semantic", "put", key, "true", *more)
        page.get_by_role("button", name="Switch off").click()
        expect(page.get_by_role("alert")).to_contain_text("VERSION_CONFLICT")


def test_locks_are_released_after_a_confirmation(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service) as tab:
        page = tab.page
        tab.open(f"/page/project/locks?{OF_LAB}")
        expect(page.get_by_role("row", name="locks/harvest")).to_contain_text("harvester:sync")
        page.get_by_role("link", name="Release locks/harvest").click()
        stale = page.url
        page.get_by_role("button", name="Release").click()
        expect(page.get_by_text("The lock locks/harvest is free.")).to_be_visible()
        expect(page.get_by_text("No lock is held.")).to_be_visible()
        assert re.search(rf"admin page: release lock with fence \d+ {LAB}locks/harvest", service.log)
        assert "no lock is held" in tab.open(stale.removeprefix(service.url))


def test_dead_letters_are_retried_and_dropped_after_a_confirmation(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service) as tab:
        page = tab.page
        tab.open(f"/page/project/dead-letters?{OF_LAB}")
        retry = page.get_by_role("link", name="Retry")
        expect(retry).to_have_count(2)
        retry.first.click()
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_role("alert")).to_contain_text("VERSION_CONFLICT")
        tab.open(f"/page/project/dead-letters?{OF_LAB}")
        page.get_by_role("link", name="Retry").first.click()
        page.get_by_label("Also if another version").check()
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_text("The writes of the dead letter are made.")).to_be_visible()
        page.get_by_role("link", name="Drop").click()
        page.get_by_role("button", name="Drop").click()
        expect(page.get_by_text("No write was given up.")).to_be_visible()
        assert re.search(rf"retry dead letter over any version {LAB}dead-letter/[0-9a-f]+", service.log)
        assert re.search(rf"drop dead letter {LAB}dead-letter/[0-9a-f]+", service.log)


def test_all_of_it_is_reached_with_the_keyboard_alone(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service, None) as tab:
        page = tab.page
        tab.open("/page/tuples")
        page.keyboard.type("kl_token-of-admin")  # the field has the focus
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Tuples")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        tab_to(page, "q")
        page.keyboard.type("users/al")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"/page/tuples\?.*q=users%2Fal$"))
        tab_to(page, "Entry at users/alice")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="users/alice")).to_be_visible()
        tab_to(page, "Show the value")
        page.keyboard.press("Enter")
        expect(page.get_by_label("The value")).to_contain_text(SECRETS[0])
        tab_to(page, "Log out")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element of this name, label or text has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        active = "const at = document.activeElement; [at.id, at.ariaLabel, at.textContent.trim()]"
        if name in page.evaluate(f"(() => {{ {active.replace('; [', '; return [')} }})()"):
            return
    raise AssertionError(f"Tab does not reach {name}")


def test_every_view_shows_its_data_and_no_values_fits_every_screen_and_is_accessible(
    service: PageService, browser: BrowserPages
) -> None:
    axe = (installed(Path(__file__).parent / "axe") / "node_modules" / "axe-core" / "axe.min.js").read_text()
    with opened(browser, service) as tab:
        page = tab.page
        assert page.url == f"{service.url}/page"
        for path, text in {"/page/login": "Token", **VIEWS}.items():
            source = tab.open(path)
            assert text in page.locator("main").inner_text(), path
            assert [secret for secret in SECRETS if secret in source] == [], path
            assert [secret for secret in SECRETS if secret in page.content()] == [], path
            assert "kl_token" not in source
            for width in (360, 800, 1920):
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            if path.endswith(("/tuples", "/projects", "=checkpoint", "=cursor", "=index_version", "=none", "=round")):
                continue  # as accessible as others that differ in their rows
            page.evaluate(axe)  # by the debugger: the page itself would not let another script in
            assert accessibility_faults(page, "['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']") == [], path
            light = page.evaluate(BACKGROUND)
            page.emulate_media(color_scheme="dark")
            assert (int(light) > 200, int(page.evaluate(BACKGROUND)) < 50) == (True, True)
            if path.endswith(("/login", "/page", OF_PROJECT, "to=on")):
                assert accessibility_faults(page, "['color-contrast']") == [], path
            page.emulate_media(color_scheme="light")
        assert not any("token=" in url for url in tab.requests[2:])
        page.set_viewport_size(SCREEN)


BACKGROUND = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"


def accessibility_faults(page: Page, rules: str) -> list[tuple[str, list[str]]]:
    """What axe-core finds wrong with a page, and where."""
    # What is right with it is much, and takes a second to make and to send.
    run = f"axe.run({{runOnly: {rules}, resultTypes: ['violations']}})"
    found = page.evaluate(f"{run}.then(found => found.violations.map(({{id, nodes}}) => ({{id, nodes}})))")
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


def test_what_others_chose_is_text_and_never_code(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service) as tab:
        page = tab.page
        for path in (
            "/page/tuples",
            "/page/plugins",
            "/page/project?tenant=evil&project=x",
            "/page/project/audit?tenant=evil&project=x",
            "/page/project/entry?tenant=evil&project=x&path=a",
        ):
            tab.open(path)
            if "audit" not in path:
                state(page).to_have_text("Live")
            assert "onerror" in page.locator("main").inner_text(), path
            link = page.get_by_role("link", name="onerror")
            if link.count():
                link.first.click()
                expect(page.locator("main")).to_contain_text("onerror")
        page.get_by_role("button", name="Show the value").click() if page.get_by_role("button").count() > 2 else None
        for search in ("/page/tuples?q=", "/page/plugins?q=", f"/page/project?{OF_PROJECT}&purpose="):
            tab.open(search + HOSTILE.replace("/", "%2F").replace(" ", "%20"))
        tab.open("/page/tuples/entry?key=" + HOSTILE.replace("/", "%252F").replace(" ", "%2520"))
        assert page.evaluate("window.hacked") is None


class ForeignPage(http.server.BaseHTTPRequestHandler):
    """A page of another origin that sends a form to the admin page as soon as it is loaded."""

    target = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        fields = {"tenant": "acme", "project": "web", "name": "fast-search", "to": "off", "version": "1"}
        inputs = "".join([f'<input name="{name}" value="{text}">' for name, text in fields.items()])
        script = "<script>document.forms[0].submit()</script>"
        form = f'<form method="post" action="{self.target}/page/project/flag">{inputs}</form>'
        self.wfile.write(f"<body>{form}{script}</body>".encode())

    def log_message(self, *arguments: object) -> None:
        """Prints nothing."""


def test_a_page_of_another_origin_can_change_nothing(service: PageService, browser: BrowserPages) -> None:
    ForeignPage.target = service.url
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ForeignPage) as foreign:
        serving = threading.Thread(target=foreign.serve_forever)
        serving.start()
        try:
            context = browser.browser.new_context()
            page = context.new_page()
            page.goto(f"{service.url}/?token=kl_token-of-admin")
            for host in ("127.0.0.1", "localhost"):  # the same site, and another one
                page.goto(f"http://{host}:{foreign.server_port}/")
                page.wait_for_url(f"{service.url}/page/project/flag")
                expect(page.get_by_role("alert")).to_contain_text("Origin")
            page.goto(f"{service.url}/page/project/flags?{OF_PROJECT}")
            expect(page.get_by_role("row", name="fast-search")).to_contain_text("Switch off")
            context.close()
        finally:
            foreign.shutdown()
            serving.join()


def test_reading_needs_no_script(service: PageService, browser: BrowserPages) -> None:
    with opened(browser, service, "reader", runs_scripts=False) as tab:
        page = tab.page
        page.get_by_role("link", name="Projects").click()
        page.get_by_role("link", name="Checkpoints of acme/web").click()
        expect(page.get_by_role("row", name="docs/gdrive/delta")).to_contain_text("harvester:sync")
        expect(page.get_by_role("row", name="docs/gdrive/delta").locator("time")).to_have_attribute(
            "title", re.compile(r"^\d{4}-\d\d-\d\d .* UTC$")
        )
        expect(page.get_by_text("read-only")).to_be_visible()
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        page.get_by_role("link", name="Flags").click()
        assert "Switch" not in page.locator("main").inner_text()
        assert "may not write" in tab.open(f"/page/project/flag?{OF_PROJECT}&name=new-ui&to=on")


def test_an_open_page_says_when_its_session_or_the_service_has_ended(
    service: PageService, browser: BrowserPages
) -> None:
    with opened(browser, service, "guest") as tab, opened(browser, service) as other:
        tab.open("/page/plugins")
        state(tab.page).to_have_text("Live")
        service.write_tokens("admin", "reader")
        state(tab.page).to_have_text("Session ended: log in")
        other.open("/page/plugins?q=tri")
        state(other.page).to_have_text("Live")
        service.stop()
        state(other.page).to_have_text("Lost connection, trying again")
        service.start()
        other.page.get_by_role("link", name="Session ended: log in").click()
        other.page.get_by_label("Token").fill("kl_token-of-admin")
        other.page.get_by_role("button", name="Log in").click()
        other.page.wait_for_url("**/page/plugins?q=tri")
        state(other.page).to_have_text("Live")


def test_another_process_uses_the_plugin_that_is_shown(service: PageService, browser: BrowserPages) -> None:
    """Counters, keys and errors of a plugin follow its requests over NATS."""
    address = service.logs[-1].nats
    with opened(browser, service) as tab:
        tab.open("/page/plugin?name=quiz")
        expect(tab.page.get_by_text("This plugin stores nothing now.")).to_be_visible()
        done = run(["-m", "keyloft", "plugin", "set", "--nats", address, "quiz", "score", "100"])
        assert done.returncode == 0, done.stderr
        expect(tab.page.get_by_role("link", name="score")).to_be_visible()
        expect(tab.page.get_by_role("region", name="Requests")).to_contain_text("set")
