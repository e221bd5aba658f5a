"""Services and clients on NATS: what they take in, how owners share them, and watches with leases and events."""

from typing import Final

MANY_REQUESTS: Final = 1000
"""How many requests one message may hold."""

SETS_READ_AT_ONCE_BYTES: Final = 16 * 1024
"""The largest message whose sets are read together. If one of them is no ordinary one, all are read again."""

OWNER_BYTES: Final = 8 * 1024 * 1024
"""How many bytes the unanswered requests of one plugin, or of one tenant, may have before the next is answered BUSY."""

INTAKE_BYTES: Final = 64 * 1024 * 1024
"""The same for all plugins together, and for all tenants; a quarter of it is for replies that are being made."""

ROUTES: Final = 4096
"""For how many subjects a service remembers their owner and operation."""

OWNERS: Final = 1024
"""This many plugins, or tenants, with something unanswered have a queue of their own; all further ones share one."""

DEADLINE_SECONDS: Final = 5.0
"""How long a request waits for the database before it is answered with an error."""

PATIENCE_SECONDS: Final = 10.0
"""How long a client waits for an answer: longer than the service waits for its database, so that it hears from it."""

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
"""Seconds without a heartbeat after which an instance counts as dead: others publish for the watches that it served."""

HEARTBEATS: Final = 3
"""How many heartbeats an instance stores within HEARTBEAT_SECONDS, while there are watches."""

LEASE_CHECK_SECONDS: Final = 1.0
"""Seconds between two checks, by an instance without watches, whether other instances have some."""

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
"""How many events a client holds for its user; it drops further ones, and asks for them again later."""

REMEMBERED_EVENTS: Final = 10_000
"""For how many keys a client remembers the last event, to leave out what arrives twice."""

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
"""How many bytes of a message must be missing for it to be refused, if at all, before they arrive."""

GATHERED_BYTES: Final = 256 * 1024
"""How many bytes the requests have that a client sends in one message."""

CALL_EXPIRY_SECONDS: Final = 0.01
"""A client looks for calls whose time is over no more often than this."""

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
"""Seconds after which a cancelled task of nats-py that has not ended is cancelled again."""

LATENCY_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""The upper bounds of a latency histogram's buckets, in seconds; the PRD's targets are among them."""

REQUEST_BYTES: Final = 192
"""How much memory a waiting request takes besides its message and its reply subject: it counts towards the bounds."""

LITTLE_UNANSWERED_BYTES: Final = 64 * 1024
"""An owner with no more unanswered than this may use the reserve that a service keeps for such owners."""

SMALL_REQUEST_BYTES: Final = 1024
"""Requests of up to this size are read so fast that the time of a turn is checked after every eighth alone."""

OWNER_MEMORY_SECONDS: Final = 1.0
"""While new names need queues, the number of an owner's visits is halved after each such time: owners with one visit at
most lose their queues."""

PAGE_REPLY_BYTES: Final = 4 * 1024 * 1024
"""How much is reserved for a list: what is read for it, and its reply."""

SHORT_REPLY_BYTES: Final = 512
"""A reply of up to this many bytes always fits into one message with the others of a `many`."""

WRITES_SUBMITTED_TOGETHER: Final = 64
"""How many small writes of a service are handed to the engine together."""

OWNER_REPLY_BYTES: Final = 4 * 1024 * 1024
"""With this many bytes of replies that are being made or sent, the next requests of their owner wait."""

OWNER_REQUESTS_UNDER_WAY: Final = 256
"""This many requests of one owner are carried out at a time: another owner's write waits for no more than these."""

OWNER_BYTES_UNDER_WAY: Final = 1024 * 1024
"""The same in bytes: a commit of 8 MiB takes half a second on a slow disk, and others' writes wait for it."""

TURN_SECONDS: Final = 0.001
"""How long the requests of one owner are read before the next owner has its turn."""

TURNS_SECONDS: Final = 0.004
"""Seconds of turns after which other tasks run: messages are read from the socket, replies are sent."""

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

LONGEST_DEBT_SECONDS: Final = 0.1
"""An owner whose turn took longer than it should misses turns, but for no more than this."""

FLOOD_PAUSE_SECONDS: Final = 0.001
"""How long a service whose connection has too much to send waits before it checks again."""

UNSENT_BYTES: Final = 512 * 1024
"""A service sends no further replies while its connection has more bytes to send than this."""

HELD_REPLY_BYTES: Final = 8 * 1024 * 1024
"""How many bytes of longer replies wait for the others of their `many`; those beyond are to be asked for alone."""
