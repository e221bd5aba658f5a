"""etcd for tests: one node for all tests of a process, and a prefix of its own for each test.

A test that needs it is skipped where etcd is not installed.
PYTEST_DONT_REWRITE: modules may import from here, too.
"""

import importlib
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.temporary_files import MEMORY
from tools.etcd import NOT_INSTALLED, Node, is_installed, own_cluster, url_of


def and_etcd(*names: str) -> list[str]:
    """The parameters of tests that depend little on the engine: on etcd, too, if KEYLOFT_TEST_ETCD=everywhere."""
    return [*names, "etcd"] if os.environ.get("KEYLOFT_TEST_ETCD") == "everywhere" else list(names)


class EtcdPrefixes:
    """The prefixes of a node: each is used once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._numbers = count(1)

    def emptied(self) -> str:
        """The URL of a prefix that holds nothing."""
        return url_of([self._node], f"test{next(self._numbers)}")


@pytest.fixture(scope="session")
def etcd_node() -> Iterator[Node]:
    """A node that no test stops; it ends with the run."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    # To import gRPC takes most of a second on a busy machine: not in a test, whose event loop would be blocked.
    for module in ("engine", "maintenance", "inspection"):
        importlib.import_module(f"keyloft.engines.etcd.{module}")
    with TemporaryDirectory(dir=MEMORY) as folder, own_cluster(Path(folder)) as [node]:
        yield node


@pytest.fixture(scope="session")
def etcd_prefixes(etcd_node: Node) -> EtcdPrefixes:
    return EtcdPrefixes(etcd_node)


@pytest.fixture
def etcd_url(etcd_prefixes: EtcdPrefixes) -> str:
    """The URL of a prefix that holds nothing."""
    return etcd_prefixes.emptied()
