"""Commands on an etcd cluster: what an operator does with a whole store, and the service."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest

from keyloft.plugins import DatabaseClient
from tests.cli.commands import SURROUNDINGS, Keyloft, run_command
from tests.server.test_serve import serving


@pytest.fixture
def run(etcd_url: str) -> Keyloft:
    """Runs a command on an empty prefix, in this process."""
    return partial(run_command, {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": etcd_url})


def succeed(run: Keyloft, *arguments: str) -> str:
    code, stdout, stderr = run(*arguments)
    assert code == 0, stderr
    return stdout


def test_an_operator_saves_checks_moves_and_restores_a_store(run: Keyloft, etcd_url: str, tmp_path: Path) -> None:
    for command in ("stats", "export", "check"):
        code, stdout, stderr = run(command)
        said = stdout + stderr  # check lists what it has found
        assert (code, "there is no store of Keyloft at this prefix" in said) == (1, True), (command, said)
    succeed(run, "set", "users/alice", '{"name": "Alice"}')
    succeed(run, "set", "users/bob", "2", "--expire-in", "3600")
    exported = succeed(run, "export")
    assert len(exported.splitlines()) >= 2
    assert '"etcd 3' in succeed(run, "stats", "--json")
    assert succeed(run, "check") == "[]\n"
    backup, elsewhere = str(tmp_path / "backup.db"), f"{etcd_url}-copy"
    succeed(run, "backup", backup)
    succeed(run, "copy", etcd_url, elsewhere)
    succeed(run, "copy", backup, f"{etcd_url}-from-file")
    succeed(run, "delete", "users/alice")
    code, _, stderr = run("restore", backup)
    assert (code, "would be lost" in stderr) == (2, True)
    succeed(run, "restore", backup, "--replace", "--yes")
    assert json.loads(succeed(run, "get", "users/alice")) == {"name": "Alice"}
    fresh = ("--database", f"{etcd_url}-fresh")  # as in a new cluster, after the old one was lost
    succeed(run, "restore", backup, *fresh)
    assert json.loads(succeed(run, "get", "users/alice", *fresh)) == {"name": "Alice"}
    succeed(run, "compact")
    assert succeed(run, "check") == "[]\n"
    assert succeed(run, "changes") == ""  # a restored store has no history yet


def test_doctor_examines_a_cluster_and_leaves_it_as_it_is(run: Keyloft, etcd_url: str) -> None:
    code, stdout, _ = run("doctor")
    assert code == 0
    assert "opens and answers (etcd 3" in stdout
    assert "warning: schema" in stdout
    assert run("stats")[0] == 1  # no store was made
    succeed(run, "set", "k", "1")
    stdout = succeed(run, "doctor")
    assert "ok: schema" in stdout
    assert "ok: store: its id is" in stdout
    assert "ok: clock" in stdout
    assert "warning: cluster: etcd runs on 1 member: it does not go on without one of them" in stdout
    code, _, stderr = run("migrate")
    assert (code, "no tables to migrate" in stderr) == (1, True)


async def test_it_is_served(etcd_url: str, tmp_path: Path) -> None:
    async with serving(tmp_path, "--nats-port", "0", "--database", etcd_url) as served:
        async with await DatabaseClient.connect(served.nats, plugin_name="trivia") as client:
            await client.kv.set("score", 42)
            assert await client.kv.get("score") == 42
            assert [key async for key in client.kv.list()] == ["score"]
        assert await served.is_healthy()
        served.process.send_signal(signal.SIGTERM)
        assert await served.ends() == 0
        assert "Traceback" not in served.log
