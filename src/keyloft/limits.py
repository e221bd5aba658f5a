"""Every limit and every tuned number of the product, in one place.

First what a user can run into, interface by interface; then, by package, the numbers that were tuned.
"""

from typing import Final

KEY_BYTES: Final = 2048
"""The longest key, counted in its byte encoding."""

KEY_INT_BYTES: Final = 255
"""The longest int in a key: its length is one byte of the encoding."""

STORE_NAME_CHARACTERS: Final = 64
"""The longest name of a tuple store."""

VALUE_BYTES: Final = 1024 * 1024
"""The largest value of the tuple store, as stored; `keyloft.open(max_value_bytes=…)` changes it."""

LARGEST_VALUE_BYTES: Final = 512 * 1024 * 1024
"""How far `max_value_bytes` can be raised: SQLite holds a row of up to a billion bytes."""

VALUE_DEPTH: Final = 128
"""How deep lists and dicts may nest, so that what one caller stored another can read, with less of the stack left."""

U64_MAX: Final = 2**64 - 1
"""The largest `U64`; a sum beyond it wraps around to 0."""

LARGEST_INCREMENT: Final = 2**63 - 1
"""The most that a plugin adds to an integer, or subtracts from it, at a time."""

COUNTER_DIGITS: Final = 3000
"""How many digits a JSON integer may have to be added to: to read and write longer ones takes long."""

LONGEST_EXPIRY_SECONDS: Final = 1000 * 366 * 86_400
"""The longest `expire_in`: about a thousand years, which a `datetime` can still show."""

SCAN_ROWS: Final = 1000
"""The most entries that one page of a list or of a range delete holds; pages grow up to it from 64."""

SCAN_BYTES: Final = 1024 * 1024
"""A page aims at no more value bytes than this, going by what the page before it weighed."""

MAINTENANCE_ROWS: Final = 4096
"""The most entries that one slice of an import or a copy holds, which is one commit; SCAN_BYTES binds it, too."""

SWEEP_SLICE: Final = 48
"""How many expired entries one commit of the sweeper removes while others write: they wait for one slice at most."""

SWEEP_ROWS: Final = 16_384
"""How many expired entries the sweeper looks up at once, without their values: it removes them in many slices."""

SWEEP_SLICE_ALONE: Final = 2048
"""The most while no one else writes; a writer that arrives then waits for one such slice, some 20 ms."""

SWEEP_GROWTH: Final = 4
"""How many times as many entries the next slice may hold while no one else writes."""

SWEEP_EVERY: Final = 60.0
"""Seconds between two sweeps of an open store, unless `keyloft.open(sweep_every=…)` says otherwise."""

BUSY_SECONDS: Final = 30.0
"""How long a write waits for other processes that hold the database before it fails with BUSY."""

SERVER_SECONDS: Final = 60.0
"""How long a call waits for a database server that is away or silent; `keyloft.open(patience=…)` changes it.

PgBouncer refuses logins for 15 s after one that failed (`server_login_retry`). Patroni needs up to 40 s to find out
that a primary is gone and to promote a standby (`ttl` 30 s, `loop_wait` 10 s). A write leaves a quarter of the time for
learning what became of it."""

OPERATOR_SERVER_SECONDS: Final = 10.0
"""The same for an operator's command."""

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

PLUGIN_NAME_CHARACTERS: Final = 100
"""The longest name of a plugin."""

PLUGIN_KEY_CHARACTERS: Final = 255
"""The longest key of a plugin."""

PLUGIN_VALUE_BYTES: Final = 64 * 1024
"""The largest value of a plugin, as stored: compact JSON in UTF-8."""

PLUGIN_VALUE_DEPTH: Final = 900
"""How deep lists and dicts may nest in a value of a plugin, or of the semantic store; the tuple store has VALUE_DEPTH.
"""

PLUGIN_REQUEST_BYTES: Final = 16 * 1024
"""The largest get, delete or list of a plugin; a set may have this much besides its value."""

LONGEST_INT_DIGITS: Final = 64 * 1024
"""The longest int of a request: a longer one alone would be over the size of a value."""

LONGEST_TTL_SECONDS: Final = 2**31 - 1
"""The longest TTL of a plugin's entry: about 68 years."""

KEYS_AT_ONCE: Final = 1000
"""How many keys of a plugin one request may read, write or delete together."""

KEYS_REQUEST_BYTES: Final = 512 * 1024
"""The largest request of a plugin that lists keys."""

LISTED_KEYS: Final = 1000
"""How many keys a plugin's list shows unless asked for another number."""

MOST_LISTED_KEYS: Final = 10_000
"""The most keys that one list of a plugin shows; `after` goes on behind them."""

PLUGIN_SCAN_ROWS: Final = 64
"""A list of more keys is read beside the event loop: it may have to pass any number of entries that have expired."""

GETS_PER_READ: Final = 64
"""How many gets of one owner are read together: at most 4 MiB of values."""

GETS_PER_REPLY: Final = 32
"""After so many small gets, the replies are sent before others are read: their senders go on meanwhile."""

MANY_REQUESTS: Final = 1000
"""How many requests one message may hold."""

OWNER_BYTES: Final = 8 * 1024 * 1024
"""How many bytes the unanswered requests of one plugin, or of one tenant, may have before the next is answered BUSY."""

INTAKE_BYTES: Final = 64 * 1024 * 1024
"""The same for all plugins together, and for all tenants; a quarter of it is for replies that are being made."""

ROUTES: Final = 4096
"""Of so many subjects a service remembers the meaning."""

OWNERS: Final = 1024
"""So many plugins, or tenants, with something unanswered have a queue of their own; all further ones share one."""

DEADLINE_SECONDS: Final = 5.0
"""How long a request waits for the database before it is answered with an error."""

PATIENCE_SECONDS: Final = 10.0
"""How long a client waits for an answer: longer than the service waits for its database, so that it hears from it."""

CLEANUP_SECONDS: Final = 300.0
"""Seconds between two sweeps of a plugin service, unless configured otherwise."""

SLOW_SECONDS: Final = 0.1
"""A request that takes longer is logged as slow."""

PLUGIN_LABELS: Final = 1000
"""How many plugins have metrics of their own; the rest are counted together as `other`."""

SEMANTIC_KEY_CHARACTERS: Final = 128
"""The longest key of the semantic store, with its tenant and project."""

SEMANTIC_ID_CHARACTERS: Final = 64
"""The longest id of a tenant or project."""

SEMANTIC_VALUE_BYTES: Final = 64 * 1024
"""The largest value of the semantic store, as stored: compact JSON in UTF-8."""

WRITER_CHARACTERS: Final = 128
"""The longest name of a writer; also of a producer, a consumer hint, a requestId."""

SEMANTIC_REQUEST_BYTES: Final = 32 * 1024
"""What a request to the semantic service may have besides its value."""

DEAD_LETTER_ERROR_CHARACTERS: Final = 1000
"""How much of an error's message a client over NATS keeps with a dead letter."""

COMPARED_NAME_CHARACTERS: Final = 64
"""A longer unknown field of a request is not compared with the known ones to find out which of them is meant."""

SPEC_REF_CHARACTERS: Final = 256
"""The longest pointer to a spec."""

CONSUMER_HINTS: Final = 32
"""How many consumer hints an entry may have."""

PURPOSE_CHARACTERS: Final = 64
"""The longest name of a purpose."""

BATCH_OPERATIONS: Final = 1000
"""How many puts and deletes one batch of the semantic store may have."""

REQUEST_MEMORY_SECONDS: Final = 86_400
"""How long a requestId is remembered: a retry within this time returns the first outcome."""

RESTORE_SECONDS: Final = 7 * 86_400
"""How long what was deleted or has expired can be restored."""

AUDIT_SECONDS: Final = 90 * 86_400
"""How long audit records are kept."""

UPDATE_ATTEMPTS: Final = 100
"""How often an update is tried while others change the same entry."""

TYPES_REMEMBERED: Final = 256
"""For how many types the tuple store keeps what reads and writes their values."""

TRANSIENT_ATTEMPTS: Final = 5
"""How often a write is tried against transient errors before it is escalated."""

CONFLICT_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds between the attempts at a write that meets conflicts; after the last one it is escalated."""

CONFLICT_RATE: Final = 0.10
"""More conflicts than this share of all writes, for CONFLICT_WINDOW_SECONDS, raise an alert."""

CONFLICT_WINDOW_SECONDS: Final = 60.0
"""How long writes have to conflict that often before an alert is raised; longer where writes are few."""

OUTAGE_SECONDS: Final = 300.0
"""A database that fails for longer than this raises an alert."""

# Tuned: core and tuples

FIRST_PAGE_ROWS: Final = 64
"""How many entries the first page of a scan holds; later pages grow up to SCAN_ROWS."""

PAGE_GROWTH: Final = 16
"""How many times as many entries as a page the next one may hold."""

LONG_INT_DIGITS: Final = 256
"""From so many digits on, an int of a request is kept as text: its conversion takes a time that grows with the square
of its digits, 70 ns per digit for 4,000 of them (`scripts/bench nats`, row «readers»)."""

GC_PAUSE_BYTES: Final = 4 * 1024
"""While a request of this size or more is read, Python collects no garbage: the collector would go through the lists
and dicts of the request again and again (`scripts/bench nats`, row «readers»)."""

SLICE_ITEMS: Final = 250
"""After so many keys or entries of a long call, other tasks run: a slice takes 1 to 3 ms."""

GIVE_WAY_SECONDS: Final = 0.0001
"""How long a thread pauses between two slices of a long call, so that another one wakes up in time to run."""

LONGEST_TIMER_SECONDS: Final = 30.0
"""A timer runs by the monotonic clock, and the wall clock can jump: it is compared again at least this often."""

# Tuned: the SQLite engine

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
"""For so long after it, the thread does all commits."""

SQLITE_GETS_PER_STATEMENT: Final = 16
"""How many keys one statement looks up: 1.2 µs per key, against 2.1 µs with a statement per key."""

SQLITE_GETS_WORTH_A_STATEMENT: Final = 5
"""Fewer keys are looked up one by one, which is faster than one statement with mostly empty slots."""

READER_CACHE_MIB: Final = 2
"""How much of a file each further reader of a synchronous store caches: they read while another thread commits."""

IDLE_READERS: Final = 8
"""So many of these readers stay open while no thread uses them."""

VIEW_READS: Final = 64
"""How many reads of a synchronous store share one read transaction, as long as no one commits (ADR 18)."""

VIEW_READS_SECONDS: Final = 0.001
"""Reads that follow each other within this time share one."""

VIEW_IDLE_SECONDS: Final = 0.02
"""A view that no read has used for so long is ended."""

COMMITS_PER_LOG_CHECK: Final = 8
"""A synchronous store reads the length of the write-ahead log after so many commits, or a second after the last one."""

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

INSPECTION_SECONDS: Final = 2.0
"""How long `keyloft doctor` waits for a file that another process has locked."""

# Tuned: the PostgreSQL engine

POSTGRES_GET_CONNECTIONS: Final = 2
"""How many connections answer gets: one waits for its statement while the other hands out results."""

POSTGRES_READ_CONNECTIONS: Final = 4
"""How many connections answer all other reads."""

POSTGRES_KEYS_PER_READ: Final = 512
"""How many keys of several callers one statement looks up; a caller with more gets a statement of its own."""

POSTGRES_SHARED_GETS: Final = 16
"""From this many waiting gets on, two connections share them."""

POSTGRES_HEAD_BYTES: Final = 1024
"""A commit that needs to know of an entry reads its value, too, if it has at most this many bytes."""

POSTGRES_REMEMBERED_COUNTERS: Final = 5_000
"""How many counters a process remembers as it has written them, so that it need not read them: about 2 MB."""

POSTGRES_GROUPS_READ: Final = 256
"""After remembered counters were found to be out of date, at most so many groups are read before they count again."""

POSTGRES_IDLE_SECONDS: Final = 60.0
"""A connection that was idle for longer is tested before use: firewalls drop idle connections silently."""

POSTGRES_PING_SECONDS: Final = 2.0
"""How long that test waits for an answer."""

POSTGRES_CONNECT_SECONDS: Final = 5.0
"""How long one attempt to connect to one host may take."""

POSTGRES_HOSTS_SECONDS: Final = 2.0
"""How often all hosts of a URL are asked whether they are primary or standby, and on which timeline."""

POSTGRES_SURVEY_SECONDS: Final = 1.0
"""How long the other hosts have to answer once one has that can be written."""

POSTGRES_LEASE_SECONDS: Final = 2.5
"""How long it counts that no host had a higher timeline; the first commit on a new timeline waits for so long. Longer
than POSTGRES_RENEW_SECONDS and POSTGRES_SURVEY_SECONDS together, so that a silent host holds no reads up."""

POSTGRES_RENEW_SECONDS: Final = 1.0
"""Hosts are asked again when a connection is used, and their answers are older than this."""

POSTGRES_STANDBY_SECONDS: Final = 1.0
"""How long a host may take to answer a read that another host could answer."""

POSTGRES_LAG_MARKS: Final = 1024
"""How many versions of the primary are remembered, to tell how far a standby is behind: those of half an hour."""

POSTGRES_CLOSE_SECONDS: Final = 1.0
"""How long closing a connection may take before it is cut."""

POSTGRES_RETRY_SECONDS: Final = 0.01
"""The pause between two attempts at a statement."""

POSTGRES_CONNECT_PAUSES: Final = (0.02, 0.5)
"""The first and the longest pause between two attempts to connect; they double."""

POSTGRES_LOCK_SECONDS: Final = 5.0
"""How long a commit waits for the version counter before the server cancels it: a commit of 100,000 keys takes about
two seconds."""

POSTGRES_TABLE_SECONDS: Final = 0.25
"""How long a commit waits for a table that another client has locked, before commits to other tables pass it."""

POSTGRES_INSERT_SECONDS: Final = 0.1
"""How long a commit that holds the version counter waits for a row that another client inserted and did not commit."""

POSTGRES_TRANSACTION_SECONDS: Final = 1.0
"""A commit that holds the version counter may take so long: then the function gives up, and a client that leaves its
transaction idle is cut off."""

POSTGRES_TRANSACTION_SECONDS_EACH: Final = 0.0001
"""So much longer for each check and mutation: to decide and write 100,000 of them takes seconds."""

POSTGRES_LOST_RACES: Final = 3
"""After so many lost races a commit takes its locks before it reads."""

POSTGRES_RACE_PAUSES: Final = (0.001, 0.003)
"""The pause after a lost race lies between these."""

POSTGRES_LOCKED_PAUSES: Final = (0.02, 0.5)
"""The first and the longest pause before a batch is tried again that met a locked row; they double."""

POSTGRES_TRY_SECONDS: Final = 60.0
"""The server refuses a commit that reaches it later than this: TRIM_SPARED_SECONDS must be longer."""

POSTGRES_SETUP_ATTEMPTS: Final = 5
"""How often the tables are created while another process creates them, too."""

POSTGRES_LAST_REPORT_SECONDS: Final = 1.0
"""How long closing waits for watches to report the last commits."""

# Tuned: the etcd engine

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
"""A group of sets of up to so many keys is written without having been read, if its keys are probably absent: each is a
comparison, and etcd allows 128 in a transaction."""

ETCD_GROUPS_READ: Final = 256
"""After wrong guesses, at most so many groups are read before the next guess."""

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
"""A reverse scan lets etcd sort up to so many rows more than it returns; beyond, it looks for a narrower range."""

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
"""A commit that has lost up to so many races against other processes tries again at once: with a pause after each, the
process that won the last race wins the next ones, too."""

ETCD_RACE_PAUSES: Final = (0.001, 0.05)
"""The first and the longest pause after each further one; they double, at random."""

ETCD_TURN_SECONDS: Final = 0.05
"""For how long one of several processes that write commits, before it lets another one do so."""

ETCD_HANDOVER_SECONDS: Final = 0.015
"""How long it waits after that for another one to begin."""

ETCD_HANDOVER_POLL_SECONDS: Final = 0.002
"""How often it looks meanwhile."""

ETCD_TURN_PAUSE_SECONDS: Final = 0.01
"""A process whose next batch arrives later than this after its last commit asks for no turn: it has little to write."""

ETCD_RIVAL_SECONDS: Final = 1.0
"""For how long a process takes turns after it has seen a commit of another one."""

ETCD_LONGEST_TURNS_SECONDS: Final = 0.5
"""How long a commit waits for the turns of others before it tries all the same."""

ETCD_KEEPALIVE_SECONDS: Final = (10, 5)
"""After so many silent seconds a member is asked for a sign of life, which must arrive in as many."""

ETCD_ORPHAN_SECONDS: Final = 3600.0
"""Chunks of a value that no entry refers to are removed once they are older: a commit may be about to refer to them."""

ETCD_COMPACT_SECONDS: Final = 600.0
"""How long `keyloft compact` waits for a member to compact or defragment its data."""

ETCD_LAST_TRIM_SECONDS: Final = 1.0
"""How long closing waits for the change log to be trimmed."""

ETCD_LAST_REPORT_SECONDS: Final = 1.0
"""How long closing waits for watches to report what they were woken for."""

# Tuned: the client of the HTTP API

HTTP_CLIENT_REQUESTS: Final = 32
"""How many requests a store over HTTP has under way at a time, each on a connection of its own; others wait."""

HTTP_CLIENT_GET_REQUESTS: Final = 2
"""How many requests gets may have under way; further gets wait, and travel together in the next one."""

HTTP_CLIENT_GATHERED_GETS: Final = 250
"""How many gets travel together in one request."""

HTTP_CLIENT_KEYS: Final = 1000
"""How many keys the API reads from one view."""

HTTP_CLIENT_PAGE_ENTRIES: Final = 1000
"""How many entries one page of a list holds at most."""

HTTP_CLIENT_CONNECT_SECONDS: Final = 5.0
"""How long one try to connect may take."""

HTTP_CLIENT_IDLE_SECONDS: Final = 15.0
"""A connection that was idle for longer is closed: before the server does so, or a request may be lost in between."""

HTTP_CLIENT_PAUSES: Final = (0.05, 1.0)
"""The first and the longest pause before a request is repeated, or a watch connects again; they double."""

HTTP_CLIENT_SILENCE_SECONDS: Final = 45.0
"""A watch that has received nothing for so long, not even one of the server's signs of life, connects again."""

HTTP_CLIENT_CLOSE_SECONDS: Final = 5.0
"""How long closing waits for requests under way."""

# Tuned: the change log, watches and group commit

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
"""How many rows of the change log one commit removes at most."""

TRIM_SPARED_SECONDS: Final = 120.0
"""On PostgreSQL, changes younger than this stay, however many: a commit whose reply was lost is looked up there."""

GROUP_OPERATIONS: Final = 4096
"""A group takes no further batch once it holds this many checks and mutations."""

GROUP_WORTH_TWO: Final = 48
"""Fewer batches are committed together: what a second commit costs would be a large part of what they cost."""

GROUP_SECONDS_WORTH_TWO: Final = 0.002
"""The same for batches whose last group took longer: the disk is slow, or the processors are busy."""

COMING_BACK: Final = 10.0
"""Callers that were away for longer than so many times as long as their last group took don't wait for each other."""

LONG_BATCH_OPERATIONS: Final = 1000
"""A batch of more checks and mutations is committed in parts of SLICE_ITEMS each, within one transaction."""

LOOP_END_SECONDS: Final = 5.0
"""How long the event loop of a synchronous store waits, at its end, for coroutines that it has cancelled."""

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

WATCH_DUE_KEYS: Final = 1000
"""About how many expired keys are read at a time for watches."""

LATE_EXPIRY_SECONDS: Final = 5.0
"""A reader of changes who continues from a version gets the expiries of so many seconds before it again."""

WATCHES_WOKEN_AT_ONCE: Final = 64
"""After waking so many watches, the event loop runs them before it wakes more: each reads what its user waits for."""

WATCH_INLINE_CALLS: Final = 1000
"""After so many calls of watches, the event loop runs other tasks before the next change is dispatched. Where many
watches have the same keys, the changes of one group take long to dispatch."""

WATCH_INLINE_CHANGES: Final = 1000
"""A group with more changes than this is dispatched to watches from the change log, a slice at a time."""

WATCH_DRAIN_POLL_SECONDS: Final = 0.002
"""How often an engine that closes checks whether its watches have reported everything."""

LEASE_SECONDS: Final = 30.0
"""How long a watch over NATS lasts unless its client renews it; clients do so after a third of it."""

OWNER_LEASES: Final = 250
"""How many watches over NATS a plugin, or a tenant, may have at a time."""

OWNER_LEASE_BYTES: Final = 1024 * 1024
"""How many bytes their keys may take together, each with LEASE_KEY_BYTES."""

LEASE_KEY_BYTES: Final = 256
"""What a key of a watch takes besides its text: 250 watches of 1,000 short keys took 65 MB."""

OWNER_STREAMS: Final = 1000
"""How many watches over HTTP a plugin, or a tenant, may have at a time."""

OWNER_STREAM_BYTES: Final = 4 * 1024 * 1024
"""How many bytes their keys may take together, each with LEASE_KEY_BYTES."""

LEASE_KEYS: Final = 1000
"""How many keys one watch over NATS may have."""

WATCH_REQUEST_BYTES: Final = 64 * 1024
"""The largest request for a watch."""

HEARTBEAT_SECONDS: Final = 3.0
"""An instance of a service that is silent for so long counts as dead: others publish for the watches that it served."""

HEARTBEATS: Final = 3
"""How many heartbeats an instance stores within HEARTBEAT_SECONDS, while there are watches."""

LEASE_CHECK_SECONDS: Final = 1.0
"""How often an instance without watches looks whether other instances have some."""

TAKE_OVER_LEASES: Final = 100
"""How many watches an instance takes over in one commit."""

EVENTS_REPLY_BYTES: Final = 256 * 1024
"""How much is reserved for the events that are published in one turn."""

EVENTS_PER_TURN: Final = 256
"""How many events of a watch are published in one turn of its owner."""

RENEWALS: Final = 3
"""How many times a client renews a watch within the time after which it would expire."""

WATCH_RETRY_SECONDS: Final = 0.05
"""The first pause of a client whose watch can't be renewed; it doubles up to WATCH_CHECK_SECONDS."""

REFUSED_EVENTS: Final = 100
"""How many subjects of events a service remembers that NATS did not let it publish to."""

UNREAD_EVENTS: Final = 10_000
"""A client whose user has so many events to read drops further ones, and asks for them again later."""

REMEMBERED_EVENTS: Final = 10_000
"""For how many keys a client remembers the last event, to leave out what arrives twice."""

LOOP_ITERATION_SECONDS: Final = 0.001
"""A read that starts later than this in an iteration of the event loop lets the other tasks run first."""

EXPIRES_MUCH_LATER_MILLISECONDS: Final = 1000
"""What expires so much later than the time of an iteration's first read is alive for the others, too: many times
LOOP_ITERATION_SECONDS."""

EXPIRY_TIMES: Final = 4096
"""How many expiries the tuple store keeps as datetimes: entries that are written together expire together, and some are
read again and again."""

# Tuned: NATS, plugins and the server

UNREAD_MESSAGES: Final = 20_000
"""A connection to NATS stops reading while one of its subscriptions has more unread messages than this."""

UNREAD_BYTES: Final = 64 * 1024 * 1024
"""The same for the size of the unread messages."""

NATS_READ_BYTES: Final = 256 * 1024
"""How many bytes are read at once from the connection to NATS: as many as asyncio takes from a socket at once."""

NATS_PENDING_BYTES: Final = 256 * 1024 * 1024
"""How much nats-server keeps for a connection, by the configuration of `keyloft nats-config` and of `keyloft serve`:
what three owners send within a fifth of a second at full speed, in which a service on a busy machine may have no
processor. From three quarters of it on, nats-server slows senders down."""

NATS_TAKING_SECONDS: Final = 0.004
"""After so much time of the processor for messages from NATS, other tasks run before more of them are read."""

NATS_DISCARDED_BYTES: Final = 4 * 1024 * 1024
"""How many bytes of a refused message are left out at once."""

REFUSED_EARLY_BYTES: Final = 32 * 1024
"""Of a message of which so many bytes have not arrived yet, it is asked before whether it is refused."""

GATHERED_BYTES: Final = 256 * 1024
"""How many bytes the requests have that a client sends in one message."""

MANY_PROBE_SECONDS: Final = 60.0
"""How often a client asks a service that does not answer `many` whether it does now."""

CONNECT_SECONDS: Final = 3.0
"""The longest that a client waits for a connection to NATS."""

LOG_LINES_PER_SECOND: Final = 20
"""How many failed and slow requests a service logs a second; the others are counted in one line."""

CONNECTION_LOG_LINES_PER_SECOND: Final = 10
"""How many errors of a connection to NATS are logged a second."""

UNREAD_PAUSE_SECONDS: Final = 0.001
"""How long a connection that has stopped reading waits before it checks again."""

CANCEL_SECONDS: Final = 0.1
"""A task of nats-py that has not ended so long after its cancellation is cancelled again."""

LATENCY_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""The upper bounds of a latency histogram's buckets, in seconds; the PRD's targets are among them."""

LOGGED_OPERATIONS_PER_SECOND: Final = 1000
"""Up to this many operations a second, each has a DEBUG line."""

LOGGED_SAMPLE: Final = 100
"""Above that, one in so many has."""

REQUEST_BYTES: Final = 192
"""How much memory a waiting request takes besides its message and its reply subject: it counts towards the bounds."""

LITTLE_UNANSWERED_BYTES: Final = 64 * 1024
"""An owner with no more unanswered than this may use the reserve that a service keeps for such owners."""

SMALL_REQUEST_BYTES: Final = 1024
"""Requests of up to this size are read so fast that the time of a turn is checked after every eighth alone."""

OWNER_MEMORY_SECONDS: Final = 1.0
"""While new names need queues, the number of an owner's visits is halved after each such time: owners with one visit at
most lose their queues."""

VALUE_REPLY_BYTES: Final = 64 * 1024 + 512
"""How much is reserved for a reply with one value; for a shorter reply, nothing."""

PAGE_REPLY_BYTES: Final = 4 * 1024 * 1024
"""How much is reserved for a list: what is read for it, and its reply."""

SHORT_REPLY_BYTES: Final = 512
"""A reply of up to so many bytes always fits into one message with the others of a `many`."""

HELD_REPLY_BYTES: Final = 8 * 1024 * 1024
"""How many bytes of longer replies wait for the others of their `many`; those beyond are to be asked for alone."""

LOCKS_REPLY_BYTES: Final = 256 * 1024
"""How much is reserved for a request about locks: a list of them, or the entry of another holder."""

DEAD_LETTERS_READ_BYTES: Final = 4 * 1024 * 1024
"""Once the dead letters of a list hold so many bytes of values, its reply shows no more of them."""

OWNER_REPLY_BYTES: Final = 4 * 1024 * 1024
"""With so many bytes of replies that are being made or sent, the next requests of their owner wait."""

OWNER_REQUESTS_UNDER_WAY: Final = 256
"""So many requests of one owner are carried out at a time: another owner's write waits for no more than these."""

OWNER_BYTES_UNDER_WAY: Final = 1024 * 1024
"""The same in bytes: a commit of 8 MiB takes half a second on a slow disk, and others' writes wait for it."""

TURN_SECONDS: Final = 0.001
"""How long the requests of one owner are read before the next owner has its turn."""

TURNS_SECONDS: Final = 0.004
"""After so many seconds of turns, other tasks run: messages are read from the socket, replies are sent."""

READING_BYTES: Final = 32 * 1024
"""If so much arrives in one iteration of the event loop, reading goes on before owners have further turns,"""

READING_SECONDS: Final = 0.02
"""for so long, or twice as long as the last turns took: nats-server cuts a service off that reads too slowly."""

CLOSING_SECONDS: Final = 20.0
"""A service that ends waits so long until its requests are done; what a stuck database still holds is then left behind.
With CLOSING_LOCK_SECONDS it is less than the 30 s after which a supervisor kills a service.
"""

CLOSING_REMARK_SECONDS: Final = 1.0
"""A service that ends, and waits longer than this for the database, says so."""

CLOSING_LOCK_SECONDS: Final = 5.0
"""How long an SQLite file that is being closed waits for other processes' locks, for all writes together."""

LONGEST_DEBT_SECONDS: Final = 0.1
"""An owner whose turn took longer than it should misses turns, but for no more than this."""

FLOOD_PAUSE_SECONDS: Final = 0.001
"""How long a service whose connection has too much to send waits before it checks again."""

UNSENT_BYTES: Final = 512 * 1024
"""A service sends no further replies while its connection has more bytes to send than this."""

SLOW_CLEANUP_SECONDS: Final = 1.0
"""A removal of expired entries that takes longer is logged as a warning."""

HEALTH_SECONDS: Final = 2.0
"""How long a health check waits for the database."""

MEMBERS_SECONDS: Final = 1.0
"""How long a starting service gathers the answers of other services; if there are none, NATS says so at once."""

NEW_FILE_CHECK_SECONDS: Final = 5.0
"""How long `keyloft serve` asks NATS whether it may serve there, before it makes a new database file."""

RECONNECT_SECONDS: Final = 1.0
"""The pause before `keyloft serve` tries again to connect to NATS, to serve, or to start its nats-server."""

OPENING_PAUSES: Final = (0.25, 5.0)
"""The first and the longest pause between two attempts of `keyloft serve` to open the database; they double."""

SAME_SIGNAL_SECONDS: Final = 0.5
"""Two signals within this time count as one: some supervisors signal a process and its group."""

HTTP_HEAD_BYTES: Final = 32 * 1024
"""The most bytes that the path and the headers of a request over HTTP may have: a key of 2,048 bytes fits, encoded."""

HTTP_HEADERS: Final = 100
"""The most headers of a request."""

HTTP_QUERY_FIELDS: Final = 1100
"""The most parameters in the query of a request."""

HTTP_JSON_BYTES: Final = 2 * VALUE_BYTES
"""The largest JSON that is stored by a PUT, as sent: with spaces, it is longer than as stored."""

HTTP_SMALL_BODY_BYTES: Final = 4096
"""The largest body that holds no value."""

HTTP_BODY_BYTES: Final = 8 * 1024 * 1024
"""The largest body that holds several keys or values."""

HTTP_GET_KEYS: Final = 1000
"""The most keys of one /get."""

HTTP_BATCH_OPERATIONS: Final = 10_000
"""The most checks and mutations of one /atomic."""

HTTP_REPLY_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of values in the answer to one /get."""

HTTP_LIST_ENTRIES: Final = 100
"""How many entries a list over HTTP has, unless `limit` says otherwise."""

HTTP_LONGEST_LIST: Final = 1000
"""The most entries of one list over HTTP; its cursor continues it."""

HTTP_PAGE_BYTES: Final = 1024 * 1024
"""A list over HTTP ends after the entry with which it has more bytes than this; its cursor continues it."""

HTTP_PAGE_ROWS: Final = 32
"""How many entries a list, or a get of several keys, reads at a time over HTTP: values of 1 MiB fit memory, too."""

HTTP_ENTRY_BYTES: Final = 100
"""About what an entry in a list takes besides its key and value."""

HTTP_LISTS: Final = 8
"""How many lists are read at a time."""

HTTP_WATCHED_KEYS: Final = 1000
"""The most keys of one watch over HTTP."""

HTTP_LISTENERS: Final = 0.75
"""How many of all connections may be watches; others need some, too."""

HTTP_HEARTBEAT_SECONDS: Final = 15.0
"""How often a watch over HTTP sends a comment, so that a dead connection is noticed."""

HTTP_EVENT_BYTES: Final = 256 * 1024
"""A change of more bytes is sent as several events, of which the last has the id."""

HTTP_KEPT_EVENTS: Final = 256
"""The most events that a watch keeps for clients that come back for them."""

HTTP_KEPT_EVENT_BYTES: Final = 1024 * 1024
"""The most bytes of these events."""

HTTP_LISTENER_BYTES: Final = 256 * 1024
"""A listener that has more bytes of events unread is cut off; it can come back for them."""

HTTP_DISCARDED_BYTES: Final = 16 * 1024 * 1024
"""So much of a body that was refused is read and dropped, so that the client reads the refusal; then it is cut off."""

HTTP_PIPELINED: Final = 64
"""The most requests of a connection that wait for the one before them."""

HTTP_REQUEST_SECONDS: Final = 30.0
"""How long a client may take to send a request, from its first byte to its last."""

HTTP_IDLE_SECONDS: Final = 75.0
"""How long a connection may be idle."""

HTTP_ANSWER_SECONDS: Final = 30.0
"""How long a client may take to read a response."""

HTTP_UNSENT_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of complete responses that clients have not read; beyond, the oldest such client is cut off."""

HTTP_UNSENT_SECONDS: Final = 2.0
"""How long a client may read a response, however much others have not read: many may ask for large ones at once."""

HTTP_CONNECTIONS: Final = 2000
"""How many connections there are at a time, unless `http_connections` says so; for one more, an idle one ends."""

HTTP_FEWEST_CONNECTIONS: Final = 64
"""How many there are at a time where the limit on open files is low."""

HTTP_SPARE_FILES: Final = 256
"""How many files a service may open besides its HTTP connections."""

HTTP_BACKLOG: Final = 1024
"""How many connections may wait to be accepted."""

HTTP_SHUTDOWN_SECONDS: Final = 10.0
"""How long a service that ends waits for its running HTTP requests."""

HTTP_FLUSH_SECONDS: Final = 2.0
"""How long it then waits for clients to read their responses."""

HTTP_PATIENCE_SECONDS: Final = 0.1
"""How long a request for a plugin or a workflow may take before it is noticed that its client is gone."""

AUDITED_KEYS: Final = 20
"""How many keys of one request the audit log names."""

AUDITED_BYTES: Final = 64 * 1024
"""The audit log names no keys of a larger request: to read it again would take others' time."""

OFREP_REQUEST_BYTES: Final = 256 * 1024
"""The largest context that a feature flag may be evaluated with."""

OFREP_FLAGS_BYTES: Final = 8 * 1024 * 1024
"""How many bytes the flags of a project may have, to be evaluated together."""

OFREP_POLLING_MILLISECONDS: Final = 1000
"""How often a client may ask for all flags; there is no rule that enforces it."""

HTTP_KNOWN_STORES: Final = 256
"""How many named stores are kept ready."""

HTTP_TOKEN_CHARACTERS: Final = 16
"""The shortest token that a person may choose."""

HTTP_TOKENS_SECONDS: Final = 1.0
"""How often the file of tokens is looked at, at most."""

HTTP_FREE_LOGINS: Final = 5
"""How many wrong tokens of an address are answered at once."""

HTTP_LOGIN_PAUSES: Final = (0.1, 2.0)
"""The first and the longest pause before a further one is answered; they double."""

HTTP_LONGEST_LOGIN_SECONDS: Final = 10.0
"""The longest time that a wrong token waits for its answer."""

HTTP_WAITING_LOGINS: Final = 16
"""How many wrong tokens of an address wait for their answers; further ones are refused at once."""

HTTP_LOGIN_MEMORY_SECONDS: Final = 300.0
"""How long an address is remembered after its last wrong token."""

HTTP_LOGIN_ADDRESSES: Final = 1000
"""How many addresses that sent wrong tokens are remembered."""

PAGE_ROWS: Final = 100
"""How many rows a table of the admin page has."""

PAGE_SCANNED_ROWS: Final = 2000
"""How many rows the admin page reads for one table, where a filter leaves some out."""

PAGE_FORM_BYTES: Final = 32 * 1024
"""The largest form that the admin page takes: the longest key fits, encoded."""

PAGE_VALUE_BYTES: Final = 256 * 1024
"""Of a longer value, the admin page shows so much."""

PAGE_SESSIONS: Final = 1000
"""How many people can be logged in at a time; the one who was away for the longest is logged out for one more."""

PAGE_SESSION_SECONDS: Final = 12 * 3600.0
"""How long a session of the admin page lasts."""

PAGE_IDLE_SECONDS: Final = 3600.0
"""After so long without a request or an open page, a session ends."""

PAGE_CODE_SECONDS: Final = 60.0
"""How long a code for one log-in is valid, as `keyloft open` asks for one."""

PAGE_CODES: Final = 100
"""How many such codes are valid at a time."""

PAGE_SAMPLE_SECONDS: Final = 5.0
"""How often the admin page reads the counters that its charts show."""

PAGE_SAMPLES: Final = 360
"""How many of these readings are kept: half an hour."""

PAGE_FEWEST_SAMPLES: Final = 24
"""A chart is as wide as so many readings at least: the first ones do not fill it."""

PAGE_RATE_SAMPLES: Final = 12
"""Over how many of them a rate is taken: a minute."""

PAGE_LIVE_SECONDS: Final = 1.0
"""How often an open page is updated, at most."""

PAGE_LIVE_SHARE: Final = 0.05
"""How much of a core the updates of all open pages may take; with more of them, each is updated less often."""

PAGE_STREAMS: Final = 500
"""How many open pages are updated; the others are as they were when they were loaded."""

USAGE_ROWS: Final = 1000
"""So many rows of plugins are counted in one read: 1.6 ms with a million of them on SQLite, 10 ms on PostgreSQL."""

USAGE_FEWEST_ROWS: Final = 125
"""So many if they take longer than USAGE_SLICE_SECONDS."""

USAGE_SLICE_SECONDS: Final = 0.004
"""After a read that took longer, the next one counts half as many rows."""

USAGE_EVERY_SECONDS: Final = 60.0
"""A round of counting all plugins' keys begins so long after the one before, or when that has ended."""

USAGE_PAUSES: Final = (3, 19)
"""After each slice of a round, counting pauses for so many times as long as the slice took, at least and at most: a
round of a million keys on SQLite takes 2 s of reading, spread over 40 s."""

USAGE_FRESH_SECONDS: Final = 1.0
"""A write over its plugin's quota is refused by a count no older than this; else the plugin is counted again."""

USAGE_RECOUNT_PAUSE: Final = 20
"""A count may also be so many times as old as it took: a full plugin with many keys is not counted all the time."""

USAGE_WANTED_SECONDS: Final = 300.0
"""So long after the last scrape, or the last write under a quota, counting ends."""

USAGE_RETRY_SECONDS: Final = 5.0
"""After a failure, counting begins again after so many seconds."""

USAGE_PATIENCE_SECONDS: Final = 0.1
"""How long a scrape waits for the first round."""

USAGE_PLUGINS: Final = 10_000
"""Of so many plugins a service remembers what each stores; the others are added up."""

NATS_READY_SECONDS: Final = 10.0
"""How long a nats-server that Keyloft starts may take until it listens."""

NATS_GRACE_SECONDS: Final = 5.0
"""How long it may take to end before it is killed."""

NATS_PASSWORD_BYTES: Final = 24
"""How many random bytes a generated password of NATS has."""

NATS_LOG_LINE_BYTES: Final = 1024 * 1024
"""The longest line of nats-server's log that is read."""

# Tuned: the semantic store

RECENT_ENTRIES: Final = 16_384
"""Of so many entries a semantic store remembers the last version, so that a put needs no read: at most 8 MiB."""

PARSED_KEYS: Final = 16_384
"""So many keys of the semantic store are kept parsed, in at most 7 MB: parsing would take a fifth of a get
(`scripts/bench semantic`, row «get»)."""

KNOWN_SEMANTICS: Final = 1024
"""So many semantics are kept decoded: the entries of a kind mostly have the same ones."""

AUDIT_UNINDEXED: Final = 16
"""An entry's row lists so many of its audit records before they move to an index row."""

KNOWN_FENCES: Final = 1024
"""Of so many fencing tokens a semantic store remembers the lock."""

UNSAVED_DEAD_LETTERS: Final = 1000
"""So many dead letters wait in memory for a database that fails; the oldest is dropped for one more."""

TRANSIENT_PAUSE_SECONDS: Final = 0.5
"""The pause before the second attempt after a transient error; each further pause is twice as long."""

LONGEST_TRANSIENT_PAUSE_SECONDS: Final = 8.0
"""The longest pause between two attempts after transient errors."""

LOCK_TTL_SECONDS: Final = 30
"""The TTL of a lock, unless its holder asks for another one."""

LOCK_RENEWALS_PER_TTL: Final = 3
"""How often a lock is renewed within its TTL."""

LOCK_RETRY_SECONDS: Final = 0.1
"""The pause before a lock tries again to acquire or renew after an error of the database."""

LIVE_FLAGS_PAUSE_SECONDS: Final = 1.0
"""The pause before live flags are read again after an error of the database."""

CONFLICT_WINDOW_STEPS: Final = 12
"""In so many steps the window of the conflict rate moves on."""

CONFLICT_WINDOW_PARTS: Final = 3
"""In each of so many parts of the window the conflict rate must be too high, so that one burst raises no alert."""

CONFLICT_FEWEST_WRITES: Final = 10
"""The window of the conflict rate must have so many writes; it is doubled until it has."""

CONFLICT_WINDOW_DOUBLINGS: Final = 6
"""So often, to a bit over an hour: a workflow with one write in six minutes still raises the alert."""

# Tuned: migrations

MIGRATION_ATTEMPTS: Final = 5
"""How often a migration of PostgreSQL is tried while other processes migrate the same database."""

# Tuned: operators' commands

TRANSFER_SLICE_BYTES: Final = 4 * SCAN_BYTES
"""How many value bytes one commit of an import holds; MAINTENANCE_ROWS bounds it, too."""

ROWS_BETWEEN_PROGRESS: Final = 1000
"""How many rows a comparison reads between two reports of its progress."""

SOON_SECONDS: Final = 3600.0
"""What expires within so many seconds is counted by stats as expiring soon, unless asked for another number."""

FINDINGS: Final = 100
"""How many problems a check shows, unless asked for another number."""

SHOWN_KEY_CHARACTERS: Final = 300
"""A longer key is cut in the messages of an import."""

UPDATE_PAUSES: Final = (0.002, 0.25)
"""The first and the longest pause after an update that met a conflict; they double, and a random part of each is used.
"""

PLUGIN_REQUESTS_AT_ONCE: Final = 200
"""How many requests `keyloft plugin import-json` has under way."""

COLOURED_DEPTH: Final = 100
"""A value that nests deeper is shown at a terminal without colours: Rich recurses, several calls for a level."""

CERTIFICATE_DAYS: Final = 21
"""`keyloft doctor` warns of a certificate that ends in fewer days."""

DOCTOR_CHECK_SECONDS: Final = 8.0
"""How long one check of `keyloft doctor` may take."""

DOCTOR_DATABASE_SECONDS: Final = 6.0
"""How long doctor waits for a database server."""

DOCTOR_NATS_SECONDS: Final = 40.0
"""How long all checks of NATS may take together."""

DOCTOR_ISOLATION_SECONDS: Final = 20.0
"""How long doctor tries whether NATS keeps users apart; there may be many users."""

DOCTOR_LOGINS_AT_ONCE: Final = 8
"""How many users doctor tries at a time."""

DOCTOR_ANSWER_SECONDS: Final = 3.0
"""How long doctor waits for one answer of NATS or of the service."""

DOCTOR_PORT_SECONDS: Final = HEALTH_SECONDS + 2.0
"""How long doctor waits for a program that listens on a port to say what it is. A service whose database does not
answer says so after HEALTH_SECONDS."""

DOCTOR_SKEW_SECONDS: Final = 1.0
"""A database clock that differs by more than this is a warning."""

DOCTOR_HARMFUL_SKEW_SECONDS: Final = 30.0
"""A database clock that differs by more than this is a problem."""

DOCTOR_FREE_BYTES: Final = 1024**3
"""Less free space than this, or than twice the database, is a warning."""

DOCTOR_LEAST_FREE_BYTES: Final = 16 * 1024**2
"""Less free space than this is a problem."""

DOCTOR_FREE_INODES: Final = 1000
"""Fewer free inodes than this are a warning."""
