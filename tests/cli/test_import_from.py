"""`keyloft import-from`: what other stores keep in files."""

import json
from pathlib import Path

import diskcache  # type: ignore[import-untyped]

from tests.cli.commands import Keyloft


def test_the_command_prints_what_became_of_the_entries(tmp_path: Path, run: Keyloft) -> None:
    with diskcache.Cache(str(tmp_path / "cache")) as cache:
        cache["a"] = 1
        cache["b"] = [1]
    code, shown, problem = run(
        "import-from", "diskcache", str(tmp_path / "cache"), "--prefix", "cache", "--name", "shop"
    )
    assert (code, json.loads(shown)["new"], json.loads(shown)["refused"]) == (1, 1, 1)
    assert "--trust" in problem
    code, shown, _ = run(
        *("import-from", "diskcache", str(tmp_path / "cache"), "--prefix", "cache", "--name", "shop", "--trust")
    )
    assert (code, json.loads(shown)["new"], json.loads(shown)["same"]) == (0, 1, 1)
    assert run("keys", "--name", "shop")[1] == "cache/a\ncache/b\n"
