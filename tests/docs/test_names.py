"""The developers' documents name only files, functions and classes that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keyloft"
DOCUMENTS = [ROOT / "docs" / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]

_PATH = re.compile(r"(?<![\w/.*-])((?:[\w.]+/)*[\w.]+\.(?:py|js)|(?:[\w.]+/)+)(?![\w*])")
_NAMED_WITH_FILE = re.compile(r"^[ │]*(\w+) {2,}([\w/]+\.py)", re.MULTILINE)
_NAMED_IN_TEXT = re.compile(r"`(\w+)`(?: in | [\w ]*\()`((?:\w+/)*\w+\.py)`")


def found(path: str) -> Path | None:
    folders = (ROOT, SOURCE, SOURCE / "engines", ROOT / "bench")
    return next((folder / path for folder in folders if (folder / path).exists()), None)


def paths_in(document: Path) -> set[str]:
    text = document.read_text()
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {path for span in spans for path in _PATH.findall(span) if "://" not in span}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_path_exists(document: Path) -> None:
    paths = paths_in(document)
    assert len(paths) > 20
    assert sorted(path for path in paths if found(path) is None) == []


def test_every_module_that_another_document_names_exists() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    paths = {(document.name, path) for document in documents for path in paths_in(document) if path.endswith(".py")}
    assert len(paths) > 20
    assert sorted(pair for pair in paths if "/" in pair[1] and found(pair[1]) is None) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_name_is_in_the_file_that_stands_beside_it(document: Path) -> None:
    text = document.read_text()
    pairs = _NAMED_WITH_FILE.findall(text) + _NAMED_IN_TEXT.findall(text)
    assert len(pairs) > 5
    for name, path in pairs:
        file = found(path)
        assert file is not None, path
        defined = re.search(rf"^\s*(async def|def|class) {name}\b|^{name}\b", file.read_text(), re.MULTILINE)
        assert defined, f"{path} has no {name}"
