"""Makes the virtual environment of an extra where there is none yet, and prints its folder; for `scripts/venv`.

What an environment is made from is part of its folder's name, `.venvs/NAME-HASH`. A change of `pyproject.toml` makes a
new one beside it, and a program that runs from the old one goes on. `.venvs/NAME` links to the one made last.

A folder without the file `complete` is unfinished: the next run makes it again, at the same path, because virtual
environments can't be moved.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

COMPLETE: Final = "complete"
UNUSED_SECONDS: Final = 24 * 3600
"""An environment that was asked for within this time is kept, also if nothing runs from it."""


def install(folder: Path, root: Path, name: str, constraints: str) -> None:
    """Make a virtual environment with an extra of a project, and the project itself as it lies in its folder."""
    _run(sys.executable, "-m", "venv", folder)
    written = folder / "constraints.txt"
    written.write_text(constraints)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    _run(*pip, "--constraint", written, "--editable", f"{root}[{name}]")


def _run(*command: str | Path) -> None:
    # Standard output is for the folder alone. A child inherits the lock, and holds it should this process be killed.
    ended = subprocess.run(command, stdout=sys.stderr, close_fds=False)
    if ended.returncode:
        sys.exit(f"could not make the virtual environment: {command[2]} ended with {ended.returncode}; see above")


def environment(
    root: Path,
    name: str,
    versions: str = "tested",
    *,
    make: Callable[[Path, Path, str, str], None] = install,
    processes: Path = Path("/proc"),
) -> Path:
    """The folder of an environment that is complete, made now if need be.

    Args:
        root: The folder of `pyproject.toml`.
        name: An extra of it.
        versions: `tested` for those of `constraints.txt`, where they are meant for this Python; `latest`; or `lowest`
            for the lowest that `pyproject.toml` allows.
        make: Makes an environment, as `install` does.
        processes: Where the system describes its processes.
    """
    constraints = constraints_of(root, versions)
    made_from = [sys.version.encode(), (root / "pyproject.toml").read_bytes(), constraints.encode()]
    digest = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:12]
    all_folders = root / ".venvs"
    all_folders.mkdir(exist_ok=True)
    folder = all_folders / f"{name}-{digest}"
    if not _use(folder):
        with _locked(all_folders / ".building"):
            if not _use(folder):
                print(f"making the virtual environment .venvs/{folder.name} …", file=sys.stderr)  # noqa: T201
                shutil.rmtree(folder, ignore_errors=True)
                make(folder, root, name, constraints)
                (folder / COMPLETE).touch()
            _link(all_folders / name, folder)
            _remove_unused(all_folders, name, folder, processes)
    return folder


def _use(folder: Path) -> bool:
    """Whether the environment is complete; it is not removed for a day from now."""
    try:
        with _locked(folder.parent / ".using"):
            os.utime(folder / COMPLETE)
    except FileNotFoundError:
        return False
    except PermissionError:
        # Another user has made it. It is kept while a process runs from it.
        return (folder / COMPLETE).exists()
    return True


def _link(link: Path, folder: Path) -> None:
    if link.is_symlink() or not link.exists():
        new = link.with_name(f".{link.name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.replace(link)


def _remove_unused(all_folders: Path, name: str, newest: Path, processes: Path) -> None:
    """Remove the other environments of this name from which nothing can be running."""
    others = [
        one
        for one in all_folders.glob(f"{name}-*")
        if one != newest and re.fullmatch(r"[0-9a-f]{12}", one.name[len(name) + 1 :])
    ]
    for folder in others:
        with _locked(all_folders / ".using"):
            with suppress(FileNotFoundError):
                if time.time() - (folder / COMPLETE).stat().st_mtime < UNUSED_SECONDS:
                    continue
            if _may_run(folder, name, processes):
                continue
            (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _may_run(folder: Path, name: str, processes: Path) -> bool:
    """Whether a process may be running from an environment; where the system doesn't say, it may.

    A process that was started by the link may run from any environment of this name. In an activated environment the
    command line is `python` and the program that of the system: only variables, or open files, name the environment.
    """
    if not (processes / "self" / "maps").exists():
        return True
    signs = (folder.name.encode(), f".venvs/{name}/".encode())
    made_at = 0.0
    with suppress(FileNotFoundError):
        made_at = (folder / "pyvenv.cfg").stat().st_mtime
    return any(_names(process, signs, made_at) for process in processes.glob("[0-9]*"))


def _names(process: Path, signs: tuple[bytes, ...], made_at: float) -> bool:
    """Whether one of these names stands in what the system shows of a process.

    Of other users' processes it shows the command line alone. What can't be read of this user's counts as a yes, unless
    the process is older than the environment.
    """
    try:
        for file in ("cmdline", "environ", "maps"):
            text = (process / file).read_bytes()
            if any([sign in text for sign in signs]):
                return True
        for link in (process / "exe", process / "cwd", *(process / "fd").iterdir()):
            # A process of the kernel has no program, and a file may just have been closed.
            with suppress(FileNotFoundError):
                if any([sign in os.fsencode(f"{link.readlink()}/") for sign in signs]):
                    return True
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended
    except OSError:
        with suppress(FileNotFoundError, ProcessLookupError):
            return process.stat().st_uid == os.geteuid() and _started_at(process) >= made_at
    return False


def _started_at(process: Path) -> float:
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[19]
    since_boot = float((process.parent / "uptime").read_text().split()[0])
    return time.time() - since_boot + int(ticks) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(descriptor, True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def constraints_of(root: Path, versions: str) -> str:
    """The constraints for pip, one a line."""
    match versions:
        case "latest":
            return ""
        case "lowest":
            return _lowest((root / "pyproject.toml").read_text())
        case "tested":
            with suppress(FileNotFoundError):
                text = (root / "constraints.txt").read_text()
                if f"Python {sys.version_info.major}.{sys.version_info.minor}" in text.partition("\n")[0]:
                    return text
            return ""
    sys.exit(f"KEYLOFT_VERSIONS is {versions}: expected tested, latest or lowest")


def _lowest(pyproject: str) -> str:
    """A constraint for each requirement, to the version after its >=."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *[one for extra in extras for one in extra]]
    found = [re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", requirement) for requirement in requirements]
    return "".join(sorted({f"{one[1]}=={one[2]}\n" for one in found if one}))


if __name__ == "__main__":
    _, extra = sys.argv
    try:
        chosen = environment(Path(__file__).resolve().parents[1], extra, os.environ.get("KEYLOFT_VERSIONS", "tested"))
    except PermissionError as error:
        sys.exit(f"this user may not write {error.filename}: run this once as the user who owns that folder")
    print(chosen)  # noqa: T201
