"""The admin page: limits and tuned numbers."""

from typing import Final

PAGE_ROWS: Final = 100
"""How many rows a table of the admin page has."""

PAGE_SCANNED_ROWS: Final = 2000
"""How many rows the admin page reads for one table, where a filter leaves some out."""

PAGE_FORM_BYTES: Final = 32 * 1024
"""The largest form that the admin page takes: the longest key fits, encoded."""

PAGE_VALUE_BYTES: Final = 256 * 1024
"""Of a longer value, the admin page shows so much."""

PAGE_SESSIONS: Final = 1000
"""How many sessions there can be; one more ends the session that was unused for the longest time."""

PAGE_SESSION_SECONDS: Final = 12 * 3600.0
"""How long a session of the admin page lasts."""

PAGE_IDLE_SECONDS: Final = 3600.0
"""Seconds without a request or an open page after which a session ends."""

PAGE_CODE_SECONDS: Final = 60.0
"""How long a code for one log-in is valid, as `keyloft open` asks for one."""

PAGE_CODES: Final = 100
"""How many such codes are valid at a time."""

PAGE_SAMPLE_SECONDS: Final = 5.0
"""How often the admin page reads the counters that its charts show."""

PAGE_SAMPLES: Final = 360
"""How many of these readings are kept: half an hour."""

PAGE_FEWEST_SAMPLES: Final = 24
"""The fewest readings that fill a chart: the first ones after a start leave room."""

PAGE_RATE_SAMPLES: Final = 12
"""Over how many of them a rate is taken: a minute."""

PAGE_LIVE_SECONDS: Final = 1.0
"""How often an open page is updated, at most."""

PAGE_LIVE_SHARE: Final = 0.05
"""How much of a core the updates of all open pages may take; with more of them, each is updated less often."""

PAGE_STREAMS: Final = 500
"""How many open pages are updated; the others are as they were when they were loaded."""
