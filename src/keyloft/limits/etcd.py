"""The engine on etcd: limits and tuned numbers."""

from typing import Final

ETCD_TXN_BYTES: Final = 1_250_000
"""The largest commit: etcd refuses a request of more than 1.5 MiB (`--max-request-bytes`). Larger values are stored in
chunks of their own before it; what is left, keys above all, must fit."""

ETCD_INLINE_BYTES: Final = 128 * 1024
"""The largest value that is stored with its key. Others are stored in chunks, so that lists of keys, and commits that
replace entries, don't transfer them."""

ETCD_CHUNK_BYTES: Final = 512 * 1024
"""The largest piece of a value that is stored in chunks."""

ETCD_SMALLEST_CHUNKED_BYTES: Final = 128
"""Smaller values are never stored in chunks: that would save little."""

ETCD_SLICE_OPERATIONS: Final = 1000
"""A group of more checks and mutations is committed in several transactions."""

ETCD_RELOADED_KEYS: Final = 512
"""A commit of more keys does not ask for them in case it loses its race: that would double its size."""

ETCD_RELOADED_BYTES: Final = ETCD_TXN_BYTES // 4
"""Nor does a commit whose keys take more than this."""

ETCD_GUESSED_KEYS: Final = 100
"""A group of sets of up to this many keys is written without a read, if its keys are probably absent: each key is a
comparison, and etcd allows 128 in a transaction."""

ETCD_GROUPS_READ: Final = 256
"""How many groups are read, at most, after wrong guesses before the next guess."""

ETCD_REMEMBERED_ROWS: Final = 20_000
"""How many rows a process remembers as it has written them, without their values: about 6 MB."""

ETCD_TRIM_SECONDS: Final = 0.5
"""A process trims the change log at most so often."""

ETCD_REPLY_BYTES: Final = 4 * 1024 * 1024
"""How many bytes of large values one request asks for, unless one value is larger."""

ETCD_KEYS_PER_READ: Final = 512
"""How many keys of several callers one transaction looks up."""

ETCD_READS_AT_ONCE: Final = 2
"""How many such transactions are under way: one waits for its reply while the results of the other are handed out."""

ETCD_PAGE_ROWS: Final = 1000
"""How many rows one request of a scan asks for."""

ETCD_SORTED_ROWS: Final = 256
"""A reverse scan lets etcd sort up to this many rows more than it returns; beyond, it looks for a narrower range."""

ETCD_PROBES: Final = 40
"""How often a reverse scan halves its range before it lets etcd sort what is left."""

ETCD_LOG_ROWS: Final = 64
"""How many rows of the change log are read at a time."""

ETCD_TRY_SECONDS: Final = 2.0
"""How long one try at a request may take before another member is asked; each further try may take twice as long."""

ETCD_LONGEST_TRY_SECONDS: Final = 8.0
"""The longest of these tries."""

ETCD_CONNECT_SECONDS: Final = 0.5
"""The longest pause between two attempts to connect to a member."""

ETCD_RETRY_SECONDS: Final = 0.02
"""The pause between two tries at a request."""

ETCD_MEMBERS_SECONDS: Final = 30.0
"""How often the cluster is asked for members that the URL does not name."""

ETCD_FREE_RACES: Final = 8
"""A commit that has lost up to this many races against other processes is tried again at once: with a pause after each
loss, the process that won the last race wins the next ones, too."""

ETCD_RACE_PAUSES: Final = (0.001, 0.05)
"""The first and the longest pause after each further one; they double, at random."""

ETCD_QUEUED_WRITERS: Final = 64
"""How many processes that write take turns; others race."""

ETCD_HANDOVER_POLL_SECONDS: Final = 0.003
"""Seconds between two reads of the counter, while one waits for its turn and its watch has not begun."""

ETCD_QUIET_SECONDS: Final = 0.012
"""A process that is next and has not committed for so long has nothing more to write: the one behind it goes on."""

ETCD_QUIET_COMMITS: Final = 3
"""Nor may that be shorter than so many commits take."""

ETCD_NOTING_SECONDS: Final = 60.0
"""For how long a process notes which rows it writes after it has seen a commit of another one."""

ETCD_NOTED_ROWS: Final = 512
"""A commit beside other processes that write notes up to so many rows, which these then need not read."""

ETCD_NOTE_BYTES: Final = 64 * 1024
"""The largest of these notes."""

ETCD_NOTED_VERSIONS: Final = 5000
"""Notes that are so many versions old are removed."""

ETCD_NOTES_READ: Final = 64
"""How many notes are read at a time; a process that has missed more reads rows instead."""

ETCD_TURN_PAUSE_SECONDS: Final = 0.01
"""A process whose next batch arrives later than this after its last commit takes no place in the queue: it has little
to write."""

ETCD_FEW_BATCHES: Final = 8
"""After such a pause, a commit of up to this many batches takes no place; more are likely to be followed by others."""

ETCD_RIVAL_SECONDS: Final = 1.0
"""For how long a process takes turns after it has seen a commit of another one."""

ETCD_LONGEST_TURNS_SECONDS: Final = 0.5
"""How long a commit waits for the turns of others before it tries all the same."""

ETCD_KEEPALIVE_SECONDS: Final = (10, 5)
"""Seconds of silence after which a member is pinged; its answer must arrive within the same time."""

ETCD_ORPHAN_SECONDS: Final = 3600.0
"""Chunks of a value that no entry refers to are removed once they are older: a commit may be about to refer to them."""

ETCD_COMPACT_SECONDS: Final = 600.0
"""How long `keyloft compact` waits for a member to compact or defragment its data."""

ETCD_LAST_TRIM_SECONDS: Final = 1.0
"""How long closing waits for the change log to be trimmed."""

ETCD_LAST_REPORT_SECONDS: Final = 1.0
"""How long closing waits for watches to report what they were woken for."""
