"""`keyloft serve` as a process: it starts, serves, survives what happens around it, and ends in good order."""

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.errors import FlushTimeoutError, NoRespondersError

from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from keyloft.server.app import App
from keyloft.server.config import Config
from keyloft.server.isolation import isolate
from keyloft.server.nats_process import NatsServer
from tests.support.fork_server import ForkedProcess, run
from tests.support.http import http_client
from tests.support.nats import private_server
from tests.support.ports import free_port
from tests.support.postgres_proxy import listening
from tests.support.processes import stop

pytestmark = pytest.mark.slow

LONGEST_SECONDS = 30.0
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KEYLOFT_")}
# Without the folder of a virtual environment, as in a fresh terminal.
_ENVIRONMENT |= {"PATH": os.defpath}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


class Serving:
    """A `keyloft serve` for one test, in a folder with its database and its output.

    By default it is a copy of a process that has imported Keyloft; a new interpreter starts as for a user, and holds no
    more than it needs.
    """

    process: ForkedProcess | subprocess.Popen[bytes]

    def __init__(
        self,
        folder: Path,
        *flags: str,
        program: tuple[str, ...] = ("-m", "keyloft"),
        new_interpreter: bool = False,
    ) -> None:
        run = secrets.token_hex(4)
        self.folder = folder
        self._printed, self._logged = folder / f"{run}.out", folder / f"{run}.err"
        with self._printed.open("wb") as printed, self._logged.open("wb") as logged:
            arguments = [*program, "serve", "--http", "127.0.0.1:0", *flags]
            options: Any = {"cwd": folder, "env": _ENVIRONMENT, "stdout": printed, "stderr": logged}
            if new_interpreter:
                command = [sys.executable, "-W", "error", *arguments]
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
            else:
                self.process = ForkedProcess(arguments, **options)

    @property
    def printed(self) -> str:
        """Its standard output."""
        return self._printed.read_text()

    @property
    def log(self) -> str:
        """Its standard error, with the lines that it prints for a person at the start."""
        return self._logged.read_text()

    @property
    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        return "Ctrl-C" in self.log or '"health"' in self.log

    @property
    def nats(self) -> str:
        return str(re.findall(r"nats://[\d.:]+", self.log)[0])

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def ready(self) -> None:
        await until(lambda: self.is_ready)

    async def logs(self, text: str) -> None:
        await until(lambda: text in self.log)

    async def ends(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.wait()

    async def page(self, path: str) -> tuple[int, str]:
        [(host, port)] = set(re.findall(r"http://([\d.]+):(\d+)", self.log))
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        async with asyncio.timeout(LONGEST_SECONDS):
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.transport.abort()
        return int(head.split(" ")[1]), body

    async def is_healthy(self) -> bool:
        status, text = await self.page("/healthz")
        return status == 200 and text.startswith("ok\n")

    async def shows(self, path: str, status: int) -> str:
        """Wait until a page has a status."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while (page := await self.page(path))[0] != status:
                await asyncio.sleep(0.02)
        return page[1]

    async def metrics(self) -> str:
        """What a scrape shows once the plugins' keys are counted, for which each scrape waits a little."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while "rosey_kv_keys_total{" not in (text := await self.shows("/metrics", 200)):
                pass
        return text

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def serving(folder: Path, *flags: str, ready: bool = True, **options: Any) -> AsyncIterator[Serving]:
    served = Serving(folder, *flags, **options)
    try:
        if ready:
            await served.ready()
        yield served
    finally:
        served.process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(served.ends(), 5)
        served.end()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def answers(url: str, key: str = "score") -> object:
    """A value of trivia, from the service that runs there by now."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while True:
            try:
                async with await DatabaseClient.connect(url, plugin_name="trivia", timeout=1) as client:
                    return await client.kv.get(key, "nothing")
            except ConnectionError:
                await asyncio.sleep(0.02)


async def keyloft(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a command: its exit code, standard output and standard error."""
    done = await asyncio.to_thread(run, ["-m", "keyloft", *arguments], env={**_ENVIRONMENT, **environment})
    return done.returncode, done.stdout, done.stderr


async def test_the_printed_lines_store_and_read_a_first_value(tmp_path: Path) -> None:
    async with serving(tmp_path, "--nats-port", "0", new_interpreter=True) as served:
        assert str(tmp_path / "keyloft.db") in served.log
        lines = [line.strip() for line in served.log.splitlines() if " plugin " in line]
        assert len(lines) == 2
        for line in lines:
            # From a terminal elsewhere, with nothing on its path.
            done = await asyncio.to_thread(
                subprocess.run,
                shlex.split(line),
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                timeout=LONGEST_SECONDS,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "100\n", "")


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
async def test_a_service_whose_terminal_is_closed_ends_unless_nohup_started_it(tmp_path: Path, handler: str) -> None:
    """`nohup` ignores SIGHUP, and sends what is printed to a file."""
    terminal, its_end = os.openpty()
    program = f"import os, signal; signal.signal(signal.SIGHUP, signal.{handler}); "
    program += "os.dup2(os.open('log', os.O_WRONLY | os.O_CREAT), 2); from keyloft.cli import main; main()"
    service = ForkedProcess(
        ["-c", program, "serve", "--http", "127.0.0.1:0", "--nats-port", "0"],
        cwd=tmp_path,
        env=_ENVIRONMENT,
        stdin=its_end,
        at_terminal=True,
    )
    try:
        os.close(its_end)
        log = tmp_path / "log"
        await until(lambda: log.exists() and "Ctrl-C" in log.read_text())
        os.close(terminal)
        if handler == "SIG_IGN":
            [health] = re.findall(r"http://\S+/healthz", log.read_text())
            async with http_client() as client:
                assert (await client.get(health)).status_code == 200
            service.terminate()
        assert await asyncio.to_thread(service.wait, LONGEST_SECONDS) == 0
        assert ("SIGHUP: answering the accepted requests" in log.read_text()) == (handler == "SIG_DFL")
    finally:
        service.kill()


async def test_aiohttp_is_loaded_for_websockets_alone(tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "nats.conf"
    config.write_text(f'websocket {{ listen: "127.0.0.1:{port}", no_tls: true }}\n')
    async with private_server(config) as server:
        # nats-py calls aiohttp in a way that is deprecated.
        program = ("-W", "ignore::DeprecationWarning", "-m", "keyloft")
        for address, is_loaded in ((server.url, False), (f"ws://127.0.0.1:{port}", True)):
            async with serving(tmp_path, "--nats", address, program=program, new_interpreter=True) as served:
                assert await answers(server.url) == "nothing"
                assert ("/aiohttp/" in Path(f"/proc/{served.process.pid}/maps").read_text()) is is_loaded


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_and_its_nats_server(tmp_path: Path, number: signal.Signals) -> None:
    async with serving(tmp_path, "--nats-port", "0") as served:
        [child] = served.children
        served.process.send_signal(number)
        assert await served.ends() == 0
        assert not runs(child)
        assert "Traceback" not in served.log
        assert not list(tmp_path.glob("*.db-wal"))


async def test_what_was_taken_is_answered_before_it_ends(tmp_path: Path, nats_url: str) -> None:
    prefix = f"ending-{secrets.token_hex(4)}"
    async with serving(tmp_path, "--nats", nats_url, "--prefixes", prefix) as served:
        client = await nats.connect(nats_url)
        stored = []

        async def store(number: int) -> None:
            data = json.dumps({"key": f"k{number}", "value": "x" * 1000}).encode()
            try:
                reply = await client.request(f"{prefix}.trivia.set", data, timeout=LONGEST_SECONDS)
            except NoRespondersError:
                return  # it was sent after the end
            assert json.loads(reply.data) == {"success": True}
            stored.append(f"k{number}")
            if len(stored) == 1:
                served.process.terminate()

        await asyncio.gather(*[store(number) for number in range(400)])
        assert await served.ends() == 0
        assert stored
        await client.close()
    db = BotDatabase(tmp_path / "keyloft.db")
    kept = (await db.kv_list("trivia"))["keys"]
    await db.close()
    assert sorted(kept) == sorted(stored)


async def test_a_killed_service_loses_nothing_and_leaves_nothing_running(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, "--nats-port", "0") as served,
        await DatabaseClient.connect(served.nats, plugin_name="trivia") as client,
    ):
        await client.kv.set("score", 100)
        [child] = served.children
        served.process.kill()
        await until(lambda: not runs(child))
    async with serving(tmp_path, "--nats-port", "0") as served:
        assert await answers(served.nats) == 100


async def test_its_nats_server_is_started_again(tmp_path: Path) -> None:
    async with serving(tmp_path, "--nats-port", "0") as served:
        [child] = served.children
        os.kill(child, signal.SIGKILL)
        await served.logs("starting it again")
        assert await answers(served.nats) == "nothing"
        assert served.children != [child]
        served.process.terminate()
        assert await served.ends() == 0


async def test_it_ends_in_good_order_while_nats_is_away(tmp_path: Path) -> None:
    async with private_server() as server, serving(tmp_path, "--nats", server.url) as served:
        os.kill(server.pid, signal.SIGKILL)
        await served.logs("the connection is lost")
        served.process.terminate()
        assert await served.ends() == 0


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_signal_ends_it_though_a_library_has_caught_the_cancellation(tmp_path: Path, is_away: bool) -> None:
    caught = asyncio.Event()

    async def start(service: DatabaseService) -> None:
        beginning.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            caught.set()
        if is_away:
            await server.stop()
            raise FlushTimeoutError
        await original(service)

    beginning, original = asyncio.Event(), DatabaseService.start
    async with private_server() as server:
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(DatabaseService, "start", start)
            app = App(Config(database=str(tmp_path / "a.db"), nats=(server.url,), http="off"))
            running = asyncio.create_task(app.run())
            await beginning.wait()
            running.cancel()
            async with asyncio.timeout(LONGEST_SECONDS):
                await asyncio.wait([running])
    assert caught.is_set()
    assert running.cancelled()


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with private_server() as server, serving(tmp_path, "--nats", server.url, "--deadline", "60") as served:
        stop(server.pid)
        try:
            served.process.terminate()
            await served.logs("SIGTERM: answering")
            assert served.process.poll() is None
            served.process.terminate()  # at once: still the same request, as some supervisors send it twice
            async with asyncio.timeout(60):
                while served.process.poll() is None:
                    served.process.terminate()
                    await asyncio.sleep(0.1)
            # A shell shows 143 for both: the service ended itself, or its event loop was closed when the signal came.
            assert await served.ends() in (128 + signal.SIGTERM, -signal.SIGTERM)
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_health_notices_a_lost_table_and_a_lost_file(tmp_path: Path) -> None:
    async with private_server() as server:
        for number, (harm, reason) in enumerate(
            [
                (lambda path: path.unlink(), "DATABASE_ERROR"),
                (lambda path: dropped(path), "DATABASE_ERROR"),
            ]
        ):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with serving(folder, "--nats", server.url) as served:
                assert await served.is_healthy()
                [path] = folder.glob("*.db")
                await asyncio.to_thread(harm, path)
                assert reason in await served.shows("/healthz", 503)


def dropped(path: Path) -> None:
    code = "import apsw, sys; apsw.Connection(sys.argv[1]).execute('DROP TABLE plugin_kv_storage')"
    run(["-c", code, str(path)]).check_returncode()


async def test_nats_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    async with serving(tmp_path, "--nats", f"nats://127.0.0.1:{port}", ready=False) as served:
        await served.logs("connecting to NATS")
        async with NatsServer(port=port):
            await served.ready()
            assert await answers(served.nats) == "nothing"


async def test_waiting_for_nats_can_be_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, "--nats", f"nats://127.0.0.1:{free_port()}", ready=False) as served:
        await served.logs("connecting to NATS")
        served.process.terminate()
        assert await served.ends() == 0
        assert "is running" not in served.log


async def test_a_lost_nats_shows_in_the_health_until_it_is_back(tmp_path: Path) -> None:
    async with private_server() as server, serving(tmp_path, "--nats", server.url) as served:
        assert await served.is_healthy()
        await server.stop()
        assert await served.shows("/healthz", 503) == "not connected to NATS\n"
        await server.start()
        await served.shows("/healthz", 200)
        assert await answers(server.url) == "nothing"


async def test_a_service_is_healthy_only_once_nats_has_its_subscriptions_again(tmp_path: Path) -> None:
    may_subscribe, connections = asyncio.Event(), list[asyncio.StreamWriter]()
    may_subscribe.set()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_nats, to_nats = await asyncio.open_connection("127.0.0.1", server.port)
        connections.append(writer)
        either = [pass_on(from_nats, writer), pass_on(reader, to_nats, delays=True)]
        try:
            await asyncio.wait(map(asyncio.ensure_future, either), return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_nats.transport.abort()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delays: bool = False) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                if delays and data.endswith(b"PING\r\n"):  # the end of the login; the subscriptions follow
                    await may_subscribe.wait()

    async with (
        private_server() as server,
        listening(between) as port,
        serving(tmp_path, "--nats", f"nats://127.0.0.1:{port}") as served,
    ):
        assert await served.is_healthy()
        may_subscribe.clear()
        connections[-1].transport.abort()
        await served.logs("the connection is lost")
        while "not carried out" not in (await served.page("/healthz"))[1]:
            assert not await served.is_healthy()
        assert (await served.page("/readyz"))[0] == 503
        may_subscribe.set()
        await served.shows("/readyz", 200)
        assert await served.is_healthy()
        client = await nats.connect(server.url)
        assert await DatabaseClient(client, "trivia").kv.get("score", "nothing") == "nothing"
        await client.close()


async def test_metrics_and_logs_show_an_operation_and_not_its_value(tmp_path: Path) -> None:
    async with serving(tmp_path, "--nats-port", "0", "--log-format", "json", "--log-level", "debug") as served:
        async with await DatabaseClient.connect(served.nats, plugin_name="trivia") as client:
            await client.kv.set("score", "confidential")
        text = await served.metrics()
        assert 'rosey_kv_set_total{plugin="trivia"} 1\n' in text
        assert 'rosey_kv_keys_total{plugin="trivia"} 1\n' in text
        assert served.printed == ""
        lines = [json.loads(line) for line in served.log.splitlines()]
        [started] = [line for line in lines if "is running" in line["message"]]
        assert started["nats"] == [served.nats]
        assert started["database"] == str(tmp_path / "keyloft.db")
        assert started["health"].endswith("/healthz")
        [line] = [line for line in lines if line.get("operation") == "kv_set"]
        assert (line["level"], line["plugin"], line["key"]) == ("DEBUG", "trivia", "score")
        assert line["latency_ms"] > 0
        assert "confidential" not in served.log


async def test_a_taken_metrics_port_is_a_warning(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with serving(tmp_path, "--nats-port", "0", "--http", address) as served:
            assert f"{address} is taken: choose another with --http, as in --http 127.0.0.1:0" in served.log
            assert f"  metrics   none: {address} is taken\n" in served.log
            assert await answers(served.nats) == "nothing"


async def refused(folder: Path, *flags: str) -> tuple[int, str]:
    """The exit code and last line of a service that can't start."""
    async with serving(folder, *flags, ready=False) as served:
        code = await served.ends()
        for untrue in ("is running", "[KV] serving", "trying again until", "nats-config --replace", "Traceback"):
            assert untrue not in served.log
        return code, served.log.splitlines()[-1]


async def test_a_taken_nats_port_names_the_ways_out(tmp_path: Path, nats_url: str) -> None:
    port = nats_url.rpartition(":")[2]
    code, error = await refused(tmp_path, "--nats-port", port)
    assert code == 1
    assert f"port {port} is taken" in error
    assert list(tmp_path.glob("*.db*")) == [], "no new file is left behind"
    assert f"--nats {nats_url}" in error
    assert "--nats-port" in error


@pytest.mark.parametrize(
    ("database", "code", "error"),
    [
        ("sqlite:///no/such/folder/x.db", 1, "CANNOT_OPEN: .*the folder .* does not exist"),
        ("not-a-database", 1, "NOT_A_DATABASE: .*is not an SQLite database"),
        ("sqlite://x.db", 2, "^keyloft: --database or KEYLOFT_DATABASE_URL: .*three slashes"),
        ("oracle://host/x", 2, "^keyloft: --database or KEYLOFT_DATABASE_URL: no engine"),
    ],
)
async def test_a_database_that_will_never_open_ends_it(tmp_path: Path, database: str, code: int, error: str) -> None:
    (tmp_path / "not-a-database").write_text("This is text, and enough of it to be no empty file. " * 100)
    ended, line = await refused(tmp_path, "--nats-port", "0", "--database", database)
    assert ended == code
    assert re.search(error, line)


_IMPATIENT = """
import sys
from keyloft import limits
limits.BUSY_SECONDS = 0.05
from keyloft.server.__main__ import main
del sys.argv[1]
main()
"""
_HOLDS_IT = """
import apsw
connection = apsw.Connection("keyloft.db")
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
input()
"""


def _hears_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    heard = sum(int(mask, 16) for mask in re.findall(r"^Sig(?:Blk|Cgt):\t(\w+)$", status, re.MULTILINE))
    return bool(heard & 1 << (signal.SIGTERM - 1))


def _is_the_service(pid: int) -> bool:
    return b"keyloft.server" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("is_so_far", [_hears_sigterm, _is_the_service])
async def test_a_signal_before_it_has_started_ends_it_well(tmp_path: Path, is_so_far: Callable[[int], bool]) -> None:
    served = Serving(tmp_path, "--nats-port", "0", new_interpreter=True)
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            while not is_so_far(served.process.pid):
                assert served.process.poll() is None
                await asyncio.sleep(0)
        served.process.terminate()
        assert await served.ends() == 0
    finally:
        served.end()


async def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDS_IT, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    await holder.stdout.readline()
    served = Serving(tmp_path, "--nats-port", "0", program=("-c", _IMPATIENT))
    try:
        await served.logs("the database is not ready, trying again")
        await holder.communicate(b"\n")
        await served.ready()
    finally:
        served.end()


async def test_wrong_settings_end_it_with_code_2(tmp_path: Path) -> None:
    assert await refused(tmp_path, "--nats-port", "many") == (
        2,
        "keyloft: --nats-port: expected a whole number, got text",
    )


async def test_a_server_without_tls_is_refused_with_no_word_about_the_login(nats_url: str, tmp_path: Path) -> None:
    url = nats_url.replace("nats://", "tls://")
    code, error = await refused(tmp_path, "--nats", url)
    assert code == 1
    assert f"keyloft: UNANSWERED: {url}: this server does not offer TLS" in error
    assert "--nats-user" not in error


async def test_logins_are_used_and_their_refusal_is_reported(tmp_path: Path) -> None:
    isolation = isolate(["trivia"])
    config = tmp_path / "nats.conf"
    isolation.write(config)
    async with private_server(config) as server:
        code, error = await refused(tmp_path, "--nats", server.url)
        assert code == 1
        assert "NATS refuses this login" in error
        assert "--nats-user SERVICE" in error
        assert "--nats-ca" not in error

        trivia = isolation.plugins["trivia"]
        login = ["--nats", server.url, "--nats-user", "trivia", f"--nats-password={trivia.password}"]
        code, error = await refused(tmp_path, *login)
        assert code == 1
        assert "NATS refused to let this user subscribe to db.kv.>" in error
        assert "--nats-user SERVICE" in error
        _, error = await refused(tmp_path, *login, "--prefixes", "Bot.KV")
        assert "NATS refused to let this user subscribe to Bot.KV.>" in error

        login = ["--nats", server.url, "--nats-user", "SERVICE", f"--nats-password={isolation.service.password}"]
        async with serving(tmp_path, *login) as served:
            assert isolation.service.password not in served.printed + served.log
            client = await nats.connect(server.url, **trivia.options())
            assert await DatabaseClient(client, "trivia").kv.get("score", "nothing") == "nothing"

            for user in (trivia, isolation.admin):
                assert await keyloft(
                    *["plugin", "set", "trivia", "by", user.name, "--nats", server.url],
                    KEYLOFT_NATS_USER=user.name,
                    KEYLOFT_NATS_PASSWORD=user.password,
                ) == (0, f'"{user.name}"\n', "")
            code, _, error = await keyloft("plugin", "get", "trivia", "by", "--nats", server.url)
            assert code == 1
            assert error.startswith("keyloft: NOT_PERMITTED: NATS refuses this login")
            assert error.endswith("; --nats-user and KEYLOFT_NATS_PASSWORD set the login\n")

            # A server that no longer knows us ends the connection for good; once it does again, we are back.
            other = isolate(["trivia"], passwords={"trivia": trivia.password})
            other.write(config, replace=True)
            await server.reload()
            await served.shows("/healthz", 503)
            await served.logs("connecting again")
            isolation.write(config, replace=True)
            await server.reload()
            await served.shows("/healthz", 200)
            assert await DatabaseClient(client, "trivia").kv.get("score", "nothing") == "nothing"
            await client.close()


def test_a_serving_process_loads_no_more_than_it_needs() -> None:
    script = "import sys, keyloft.server.app; print(sorted({'sqlalchemy', 'alembic'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONGEST_SECONDS)
    assert done.stdout == "[]\n"
