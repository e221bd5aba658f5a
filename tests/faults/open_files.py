"""Which files this process holds open, as the operating system sees it."""

from pathlib import Path

import pytest


def files_open_in(folder: Path) -> list[str]:
    """The files below a folder that are open in this process; skips the test where there is no way to know."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("open files can't be listed without /proc")
    found = []
    for descriptor in descriptors.iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith(f"{folder}/"):
            found.append(target)
    return sorted(found)
