"""The process of the service: signals, health, its nats-server."""

from typing import Final

HEALTH_SECONDS: Final = 2.0
"""How long a health check waits for the database."""

MEMBERS_SECONDS: Final = 1.0
"""How long a starting service gathers the answers of other services; if there are none, NATS says so at once."""

STORE_ID_SECONDS: Final = 0.5
"""How long a service that says which store it serves waits for the database: it must answer within MEMBERS_SECONDS."""

NEW_FILE_CHECK_SECONDS: Final = 5.0
"""How long `keyloft serve` asks NATS whether it may serve there, before it makes a new database file."""

RECONNECT_SECONDS: Final = 1.0
"""The pause before `keyloft serve` tries again to connect to NATS, to serve, or to start its nats-server."""

OPENING_PAUSES: Final = (0.25, 5.0)
"""The first and the longest pause between two attempts of `keyloft serve` to open the database; they double."""

SAME_SIGNAL_SECONDS: Final = 0.5
"""Two signals within this time count as one: some supervisors signal a process and its group."""

NATS_READY_SECONDS: Final = 10.0
"""How long a nats-server that Keyloft starts may take until it listens."""

NATS_GRACE_SECONDS: Final = 5.0
"""How long it may take to end before it is killed."""

NATS_PASSWORD_BYTES: Final = 24
"""How many random bytes a generated password of NATS has."""

NATS_LOG_LINE_BYTES: Final = 1024 * 1024
"""The longest line of nats-server's log that is read."""
