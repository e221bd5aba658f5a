"""Decides a group of batches by the rows that are stored, and writes the rows that it changes, within a deadline."""

from collections.abc import Iterable, Sequence
from time import perf_counter

import apsw

from keyloft import limits
from keyloft.core.records import Address, Batch, Get, Key, Record, Space
from keyloft.core.schema import Row
from keyloft.engines.commit.settle import (
    PutRow,
    SetExpiry,
    Settled,
    Write,
    deciding,
    settle,
    unread,
    with_values,
)
from keyloft.engines.sqlite.expected import expected_rows, write_expected
from keyloft.engines.sqlite.reads import head, heads, point, points
from keyloft.engines.sqlite.rows import put, put_rows, remove_large
from keyloft.engines.sqlite.tables import LAYOUTS


class TakesTooLong(Exception):
    """The event loop has no time for this group."""


def check_time(deadline: float) -> None:
    """Raise TakesTooLong if the deadline is over."""
    if perf_counter() > deadline:
        raise TakesTooLong


def settle_and_write(
    cursor: apsw.Cursor, group: Sequence[Batch], version: int, now: int, deadline: float, *, expects_rows: bool
) -> Settled:
    """Decide a group, and write the rows that it changes.

    Raises:
        NotAsExpected: Other rows are stored than the group expects; some of its rows may be written.
        TakesTooLong: The deadline is over; some rows may be written.
    """
    if expects_rows and (expected := expected_rows(group)):
        settled = settle(group, expected, version, now)
        write_expected(cursor, settled.writes, expected, lambda: check_time(deadline))
        return settled
    wanted = deciding(group)
    current = load_rows(cursor, wanted.items(), deadline) if wanted else {}
    settled = settle(group, current, version, now)
    if current and (shown := unread(settled)):
        settled = with_values(settled, load_rows(cursor, [(address, True) for address in shown], deadline))
    if settled.writes:
        write_rows(cursor, settled.writes, current, deadline)
    return settled


def load_rows(cursor: apsw.Cursor, wanted: Iterable[tuple[Address, bool]], deadline: float) -> dict[Address, Record]:
    """The rows that are stored at some keys, with their values if wanted.

    Raises:
        TakesTooLong: The deadline is over.
    """
    found: dict[Address, Record] = {}
    wanted = list(wanted)
    if len(wanted) >= limits.SQLITE_GETS_WORTH_A_STATEMENT and all(
        [with_value and space is Space.PLUGINS for (space, _), with_value in wanted]
    ):
        # Counters of plugins: several are loaded by one statement, and none of their values is large.
        asks = [Get(space, key, include_expired=True) for (space, key), _ in wanted]
        records = points(cursor, asks, 0)
        return {address: record for (address, _), record in zip(wanted, records, strict=True) if record is not None}
    if len(wanted) > limits.INLINE_OPERATIONS and not any([with_value for _, with_value in wanted]):
        # A long delete, or what the sweeper removes.
        keys: dict[Space, list[Key]] = {}
        for (space, key), _ in wanted:
            keys.setdefault(space, []).append(key)
        return {(space, stored.key): stored for space, some in keys.items() for stored in heads(cursor, space, some)}
    for address, with_value in wanted:
        record = (point if with_value else head)(cursor, *address)
        if record is not None:
            found[address] = record
        if perf_counter() > deadline:  # a large value takes long to load, however small the batch
            raise TakesTooLong
    return found


def write_rows(
    cursor: apsw.Cursor, writes: dict[Address, Write], current: dict[Address, Record], deadline: float
) -> None:
    """Write each changed row once; `current` has the rows that were loaded.

    Raises:
        TakesTooLong: The deadline is over; some rows may be written.
    """
    if len(writes) == 1:
        [((space, key), write)] = writes.items()
        layout = LAYOUTS[space]
        if type(write) is PutRow and (layout.large is None or not layout.large.holds(write.record)):
            if perf_counter() > deadline:
                raise TakesTooLong
            put_rows(cursor, layout, [layout.bind_put(write.record, write.is_new_entry)])
            return  # most groups of a lone caller
    rows: dict[Space, list[Row]] = {}
    removed: dict[Space, list[Row]] = {}
    # In the order of the keys, so that neighbours on one page are written together.
    for at, address in enumerate(sorted(writes), 1):
        space, key = address
        layout, write = LAYOUTS[space], writes[address]
        if type(write) is PutRow:
            record = write.record
            if layout.large is not None and layout.large.holds(record):
                put(cursor, layout, record, is_new_entry=write.is_new_entry)
            elif (some := rows.get(space)) is None:
                rows[space] = [layout.bind_put(record, write.is_new_entry)]
            else:
                some.append(layout.bind_put(record, write.is_new_entry))
        elif type(write) is SetExpiry:
            bindings = (layout.bind_time(write.expires_at), *layout.bind_key(key))
            cursor.execute(layout.set_expiry, bindings)
        elif (stored := current.get(address)) is not None:
            remove_large(cursor, layout, stored)
            removed.setdefault(space, []).append(layout.bind_key(key))
        # Not after each write, because reading the clock takes time, too.
        if at % 4 == 1 and perf_counter() > deadline:
            raise TakesTooLong
    for space, some in removed.items():
        cursor.executemany(LAYOUTS[space].remove, some)
    for space, some in rows.items():
        if perf_counter() > deadline:  # not after the last write: then the group is complete
            raise TakesTooLong
        put_rows(cursor, LAYOUTS[space], some)
