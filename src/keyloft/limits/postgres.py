"""The engine on PostgreSQL: tuned numbers."""

from typing import Final

POSTGRES_GET_CONNECTIONS: Final = 2
"""How many connections answer gets: one waits for its statement while the other hands out results."""

POSTGRES_READ_CONNECTIONS: Final = 4
"""How many connections answer all other reads."""

POSTGRES_KEYS_PER_READ: Final = 512
"""How many keys of several callers one statement looks up; a caller with more gets a statement of its own."""

POSTGRES_TEXT_BYTES: Final = 16 * 1024 * 1024
"""A long batch whose values have at most this many bytes is settled in parts, and sends them as text, of twice their
size. Of more bytes, most values are large, and text takes longer than arrays (30 against 16 ms per MB,
measured by hand)."""

POSTGRES_SHARED_GETS: Final = 16
"""From this many waiting gets on, two connections share them."""

POSTGRES_HEAD_BYTES: Final = 1024
"""A commit that needs to know of an entry reads its value, too, if it has at most this many bytes."""

POSTGRES_CACHED_COUNTERS: Final = 5_000
"""How many counters a process remembers as it has written them, so that it need not read them: about 2 MB."""

POSTGRES_GROUPS_READ: Final = 256
"""How many groups are read, at most, after a cached counter was out of date, before the cache is used again."""

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
"""How long a host may take to answer a read that another host could answer. If none has, and there is no primary, the
standbys share the time that the caller waits."""

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
"""How many races a commit may lose before it takes its locks first."""

POSTGRES_RACE_PAUSES: Final = (0.001, 0.003)
"""The pause after a lost race lies between these."""

POSTGRES_LOCKED_PAUSES: Final = (0.02, 0.5)
"""The first and the longest pause before a batch is tried again that met a locked row; they double."""

POSTGRES_TRY_SECONDS: Final = 60.0
"""The server refuses a commit that reaches it later than this: TRIM_SPARED_SECONDS must be longer."""

POSTGRES_SETUP_ATTEMPTS: Final = 5
"""How often the tables are created while another process creates them, too."""

POSTGRES_LISTENERS_SECONDS: Final = 1.0
"""How long commits rely on the last search for listeners. A process that begins to listen polls for twice as long."""

POSTGRES_LISTENERS_COMMITS: Final = 16
"""After that time, so many commits notify before a process looks for listeners again: to look takes a commit as long as
to notify takes some ten, and one that comes alone would wait for it."""

POSTGRES_NOTIFY_PAUSE_SECONDS: Final = 60.0
"""For how long commits don't notify after the server's queue of notifications was full."""

POSTGRES_LAST_REPORT_SECONDS: Final = 1.0
"""How long closing waits for watches to report the last commits."""
