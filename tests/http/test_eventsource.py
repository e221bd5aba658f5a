"""An EventSource, as JavaScript has it, on a watch: npm's `eventsource`, which can send a token as browsers can't."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, running_api
from tests.support.fork_server import ForkedProcess
from tests.support.http import http_client
from tests.support.node import ROOT, installed
from tests.support.ports import free_port


class Listening:
    """A program in Node.js that prints the events it gets."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def next(self, *names: str) -> tuple[str, str, Any]:
        """The next event of one of these names: its name, its id and its data."""
        assert self._process.stdout is not None
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                line = await self._process.stdout.readline()
                assert line, "the program has ended"
                name, last, data = json.loads(line)
                if name in names:
                    return name, last, data and json.loads(data)


@asynccontextmanager
async def listening(folder: Path, url: str, token: str) -> AsyncIterator[Listening]:
    arguments = ["listen.js", url, token]
    process = await asyncio.create_subprocess_exec("node", *arguments, cwd=folder, stdout=subprocess.PIPE)
    try:
        yield Listening(process)
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(scope="module")
def folder() -> Path:
    return installed(Path(__file__).parent / "eventsource")


@pytest.mark.slow
async def test_it_gets_changes_and_resumes_by_itself_after_the_service_was_killed(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    arguments = ["-m", "tests.http.serve_file", str(tmp_path / "app.db"), str(port), ADMIN_TOKEN]

    def start() -> ForkedProcess:
        return ForkedProcess(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)

    url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {ADMIN_TOKEN}"}
    async with http_client(url, headers=headers, timeout=LONGEST_SECONDS) as client:

        async def put(key: str) -> str:
            async with asyncio.timeout(LONGEST_SECONDS):
                while True:
                    try:
                        return str((await client.put(f"/v1/kv/users/{key}", json=key)).json()["versionstamp"])
                    except httpx.ConnectError:
                        await asyncio.sleep(0.01)  # it is starting

        process = start()
        try:
            await put("before")
            async with listening(folder, f"{url}/v1/watch?prefix=users", ADMIN_TOKEN) as events:
                await events.next("ready")
                first = await put("a")
                _, last, data = await events.next("change")
                assert (last, [entry["value"] for entry in data["entries"]]) == (first, ["a"])
                process.kill()
                process.wait()
                process = start()
                second = await put("b")  # most likely before it has connected again
                assert (await events.next("error"))[0] == "error"
                assert (await events.next("ready"))[1] == first, "it begins where it was"
                _, last, data = await events.next("change")
                assert (last, [entry["key"] for entry in data["entries"]]) == (second, ["users/b"])
        finally:
            process.kill()
            process.wait()


async def test_a_wrong_token_is_an_error_with_its_status(folder: Path) -> None:
    async with running_api() as api:
        url = f"http://127.0.0.1:{api.port}/v1/watch?prefix=a"
        async with listening(folder, url, "kl_wrong") as events:
            assert await events.next("open", "error") == ("error", "401", None)
