"""A commit whose reply is lost is made once, or reported as unknown; never twice, and never as refused."""

from collections.abc import AsyncIterator
from typing import Any

import grpc  # type: ignore[import-untyped,unused-ignore]
import pytest

from keyloft import CommitUnknown, ManualClock, Unreachable
from keyloft.core.records import Batch, Check, Committed, Conflict, Get, Set, Space, Sum
from keyloft.core.values import Encoding, unpack_counter
from keyloft.engines import open_engine
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.engine import EtcdEngine

A = Space.TUPLES
SUM = Batch((Sum(A, b"n", 1),))


def lost() -> Exception:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "connection lost")  # type: ignore[no-any-return,unused-ignore]


class LossyConnection:
    """The connection to etcd: it loses requests that compare something, or their replies, as often as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loses_requests = self.loses_replies = 0
        self.is_cut = self.is_cut_by_commit = False
        call = EtcdCluster.call

        async def losing(cluster: EtcdCluster, method: str, request: Any, *rest: Any) -> Any:
            commits = method == "Txn" and len(request.compare) > 0
            if commits and self.loses_requests:
                self.loses_requests -= 1
                raise lost()
            if self.is_cut:
                raise lost()
            response = await call(cluster, method, request, *rest)
            self.is_cut = commits and self.is_cut_by_commit
            if self.is_cut:
                raise lost()
            if commits and self.loses_replies:
                self.loses_replies -= 1
                raise lost()
            return response

        monkeypatch.setattr(EtcdCluster, "call", losing)


@pytest.fixture
async def engine(etcd_url: str) -> AsyncIterator[EtcdEngine]:
    engine = await open_engine(etcd_url, ManualClock(), patience=1)
    assert isinstance(engine, EtcdEngine)
    yield engine
    await engine.aclose()


@pytest.fixture
async def line(engine: EtcdEngine, monkeypatch: pytest.MonkeyPatch) -> LossyConnection:
    return LossyConnection(monkeypatch)


async def total(engine: EtcdEngine) -> int:
    [record] = await engine.read(Get(A, b"n"))
    return 0 if record is None else unpack_counter(record.value)


async def test_a_lost_reply_is_found_in_the_log_and_a_lost_request_is_sent_again(
    engine: EtcdEngine, line: LossyConnection
) -> None:
    for number in range(1, 4):
        line.loses_replies = number % 2
        line.loses_requests = number
        done = await engine.commit(SUM)
        assert isinstance(done, Committed)
        assert done.values == (number,)
        assert await total(engine) == number


async def test_what_another_process_writes_meanwhile_does_not_hide_a_lost_commit(
    engine: EtcdEngine, line: LossyConnection, etcd_url: str
) -> None:
    other = await open_engine(etcd_url, ManualClock())
    line.loses_replies = 1
    claim = Batch((Set(A, b"k", b"1", Encoding.JSON),), (Check(A, b"k", None),))
    mine = engine.commit(claim)
    [first, second] = [await mine, await other.commit(claim)]
    assert isinstance(first, Committed)
    assert isinstance(second, Conflict)
    await other.aclose()


async def test_a_commit_is_unknown_if_the_cluster_does_not_come_back(engine: EtcdEngine, line: LossyConnection) -> None:
    line.is_cut = True
    with pytest.raises(Unreachable):
        await engine.commit(SUM)
    line.is_cut, line.is_cut_by_commit = False, True
    with pytest.raises(CommitUnknown, match="all of the batch was written, or nothing"):
        await engine.commit(SUM)
    line.is_cut = False
    assert await total(engine) == 1
