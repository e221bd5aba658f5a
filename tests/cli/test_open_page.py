"""`keyloft open`: it prints a link that logs in once, and says what is wrong where there is no page."""

import asyncio
import os
import re
from pathlib import Path

import httpx

from tests.http.api import ADMIN_TOKEN, running_api
from tests.http.page.pages import running_page
from tests.support.fork_server import run
from tests.support.ports import free_port

_ENVIRONMENT = {
    name: text
    for name, text in os.environ.items()
    if not name.startswith("KEYLOFT_") and name not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
}


async def opened(url: str, token: str = "", **more: str) -> tuple[int, str, str]:
    environment = {**_ENVIRONMENT, "KEYLOFT_HTTP_TOKEN": token, **more}
    arguments = ["-m", "keyloft", "open", "--http", url.removeprefix("http://")]
    done = await asyncio.to_thread(run, arguments, env=environment)
    return done.returncode, done.stdout.strip(), done.stderr


async def test_open_prints_a_link_that_logs_in_once() -> None:
    async with running_page() as page:
        code, link, remark = await opened(page.url, ADMIN_TOKEN)
        assert (code, "No browser" in remark) == (0, True)
        assert re.fullmatch(rf"{page.url}/\?code=[\w-]{{43}}", link)
        assert ADMIN_TOKEN not in link
        for expected in ("/page", "/page/login?next=/page"):
            async with httpx.AsyncClient(follow_redirects=True) as client:
                shown = await client.get(link)
                assert (shown.status_code, str(shown.url)) == (200, page.url + expected)
        assert (await opened(page.url))[:2] == (0, f"{page.url}/page")
        failed = await opened(page.url, "a-token-of-no-one")
        assert (failed[0], "does not know this token" in failed[2]) == (1, True)


async def test_open_starts_the_browser_of_the_environment(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    async with running_page() as page:
        code, link, remark = await opened(page.url, ADMIN_TOKEN, BROWSER=str(browser))
        assert (code, remark) == (0, "")
        assert (tmp_path / "opened").read_text().strip() == link


async def test_open_says_what_is_missing() -> None:
    async with running_api() as api:
        code, _, error = await opened(f"http://127.0.0.1:{api.port}")
        assert (code, "has no page" in error) == (1, True)
    code, _, error = await opened(f"http://127.0.0.1:{free_port()}", ADMIN_TOKEN)
    assert (code, "Start one with `keyloft serve`" in error) == (1, True)
