"""Makes the screenshots of the admin page in docs/guides/images: starts a service with demo data, and takes pictures.

For `scripts/screenshots`; needs Chromium.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, sync_playwright

from keyloft.errors import KeyloftError
from keyloft.plugins import DatabaseClient
from keyloft.semantic import SemanticClient, Semantics
from tools.demo_data import fill

_FOLDER: Final = Path(__file__).parents[1] / "docs" / "guides" / "images"
_TOKEN: Final = "kl_token-of-screenshots"
_HTTP: Final = "127.0.0.1:19470"
_NATS: Final = 14270
_OF_PROJECT: Final = "tenant=acme&project=web"
_BEFORE_SECONDS: Final = 75.0
_TRAFFIC_SECONDS: Final = 105.0

_SHOTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "overview": ("/page", {}),
    "entry": ("/page/tuples/entry?key=users/alice", {}),
    "plugins": ("/page/plugins", {}),
    "checkpoints": (f"/page/project?{_OF_PROJECT}&purpose=checkpoint", {}),
    "flags-dark": (f"/page/project/flags?{_OF_PROJECT}", {"color_scheme": "dark"}),
    "locks-phone": (f"/page/project/locks?{_OF_PROJECT}", {"viewport": {"width": 390, "height": 620}}),
}


@contextlib.contextmanager
def _demo_folder() -> Iterator[Path]:
    """A folder with a plain name: the overview shows it."""
    folder = Path(tempfile.gettempdir()) / "keyloft-demo"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[str]:
    database = folder / "app.db"
    asyncio.run(fill(str(database)))
    environment = {**os.environ, "KEYLOFT_HTTP_TOKEN": _TOKEN}
    command = [sys.executable, "-m", "keyloft", "serve", "--database", database.name, "--http", _HTTP]
    command += ["--nats-port", str(_NATS), "--quota-keys", "200"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{_HTTP}/readyz", timeout=1):
                break
            time.sleep(0.1)
        yield f"http://{_HTTP}"
    finally:
        process.terminate()
        process.wait()


async def _traffic() -> None:
    """Requests of two plugins and a workflow, so that the charts show something."""
    url, end, number = f"nats://127.0.0.1:{_NATS}", time.monotonic() + _TRAFFIC_SECONDS, 0
    meaning = Semantics("cursor", ttl_seconds=86_400)
    async with (
        await DatabaseClient.connect(url, plugin_name="trivia") as trivia,
        await DatabaseClient.connect(url, plugin_name="playlist") as playlist,
        await SemanticClient.connect(url, tenant="acme", project="web") as workflow,
    ):
        while time.monotonic() < end:
            number += 1
            await asyncio.gather(*[trivia.kv.set("score", number + each) for each in range(number % 7)])
            await asyncio.gather(*[playlist.kv.get(f"playlist-{each}") for each in range(number % 23)])
            await workflow.put(
                "mail/inbox/position", number, expected_version="*", writer="mailer:poll", semantics=meaning
            )
            with contextlib.suppress(KeyloftError):
                await trivia.kv.set("x" * 300, 1) if number % 40 == 0 else None
            await asyncio.sleep(0.1)


def _shoot(browser: Browser, base: str, folder: Path) -> None:
    for name, (path, options) in _SHOTS.items():
        context = browser.new_context(**{"viewport": {"width": 1180, "height": 760}, **options})
        page = context.new_page()
        page.goto(f"{base}/?token={_TOKEN}")
        page.goto(base + path)
        page.locator("#connection[data-state=live]").wait_for()
        page.screenshot(path=folder / f"{name}.png")
        context.close()


def main(folder: Path = _FOLDER) -> None:
    program = shutil.which("chromium")
    if program is None:
        sys.exit("screenshots need Chromium: apt install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with _demo_folder() as demo, _service(demo) as base:
        traffic = threading.Thread(target=asyncio.run, args=(_traffic(),))
        traffic.start()
        time.sleep(_BEFORE_SECONDS)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--headless", "--no-sandbox"])
            _shoot(browser, base, folder)
            browser.close()
        traffic.join()


if __name__ == "__main__":
    main()
