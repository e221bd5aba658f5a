"""The container, the compose file and the workflow agree with the code: no container engine is needed to see that."""

import re
import tomllib
from pathlib import Path

from keyloft.server.config import SETTINGS

ROOT = Path(__file__).parents[2]


def test_containers_set_only_settings_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "compose.yaml").read_text()
    names = set(re.findall(r"\bKEYLOFT_[A-Z_]+", text))
    assert names
    assert names <= {setting.environment for setting in SETTINGS.values()}


def test_the_image_has_every_file_that_it_installs() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert allowed >= {"src", "pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert all((ROOT / name).exists() for name in allowed)


def test_the_workflow_runs_every_python_version_of_the_classifiers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    run = re.findall(r'python: "(3\.\d+)"', (ROOT / ".github/workflows/ci.yml").read_text())
    assert set(named) <= set(run)
