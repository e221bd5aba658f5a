"""Node.js for tests: packages of npm, installed once per `package.json`."""

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_INSTALL_SECONDS = 120


def installed(folder: Path) -> Path:
    """A folder beside the virtual environments that has the files of this one, and the packages that they need.

    The test is skipped where Node.js or the packages can't be had.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs Node.js and npm: apt install nodejs npm")
    package = folder / "package.json"
    made = ROOT / ".venvs" / f"node-{hashlib.sha256(package.read_bytes()).hexdigest()[:12]}"
    made.mkdir(parents=True, exist_ok=True)
    with (made / "lock").open("w") as lock:  # of several processes that test at the same time, one installs
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "complete").exists():
            shutil.copy(package, made)
            command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock"]
            ended = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
            if ended.returncode:
                pytest.skip(f"npm can't install the packages of {package.name}: {ended.stderr.strip()[-200:]}")
            (made / "complete").touch()
        for file in folder.glob("*.js"):
            shutil.copy(file, made)
    return made
