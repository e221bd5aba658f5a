"""The change log in etcd: one key for each part of what a group of commits changed."""

from itertools import accumulate

from keyloft import limits
from keyloft.core.maintenance import LogRow
from keyloft.core.records import WHOLE, LogPosition, LogSlice
from keyloft.engines import change_log
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.etcd import large_values, transactions
from keyloft.engines.etcd.views import RevisionView
from keyloft.errors import HistoryGone


async def rows_from(view: RevisionView, version: int, limit: int) -> list[LogRow]:
    """Rows of the log, from the first row that ends with this version or a later one."""
    found: list[LogRow] = []
    async for page in view.pages(view.keys.log(version), view.keys.log_range[1], limit):
        for kv in page:
            row, chunks = view.keys.log_row(kv.key, kv.value)
            if chunks is not None:
                [changes] = await view.values([chunks])
                if changes is None:
                    raise view.damaged()
                row = LogRow(row.version, row.part, row.base, row.at, row.size, changes)
            found.append(row)
    return found


async def read(view: RevisionView, after: LogPosition) -> LogSlice:
    """A slice of the log.

    Raises:
        HistoryGone: The log does not hold the position.
    """
    rows = await rows_from(view, max(after.version, 0), limits.ETCD_LOG_ROWS + 1)
    if not rows or not change_log.is_of_group(after.version, rows[0].base, rows[0].version):
        [oldest] = await rows_from(view, 0, 1)
        raise HistoryGone(after.version, oldest.base + 1, view.counter.version)
    later = [row for row in rows if (row.version, row.part) > (after.version, after.part)]
    if not later:
        return LogSlice((), after, is_last=True, began=rows[0].at, ended=rows[0].at)
    ends = accumulate(len(row.changes) for row in later)
    taken = [row for row, end in zip(later, ends, strict=True) if end - len(row.changes) < limits.LOG_SLICE_BYTES]
    has_more = len(rows) > limits.ETCD_LOG_ROWS or len(taken) < len(later)
    if len(taken) == len(later) > 1 and has_more:
        taken.pop()  # the last version may have further parts
    changes = [
        change
        for row in taken
        for change in change_log.unpack(row.base, row.at, row.changes)
        if change.version > after.version or after.part != WHOLE
    ]
    last = taken[-1]
    is_whole = len(taken) == len(later) or later[len(taken)].version != last.version
    end = LogPosition(last.version) if is_whole else LogPosition(last.version, last.part)
    return LogSlice(changes, end, is_last=not has_more, began=rows[0].at, ended=last.at)


async def trim(view: RevisionView, kept: KeptHistory) -> None:
    """Remove the oldest rows that the log need not keep; the newest one of these stays.

    Rows that the writer of a lost commit may still look up stay in any case.
    """
    spared = view.now - round(1000 * limits.TRIM_SPARED_SECONDS)
    oldest_time, oldest_size = kept.oldest_time(view.now), kept.oldest_size(view.counter.log_size)
    # Rows are large, since they hold all changes of their commits. Two rows show whether any may be removed.
    for most in (2, limits.TRIM_ROWS):
        rows = await rows_from(view, 0, most)
        may_go = [row for row in rows if row.at < spared and (row.at < oldest_time or row.size <= oldest_size)]
        if len(may_go) < 2:
            return
    if may_go[-1].version == rows[0].version:
        return
    end = view.keys.log(may_go[-1].version)
    async for page in view.pages(view.keys.log_range[0], end):
        stored = [view.keys.log_row(kv.key, kv.value)[1] for kv in page]
        removals = [large_values.removal(view.keys, chunks) for chunks in stored if chunks is not None]
        removed = transactions.delete(page[0].key, page[-1].key + b"\x00")
        await view.cluster.ask("Txn", transactions.transaction((), [removed, *removals]))
