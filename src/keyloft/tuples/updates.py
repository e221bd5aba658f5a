"""Changes of one entry that depend on what is stored: read, decide, write if nothing changed, else start again."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from keyloft import limits
from keyloft.core import keys
from keyloft.core.backoff import back_off
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Check, Committed, Delete, Get, Record, Set, Space
from keyloft.errors import VersionConflict

Decide: TypeAlias = Callable[[Record | None], Awaitable[Set | Delete | None]]
"""Returns what to write instead of the stored entry; None to leave it."""


async def change(engine: Engine, key: bytes, decide: Decide) -> tuple[Record | None, Committed | None]:
    """Write what `decide` makes of the entry at a key; if the entry has changed meanwhile, read and decide again.

    Returns:
        What was stored before, and the commit; None for the commit if `decide` left the entry as it was.

    Raises:
        VersionConflict: Other writers were faster a hundred times.
    """
    for attempt in range(limits.UPDATE_ATTEMPTS):
        if attempt:
            await back_off(attempt - 1)
        [record] = await engine.read(Get(Space.TUPLES, key))
        mutation = await decide(record)
        if mutation is None:
            return record, None
        check = Check(Space.TUPLES, key, None if record is None else record.version)
        done = await engine.commit(Batch((mutation,), (check,)))
        if isinstance(done, Committed):
            return record, done
    raise VersionConflict(
        f"other writers changed the entry at {keys.decode(key)!r} {limits.UPDATE_ATTEMPTS} times before this update "
        "could be written; nothing was written: try again later"
    )
