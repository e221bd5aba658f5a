"""`keyloft open`: it prints a link that logs in once, and says what is wrong where there is no page."""

import asyncio
import os
import re
import ssl
import sys
from pathlib import Path

import trustme

from tests.http.api import ADMIN_TOKEN, running_api
from tests.http.page.pages import running_page
from tests.support.fork_server import run
from tests.support.http import http_client
from tests.support.ports import free_port

_ENVIRONMENT = {
    name: text
    for name, text in os.environ.items()
    if not name.startswith("KEYLOFT_") and name not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
}


async def opened(url: str, token: str = "", **more: str) -> tuple[int, str, str]:
    environment = {**_ENVIRONMENT, "KEYLOFT_HTTP_TOKEN": token, **more}
    arguments = ["-m", "keyloft", "open", "--http", url.partition("://")[2]]
    done = await asyncio.to_thread(run, arguments, env=environment)
    return done.returncode, done.stdout.strip(), done.stderr


async def test_open_prints_a_link_that_logs_in_once() -> None:
    async with running_page() as page:
        code, link, remark = await opened(page.url, ADMIN_TOKEN)
        assert (code, "No browser" in remark) == (0, True)
        assert re.fullmatch(rf"{page.url}/\?code=[\w-]{{43}}", link)
        assert ADMIN_TOKEN not in link
        for expected in ("/page", "/page/login?next=/page"):
            async with http_client(follow_redirects=True) as client:
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


async def test_open_says_how_a_certificate_of_an_own_authority_is_trusted(tmp_path: Path) -> None:
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued = authority.issue_cert("127.0.0.1")
    issued.configure_cert(tls)
    alone, both = tmp_path / "srv.pem", tmp_path / "both.pem"
    alone.write_bytes(issued.cert_chain_pems[0].bytes())
    both.write_bytes(alone.read_bytes() + authority.cert_pem.bytes())
    async with running_api(tls=tls) as api:
        url = f"https://127.0.0.1:{api.port}"
        code, _, error = await opened(url, KEYLOFT_HTTP_CERT=str(alone))
        if sys.version_info < (3, 13):  # from then on, Python trusts a certificate that stands in the file itself
            assert (code, f"the service at {url} has a certificate that is not trusted: " in error) == (1, True), error
            assert "the certificate and that of its authority" in error
        code, _, error = await opened(url, KEYLOFT_HTTP_CERT=str(both))
        assert (code, "has no page" in error) == (1, True), error
        code, _, error = await opened(f"https://localhost:{api.port}", KEYLOFT_HTTP_CERT=str(both))
        assert (code, "not trusted: " in error) == (1, True), error
