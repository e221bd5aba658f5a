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
