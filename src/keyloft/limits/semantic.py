"""Limits of the semantic store, its locks, alerts and retries."""

from typing import Final

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

LOCKS_REPLY_BYTES: Final = 256 * 1024
"""How much is reserved for a request about locks: a list of them, or the entry of another holder."""

DEAD_LETTERS_READ_BYTES: Final = 4 * 1024 * 1024
"""Once the dead letters of a list hold this many bytes of values, its reply shows no more of them."""

RECENT_ENTRIES: Final = 16_384
"""For how many entries a semantic store remembers the last version, so that a put needs no read: at most 8 MiB."""

PARSED_KEYS: Final = 16_384
"""This many keys of the semantic store are kept parsed, in at most 7 MB: parsing would take a fifth of a get
(`scripts/bench semantic`, row «get»)."""

KNOWN_SEMANTICS: Final = 1024
"""This many semantics are kept decoded: the entries of a kind mostly have the same ones."""

AUDIT_UNINDEXED: Final = 16
"""An entry's row lists this many of its audit records before they move to an index row."""

KNOWN_FENCES: Final = 1024
"""For how many fencing tokens a semantic store remembers the lock."""

UNSAVED_DEAD_LETTERS: Final = 1000
"""This many dead letters wait in memory for a database that fails; the oldest is dropped for one more."""

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
"""How many steps the window of the conflict rate is divided into; it moves on by one at a time."""

CONFLICT_WINDOW_PARTS: Final = 3
"""How many parts the window has: in each the conflict rate must be too high, so that one burst raises no alert."""

CONFLICT_FEWEST_WRITES: Final = 10
"""How many writes the window of the conflict rate must have; it is doubled until it has them."""

CONFLICT_WINDOW_DOUBLINGS: Final = 6
"""So often, to a bit over an hour: a workflow with one write in six minutes still raises the alert."""
