"""Sweeps expired entries: each is kept for a restore, with an audit record; other expired rows are removed."""

import asyncio
import logging
from typing import Final

from keyloft import limits
from keyloft.core.records import Batch, Committed, Conflict, Expired, Get, Now, Purge, Record, Space
from keyloft.errors import Undecodable
from keyloft.semantic import keys
from keyloft.semantic.commits import Committer

logger = logging.getLogger("keyloft.semantic")

_SEMANTIC: Final = Space.SEMANTIC


async def sweep(committer: Committer) -> int:
    """Sweep all that has expired, in slices; returns how many entries expired."""
    expired = 0
    while True:
        [due] = await committer.read(Expired(_SEMANTIC, limits.SWEEP_SLICE))
        entries = [record for record in due if keys.is_entry(record.key)]
        rest = [record for record in due if not keys.is_entry(record.key)]
        swept = sum(await asyncio.gather(*[_expire(committer, record) for record in entries]))
        removed = 0
        if rest:
            done = await committer.commit(Batch(tuple(Purge(_SEMANTIC, row.key, row.version) for row in rest)))
            assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
            removed = sum(done.found)
        expired += swept
        if len(due) < limits.SWEEP_SLICE or not removed + swept:
            return expired


async def _expire(committer: Committer, due: Record) -> bool:
    """Expire one entry; returns whether it was still the one that was due."""
    record, now = await committer.read(Get(_SEMANTIC, due.key, include_expired=True), Now())
    if record is None or record.version != due.version or record.is_alive(now):
        return False
    plan = await committer.new_plan()
    try:
        key = keys.parse(keys.key_of_row(record.key))
        plan.expire(key, record, now - record.expires_at)
    except (Undecodable, ValueError) as error:
        logger.error("[KV] a damaged entry has expired and is removed: %s", error)
        await committer.commit(Batch((Purge(_SEMANTIC, record.key, record.version),)))
        return True
    if isinstance(await committer.commit(plan.batch()), Conflict):
        return False
    committer.report_expiry(key.key, record)
    return True
