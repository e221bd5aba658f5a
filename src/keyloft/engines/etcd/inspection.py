"""Inspects a store in etcd without changing it: whether it is there, its members, and alarms."""

from typing import Final

from keyloft.core.urls import EtcdAddress
from keyloft.engines.etcd import messages, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.layout import FORMAT, counter_key, unpack_state
from keyloft.engines.inspection import Inspection
from keyloft.errors import Unreachable

_SAFE_MEMBERS: Final = 3
_RAISE_QUOTA: Final = "run `keyloft compact`; raise --quota-backend-bytes if that frees too little"


async def inspect(address: EtcdAddress, patience: float) -> Inspection:
    """Connect, inspect, disconnect.

    Raises:
        DatabaseError: No member answers, or one of them can't be used; the message says why.
    """
    cluster = EtcdCluster(address, patience=patience)
    try:
        return await _inspect(cluster)
    finally:
        await cluster.aclose()


async def _inspect(cluster: EtcdCluster) -> Inspection:
    read = transactions.transaction((), [transactions.read(counter_key(cluster.address.prefix))])
    try:
        [reply] = transactions.replies(await cluster.ask("Txn", read))
    except Unreachable as error:
        raise await _with_members(cluster, error) from None
    counter = unpack_state(cluster.name, reply.kvs[0].value) if reply.kvs else None
    await cluster.check_members()
    statuses = await cluster.statuses()
    alarms = {alarm.alarm for alarm in (await cluster.ask("Alarm", messages.AlarmRequest())).alarms}
    obstacles: list[tuple[str, str]] = []
    if messages.NOSPACE in alarms:
        obstacles.append(("etcd has used up its quota (alarm NOSPACE), and refuses writes", _RAISE_QUOTA))
    if messages.CORRUPT in alarms:
        what = "etcd has found that its members differ (alarm CORRUPT)"
        obstacles.append((what, "replace the member that differs, then `etcdctl alarm disarm`"))
    ahead = None
    if counter is not None:
        # Machines that write have clocks of their own; the latest of them is the store's.
        ahead = max(0.0, round((counter.at - cluster.clock.now()) / 1000, 3))
    return Inspection(
        software=f"etcd {', '.join(sorted({status.version for status in statuses.values()}))}",
        revision=None if counter is None else str(counter.format),
        wanted=str(FORMAT),
        store=None if counter is None else counter.store_id,
        ahead=ahead,
        obstacles=tuple(obstacles),
        doubts=tuple(await _doubts(cluster, list(statuses))),
    )


async def _with_members(cluster: EtcdCluster, error: Unreachable) -> Unreachable:
    """The error of a cluster that does not answer, with the members that do by themselves, and those that don't."""
    answering = list(await cluster.statuses())
    silent = [member.endpoint for member in cluster.members if member.endpoint not in answering]
    if not answering:
        return Unreachable(f"{error}; none of its members answers")
    without = f", and these don't: {', '.join(silent)}" if silent else ""
    return Unreachable(f"{error}; these members answer by themselves: {', '.join(answering)}{without}")


async def _doubts(cluster: EtcdCluster, answering: list[str]) -> list[tuple[str, str]]:
    """What would end the service if one more member were lost."""
    members = len((await cluster.ask("MemberList", messages.MemberListRequest())).members)
    named = [member.endpoint for member in cluster.members]
    doubts: list[tuple[str, str]] = []
    if away := [endpoint for endpoint in named if endpoint not in answering]:
        doubts.append((f"these members of etcd don't answer: {', '.join(away)}", "start them, or correct the URL"))
    if members < _SAFE_MEMBERS:
        what = f"etcd runs on {members} member{'s' if members > 1 else ''}: it does not go on without one of them"
        doubts.append((what, "let others join, until there are three or five"))
    elif len(named) < members:
        what = f"the URL names {len(named)} of etcd's {members} members: Keyloft can't start if those are away"
        doubts.append((what, "name all of them in the URL"))
    return doubts
