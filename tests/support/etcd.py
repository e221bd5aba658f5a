"""etcd for tests: one node for all tests of a process, and a prefix of its own for each test.

A test that needs it is skipped where etcd is not installed.
PYTEST_DONT_REWRITE: modules may import from here, too.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest

from tools.etcd import NOT_INSTALLED, Node, is_installed, own_cluster, url_of

_numbers: Final = count(1)


@pytest.fixture(scope="session")
def etcd_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that no test stops; it ends with the run."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    with own_cluster(tmp_path_factory.mktemp("etcd")) as [node]:
        yield node


@pytest.fixture
def etcd_url(etcd_node: Node) -> str:
    """The URL of a prefix that holds nothing."""
    return url_of([etcd_node], f"test{next(_numbers)}")
