"""scripts/venv never harms an environment that something runs from, nor one that is being made."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.environment import COMPLETE, UNUSED_SECONDS, constraints_of, environment

ROOT = Path(__file__).parents[2]
NAME = f"test{os.getpid()}"
"""Of its own: an environment is kept while any process of the machine names it."""
# Makes an environment without packages, which takes a tenth of a second; before, it waits while there is a file `wait`.
MAKING = """
import pathlib, sys, time, venv
from tools.environment import environment

root = pathlib.Path(sys.argv[1])

def make(folder, *_):
    venv.create(folder, symlinks=True)
    (root / "making").touch()
    while (root / "wait").exists():
        time.sleep(0.01)

print(environment(root, sys.argv[2], make=make))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("# one\n")
    return tmp_path


def started(project: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKING, project, NAME],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def made(project: Path) -> Path:
    running = started(project)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    return Path(output.strip())


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def not_used_for_long(folder: Path) -> None:
    then = time.time() - UNUSED_SECONDS - 1
    os.utime(folder / COMPLETE, (then, then))


@pytest.mark.slow
def test_a_new_environment_is_made_beside_the_one_that_something_runs_from(project: Path) -> None:
    first = made(project)
    assert made(project) == first
    assert (project / ".venvs" / NAME).resolve() == first
    code = "print('up', flush=True); input(); print('still here')"
    with subprocess.Popen(
        [first / "bin" / "python", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdin
        assert running.stdout
        assert running.stdout.readline() == "up\n"
        not_used_for_long(first)
        (project / "pyproject.toml").write_text("# two\n")
        second = made(project)
        assert second != first
        assert (project / ".venvs" / NAME).resolve() == second
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.stdout.readline() == "still here\n"
    (project / "pyproject.toml").write_text("# three\n")
    third = made(project)
    # The first was not asked for for a day, and nothing runs from it; the second was asked for a moment ago.
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)


COMMANDS = {
    "activated": ". {folder}/bin/activate; exec python -c '{code}'",
    "on the path": "PATH={folder}/bin:$PATH exec python -c '{code}'",
    "by the link": "cd {folder}/../..; exec .venvs/{name}/bin/python -c '{code}'",
    "relative": "cd {folder}/..; exec {folder.name}/bin/python -c '{code}'",
    "an open file": "exec {python} -c '{code}' 9< {folder}/pyvenv.cfg",
    "a folder": "cd {folder}/bin; exec {python} -c '{code}'",
}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, all environments are kept")
@pytest.mark.parametrize("way", COMMANDS)
@pytest.mark.slow
def test_an_environment_is_kept_in_whatever_way_something_uses_it(project: Path, way: str) -> None:
    first = made(project)
    code = "print(1, flush=True); input()"
    command = COMMANDS[way].format(folder=first, name=NAME, code=code, python=sys.executable)
    with subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin
        assert running.stdout
        assert running.stdout.readline() == "1\n"
        not_used_for_long(first)
        (project / "pyproject.toml").write_text("# two\n")
        made(project)
        assert first.exists()
        running.stdin.write("\n")
    not_used_for_long(first)
    (project / "pyproject.toml").write_text("# three\n")
    made(project)
    assert not first.exists()


@pytest.mark.parametrize("is_older", [False, True])
def test_an_environment_is_kept_where_a_later_process_of_this_user_can_not_be_read(
    project: Path, is_older: bool
) -> None:
    first = made(project)
    processes = project / "proc"
    for name in ("self", "42"):
        (processes / name / "environ").mkdir(parents=True)  # reading it fails, for root, too
        (processes / name / "maps").touch()
        (processes / name / "cmdline").touch()
        ticks = 0 if is_older else 1000 * os.sysconf("SC_CLK_TCK")
        (processes / name / "stat").write_text(f"42 (a name) S {'0 ' * 18}{ticks} 0")
    (processes / "uptime").write_text("1000.00 1.00")
    not_used_for_long(first)
    (project / "pyproject.toml").write_text("# two\n")
    environment(project, NAME, make=lambda folder, *_: folder.mkdir(), processes=processes)
    assert first.exists() is not is_older


def test_an_environment_whose_making_was_killed_is_made_again_and_only_once(project: Path) -> None:
    (project / "wait").touch()
    killed = started(project)
    wait_for(project / "making")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (folder,) = (project / ".venvs").glob(f"{NAME}-*")
    assert not (folder / COMPLETE).exists()
    assert not (project / ".venvs" / NAME).exists()
    (project / "wait").unlink()
    both = [started(project), started(project)]
    endings = [running.communicate(timeout=60) for running in both]
    assert [output for output, _ in endings] == [f"{folder}\n"] * 2
    assert sum(["making" in errors for _, errors in endings]) == 1
    assert (folder / COMPLETE).exists()


def test_who_may_not_write_runs_from_an_environment_that_is_made_and_learns_why_none_can_be(project: Path) -> None:
    folder = made(project)
    (project / ".venvs" / ".using").chmod(0)
    # Root may open every file, unless it has no capabilities.
    as_other = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []

    def ask() -> subprocess.CompletedProcess[str]:
        script = [sys.executable, str(project / "tools" / "environment.py"), NAME]
        return subprocess.run([*as_other, *script], capture_output=True, text=True, timeout=60)

    (project / "tools").mkdir()
    (project / "tools" / "environment.py").write_text((ROOT / "tools" / "environment.py").read_text())
    assert ask().stdout == f"{folder}\n"
    (folder / COMPLETE).unlink()
    (project / ".venvs" / ".building").chmod(0)
    refused = ask()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(
        f"this user may not write {project}/.venvs/.building: run this once as the user who"
    )


def test_a_python_that_is_not_there_is_named() -> None:
    environment = {**os.environ, "PYTHON": "nopython"}
    refused = subprocess.run([ROOT / "scripts" / "venv", "test"], env=environment, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "Keyloft needs Python 3.11 or later; there is no program nopython. Set PYTHON to one.\n"


def test_an_environment_is_kept_where_the_system_does_not_name_its_processes(project: Path) -> None:
    first = made(project)
    not_used_for_long(first)
    (project / "pyproject.toml").write_text("# two\n")
    environment(project, NAME, make=lambda folder, *_: folder.mkdir(), processes=project / "no-proc")
    assert (first / COMPLETE).exists()


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_every_requirement_is_constrained_to_a_plain_version() -> None:
    first, *lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "Python 3.11" in first
    names = [re.fullmatch(r"([\w.-]+)==[\w.]+", line) for line in lines]
    assert all(names)
    constrained = {normal(name[1]) for name in names if name}
    required = set(re.findall(r'"([\w.-]+)(?:\[\w+\])?>=', (ROOT / "pyproject.toml").read_text())) - {"hatchling"}
    assert "keyloft" not in constrained
    assert {normal(name) for name in required} - constrained == set()


def test_the_lowest_versions_are_those_that_pyproject_allows() -> None:
    lowest = constraints_of(ROOT, "lowest").splitlines()
    requirements = (ROOT / "pyproject.toml").read_text()
    assert "apsw==3.53" in lowest
    assert all(
        [
            re.search(rf'"{name}(\[\w+\])?>={version}', requirements)
            for name, version in [line.split("==") for line in lowest]
        ]
    )
    assert constraints_of(ROOT, "latest") == ""
    with pytest.raises(SystemExit, match="expected tested, latest or lowest"):
        constraints_of(ROOT, "newest")
