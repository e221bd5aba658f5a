"""Limits of the plugins' storage, and how its usage is counted."""

from typing import Final

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

CLEANUP_SECONDS: Final = 300.0
"""Seconds between two sweeps of a plugin service, unless configured otherwise."""

SLOW_SECONDS: Final = 0.1
"""A request that takes longer is logged as slow."""

PLUGIN_LABELS: Final = 1000
"""How many plugins have metrics of their own; the rest are counted together as `other`."""

LOGGED_OPERATIONS_PER_SECOND: Final = 1000
"""Up to this many operations a second, each has a DEBUG line."""

LOGGED_SAMPLE: Final = 100
"""Above that, one operation in this number is logged."""

VALUE_REPLY_BYTES: Final = 64 * 1024 + 512
"""How much is reserved for a reply with one value; for a shorter reply, nothing."""

SLOW_CLEANUP_SECONDS: Final = 1.0
"""A removal of expired entries that takes longer is logged as a warning."""

USAGE_ROWS: Final = 1000
"""This many rows of plugins are counted in one read: 1.6 ms with a million of them on SQLite, 10 ms on PostgreSQL."""

USAGE_FEWEST_ROWS: Final = 125
"""This many if they take longer than USAGE_SLICE_SECONDS."""

USAGE_SLICE_SECONDS: Final = 0.004
"""After a read that took longer, the next one counts half as many rows."""

USAGE_EVERY_SECONDS: Final = 60.0
"""Seconds from the start of one round of counting all plugins' keys to the next; more if a round takes longer."""

USAGE_PAUSES: Final = (3, 19)
"""After each slice of a round, counting pauses for this many times as long as the slice took, at least and at most: a
round of a million keys on SQLite takes 2 s of reading, spread over 40 s."""

USAGE_FRESH_SECONDS: Final = 1.0
"""A write over its plugin's quota is refused by a count no older than this; else the plugin is counted again."""

USAGE_RECOUNT_PAUSE: Final = 20
"""A count may also be this many times as old as it took: a full plugin with many keys is not counted all the time."""

USAGE_WANTED_SECONDS: Final = 300.0
"""So long after the last scrape, or the last write under a quota, counting ends."""

USAGE_RETRY_SECONDS: Final = 5.0
"""Seconds until counting begins again after a failure."""

USAGE_PATIENCE_SECONDS: Final = 0.1
"""How long a scrape waits for the first round."""

USAGE_PLUGINS: Final = 10_000
"""For how many plugins a service remembers what each stores; the others are added up."""

PLUGIN_REQUESTS_AT_ONCE: Final = 200
"""How many requests `keyloft plugin import-json` has under way."""
