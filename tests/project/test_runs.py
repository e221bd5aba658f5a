"""A run of the tests can be trusted: it notices a blocked event loop and a process left behind."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPTIONS = (
    *("-p", "pytest_asyncio.plugin", "-p", "xdist.plugin", "-p", "no:cacheprovider"),
    *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"),
)


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load all plugins that are installed takes half a second of a processor, in each process of a run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


async def test_the_guard_notices_a_blocked_loop(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(
        """
        import time

        async def test_blocks():
            time.sleep(0.8)

        async def test_does_not():
            pass
        """
    )
    result = await asyncio.to_thread(pytester.runpytest_subprocess, *OPTIONS, "-o", f"pythonpath={ROOT}")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*the event loop was blocked for * s by*"])


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_process_that_outlives_a_run_fails_it_and_is_ended(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text("from tests.support import processes; processes.ENDING_SECONDS = 1.0")
    (tmp_path / "test_leaving.py").write_text(
        """
import pathlib, subprocess, sys

def test_leaves_a_process_behind():
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    running = subprocess.Popen(command, env={}, stdout=subprocess.PIPE, start_new_session=True)
    with running.stdout as printed:
        printed.readline()  # while it starts, /proc does not show its environment
    pathlib.Path("pid").write_text(str(running.pid))
    running.returncode = 0  # no warning of Python
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.processes", *OPTIONS, *options, "test_leaving.py"],
        cwd=tmp_path,
        # A run within a run would leave the check to the outer one.
        env={**os.environ, processes.MARK: "", "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    pid = int((tmp_path / "pid").read_text())
    assert f"process {pid} outlived the run, and was killed" in done.stdout
    command = Path(f"/proc/{pid}/cmdline")
    assert not command.exists() or command.read_bytes() == b""  # a zombie has none


def test_a_child_can_be_interrupted_even_if_the_run_was_started_in_the_background() -> None:
    show = "import signal; print(repr(signal.getsignal(signal.SIGINT)))"
    code = f"""
import subprocess, sys
import tests.support.processes
subprocess.run([sys.executable, "-c", {show!r}])
"""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c"]
    plain = subprocess.run([*ignoring, show], capture_output=True, text=True)
    assert "SIG_IGN" in plain.stdout
    done = subprocess.run([*ignoring, code], cwd=ROOT, capture_output=True, text=True)
    assert "default_int_handler" in done.stdout, done.stderr
