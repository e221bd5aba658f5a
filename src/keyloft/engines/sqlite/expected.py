"""Writes a batch whose caller has read the rows that decide it, without reading them again.

The sweeper has read what it removes, and a caller that checks a version has read the entry that it replaces. Such a
batch is settled with the rows that it expects, and the statements that write it change only those rows. If they change
fewer rows than expected, the transaction is rolled back, and the batch is settled with what is stored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import apsw

from keyloft.core.records import Address, Batch, Check, Head, Record, Set, Space
from keyloft.engines.commit.purges import rows_to_purge
from keyloft.engines.commit.settle import PutRow, Write
from keyloft.engines.sqlite.tables import LAYOUTS

_ROWS_PER_CALL: Final = 16


class NotAsExpected(Exception):
    """Another row is stored than a batch expects."""


def expected_rows(group: Sequence[Batch]) -> dict[Address, Record]:
    """The rows that the only batch of a group expects, if they decide it; else empty: what is stored decides."""
    batch = group[0]
    mutations = batch.mutations
    if len(group) > 1 or not mutations:
        return {}
    if rows := rows_to_purge(batch):
        return rows
    if len(mutations) == 1 and type(only := mutations[0]) is Set:
        version = replaced_version(batch.checks, only)
        large = LAYOUTS[only.space].large
        # In the plugins' table, SQL can't decide what has expired, because times may be written by hand in any form.
        is_small = large is not None and not large.holds(only)
        if version is not None and is_small and not (only.if_absent or only.keep_expiry):
            return {(only.space, only.key): Head(only.key, b"", 0, version, None)}
    return {}


def replaced_version(checks: Sequence[Check], wanted: Set) -> int | None:
    """The version that the only check of a batch expects under the key that its only mutation sets.

    None if there are other checks, or if the check expects no entry: then what is stored decides.
    """
    if len(checks) != 1:
        return None
    [check] = checks
    is_of_its_key = check.key == wanted.key and check.space is wanted.space
    return check.version if is_of_its_key and not check.include_expired else None


def write_expected(
    cursor: apsw.Cursor,
    writes: Mapping[Address, Write],
    expected: Mapping[Address, Record],
    check_time: Callable[[], None],
) -> None:
    """Write what `settle` made of the expected rows; `check_time` is called every few rows, and may raise.

    Raises:
        NotAsExpected: Other rows are stored, or must be written; some may be written already.
    """
    connection = cursor.connection
    if len(writes) != len(expected):  # the time is before an expiry that the caller has seen pass
        raise NotAsExpected
    for (space, _), write in writes.items():
        if type(write) is not PutRow:
            break
        layout, [row] = LAYOUTS[space], expected.values()
        cursor.execute(layout.replace_expected, (*layout.bind_put(write.record, False), row.version))
        if connection.changes() != 1:
            raise NotAsExpected
        return
    spaces: dict[Space, list[Record]] = {}
    # In the order of the keys, so that neighbours on one page are written together.
    for address in sorted(expected):
        spaces.setdefault(address[0], []).append(expected[address])
    before = connection.total_changes()
    for space, rows in spaces.items():
        layout = LAYOUTS[space]
        for at in range(0, len(rows), _ROWS_PER_CALL):
            cursor.executemany(layout.remove_expected, map(layout.bind_expected, rows[at : at + _ROWS_PER_CALL]))
            check_time()
    if connection.total_changes() - before != len(expected):
        raise NotAsExpected
