"""Changes of one entry that depend on what is stored: read, decide, write if nothing changed, else start again."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from keyloft import limits
from keyloft.core import keys
from keyloft.core.backoff import back_off
from keyloft.core.engine import Engine
from keyloft.core.own_commits import note_commit, own_commits
from keyloft.core.records import Batch, Check, Committed, Delete, Get, Record, Set, Space
from keyloft.errors import InvalidArgument, VersionConflict

Decide: TypeAlias = Callable[[Record | None], Awaitable[Set | Delete | None]]
"""Returns what to write instead of the stored entry; None to leave it."""


async def change(engine: Engine, key: bytes, decide: Decide) -> tuple[Record | None, Committed | None]:
    """Write what `decide` makes of the entry at a key; if the entry has changed meanwhile, read and decide again.

    Returns:
        What was stored before, and the commit; None for the commit if `decide` left the entry as it was.

    Raises:
        VersionConflict: Other writers were faster a hundred times.
        InvalidArgument: `decide` itself has written the entry, in several calls.
    """
    written_by_itself = 0
    for attempt in range(limits.UPDATE_ATTEMPTS):
        if attempt:
            await back_off(attempt - 1)
        [record] = await engine.read(Get(Space.TUPLES, key))
        with own_commits() as own:
            mutation = await decide(record)
            if mutation is None:
                return record, None
            check = Check(Space.TUPLES, key, None if record is None else record.version)
            done = await engine.commit(Batch((mutation,), (check,)))
        if isinstance(done, Committed):
            note_commit(done.version)
            return record, done
        current = done.failed[0].current
        written_by_itself += current is not None and current.version in own
        # Not at once: the next call may find what it has written, such as defaults, and write nothing.
        if written_by_itself == limits.UPDATE_OWN_WRITES:
            raise InvalidArgument(
                f"fn: the function wrote the entry at {keys.decode(key)!r} itself in {written_by_itself} calls, so "
                "that its result could never replace what it was given; what it wrote stays: return the new value "
                "instead of writing it"
            )
    raise VersionConflict(
        f"other writers changed the entry at {keys.decode(key)!r} {limits.UPDATE_ATTEMPTS} times before this update "
        "could be written; nothing was written: try again later"
    )
