"""A spelling of a database URL means the same to engines, migrations, commands and doctor, and hides its password."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

import keyloft
from keyloft import CannotOpen, DatabaseError, InvalidArgument, KeyloftError, ReadOnly, admin, migrations
from keyloft.cli.doctor import database as doctor
from keyloft.core.addresses import without_login
from keyloft.core.urls import DatabaseUrl
from keyloft.engines import inspect_database, open_engine, open_maintenance
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite.engine import SqliteEngine

SECRET = "hunter2"
CLOSED_PORT = 1


class File(Struct, frozen=True):
    """An SQLite file of the working directory."""

    name: str = "x.db"
    read_only: bool = False


class Memory(Struct, frozen=True):
    """A database in memory."""

    engine: type


class UnansweredServer(Struct, frozen=True):
    """A PostgreSQL server that does not answer."""

    shown: str


class Refused(Struct, frozen=True):
    """Not a database URL."""

    error: type[KeyloftError]
    message: str


SPELLINGS: dict[Any, Any] = {
    None: Memory(MemoryEngine),
    ":memory:": Memory(MemoryEngine),
    "memory://": Memory(MemoryEngine),
    "MEMORY://": Memory(MemoryEngine),
    "sqlite://": Memory(SqliteEngine),
    "sqlite:///:memory:": Memory(SqliteEngine),
    "sqlite+aiosqlite:///:memory:": Memory(SqliteEngine),
    "x.db": File(),
    "./x.db": File(),
    Path("x.db"): File(),
    "folder/x.db": File("folder/x.db"),
    "~/x.db": File("home/x.db"),
    "sqlite:///x.db": File(),
    "sqlite:///./x.db": File(),
    "sqlite:///~/x.db": File("home/x.db"),
    "sqlite:///folder/x.db": File("folder/x.db"),
    "sqlite:///{here}/x.db": File(),
    "{here}/x.db": File(),
    "SQLITE:///x.db": File(),
    "SQLite+PySQLite:///x.db": File(),
    "sqlite:///x y%20z.db": File("x y%20z.db"),
    "a:b.db": File("a:b.db"),
    "a@b.db": File("a@b.db"),
    "./me:pass@x.db": File("me:pass@x.db"),
    "sqlite:///x.db?mode=ro": File(read_only=True),
    "SQLITE:///{here}/x.db?mode=ro": File(read_only=True),
    "sqlite:///x.db?mode=ro&immutable=1": File(read_only=True),
    "sqlite:///x.db?immutable=1": Refused(InvalidArgument, "immutable=1 needs mode=ro"),
    "sqlite:///x.db?mode=ro&immutable=0": Refused(InvalidArgument, "immutable takes only one value, as in immutable=1"),
    "x.db?mode=ro": Refused(InvalidArgument, r"a path takes no options: write sqlite:///x\.db\?mode=ro, or pass"),
    "/srv/x.db?mode=ro&immutable=1": Refused(InvalidArgument, r"write sqlite:////srv/x\.db\?mode=ro&immutable=1"),
    "postgresql://127.0.0.1:1/app": UnansweredServer("postgresql://127.0.0.1:1/app"),
    "postgres://me@127.0.0.1:1/app": UnansweredServer("postgresql://127.0.0.1:1/app"),
    f"postgresql://me:{SECRET}@127.0.0.1:1/app": UnansweredServer("postgresql://127.0.0.1:1/app"),
    f"PostgreSQL+AsyncPG://me:{SECRET}@127.0.0.1:1/app": UnansweredServer("postgresql://127.0.0.1:1/app"),
    f"postgresql://me:{SECRET}@127.0.0.1:1,127.0.0.1:2/app": UnansweredServer(
        "postgresql://127.0.0.1:1,127.0.0.1:2/app"
    ),
    f"postgresql://me:{SECRET}@/app?host={{here}}": UnansweredServer("postgresql:///app?host={here}"),
    f"postgresql://me@127.0.0.1:1/app?password={SECRET}": UnansweredServer("postgresql://127.0.0.1:1/app?password=…"),
    f"postgresql:///app?host=127.0.0.1,127.0.0.1&port=1,2&user=me&password={SECRET}": UnansweredServer(
        "postgresql:///app?host=127.0.0.1,127.0.0.1&port=1,2&user=me&password=…"
    ),
    "postgresql://127.0.0.1:1/app?reads=standby&max_lag=2.5": UnansweredServer(
        "postgresql://127.0.0.1:1/app?reads=standby&max_lag=2.5"
    ),
    "postgresql://127.0.0.1:1/app?reads=anywhere": Refused(InvalidArgument, 'reads: expected "primary" or "standby"'),
    "postgresql://127.0.0.1:1/app?max_lag=soon": Refused(InvalidArgument, "max_lag: expected a number of seconds"),
    "postgresql://::1/app": Refused(InvalidArgument, "IPv6 address is written between brackets"),
    "etcd://::1/app": Refused(InvalidArgument, "IPv6 address is written between brackets"),
    "etcd://host:/app": Refused(InvalidArgument, "its port.*in the URL of a server"),
    # As of a variable that is not set: without TLS, everyone on the way could read the password.
    f"etcd://me:{SECRET}@a/app?ca=": Refused(InvalidArgument, "ca=: this option is empty"),
    "https://host?ca=": Refused(InvalidArgument, "ca=: this option is empty"),
    "": Refused(InvalidArgument, "path or a URL; leave it out"),
    b"x.db": Refused(InvalidArgument, "path or a URL"),
    5: Refused(InvalidArgument, "path or a URL"),
    "a\0b": Refused(InvalidArgument, "path or a URL"),
    "x\ud800.db": Refused(InvalidArgument, "path or a URL"),
    os.fsdecode(b"x\xff.db"): Refused(CannotOpen, r"^'.*/x\\udcff\.db' can't be opened: .* paths in UTF-8; rename"),
    os.fsdecode(b"sqlite:///x\xff.db"): Refused(CannotOpen, "paths in UTF-8"),
    "~nosuchuser/x.db": Refused(CannotOpen, "no such user"),
    "sqlite://x.db": Refused(InvalidArgument, "three slashes .* sqlite:///x.db,"),
    "sqlite://x.db?mode=ro": Refused(InvalidArgument, r"sqlite:///x.db\?mode=ro,"),
    f"sqlite://me:{SECRET}@host/x.db": Refused(InvalidArgument, "three slashes"),
    f"sqlite://host=localhost password={SECRET}": Refused(InvalidArgument, "three slashes"),
    f"file:host=localhost password={SECRET}": Refused(InvalidArgument, "or sqlite:///app.db$"),
    f"sqlite:///me:{SECRET}@host/x.db": Refused(InvalidArgument, "begin with a scheme"),
    "sqlite:///": Refused(InvalidArgument, "names no file"),
    "sqlite:x.db": Refused(InvalidArgument, "as in sqlite:///app.db"),
    "sqlite:/x.db": Refused(InvalidArgument, "two slashes"),
    "file:x.db": Refused(InvalidArgument, "or sqlite:///x.db$"),
    "file:x.db?mode=ro": Refused(InvalidArgument, r"or sqlite:///x.db\?mode=ro$"),
    "file:///srv/x.db": Refused(InvalidArgument, "or sqlite:////srv/x.db$"),
    "sqlite:///file:x.db?mode=ro&uri=true": Refused(InvalidArgument, "no option uri; .*mode=ro"),
    "sqlite:///file:x.db?mode=ro": Refused(InvalidArgument, "without file:"),
    "sqlite:///x.db?mode=rw": Refused(InvalidArgument, "mode takes only one value, as in mode=ro"),
    "sqlite:///x.db?cache=shared": Refused(InvalidArgument, "no option cache; .*mode=ro"),
    "sqlite://?mode=ro": Refused(InvalidArgument, "need a file"),
    "redis://localhost": Refused(CannotOpen, "no engine for redis://…"),
    f"mysql+driver://me:{SECRET}@host/app": Refused(CannotOpen, "no engine for mysql://…"),
    f"postgres:/me:{SECRET}@host/app": Refused(InvalidArgument, "^postgres:… .*two slashes"),
    f"postgresql:me:{SECRET}@host/app": Refused(InvalidArgument, "two slashes"),
    f"postgresql//me:{SECRET}@host/app": Refused(InvalidArgument, "begin with a scheme"),
    f"pg:/me:{SECRET}@host/app": Refused(InvalidArgument, "begin with a scheme"),
    f"//me:{SECRET}@host/app": Refused(InvalidArgument, "begin with a scheme"),
    f"me:{SECRET}@host/app": Refused(InvalidArgument, "begin with a scheme"),
    f"me:{SECRET}@postgres://host/app": Refused(InvalidArgument, "begin with a scheme"),
    f"me@host:{SECRET}": Refused(InvalidArgument, "begin with a scheme"),
    f"postgresql%3A%2F%2Fme%3A{SECRET}%40host%2Fapp": Refused(InvalidArgument, "begin with a scheme"),
    f"host=localhost user=me password={SECRET}": Refused(InvalidArgument, "begin with a scheme"),
    f"Server=localhost;Pwd={SECRET}": Refused(InvalidArgument, "begin with a scheme"),
    Path(f"postgresql://me:{SECRET}@host/app"): Refused(InvalidArgument, "two slashes"),
    f"postgresql://me%3A{SECRET}@host/app": Refused(InvalidArgument, "plain colon"),
    f"postgresql://me:a@{SECRET}@host/app": Refused(InvalidArgument, "%40"),
    f"postgresql://me:a/{SECRET}@host/app": Refused(InvalidArgument, "%2F"),
    f"postgresql://me:a?{SECRET}@host/app": Refused(InvalidArgument, "name=value"),
    f"postgresql://me:1?a={SECRET}@host/app": Refused(InvalidArgument, "%3F"),
    f"postgresql://me:{SECRET}#b@host/app": Refused(InvalidArgument, "%23"),
    f"postgresql://me:{SECRET}?a=b": Refused(InvalidArgument, "its port"),
    f"postgresql://me:{SECRET}@host:99999/app": Refused(InvalidArgument, "its port"),
    f"postgresql://me:{SECRET}@[::1/app": Refused(InvalidArgument, "user:password@host"),
    f"etcd:me:{SECRET}@host/app": Refused(InvalidArgument, "two slashes"),
    f"etcd://me:a@{SECRET}@host/app": Refused(InvalidArgument, "%40"),
    f"etcd://me:{SECRET}@host:99999/app": Refused(InvalidArgument, "its port"),
    f"etcd://me:{SECRET}@host/app?ssl=1": Refused(InvalidArgument, "no option ssl; .* tls, ca, cert, key"),
    f"etcd://me:{SECRET}@host/app?tls=yes": Refused(InvalidArgument, "expected true or false"),
    f"etcd://me:{SECRET}@host/app?tls=false&ca=x": Refused(InvalidArgument, "need TLS"),
    f"etcd://me:{SECRET}@host/app?cert=x": Refused(InvalidArgument, "given together"),
    f"etcd://me:{SECRET}@host/app%00x": Refused(InvalidArgument, "%00"),
    # Two such prefixes would be one store: each of their bytes would be read as U+FFFD.
    f"etcd://me:{SECRET}@host/app%FF": Refused(InvalidArgument, "UTF-8"),
    f"etcd://me:{SECRET}%FF@host/app": Refused(InvalidArgument, "UTF-8"),
    f"postgresql://me:{SECRET}@host/app%FF": Refused(InvalidArgument, "UTF-8"),
    f"postgresql://me:{SECRET}%C3@host/app": Refused(InvalidArgument, "UTF-8"),
    f"etcd://me:{SECRET}@host/app?{SECRET}": Refused(InvalidArgument, "name=value"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.fixture(params=[pytest.param(spelling, id=repr(spelling)) for spelling in SPELLINGS])
def spelling(request: pytest.FixtureRequest, here: Path) -> tuple[Any, Any]:
    """A URL, and what it means."""
    url = request.param
    meaning = SPELLINGS[url]
    if isinstance(url, str):
        url = url.replace("{here}", str(here))
    if isinstance(meaning, UnansweredServer):
        meaning = UnansweredServer(meaning.shown.replace("{here}", str(here)))
    return url, meaning


@pytest.fixture(autouse=True)
def _no_log_shows_the_password(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.DEBUG)
    yield
    assert SECRET not in caplog.text


def test_parsed(spelling: tuple[Any, Any], here: Path) -> None:
    url, meaning = spelling
    match meaning:
        case Refused(error, message):
            with pytest.raises(error, match=message) as raised:
                DatabaseUrl.parse(url)
            assert SECRET not in repr(raised.value)
            return
        case File(name, read_only):
            parsed = DatabaseUrl.parse(url)
            assert (parsed.engine, parsed.path, parsed.read_only) == ("sqlite", str(here / name), read_only)
            assert parsed.file == here / name
            assert parsed.shown == str(url)
        case Memory(engine):
            parsed = DatabaseUrl.parse(url)
            assert parsed.engine == ("memory" if engine is MemoryEngine else "sqlite")
            assert parsed.is_in_memory
        case UnansweredServer(shown):
            parsed = DatabaseUrl.parse(url)
            assert (parsed.engine, parsed.shown, parsed.file) == ("postgres", shown, None)
            assert parsed.postgres is not None
            assert SECRET not in f"{parsed.postgres} {parsed.postgres.shown} {parsed.postgres.name}"
    assert SECRET not in f"{parsed} {parsed!r} {parsed.shown}"
    assert DatabaseUrl.parse(parsed) is parsed


@pytest.mark.parametrize(
    ("url", "endpoints", "prefix", "shown"),
    [
        ("etcd://a,b:1234,[::1]/app", ("a:2379", "b:1234", "[::1]:2379"), "app", "etcd://a,b:1234,[::1]/app"),
        ("ETCD://a", ("a:2379",), "keyloft", "etcd://a"),
        ("etcd:///my%20app/x/", ("127.0.0.1:2379",), "my app/x", "etcd:///my%20app/x/"),
        (f"etcd://me:{SECRET}@a/app?ca=f", ("a:2379",), "app", "etcd://a/app"),
    ],
)
def test_members_and_prefix_of_etcd(url: str, endpoints: tuple[str, ...], prefix: str, shown: str) -> None:
    parsed = DatabaseUrl.parse(url)
    assert parsed.etcd is not None
    assert (parsed.engine, parsed.etcd.endpoints, parsed.etcd.prefix, parsed.shown) == (
        "etcd",
        endpoints,
        prefix,
        shown,
    )
    assert (parsed.file, parsed.is_in_memory, parsed.etcd.tls) == (None, False, "ca=" in url)
    assert SECRET not in f"{parsed!r} {parsed.etcd} {parsed.etcd!r} {parsed.etcd.name}"
    with pytest.raises(CannotOpen, match="no tables to migrate"):
        migrations.upgrade(url)


async def test_the_engine_opens_it(spelling: tuple[Any, Any], here: Path) -> None:
    url, meaning = spelling
    match meaning:
        case File(name, read_only):
            if read_only:
                with pytest.raises(CannotOpen, match=name):
                    await open_engine(url)
                await (await open_engine(name)).aclose()
            await (await open_engine(url)).aclose()
            assert (here / name).exists()
        case Memory(kind):
            engine = await open_engine(url)
            assert isinstance(engine, kind)
            await engine.aclose()
        case _:
            with pytest.raises(_error(meaning)) as raised:
                await open_engine(url, patience=0.1)
            assert SECRET not in repr(raised.value)


async def test_the_operators_interface_opens_it(spelling: tuple[Any, Any], here: Path) -> None:
    url, meaning = spelling
    if isinstance(meaning, File):
        await (await open_engine(here / meaning.name)).aclose()
        await (await open_maintenance(url)).aclose()
    else:
        with pytest.raises(_error(meaning)) as raised:
            await open_maintenance(url, patience=0.1)
        assert SECRET not in repr(raised.value)


def test_migrations_take_it(spelling: tuple[Any, Any], here: Path) -> None:
    url, meaning = spelling
    if isinstance(meaning, File) and not meaning.read_only:
        migrations.upgrade(url)
        assert (here / meaning.name).exists()
    else:
        # Alembic's command line shows a CannotOpen of the migrations without a traceback.
        with pytest.raises((DatabaseError, InvalidArgument)) as raised:
            migrations.upgrade(url)
        assert SECRET not in repr(raised.value)


async def test_admin_makes_no_file_where_it_only_reads(spelling: tuple[Any, Any], here: Path) -> None:
    url, meaning = spelling
    match meaning:
        case File(name, _):
            with pytest.raises(CannotOpen, match="there is no file"):
                await admin.stats(url)
            assert not (here / name).exists()
        case Refused(error, _):
            with pytest.raises(error) as raised:
                await admin.stats(url)
            assert SECRET not in repr(raised.value)


async def test_doctor_examines_it(spelling: tuple[Any, Any], here: Path) -> None:
    url, meaning = spelling
    if isinstance(meaning, File):
        await (await open_engine(here / meaning.name)).aclose()
    found = [*await doctor.examine(url), *await doctor.disk(url)]
    assert SECRET not in repr(found)
    match meaning:
        case File(name, _):
            assert found[0].severity == "ok"
            assert str(here / name) in found[0].what
        case Memory():
            assert found[0].severity == "warning"
        case _:
            assert found[0].severity == "problem"


async def test_read_only_reads_and_refuses_to_write(here: Path) -> None:
    async with keyloft.open("x.db") as kv:
        await kv.set(("k",), 1)
    async with keyloft.open("sqlite:///x.db?mode=ro", sweep_every=0.001) as kv:
        assert (await kv.get(("k",))).value == 1
        with pytest.raises(ReadOnly):
            await kv.set(("k",), 2)
    inspection = await inspect_database("sqlite:///x.db?mode=ro")
    assert inspection is not None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://me:{SECRET}@/app?host=/run&password={SECRET}", "postgresql:///app?host=/run&password=…"),
        (f"postgresql://host/app?sslpassword={SECRET}&Pwd={SECRET}", "postgresql://host/app?sslpassword=…&Pwd=…"),
        ("postgresql://host/app?sslmode=require", "postgresql://host/app?sslmode=require"),
    ],
)
def test_passwords_among_options_are_masked(url: str, shown: str) -> None:
    assert DatabaseUrl.parse(url).shown == shown


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("nats://host:4222", "nats://host:4222"),
        (f"nats://me:{SECRET}@host:4222", "nats://host:4222"),
        (f"tls://{SECRET}@host", "tls://host"),
        (f"me:{SECRET}@host:4222", "host:4222"),
    ],
)
def test_an_address_of_nats_is_shown_without_its_login(address: str, shown: str) -> None:
    assert without_login(address) == shown


def _error(meaning: Any) -> type[KeyloftError]:
    return meaning.error if isinstance(meaning, Refused) else DatabaseError
