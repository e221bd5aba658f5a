"""`keyloft doctor`: what it finds, that it changes nothing, and that it tells no secrets."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest
import trustme

import keyloft
from keyloft import limits
from keyloft.admin import Finding
from keyloft.cli.doctor import database as examine_data
from keyloft.cli.doctor.checks import bounded
from keyloft.cli.doctor.host import SQLITE
from keyloft.core.records import Latest
from keyloft.core.schema import REVISION
from keyloft.engines import Inspection
from keyloft.http.tokens import declaration, new_token
from keyloft.nats.connection import Login, connect
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.server.isolation import ADMIN, SERVICE, Isolation, NatsUser, isolate
from keyloft.server.nats_process import NatsServer
from tests.cli.commands import LONGEST_SECONDS, SURROUNDINGS, at_a_terminal, run_command
from tests.http.api import running_api
from tests.support.fork_server import PipedProcess, run
from tests.support.nats import private_server
from tests.support.postgres import PASSWORD, MortalServer
from tools.postgres import query

Found = dict[str, list[dict[str, Any]]]
Doctor = Callable[..., tuple[int, Found]]

QUIET = {"KEYLOFT_HTTP": "off", "KEYLOFT_NATS_PORT": "0"}
"""Settings with which nothing is looked for on the ports of this machine."""


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder, and settings that hold no surprises."""
    for name in [name for name in os.environ if name.startswith("KEYLOFT_")]:
        monkeypatch.delenv(name)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def doctor(surroundings: Path) -> Doctor:
    """Examines in this process: the exit code, and what was found by name."""

    def doctor(*arguments: str) -> tuple[int, Found]:
        code, stdout, stderr = run_command(os.environ, "doctor", "--json", *arguments)
        assert stderr == ""
        found: Found = {}
        for finding in json.loads(stdout):
            assert list(finding) == ["severity", "code", "what", "where", "cure"]
            assert finding["what"]
            assert finding["cure"] or finding["severity"] in ("ok", "skipped")
            found.setdefault(finding["code"], []).append(finding)
        return code, found

    return doctor


def made(file: Path) -> Path:
    """A database with an entry."""

    async def make() -> None:
        async with keyloft.open(file) as kv:
            await kv.set(("k",), "a value")

    asyncio.run(make())
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# What it prints


def test_a_healthy_file_has_no_problem_and_stays_as_it_is(surroundings: Path) -> None:
    file = made(surroundings / "app.db")
    before = contents(surroundings)
    code, stdout, stderr = run_command(os.environ, "doctor", "--database", str(file))
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    assert f"ok: keyloft: Keyloft {keyloft.__version__}" in lines
    assert f"ok: database: {file} opens and answers (SQLite {apsw.sqlite_lib_version()})" in lines
    assert f"ok: schema: schema {REVISION}, that of this version" in lines
    assert not [line for line in lines if line.startswith("problem")]
    assert contents(surroundings) == before


def test_postgresql_is_examined_and_stays_as_it_is(postgres_url: str, doctor: Doctor) -> None:
    code, stdout, stderr = run_command({**os.environ, "KEYLOFT_DATABASE_URL": postgres_url}, "doctor")
    assert (code, stderr) == (0, "")
    assert "opens and answers (PostgreSQL " in stdout
    assert "warning: schema: there are no tables of Keyloft in it yet" in stdout
    assert query(postgres_url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]

    async def make() -> None:
        await (await keyloft.open(postgres_url)).aclose()

    asyncio.run(make())
    code, found = doctor("--database", postgres_url)
    assert code == 0
    assert [found[name][0]["severity"] for name in ("database", "schema", "clock")] == ["ok", "ok", "ok"]
    query(postgres_url, "UPDATE keyloft_version SET version_num = '0001'")
    code, found = doctor("--database", postgres_url)
    assert (code, found["schema"][0]["severity"]) == (1, "problem")
    assert "keyloft migrate" in found["schema"][0]["cure"]


def test_at_a_terminal_it_is_laid_out(surroundings: Path) -> None:
    environment = {**SURROUNDINGS, "COLUMNS": "200", **QUIET}
    code, shown = at_a_terminal(environment, "doctor", "--database", str(surroundings / "no" / "app.db"))
    assert code == 1
    assert "\x1b[32m✓" in shown
    assert "\x1b[31m✗" in shown
    assert f"mkdir -p {surroundings / 'no'}" in shown
    assert "1 problem, no warnings" in shown


def test_an_interruption_ends_it_in_silence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql://me:secret@127.0.0.1:{silent.getsockname()[1]}/app"
        silent.settimeout(LONGEST_SECONDS)
        command = ["-m", "keyloft", "doctor", "--database", address]
        with PipedProcess(command, env={**SURROUNDINGS, **QUIET}) as waiting:
            connection, _ = silent.accept()
            waiting.send_signal(signal.SIGINT)
            assert (waiting.wait(LONGEST_SECONDS), waiting.stderr.read()) == (130, "")
        connection.close()


@pytest.mark.parametrize("arguments", [("--plugin", "Trivia"), ("--nats-config", "nowhere"), ("--htpp", "off")])
def test_a_wrong_call_ends_with_code_2(surroundings: Path, arguments: tuple[str, ...]) -> None:
    assert run_command(os.environ, "doctor", *arguments)[0] == 2


def test_the_least_sqlite_is_that_of_the_oldest_apsw_that_is_allowed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [apsw_bound] = [bound for bound in project["dependencies"] if bound.startswith("apsw")]
    assert apsw_bound == f"apsw>={'.'.join(map(str, SQLITE))}"


def test_a_setting_that_can_not_be_read_is_found(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLOFT_NATS_PORT", "many")
    code, found = doctor()
    assert (code, found["settings"][0]["severity"]) == (1, "problem")
    assert "KEYLOFT_NATS_PORT" in found["settings"][0]["what"]


def test_a_mistyped_environment_variable_is_named(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLOFT_DATABSE_URL", "app.db")
    for name in ("KEYLOFT_PORT", "KEYLOFT_HTTP_PORT"):  # Kubernetes sets them for services of these names
        monkeypatch.setenv(name, "tcp://10.0.0.1:9464")
    code, found = doctor()
    assert [(one["severity"], one["cure"]) for one in found["settings"]] == [
        ("ok", ""),
        ("warning", "did you mean KEYLOFT_DATABASE_URL?"),
    ]
    assert (code, found["settings"][1]["what"]) == (0, "the environment variable KEYLOFT_DATABSE_URL is ignored")


def test_settings_that_contradict_each_other_are_found(doctor: Doctor) -> None:
    code, found = doctor("--nats-user", "trivia", "--nats-password", "secret")
    assert (code, found["settings"][0]["severity"]) == (1, "problem")


def test_a_check_that_fails_is_a_finding(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(url: str) -> list[Finding]:
        raise RuntimeError("a secret")

    monkeypatch.setattr(examine_data, "disk", fail)
    code, found = doctor()
    assert (code, found["disk"][0]["severity"]) == (1, "problem")
    assert "RuntimeError" in found["disk"][0]["what"]
    assert "secret" not in json.dumps(found)


async def test_a_check_that_takes_too_long_is_a_finding() -> None:
    async def hang() -> list[Finding]:
        await asyncio.sleep(LONGEST_SECONDS)
        return []

    [finding] = await bounded("disk", hang(), 0.01)
    assert (finding.code, finding.severity) == ("disk", "problem")


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("asyncpg", "postgres", ("--database", "postgresql://127.0.0.1:1/app")),
        ("nats", "nats", ("--nats", "nats://127.0.0.1:1")),
        ("alembic", "sql", ()),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    _, found = doctor(*arguments)
    [finding] = found["packages"]
    assert finding["severity"] == ("problem" if package in ("asyncpg", "nats") else "warning")
    assert f'pip install ".[{extra}]"' in finding["cure"]


def test_with_the_command_line_alone_the_rest_is_examined(surroundings: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('nats', 'uvicorn', 'starlette', 'httptools', 'alembic', 'sqlalchemy', 'asyncpg', 'grpc'):\n"
        "    sys.modules[name] = None\n"
        "from keyloft.cli import main\n"
        "main(['doctor', '--http', '127.0.0.1:0'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONGEST_SECONDS)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert "skipped: nats: nats-py is not installed" in lines
    assert "skipped: http: uvicorn is not installed" in lines
    assert any(line.startswith("problem: packages: Starlette") for line in lines)
    assert any(line.startswith("ok: disk") for line in lines)


# Files


def test_a_file_that_is_not_there_is_not_made(doctor: Doctor, surroundings: Path) -> None:
    code, found = doctor("--database", "sqlite:///new.db")
    assert (code, found["database"][0]["severity"]) == (0, "warning")
    assert "there is no file" in found["database"][0]["what"]
    assert list(surroundings.iterdir()) == []


def test_what_a_killed_process_left_stays_as_it_is(doctor: Doctor, surroundings: Path) -> None:
    """The file and its log: the index of the log holds no data, and every reader of the log may renew it."""

    async def leave() -> None:
        async with keyloft.open(surroundings / "app.db") as kv:
            await kv.set(("k",), 1)
            (surroundings / "left").mkdir()
            for part in ("app.db", "app.db-wal", "app.db-shm"):
                shutil.copy(surroundings / part, surroundings / "left" / part)

    asyncio.run(leave())
    for gone in (None, "app.db-shm"):
        if gone is not None:
            (surroundings / "left" / gone).unlink()
        before = contents(surroundings / "left")
        assert before["app.db-wal"]
        code, found = doctor("--database", "left/app.db")
        assert (code, found["database"][0]["severity"]) == (0, "ok")
        after = contents(surroundings / "left")
        assert after.keys() == before.keys()
        assert [after[name] for name in ("app.db", "app.db-wal")] == [before[name] for name in ("app.db", "app.db-wal")]


def test_a_file_in_use_is_examined(doctor: Doctor, surroundings: Path) -> None:
    async def use() -> tuple[int, Found]:
        async with keyloft.open(surroundings / "app.db") as kv:
            await kv.set(("k",), 1)
            found = await asyncio.to_thread(doctor, "--database", "app.db")
            await kv.set(("k",), 2)
            return found

    code, found = asyncio.run(use())
    assert (code, found["schema"][0]["severity"]) == (0, "ok")


@pytest.mark.parametrize(
    ("database", "seen", "advice"),
    [
        ("file/app.db", "is a file", "--database"),
        ("no/folder/app.db", "is not there", "mkdir -p"),
        ("folder", "is a folder", "--database"),
        ("file", "is not an SQLite database", "--database"),
        ("sqlite:app.db", "slashes", "sqlite:///FILE"),
        ("sqlite://app.db", "three slashes", "sqlite:///FILE"),
        ("mysql://me:secret@host/app", "no engine for mysql", "--database"),
        ("~no-such-user/app.db", "no-such-user", ""),
    ],
)
def test_a_wrong_database_is_reported_with_what_to_do(
    doctor: Doctor, surroundings: Path, database: str, seen: str, advice: str
) -> None:
    (surroundings / "file").write_text("no database, and of some length " * 100)
    (surroundings / "folder").mkdir()
    code, found = doctor("--database", database)
    [finding] = found["database"]
    assert (code, finding["severity"]) == (1, "problem")
    assert seen in finding["what"]
    assert advice in finding["cure"]
    assert "secret" not in json.dumps(found)
    assert sorted(contents(surroundings / "folder")) == []


def test_what_can_not_be_written_is_found() -> None:
    """Root may write everything: it becomes another user first, who may not enter every folder for temporary files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        for part, mode in (("open", 0o777), ("closed", 0o555), ("hidden", 0)):
            (folder / part).mkdir()
            (folder / part / "app.db").touch(0o444)
            (folder / part).chmod(mode)
        folder.chmod(0o755)
        script = (
            "import os, sys; from pathlib import Path; from keyloft.cli.doctor.database import file_finding\n"
            "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "for name in sys.argv[1:]: print(file_finding(Path(name)))"
        )
        files = [str(folder / part / "app.db") for part in ("open", "closed", "hidden")]
        done = run(["-c", script, *files])
        (folder / "hidden").chmod(0o755)
    lines = done.stdout.splitlines()
    assert [re.findall("severity='(.*?)'", line) for line in lines] == 3 * [["problem"]], done.stderr
    assert f"{files[0]} can't be written" in lines[0]
    assert f"the folder {folder / 'closed'} can't be written" in lines[1]


@pytest.mark.parametrize(("revision", "advice"), [("0001", "keyloft migrate --database "), ("9999", "upgrade Keyloft")])
def test_another_schema_is_found(doctor: Doctor, surroundings: Path, revision: str, advice: str) -> None:
    connection = apsw.Connection(str(made(surroundings / "app.db")))
    connection.execute("UPDATE keyloft_version SET version_num = ?", (revision,)).fetchall()
    connection.close()
    code, found = doctor("--database", "app.db")
    assert (code, found["schema"][0]["severity"]) == (1, "problem")
    assert advice in found["schema"][0]["cure"]


def test_a_database_in_memory_is_a_warning(doctor: Doctor) -> None:
    code, found = doctor("--database", ":memory:")
    assert (code, found["database"][0]["severity"]) == (0, "warning")


@pytest.mark.parametrize(("has_checksums", "severities"), [(None, []), (True, []), (False, ["warning"])])
def test_a_server_without_checksums_is_found(has_checksums: bool | None, severities: list[str]) -> None:
    found = examine_data.checksums(Inspection(software="", revision="9", wanted="9", has_checksums=has_checksums))
    assert [finding.severity for finding in found] == severities


@pytest.mark.parametrize(
    ("ahead", "severity"), [(None, "ok"), (0.4, "ok"), (-2.0, "warning"), (31.0, "problem"), (-3600.0, "problem")]
)
def test_clocks_that_differ_are_found(ahead: float | None, severity: str) -> None:
    found = examine_data.clock(Inspection(software="", revision="0003", wanted="0003", ahead=ahead))
    assert found.severity == severity


@pytest.mark.parametrize(
    ("size", "free", "inodes", "severity"),
    [
        (0, 2**31, None, "ok"),
        (2**30, 2**31 + 1, 10**6, "ok"),
        (2**31, 2**31, None, "warning"),
        (0, 2**29, None, "warning"),
        (0, 2**40, 5, "warning"),
        (0, 2**20, None, "problem"),
    ],
)
def test_a_disk_that_gets_full_is_found(size: int, free: int, inodes: int | None, severity: str) -> None:
    assert examine_data.space_for(size, free, inodes).severity == severity


def test_a_network_file_system_is_found(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    mounts = tmp_path / "mountinfo"
    lines = [
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
        f"23 22 0:40 / {place} rw shared:1 - nfs4 server:/share rw",
        f"24 22 0:41 / {place}/my\\040disk rw - xfs /dev/sdb1 rw",
    ]
    mounts.write_text("\n".join([*lines, ""]))
    (tmp_path / "my disk").mkdir()
    assert examine_data.filesystem_of(tmp_path, mounts) == "nfs4"
    assert examine_data.filesystem_of(tmp_path / "my disk", mounts) == "xfs"
    assert examine_data.filesystem_of(Path("/"), mounts) == "ext4"
    assert examine_data.filesystem_of(tmp_path, tmp_path / "absent") is None


# PostgreSQL


def test_a_wrong_password_is_found_and_not_shown(mortal_postgres: MortalServer, doctor: Doctor) -> None:
    code, found = doctor("--database", mortal_postgres.url.replace(PASSWORD, "wrong-sesame"))
    assert (code, found["database"][0]["severity"]) == (1, "problem")
    assert "password" in found["database"][0]["what"]
    assert "sesame" not in json.dumps(found)


def test_a_server_that_is_not_there_is_found(doctor: Doctor) -> None:
    code, found = doctor("--database", "postgresql://me:secret@127.0.0.1:1/app")
    assert (code, found["database"][0]["severity"]) == (1, "problem")
    assert "start it" in found["database"][0]["cure"]
    assert "secret" not in json.dumps(found)


def test_missing_rights_are_found(postgres_url: str, doctor: Doctor) -> None:
    query(postgres_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    role = f"doctor_{os.getpid()}"
    query(postgres_url, f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    try:
        as_role = re.sub("://[^@/]*@", f"://{role}:secret@", postgres_url)
        code, found = doctor("--database", as_role)
        assert (code, found["rights"][0]["severity"]) == (1, "problem")
        assert "GRANT USAGE, CREATE ON SCHEMA public" in found["rights"][0]["cure"]

        async def make() -> None:
            await (await keyloft.open(postgres_url)).aclose()

        asyncio.run(make())
        query(postgres_url, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        code, found = doctor("--database", as_role)
        assert code == 1
        cures = "\n".join(finding["cure"] for finding in found["rights"])
        assert "GRANT SELECT, UPDATE ON keyloft_version_counter" in cures
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON plugin_kv_storage" in cures
    finally:
        query(postgres_url, f"DROP OWNED BY {role}")
        query(postgres_url, f"DROP ROLE {role}")


# NATS


@asynccontextmanager
async def serving(server: NatsServer, user: NatsUser | None = None) -> AsyncIterator[BotDatabase]:
    """A service, and its database."""
    login = Login() if user is None else Login(user=user.name, password=user.password)
    db = BotDatabase(":memory:")
    service = DatabaseService(await connect(server.url, name="served", login=login), db)
    await service.start()
    try:
        yield db
    finally:
        await service.stop()
        await service.nats.close()
        await db.close()


@pytest.mark.parametrize("address", ["nats://me:secret@127.0.0.1:1", "me:secret@127.0.0.1:1"])
def test_no_nats_at_an_address_that_is_set_is_a_problem(doctor: Doctor, address: str) -> None:
    code, found = doctor("--nats", address)
    assert (code, found["nats"][0]["severity"]) == (1, "problem")
    assert "keyloft serve" in found["nats"][0]["cure"]
    assert "secret" not in json.dumps(found)


async def test_an_open_server_is_a_warning_and_nothing_is_written(doctor: Doctor) -> None:
    async with private_server() as server, serving(server) as db:
        code, found = await asyncio.to_thread(doctor, "--nats", server.url)
        assert (code, found["service"][0]["severity"], found["isolation"][0]["severity"]) == (0, "ok", "warning")
        assert "any client can read and write every plugin's data" in found["isolation"][0]["what"]
        assert "keyloft nats-config" in found["isolation"][0]["cure"]
        # A login that the server does not ask for protects no data.
        login = ("--nats-user", "trivia", "--nats-password", "secret")
        assert (await asyncio.to_thread(doctor, "--nats", server.url, *login))[1]["isolation"] == found["isolation"]
        assert await (await db.engine()).read(Latest()) == [1]


async def test_what_an_open_server_lets_through_is_not_tried(doctor: Doctor, caplog: pytest.LogCaptureFixture) -> None:
    """A service would log a warning for each attempt, and not show what else it refuses in that second."""
    async with private_server() as server, serving(server):
        await asyncio.to_thread(doctor, "--nats", server.url)
    assert [record.message for record in caplog.records if "keyloft-doctor" in record.message] == []


async def test_without_an_address_the_server_at_our_own_port_is_examined(doctor: Doctor) -> None:
    async with private_server() as server:
        port = str(server.port)
        code, found = await asyncio.to_thread(doctor, "--nats-port", port)
        assert (code, found["service"][0]["severity"]) == (1, "warning")
        assert found[f"port {port}"][0]["severity"] == "problem"
        assert f"--nats nats://127.0.0.1:{port}" in found[f"port {port}"][0]["cure"]
        async with serving(server):
            code, found = await asyncio.to_thread(doctor, "--nats-port", port)
            assert (code, found[f"port {port}"][0]["severity"]) == (0, "ok")


@pytest.fixture
def isolation(surroundings: Path) -> Isolation:
    """A configuration in nats.conf."""
    made = isolate(["trivia", "quote-db"], ["acme"])
    made.write("nats.conf")
    return made


def login_of(user: NatsUser, server: NatsServer) -> tuple[str, ...]:
    return "--nats", server.url, "--nats-user", user.name, "--nats-password", user.password


async def test_a_server_with_our_configuration_keeps_plugins_apart(doctor: Doctor, isolation: Isolation) -> None:
    passwords = [user.password for user in (*isolation.plugins.values(), isolation.admin, isolation.service)]
    async with private_server(Path("nats.conf")) as server, serving(server, isolation.service) as db:
        for arguments, service, kept in (
            (login_of(isolation.plugins["trivia"], server), "ok", "trivia"),
            (login_of(isolation.tenants["acme"], server), "skipped", "TENANT-acme"),
            (("--nats", server.url, "--nats-config", "nats.conf"), "ok", "trivia, quote-db, TENANT-acme"),
            (("--nats", server.url, "--nats-config", "nats.conf", "--plugin", "trivia"), "ok", "trivia"),
            (("--nats", server.url.replace("//", f"//trivia:{passwords[0]}@")), "ok", "trivia"),
        ):
            code, found = await asyncio.to_thread(doctor, *arguments)
            assert (code, found["service"][0]["severity"]) == (0, service), found
            [finding] = found["isolation"]
            assert finding["severity"] == "ok"
            assert finding["what"].startswith(f"{kept}: all ")
            assert not [password for password in passwords if password in json.dumps(found)]
        for user, service in ((isolation.admin, "ok"), (isolation.service, "skipped")):
            code, found = await asyncio.to_thread(doctor, *login_of(user, server))
            assert (code, found["service"][0]["severity"], found["isolation"][0]["severity"]) == (0, service, "skipped")
        assert await (await db.engine()).read(Latest()) == [1]


async def test_a_refused_login_is_found(doctor: Doctor, isolation: Isolation) -> None:
    async with private_server(Path("nats.conf")) as server:
        wrong = NatsUser("trivia", "wrong-password", "")
        code, found = await asyncio.to_thread(doctor, *login_of(wrong, server))
        assert (code, found["nats"][0]["severity"]) == (1, "problem")
        assert "wrong-password" not in json.dumps(found)
        code, found = await asyncio.to_thread(doctor, "--nats", server.url)
        assert (code, found["nats"][0]["severity"]) == (1, "problem")
        assert "--nats-user" in found["nats"][0]["cure"]
        # A file that the server has not read yet.
        isolate(["trivia"], passwords={"trivia": "another", ADMIN: isolation.admin.password}).write("newer.conf")
        arguments = (*login_of(isolation.admin, server), "--nats-config", "newer.conf")
        code, found = await asyncio.to_thread(doctor, *arguments)
        assert (code, found["isolation"][0]["severity"]) == (1, "problem")
        assert "reload" in found["isolation"][0]["cure"]


@pytest.mark.parametrize(
    ("narrow", "wider", "seen"),
    [
        ('"db.kv.trivia.get"', '"db.kv.*.get"', "publish to db.kv.keyloft-doctor-nobody.get"),
        ('"rosey.db.kv.trivia.set"', '"rosey.>"', "publish to rosey.db.kv.keyloft-doctor-nobody.set"),
        ('"_INBOX_trivia.>"', '"_INBOX_trivia.>", "_INBOX.*"', "subscribe to _INBOX.answer"),
        ('"_INBOX_trivia.>"', '"_INBOX_trivia.>", "db.kv.>"', "subscribe to db.kv.>"),
        ('"_INBOX_trivia.>"', '">"', "subscribe to db.kv.>"),
        ('"db.semantic.acme.*.get"', '"db.semantic.*.*.get"', "publish to db.semantic.keyloft-doctor-nobody"),
        ("authorization {", 'no_auth_user: "trivia"\nauthorization {', None),
    ],
)
async def test_permissions_that_are_too_wide_are_found(
    doctor: Doctor, isolation: Isolation, narrow: str, wider: str, seen: str | None
) -> None:
    assert narrow in isolation.text
    Path("wide.conf").write_text(isolation.text.replace(narrow, wider))
    async with private_server(Path("wide.conf")) as server:
        code, found = await asyncio.to_thread(doctor, "--nats", server.url, "--nats-config", "wide.conf")
    if seen is None:
        # Who brings no login is trivia, and confined as trivia is.
        assert (code, found["isolation"][0]["severity"]) == (0, "warning")
        assert "clients without a login" in found["isolation"][0]["what"]
        return
    assert code == 1
    [problem] = [finding for finding in found["isolation"] if finding["severity"] == "problem"]
    assert seen in problem["what"]
    assert "keyloft nats-config" in problem["cure"]


async def test_messages_that_are_too_small_for_values_are_found(doctor: Doctor, surroundings: Path) -> None:
    (surroundings / "small.conf").write_text("max_payload: 65536\n")
    async with private_server(surroundings / "small.conf") as server:
        code, found = await asyncio.to_thread(doctor, "--nats", server.url)
    assert (code, found["nats"][0]["severity"]) == (1, "problem")
    assert "max_payload" in found["nats"][0]["cure"]


# Ports


async def test_a_port_that_is_taken_is_reported_with_its_setting(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DOCTOR_ANSWER_SECONDS", "DOCTOR_PORT_SECONDS"):
        monkeypatch.setattr(limits, name, 0.3)  # a program that never answers needs no more patience than this
    with socket.create_server(("127.0.0.1", 0)) as pages, socket.create_server(("127.0.0.1", 0)) as silent:
        port, own = pages.getsockname()[1], silent.getsockname()[1]
        code, found = await asyncio.to_thread(doctor, "--http", f"127.0.0.1:{port}", "--nats-port", str(own))
    assert code == 1
    assert "did not speak NATS" in found["nats"][0]["what"]
    assert (found[f"port {port}"][0]["severity"], found[f"port {own}"][0]["severity"]) == ("warning", "problem")
    assert "--http" in found[f"port {port}"][0]["cure"]
    assert "--nats-port" in found[f"port {own}"][0]["cure"]


async def test_a_keyloft_service_at_its_port_is_fine(doctor: Doctor) -> None:
    async with running_api() as api:
        address = f"127.0.0.1:{api.port}"
        code, found = await asyncio.to_thread(doctor, "--http", address)
        assert (code, found[f"port {api.port}"][0]["severity"]) == (0, "ok")
    code, found = await asyncio.to_thread(doctor, "--http", address)
    assert (code, found[f"port {api.port}"][0]["what"]) == (0, "free, for HTTP")
    code, found = await asyncio.to_thread(doctor, "--http", f"192.0.2.1:{api.port}")
    assert (code, found[f"port {api.port}"][0]["severity"]) == (0, "warning")


# HTTP


def test_tokens_certificates_and_exposure_are_examined(doctor: Doctor, surroundings: Path) -> None:
    code, found = doctor("--http", "127.0.0.1:0")
    assert (code, found["tokens"][0]["severity"], found["exposure"][0]["severity"]) == (0, "ok", "ok")
    tokens = surroundings / "tokens.toml"
    tokens.write_text(declaration("ci", new_token(), ["admin"]))
    tokens.chmod(0o600)
    code, found = doctor("--http", "0.0.0.0:0", "--http-tokens", str(tokens))
    assert (code, found["tokens"][0]["severity"]) == (0, "ok")
    assert [finding["severity"] for finding in found["exposure"]] == ["warning", "warning"]
    assert "without TLS" in found["exposure"][0]["what"]
    tokens.chmod(0o622)
    code, found = doctor("--http", "127.0.0.1:0", "--http-tokens", str(tokens))
    assert (code, found["tokens"][0]["cure"]) == (1, f"chmod 600 {tokens}")
    tokens.write_text("[[token]]")
    code, found = doctor("--http", "127.0.0.1:0", "--http-tokens", str(tokens))
    assert (code, found["tokens"][0]["severity"]) == (1, "problem")


def test_tokens_that_have_expired_are_not_counted(doctor: Doctor, surroundings: Path) -> None:
    tokens = surroundings / "tokens.toml"
    old = declaration("old", new_token(), ["admin"], datetime.now(UTC) - timedelta(days=1))
    options = ("--http", "127.0.0.1:0", "--http-tokens", str(tokens))
    tokens.write_text(old)
    tokens.chmod(0o600)
    code, found = doctor(*options)
    assert (code, [each["severity"] for each in found["tokens"]]) == (1, ["warning", "problem"])
    assert "no valid token" in found["tokens"][1]["what"]
    assert doctor(*options, "--http-token", new_token())[0] == 0
    tokens.write_text(old + "\n" + declaration("ci", new_token(), ["read:kv"]))
    code, found = doctor(*options)
    assert (code, [each["severity"] for each in found["tokens"]]) == (0, ["warning", "ok"])
    assert found["tokens"][1]["what"] == f"1 valid in {tokens}, of which 0 may do everything"


def test_a_certificate_is_tried_before_it_is_served(doctor: Doctor, surroundings: Path) -> None:
    authority = trustme.CA()
    found = {}
    for name, ends in {"long": 90, "short": 5, "over": -1}.items():
        issued = authority.issue_cert("kv.example", not_after=datetime.now(UTC) + timedelta(days=ends))
        certificate, key = surroundings / f"{name}.pem", surroundings / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        options = ("--http", "127.0.0.1:0", "--http-cert", str(certificate), "--http-key", str(key))
        found[name] = doctor(*options)[1]["certificate"][0]
    assert [finding["severity"] for finding in found.values()] == ["ok", "warning", "problem"]
    assert "kv.example" in found["long"]["what"]
    assert "expired" in found["over"]["what"]
    alone = doctor("--http", "127.0.0.1:0", "--http-cert", str(surroundings / "long.pem"))[1]["certificate"][0]
    assert (alone["severity"], alone["cure"]) == ("problem", "name it with --http-key")
    wrong = ("--http-cert", str(surroundings / "long.pem"), "--http-key", str(surroundings / "short.key"))
    assert doctor("--http", "127.0.0.1:0", *wrong)[1]["certificate"][0]["severity"] == "problem"


def test_the_users_of_a_configuration_are_known(isolation: Isolation) -> None:
    from keyloft.cli.nats_config import read_logins

    assert read_logins("nats.conf", "--nats-config").keys() == {SERVICE, ADMIN, "trivia", "quote-db", "TENANT-acme"}
