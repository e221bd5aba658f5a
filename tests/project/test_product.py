"""The product around the code: its public names, its README, its error codes."""

import asyncio
import contextlib
import importlib
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import keyloft
from keyloft import errors, plugins, semantic
from keyloft.nats.connection import connect

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_these() -> None:
    assert sorted(keyloft.__all__) == sorted(
        """
        AlreadyExists AnotherStore Atomic Busy CannotOpen Children Clock ClockSetBack Closed CommitResult CommitUnknown
        CounterOutOfRange
        DatabaseError DiskFull Entry EntryList Escalated HistoryGone IncompatibleLibrary
        InvalidArgument InvalidCursor InvalidInput InvalidJson
        InvalidKey InvalidKeyType InvalidPluginName InvalidSubject InvalidValue InvalidValueType KeyTooLarge
        KeyloftError Listing LockHeld LockLost ManualClock MissingField NatsServerFailed NoService NotACounter
        NotADatabase NotEmpty NotForward NotPermitted NothingToRestore Opening QuotaExceeded ReadOnly ReentrantCall
        ReplyTooLarge SchemaTooNew SchemaTooOld
        StaleFence Stalled Store TimedOut TransferFailed U64 Unanswered Undecodable Unreachable ValueTooLarge
        VersionConflict
        SyncAtomic SyncList SyncListing SyncStore SyncWatching WatchExpired Watching WrongLoop WrongType open open_sync
        """.split()
    )
    assert all(hasattr(keyloft, name) for name in keyloft.__all__)


def test_dir_shows_public_names_only() -> None:
    shown = dir(keyloft)
    assert set(shown) - {"admin", "plugins", "semantic", "__version__"} == set(keyloft.__all__)
    assert all(hasattr(keyloft, name) for name in shown)


def test_the_public_names_of_plugins_are_these() -> None:
    names = ["BotDatabase", "CurrentValue", "DatabaseClient", "DatabaseService", "Event", "Login", "PluginEntry"]
    assert sorted(plugins.__all__) == [*names, "PluginKVStorage", "UsedStorage"]
    assert all(hasattr(plugins, name) for name in plugins.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        plugins.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_public_names_of_semantic_are_these() -> None:
    assert sorted(semantic.__all__) == sorted(
        """
        Alert AuditRecord Checkpoint DeadLetter Envelope Escalated Event FailedWrite Flags IndexVersion Intent Lock
        LockHeld LockLost Login NotForward NothingToRestore Retry SemanticClient SemanticService SemanticStore Semantics
        Signals StaleFence SyncLock SyncSemanticStore VersionConflict WriteRequest key_of request_id_of shortened
        """.split()
    )
    assert all(hasattr(semantic, name) for name in semantic.__all__)


def test_a_service_does_not_load_sqlalchemy() -> None:
    """It would take 19 MB of memory."""
    code = (
        "import sys, keyloft, keyloft.plugins, keyloft.server.app; "
        "print([name for name in ('sqlalchemy', 'alembic', 'asyncpg') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"


@pytest.mark.slow
def test_migrating_needs_no_nats(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['nats'] = None\n"
        "from keyloft.cli import main\n"
        "sys.argv = ['keyloft', 'migrate', '--database', sys.argv[1]]\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "app.db")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, f"{tmp_path / 'app.db'} has the schema of this version\n")


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['nats'] = sys.modules['sqlalchemy'] = None\n"
        "from keyloft.plugins import BotDatabase\n"
        "for name in ('DatabaseClient', 'DatabaseService', 'Login', 'PluginKVStorage'):\n"
        "    try: exec(f'from keyloft.plugins import {name}')\n"
        "    except ImportError as error: print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = shown.stdout.splitlines()
    assert [re.findall(r"\.\[(\w+)\]", line) for line in lines] == [["nats"], ["nats"], ["nats"], ["sql"]]


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("typer", "cli", ["get", "k"]),
        ("nats", "server", ["serve"]),
        ("typer", "server", ["serve"]),
        ("nats", "nats", ["plugin", "get", "trivia", "score"]),
        ("alembic", "sql", ["migrate"]),
        ("asyncpg", "postgres", ["stats", "--database", "postgresql://127.0.0.1:1/app"]),
    ],
)
@pytest.mark.slow
def test_a_command_names_the_extra_of_a_package_that_is_missing(
    tmp_path: Path, package: str, extra: str, arguments: list[str]
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})")
    shown = subprocess.run(
        [sys.executable, "-m", "keyloft", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (shown.returncode, shown.stdout, len(shown.stderr.splitlines())) == (1, "", 1)
    assert f'pip install ".[{extra}]"' in shown.stderr
    assert "in a clone of Keyloft" in shown.stderr


def test_every_error_is_public_and_drawn_in_the_tree_below_its_parent() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, keyloft.KeyloftError)
    ]
    assert {kind.__name__ for kind in kinds} <= set(keyloft.__all__)
    drawn: dict[str, str | None] = {}
    branch: list[str] = []
    for stem, name in re.findall(r"^    ([│├└─ ]*)(\w+)[ (].*$", errors.__doc__ or "", re.MULTILINE):
        branch[len(stem) // 4 :] = [name]
        drawn[name] = branch[-2] if len(branch) > 1 else None
    for kind in kinds:
        parents = [base.__name__ for base in kind.__bases__ if issubclass(base, keyloft.KeyloftError)]
        assert drawn[kind.__name__] == (parents[0] if parents else None)
        assert re.search(rf"\b{kind.__name__}\b.*\b{kind.code}\b", errors.__doc__ or "")
    assert set(drawn) == {kind.__name__ for kind in kinds}


def test_errors_live_in_one_module() -> None:
    """But for CannotMigrate, which has to be an error of Alembic, too."""
    for module in pkgutil.walk_packages(keyloft.__path__, "keyloft."):
        if ".versions" not in module.name and module.name not in ("keyloft.__main__", "keyloft.server.__main__"):
            with contextlib.suppress(AttributeError):  # migrations/env.py runs inside Alembic only
                importlib.import_module(module.name)
    elsewhere = {kind for kind in _all_below(keyloft.KeyloftError) if kind.__module__ != "keyloft.errors"}
    assert {kind.__name__ for kind in elsewhere} <= {"CannotMigrate"}


def _all_below(kind: type[Exception]) -> set[type[Exception]]:
    return {found for below in kind.__subclasses__() for found in ({below} | _all_below(below))}


@pytest.mark.parametrize(
    "error",
    [
        keyloft.ValueTooLarge(11, 10),
        keyloft.NotACounter(("k",)),
        keyloft.NotEmpty("app.db", 2, 3),
        keyloft.AlreadyExists("tuples", b"k"),
        keyloft.VersionConflict("expected 1", current=2, conflicts=(3,), correlation_id="4"),
        keyloft.Escalated("failed at every attempt", "letter"),
        keyloft.TransferFailed("ended early", {"new": 1}),
        keyloft.TimedOut("no reply"),
        keyloft.Closed(),
        keyloft.Busy("held"),
    ],
)
def test_errors_travel_between_processes(error: keyloft.KeyloftError) -> None:
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code) == (type(error), str(error), error.code)
    assert vars(copy) == vars(error)


def test_the_embedded_library_needs_two_packages() -> None:
    needed = [requirement for requirement in metadata.requires("keyloft") or [] if "extra ==" not in requirement]
    assert [re.split(r"[<>=]", requirement)[0] for requirement in needed] == ["apsw", "msgspec"]


README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
@pytest.mark.slow
async def test_the_readme_runs(block: str, tmp_path: Path, nats_url: str) -> None:
    """A block that awaits at top level is pasted at the prompt of `python -m asyncio`, others are run as a file."""
    if "nats://127.0.0.1:4222" in block:
        service = plugins.DatabaseService(await connect(nats_url, name="readme"), plugins.BotDatabase())
        await service.start()
        await asyncio.to_thread(run_twice, block.replace("nats://127.0.0.1:4222", nats_url), tmp_path)
        await service.stop()
        await service.nats.close()
        await service.db.close()
        return
    await asyncio.to_thread(run_twice, block, tmp_path)


# From Python 3.13 on, `python -m asyncio` takes indented lines from a terminal only: the block is compiled in its way.
PASTE = """
import ast, asyncio, inspect, sys, types
async def main():
    block = compile(sys.stdin.read(), "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = types.FunctionType(block, {"asyncio": asyncio, "__name__": "__main__"})()
    if inspect.isawaitable(done):
        await done
asyncio.run(main())
"""
PROMPT = ["-m", "asyncio"] if sys.version_info < (3, 13) else ["-c", PASTE]


def run_twice(block: str, tmp_path: Path) -> None:
    is_pasted = "asyncio.run" not in block
    program = PROMPT if is_pasted else ["-c", block]
    for _ in range(2):  # a reader will run it again, with the file of the first time
        done = subprocess.run(
            [sys.executable, "-W", "error", *program],
            input=block if is_pasted else "",
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "Error" not in done.stderr  # a prompt goes on after an error


def test_the_readme_has_code() -> None:
    assert len(README_BLOCKS) >= 3
