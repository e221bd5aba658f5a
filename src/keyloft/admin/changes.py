"""Reads the change log: which keys were changed, when and how."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from keyloft.admin.databases import Database, opened
from keyloft.admin.export_format import written_key
from keyloft.admin.selection import Selection
from keyloft.core.keys import TupleKey
from keyloft.core.records import LoggedChange
from keyloft.core.schema import LAST_MOMENT
from keyloft.errors import InvalidArgument


class KeyChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a commit did to a key. The value is not part of it."""

    version: int
    at: datetime
    """The time of the commit."""
    kind: Literal["put", "delete", "touch", "expired"]
    """`touch`: its expiry changed, and nothing else. `expired`: the expired entry was removed, or the entry got an
    expiry that has passed."""
    space: str
    """`tuples`, `semantic` or `plugins`."""
    store: str | UnsetType = UNSET
    """The name of the tuple store, if it has one."""
    plugin: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    """The key as text, as exports have it."""
    key_hex: str | UnsetType = UNSET
    """Instead of `key`, if that can't be decoded."""


async def changes(
    database: Database,
    *,
    since: int | None = None,
    limit: int | None = None,
    prefix: TupleKey | None = None,
    plugin: str | None = None,
    project: str | None = None,
    name: str | None = None,
) -> AsyncIterator[KeyChange]:
    """The changes that the change log holds, oldest first, as it is at one moment: all of them, or those of some keys.

    Example:
        >>> async for change in admin.changes("app.db", since=4711):
        ...     print(change.version, change.kind, change.key)

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        since: Only what changed after this version; None for all that the log holds.
        limit: How many to return at most.
        prefix: Of the tuple store, only what is below it.
        plugin: Only what this plugin stores.
        project: Only this project of the semantic store: `tenant/<tenant>/project/<project>`.
        name: Only the tuple store of this name.

    Raises:
        HistoryGone: The log does not reach back to `since`.
        InvalidArgument: `since` or `limit` is below 0.
        InvalidInput: A prefix, plugin, project or store can't have this name.
        DatabaseError: The database can't be read.
    """
    for name_of, number in (("since", since), ("limit", limit)):
        if number is not None and number < 0:
            raise InvalidArgument(f"{name_of}: expected a number from 0 on")
    selection = Selection.of(prefix, plugin, project, name)
    left = limit
    found: asyncio.Queue[Sequence[LoggedChange] | Exception | None] = asyncio.Queue(1)
    # In a task of its own, which closes the database by itself: of a generator that its caller has left half-way, and
    # of the generators that this one would be waiting for, asyncio closes all at once, in no order.
    reading = asyncio.create_task(_read(database, since, found), name="keyloft changes")
    try:
        while (some := await found.get()) is not None:
            if isinstance(some, Exception):
                raise some
            chosen = [change for change in some if selection.holds(change.space, change.key)]
            for change in chosen if left is None else chosen[:left]:
                yield _shown(change)
            if left is not None:
                left -= len(chosen)
                if left <= 0:
                    return
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _read(
    database: Database, since: int | None, found: "asyncio.Queue[Sequence[LoggedChange] | Exception | None]"
) -> None:
    """Hand over the changes in slices; then the error that ended them, or None."""
    end: Exception | None = None
    reading = asyncio.current_task()
    assert reading is not None, "this runs in a task"
    try:
        async with opened(database) as whole, whole.snapshot() as snapshot:
            async for some in snapshot.changes(since):
                await found.put(some)
    except Exception as error:
        end = error
    # After a cancellation no one takes it. An error of closing the database has then replaced CancelledError.
    if not reading.cancelling():
        await found.put(end)


def _shown(change: LoggedChange) -> KeyChange:
    key = written_key(change.space, change.key)
    return KeyChange(
        version=change.version,
        at=datetime.fromtimestamp(min(max(change.at, 0), LAST_MOMENT) / 1000, UTC),
        kind=change.kind.name.lower(),  # type: ignore[arg-type]
        space=change.space.value,
        store=key.store,
        plugin=key.plugin,
        key=key.key,
        key_hex=key.key_hex,
    )
