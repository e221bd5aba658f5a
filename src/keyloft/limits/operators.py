"""Operators' functions and commands, migrations and doctor: tuned numbers."""

from typing import Final

from keyloft.limits.server import HEALTH_SECONDS
from keyloft.limits.values import SCAN_BYTES

MAINTENANCE_ROWS: Final = 4096
"""The most entries that one slice of an import or a copy holds, which is one commit; SCAN_BYTES binds it, too."""

OPERATOR_SERVER_SECONDS: Final = 10.0
"""How long an operator's command waits for a database server that does not answer."""

MAINTENANCE_LOG_ROWS: Final = 64
"""How many rows of the change log an operator's command reads at a time: about 4 MiB at most."""

OPEN_PAGE_SECONDS: Final = 10.0
"""How long `keyloft open` waits for an answer of the service."""

INSPECTION_SECONDS: Final = 2.0
"""How long `keyloft doctor` waits for a file that another process has locked."""

MIGRATION_ATTEMPTS: Final = 5
"""How often a migration of PostgreSQL is tried while other processes migrate the same database."""

TRANSFER_SLICE_BYTES: Final = 4 * SCAN_BYTES
"""How many value bytes one commit of an import holds; MAINTENANCE_ROWS bounds it, too."""

ROWS_BETWEEN_PROGRESS: Final = 1000
"""How many rows a comparison reads between two reports of its progress."""

SOON_SECONDS: Final = 3600.0
"""Stats counts an entry as expiring soon if it expires within this many seconds; an option changes it."""

FINDINGS: Final = 100
"""How many problems a check shows, unless asked for another number."""

SHOWN_KEY_CHARACTERS: Final = 300
"""A longer key is cut in the messages of an import."""

COLOURED_DEPTH: Final = 100
"""A value that nests deeper is shown at a terminal without colours: Rich recurses, several calls for a level."""

CERTIFICATE_DAYS: Final = 21
"""`keyloft doctor` warns of a certificate that ends in fewer days."""

DOCTOR_CHECK_SECONDS: Final = 8.0
"""How long one check of `keyloft doctor` may take."""

DOCTOR_DATABASE_SECONDS: Final = 6.0
"""How long doctor waits for a database server."""

DOCTOR_NATS_SECONDS: Final = 40.0
"""How long all checks of NATS may take together."""

DOCTOR_ISOLATION_SECONDS: Final = 20.0
"""How long doctor tries whether NATS keeps users apart; there may be many users."""

DOCTOR_LOGINS_AT_ONCE: Final = 8
"""How many users doctor tries at a time."""

DOCTOR_ANSWER_SECONDS: Final = 3.0
"""How long doctor waits for one answer of NATS or of the service."""

DOCTOR_USER_INFO_SECONDS: Final = 1.0
"""How long doctor waits until a NATS server says as whom a client is logged in; servers before 2.10 don't."""

DOCTOR_PORT_SECONDS: Final = 2 * HEALTH_SECONDS + 1.0
"""How long doctor waits for a program that listens on a port to say what it is. A service waits HEALTH_SECONDS for
NATS, and as long for its database."""

DOCTOR_SKEW_SECONDS: Final = 1.0
"""A database clock that differs by more than this is a warning."""

DOCTOR_HARMFUL_SKEW_SECONDS: Final = 30.0
"""A database clock that differs by more than this is a problem."""

DOCTOR_FREE_BYTES: Final = 1024**3
"""Less free space than this, or than twice the database, is a warning."""

DOCTOR_LEAST_FREE_BYTES: Final = 16 * 1024**2
"""Less free space than this is a problem."""

DOCTOR_FREE_INODES: Final = 1000
"""Fewer free inodes than this are a warning."""
