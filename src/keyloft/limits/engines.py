"""What all engines share: how long they wait, versions, clocks, group commit, the change log and watches."""

from typing import Final

BUSY_SECONDS: Final = 30.0
"""How long a write waits for other processes that hold the database before it fails with BUSY."""

SERVER_SECONDS: Final = 60.0
"""How long a call waits for a database server that is away or silent; `keyloft.open(patience=…)` changes it.

PgBouncer refuses logins for 15 s after one that failed (`server_login_retry`). Patroni needs up to 40 s to find out
that a primary is gone and to promote a standby (`ttl` 30 s, `loop_wait` 10 s). A write leaves a quarter of the time for
learning what became of it."""

MAX_LAG_SECONDS: Final = 5.0
"""How far a standby may be behind to answer reads; `keyloft.open(max_lag=…)` changes it."""

HISTORY_SECONDS: Final = 3600.0
"""How long the change log keeps a change, unless `keyloft.open(history_seconds=…)` says otherwise."""

HISTORY_MIB: Final = 16.0
"""How large the change log grows before older changes go, unless `keyloft.open(history_mib=…)` says otherwise."""

VERSION_JUMP: Final = 2**40
"""A restored or copied database, and one on a new timeline of PostgreSQL, continues at the next multiple of this, which
no process that used it before gave."""

LAST_VERSION: Final = 2**53 - 1
"""Versions stay below 2**53: the numbers of JavaScript, and so of most JSON, are exact up to there."""

CLOCK_AHEAD_SECONDS: Final = 300.0
"""If the last commit is further ahead of the clock than this, writes are refused: the clock was set back."""

LOG_PART_BYTES: Final = 64 * 1024
"""A row of the change log holds about this many bytes; more changes of one group go into further rows."""

LOG_SLICE_BYTES: Final = 16 * 1024
"""How much of the change log is read at a time: some 500 to 1,000 changes, which take 1 to 2 ms."""

LOG_SLICE_ROWS: Final = 1024
"""The same in rows, for commits that changed little."""

MEMORY_SLICE_CHANGES: Final = 1000
"""How many changes of a log in memory are read at a time."""

MEMORY_CHANGE_BYTES: Final = 200
"""About how much memory one change takes in a log in memory; its key is shared with its entry."""

TRIM_EVERY: Final = 256
"""A commit that crosses a multiple of this many versions trims the change log."""

TRIM_ROWS: Final = 2 * TRIM_EVERY
"""How many rows of the change log one commit removes at most, or those of one version."""

TRIM_FIRST_ROWS: Final = 8
"""How many it considers at first. Groups are large where commits are many, so that few rows are older each time."""

TRIM_SPARED_SECONDS: Final = 120.0
"""On PostgreSQL, changes younger than this stay, however many: a commit whose reply was lost is looked up there."""

GROUP_OPERATIONS: Final = 4096
"""A group takes no further batch once it holds this many checks and mutations."""

LONG_BATCH_OPERATIONS: Final = 1000
"""A batch of more checks and mutations is committed in parts of SLICE_ITEMS each, within one transaction."""

LOOP_END_SECONDS: Final = 5.0
"""How long the event loop of a synchronous store waits, at its end, for coroutines that it has cancelled."""

FORK_SECONDS: Final = 1.0
"""How long a fork waits for the commit of another thread."""

FORK_SECONDS_OF_LOOP: Final = 0.05
"""How long it waits for an asynchronous store: for the end of an iteration of its event loop, or for a commit."""

EXIT_SECONDS: Final = 1.0
"""How long the exit of the interpreter waits for a checkpoint of a synchronous store that was not closed."""

WITHDRAWAL_SECONDS: Final = 1.0
"""How long a call that a signal has interrupted waits for another thread that may be committing its batch."""

LOST_GROUP_SECONDS: Final = 1.0
"""A group that takes longer is checked: an exception in the event loop may have lost it."""

GROUP_BYTES: Final = 16 * 1024 * 1024
"""A group takes no further batch once its values have this many bytes."""

WATCH_POLL_SECONDS: Final = 0.025
"""How often the version counter is polled for watches, where the database does not announce other processes' commits.
"""

WATCH_CHECK_SECONDS: Final = 1.0
"""How often it is polled where the database announces them, in case an announcement is lost."""

WATCH_PENDING_KEYS: Final = 10_000
"""A watch of a range with more changed keys to report than this forgets them, and reads the change log again."""

WATCH_REPORT_BYTES: Final = 1024 * 1024
"""A watch of a range reports no further entries at a time once their values have so many bytes."""

WATCH_REPORT_KEYS: Final = 1000
"""How many keys a step of a watch reports at most, so that it does not hold the event loop for long."""

WATCH_FIRST_KEYS: Final = 4
"""How many keys such a watch reads at a time at first: how large their values are is not known before they are read."""

WATCH_GROWTH: Final = 4
"""How many times as many it may read next."""

WATCH_READ_KEYS: Final = 32
"""The most keys that it reads at a time: should small values be followed by such of 1 MiB, they fit memory, too."""

WATCH_DUE_KEYS: Final = 1000
"""About how many expired keys are read at a time for watches."""

LATE_START_SECONDS: Final = 1.0
"""How long a database server's answer about the start of a watch may take. If expiries were read up to a moment that is
later by more than this, the server's clock was set back."""

LATE_EXPIRY_SECONDS: Final = 5.0
"""A reader that continues from a version gets the expiries of this many seconds before it once more."""

WATCHES_WOKEN_AT_ONCE: Final = 64
"""How many watches are woken before the event loop runs them: each reads what its user waits for."""

WATCH_INLINE_CALLS: Final = 1000
"""After this many calls of watches, the event loop runs other tasks before the next change is dispatched. Where many
watches have the same keys, the changes of one group take long to dispatch."""

WATCH_INLINE_CHANGES: Final = 1000
"""A group with more changes than this is dispatched to watches from the change log, a slice at a time."""

WATCH_DRAIN_POLL_SECONDS: Final = 0.002
"""How often an engine that closes checks whether its watches have reported everything."""

LOOP_ITERATION_SECONDS: Final = 0.001
"""A read that starts later than this in an iteration of the event loop lets the other tasks run first."""

EXPIRES_MUCH_LATER_MILLISECONDS: Final = 1000
"""What expires so much later than the time of an iteration's first read is alive for the others, too: many times
LOOP_ITERATION_SECONDS."""

EXPIRY_TIMES: Final = 4096
"""How many expiries the tuple store keeps as datetimes: entries that are written together expire together, and some are
read again and again."""
