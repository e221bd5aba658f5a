"""The engine on SQLite: tuned numbers."""

from typing import Final

SQLITE_CACHE_MIB: Final = 16
"""How much of a file an open store keeps in memory to read from: some 100,000 small entries. A get takes 5.7 µs instead
of 7.3 with SQLite's own 2 MiB (ADR 5)."""

PLUGIN_CACHE_MIB: Final = 4
"""The same for the plugins' storage, where a request over NATS costs several times as much as the read. With 100,000
keys more made no difference, and a service shall have less than 50 MB."""

ROW_BYTES: Final = 512
"""A value that takes more than this with its key is stored in the large value table (ADR 5)."""

INLINE_OPERATIONS: Final = 64
"""A group of at most this many checks and mutations may be written and committed on the event loop (ADR 6)."""

INLINE_BYTES: Final = 128 * 1024
"""The most bytes that the values of such a group may have in all."""

INLINE_SECONDS: Final = 0.001
"""A group that takes longer on the event loop, because it meets large values, is written again on the thread."""

LONE_CALLER_SECONDS: Final = 0.1
"""If all calls of this time came from one task, the event loop may wait for its commits (ADR 6)."""

FAST_SYNC_SECONDS: Final = 0.001
"""It does so only while the last commit took less than this."""

RECENT_SYNC_SECONDS: Final = 1.0
"""And only if that commit was so recent."""

SLOW_SYNC_SECONDS: Final = 0.01
"""A commit that takes longer shows a disk that stalls."""

AFTER_SLOW_SYNC_SECONDS: Final = 60.0
"""Seconds after a slow sync in which the thread makes all commits."""

SQLITE_GETS_PER_STATEMENT: Final = 16
"""How many keys one statement looks up, which is faster than a statement per key."""

SQLITE_GETS_WORTH_A_STATEMENT: Final = 2
"""Fewer keys are looked up one by one."""

READER_CACHE_MIB: Final = 2
"""How much of a file each further reader of a synchronous store caches: they read while another thread commits."""

IDLE_READERS: Final = 8
"""This many of these readers stay open while no thread uses them."""

VIEW_READS: Final = 64
"""How many reads of a synchronous store share one read transaction, as long as no one commits (ADR 18)."""

VIEW_READS_SECONDS: Final = 0.001
"""Reads that follow each other within this time share one."""

VIEW_IDLE_SECONDS: Final = 0.02
"""Seconds without a read after which a view is ended."""

COMMITS_PER_LOG_CHECK: Final = 8
"""How many commits a synchronous store makes between two readings of the write-ahead log's length, at most."""

COMMIT_WAIT_SECONDS: Final = 0.05
"""How long a thread waits for another one to commit its batch. Then it tries to commit the batch itself: a signal may
have interrupted the other thread."""

SQLITE_LOCK_PAUSES: Final = (*[0.0005] * 20, 0.002)
"""Seconds between the attempts to get a lock that another process holds; the last pause is repeated."""

SQLITE_TIME_TEXTS: Final = 256
"""How many times the engine keeps as text: a group has one time, and most of its expiries are the same."""

CHECKPOINT_QUIET_PAGES: Final = 2_000
"""A write-ahead log of this many pages (8 MiB) is checkpointed as soon as nothing was written for a moment (ADR 5)."""

CHECKPOINT_QUIET_SECONDS: Final = 0.02
"""How long that moment is."""

CHECKPOINT_SMALL_COMMIT_PAGES: Final = 16
"""Commits of at most this many pages on average count as small ones."""

CHECKPOINT_PAGES_AFTER_SMALL_COMMITS: Final = 4_000
"""After small commits, a write-ahead log of this many pages (16 MiB) is checkpointed at once: a small commit that
overwrites the log takes 180 µs, one that makes it grow takes 300 (ADR 5)."""

CHECKPOINT_PAGES: Final = 32_000
"""After large commits, a write-ahead log of this many pages (128 MiB) is checkpointed at once."""

WAL_BYTES_KEPT: Final = 32 * 1024 * 1024
"""A write-ahead log that is longer than this when it restarts is cut to this size; shorter ones are overwritten."""

CHECKPOINT_RETRY_PAUSES: Final = (0.01, 1.0)
"""The first and the longest pause after a second checkpoint that readers, another process or the disk prevented; they
double. After the first one there is none."""

MAINTENANCE_CHECKPOINT_PAGES: Final = 8_000
"""An import, a copy or a restore checkpoints the write-ahead log at this many pages (32 MiB)."""

BACKUP_PAGES: Final = 1_000
"""How many pages one step of a backup copies, between two reports of its progress."""

CLOSING_LOCK_SECONDS: Final = 5.0
"""How long an SQLite file that is being closed waits for other processes' locks, for all writes together."""
