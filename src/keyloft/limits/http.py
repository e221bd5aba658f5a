"""The HTTP API and its client: limits and tuned numbers."""

from typing import Final

from keyloft.limits.values import VALUE_BYTES

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
"""A watch connects again if it has received nothing for this long, heartbeats included."""

HTTP_CLIENT_CLOSE_SECONDS: Final = 5.0
"""How long closing waits for requests under way."""

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

HTTP_ARRIVING_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of bodies that arrive at a time, by their declared sizes; beyond, further ones are refused."""

HTTP_GET_KEYS: Final = 1000
"""The most keys of one /get."""

HTTP_BATCH_OPERATIONS: Final = 10_000
"""The most checks and mutations of one /atomic."""

HTTP_REPLY_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of values in the answer to one /get, and in one event of a watch of keys."""

HTTP_LIST_ENTRIES: Final = 100
"""How many entries a list over HTTP has, unless `limit` says otherwise."""

HTTP_LONGEST_LIST: Final = 1000
"""The most entries of one list over HTTP; its cursor continues it."""

HTTP_PAGE_BYTES: Final = 1024 * 1024
"""A list over HTTP ends after the entry with which it has more bytes than this; its cursor continues it."""

HTTP_PAGE_ROWS: Final = 32
"""How many entries a list, or a get of several keys, reads at a time over HTTP: values of 1 MiB fit memory, too."""

HTTP_FIRST_ROWS: Final = 8
"""How many entries a list reads first: of 1 MiB each, most of them don't fit its page and are read for nothing."""

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

HTTP_WATCH_READ_BYTES: Final = 64 * 1024 * 1024
"""How many bytes watches read at a time, each counted by the most that it may read; further ones wait."""

HTTP_RANGE_READ_BYTES: Final = 4 * 1024 * 1024
"""What a watch of a prefix counts for: it reads about 1 MiB at a time, and an entry more."""

HTTP_LARGE_STATES: Final = 4
"""How many watches of keys have more than HTTP_KEPT_EVENT_BYTES in memory at a time, up to HTTP_REPLY_BYTES each: these
are sent in parts, while their clients read."""

HTTP_WAITING_STATES: Final = 128
"""How many further ones may wait for that, with nothing in memory; a watch that would be one more is refused."""

HTTP_READ_CHECK_SECONDS: Final = 0.25
"""How often it is checked, while a listener reads a large event, whether others wait for it."""

HTTP_LISTENER_BYTES: Final = 256 * 1024
"""A listener that has more bytes of events unread is cut off; it can come back for them."""

HTTP_DISCARDED_BYTES: Final = 16 * 1024 * 1024
"""So much of a body that was refused is read and dropped, so that the client reads the refusal; then it is cut off."""

HTTP_PIPELINED: Final = 64
"""The most requests of a connection that wait for the one before them."""

HTTP_REQUEST_SECONDS: Final = 30.0
"""How long a client may take to send a request, from its first byte to its last."""

HTTP_HANDSHAKE_SECONDS: Final = 5.0
"""How long a client may take for the handshake of TLS."""

HTTP_IDLE_SECONDS: Final = 75.0
"""How long a connection may be idle."""

HTTP_ANSWER_SECONDS: Final = 30.0
"""How long a client may take to read a response."""

HTTP_UNSENT_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of complete responses that clients have not read; beyond, the oldest such client is cut off."""

HTTP_UNSENT_SECONDS: Final = 2.0
"""How long a client may read a response, however much others have not read: many may ask for large ones at once."""

HTTP_FULL_BYTES: Final = 64 * 1024 * 1024
"""While clients have not read more bytes than this, no further large response is made; those who ask for one wait."""

HTTP_FULL_PAUSE_SECONDS: Final = 0.02
"""The pause between two checks whether they have read enough meanwhile."""

HTTP_STILL_CHECKS: Final = 25
"""A client that has read nothing in this many checks, half a second, is cut off while others wait. Not by time: while
the event loop is busy, nothing is sent."""

HTTP_LARGE_VALUE_BYTES: Final = 64 * 1024
"""From this size on, the answer with a value is a large one."""

HTTP_GETS: Final = 4
"""How many gets of several keys read at a time: each may have 32 MiB of values. One large answer is made at a time."""

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

HTTP_KNOWN_HOSTS: Final = 256
"""For how many Host headers it is remembered that they are allowed."""

HTTP_TOKEN_CHARACTERS: Final = 16
"""The shortest token that a person may choose."""

HTTP_TOKENS_SECONDS: Final = 1.0
"""The least pause between two checks whether the file of tokens has changed."""

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
