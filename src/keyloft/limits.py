"""Every number of the product that a user can run into."""

from typing import Final

KEY_BYTES: Final = 2048
"""The longest key, counted in its byte encoding."""

KEY_INT_BYTES: Final = 255
"""The longest int in a key: its length is one byte of the encoding."""

VALUE_BYTES: Final = 1024 * 1024
"""The largest value of the tuple store, as stored; `keyloft.open(max_value_bytes=…)` changes it."""

LARGEST_VALUE_BYTES: Final = 512 * 1024 * 1024
"""How far `max_value_bytes` can be raised: SQLite holds a row of up to a billion bytes."""

VALUE_DEPTH: Final = 128
"""How deep lists and dicts may nest, so that what one caller stored another can read, with less of the stack left."""

U64_MAX: Final = 2**64 - 1

LONGEST_EXPIRY_SECONDS: Final = 1000 * 366 * 86_400
"""The longest `expire_in`: about a thousand years, which a `datetime` can still show."""

SCAN_ROWS: Final = 1000
"""The most entries that one page of a list or of a range delete holds; pages grow up to it from 64."""

SCAN_BYTES: Final = 1024 * 1024
"""A page aims at no more value bytes than this, going by what the page before it weighed."""

SWEEP_SLICE: Final = 48
"""How many expired entries one commit of the sweeper removes while others write: they wait for one slice at most."""

SWEEP_SLICE_ALONE: Final = 256
"""The same while nobody else writes; whoever comes then waits for one such slice."""

SWEEP_EVERY: Final = 60.0
"""Seconds between two sweeps of an open store, unless `keyloft.open(sweep_every=…)` says otherwise."""

GROUP_OPERATIONS: Final = 4096
"""A group commit takes no further batch once it holds this many checks and mutations."""

GROUP_BYTES: Final = 16 * 1024 * 1024
"""A group commit takes no further batch once its values weigh this much."""

BUSY_SECONDS: Final = 30.0
"""How long a write waits for other processes that hold the database before it fails with BUSY."""

WATCH_POLL_SECONDS: Final = 0.025
"""How often an open watch looks for commits of other processes, where nothing announces them."""
