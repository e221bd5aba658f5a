"""Clusters of three that lose nodes under load: nothing acknowledged is lost, made twice, or hidden by an older state.

`scripts/torture` does the same for minutes, with more kinds of faults in a random order.
"""

from pathlib import Path

import pytest

from tests.support.temporary_files import MEMORY
from tests.withstand.faults import etcd_arena, postgres_arena
from tests.withstand.run import Workload, tried
from tools import etcd, patroni
from tools.machines import can_cut

# The servers take most of the processors' time as it is.
_PAUSE_SECONDS = 0.05
_CALLS = 50


@pytest.mark.slow
@pytest.mark.blocks_the_loop
def test_postgresql_with_patroni_loses_its_leader_and_then_has_two(tmp_path: Path) -> None:
    if reason := patroni.missing():
        pytest.skip(reason)
    with postgres_arena(cuts=False, within=MEMORY) as arena:

        def make_faults(load: Workload) -> None:
            for name in ("the leader's PostgreSQL dies", "the leader's Patroni hangs, and another node leads"):
                load.wait_for_calls(_CALLS)
                arena.wait_until_whole()
                load.suffer(name, arena.faults[name], 0)
            load.suffer_killed_client(1)
            load.wait_for_calls(_CALLS)

        trial = tried(arena, tmp_path, make_faults, pause=_PAUSE_SECONDS)
    assert trial.findings.faults == []


@pytest.mark.slow
@pytest.mark.blocks_the_loop
def test_etcd_loses_its_leader(tmp_path: Path, server_folder: Path) -> None:
    if not etcd.is_installed():
        pytest.skip(etcd.NOT_INSTALLED)
    histories = tmp_path / "histories"
    histories.mkdir()
    cuts = can_cut()
    with etcd_arena(server_folder, cuts=cuts) as arena:

        def make_faults(load: Workload) -> None:
            cut = ("the leader is cut off", "a client is cut off") if cuts else ()
            for name in ("the leader dies", "the leader freezes", *cut):
                load.wait_for_calls(_CALLS)
                load.suffer(name, arena.faults[name], 1.2, arena.wait_until_whole)
            load.suffer_killed_client(1)
            load.wait_for_calls(_CALLS)

        trial = tried(arena, histories, make_faults, pause=_PAUSE_SECONDS)
    assert trial.findings.faults == []
