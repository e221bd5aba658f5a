"""Keys, values, lists, updates and sweeps: limits that every store has on every engine."""

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

SWEEP_SLICE: Final = 48
"""How many expired entries one commit of the sweeper removes while others write: they wait for one slice at most."""

SWEEP_ROWS: Final = 16_384
"""How many expired entries the sweeper looks up at once, without their values: it removes them in many slices."""

SWEEP_SLICE_ALONE: Final = 2048
"""The largest slice, while no one else writes; a writer that arrives meanwhile waits for the end of one slice."""

SWEEP_GROWTH: Final = 4
"""How many times as many entries the next slice may hold while no one else writes."""

SWEEP_EVERY: Final = 60.0
"""Seconds between two sweeps of an open store, unless `keyloft.open(sweep_every=…)` says otherwise."""

LONGEST_INT_DIGITS: Final = 64 * 1024
"""The longest int of a request: a longer one alone would be over the size of a value."""

UPDATE_ATTEMPTS: Final = 100
"""How often an update is tried while others change the same entry."""

UPDATE_OWN_WRITES: Final = 3
"""After how many calls of a function that writes the entry itself an update is given up."""

UPDATE_TURN_SECONDS: Final = 2.0
"""How long the function of an update may take before the next update of its key in this process begins."""

UPDATE_WAIT_SECONDS: Final = 5.0
"""How long an update waits for earlier ones of its key in this process; then it goes on beside them."""

TYPES_REMEMBERED: Final = 256
"""For how many types the tuple store keeps what reads and writes their values."""

FIRST_PAGE_ROWS: Final = 64
"""How many entries the first page of a scan holds; later pages grow up to SCAN_ROWS."""

PAGE_GROWTH: Final = 16
"""How many times as many entries as a page the next one may hold."""

LONG_INT_DIGITS: Final = 256
"""From this many digits on, an int of a request is kept as text: its conversion takes a time that grows with the square
of its digits, 70 ns per digit for 4,000 of them (`scripts/bench nats`, row «readers»)."""

GC_PAUSE_BYTES: Final = 4 * 1024
"""While a request of this size or more is read, Python collects no garbage: the collector would go through the lists
and dicts of the request again and again (`scripts/bench nats`, row «readers»)."""

SLICE_ITEMS: Final = 250
"""How many keys or entries of a long call are handled before other tasks run: a slice takes 1 to 3 ms."""

GIVE_WAY_SECONDS: Final = 0.0001
"""How long a thread pauses between two slices of a long call, so that another one wakes up in time to run."""

LONGEST_TIMER_SECONDS: Final = 30.0
"""A timer runs by the monotonic clock, and the wall clock can jump: it is compared again at least this often."""

UPDATE_PAUSES: Final = (0.002, 0.25)
"""The first and the longest pause after an update that met a conflict; they double, and a random part of each is used.
"""
