"""What a host tells of itself: whether it is primary or standby, its timeline, its store, and how far it is."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft.core import schema
from keyloft.errors import DatabaseError

Host: TypeAlias = Mapping[str, Any]
"""Host and port, as asyncpg takes them; empty where the DSN has them."""

# The control file of a standby lags by minutes. Only members of pg_read_all_stats see what its walreceiver receives.
_STANDBY_TIMELINE: Final = (
    "greatest((SELECT timeline_id FROM pg_control_checkpoint()), "
    "(SELECT min_recovery_end_timeline FROM pg_control_recovery()), "
    "(SELECT max(received_tli) FROM pg_stat_wal_receiver))::bigint"
)
_ROLE: Final = "pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool"
_WAITS_FOR: Final = "current_setting('synchronous_standby_names', true)"


def _state(standby_timeline: str) -> str:
    timeline = f"CASE WHEN pg_is_in_recovery() THEN {standby_timeline} ELSE {schema.TIMELINE} END"
    return f"{_ROLE}, {timeline}, (pg_control_system()).system_identifier, {_WAITS_FOR}"


STATE: Final = _state("NULL")
"""SQL: whether the server is a standby, whether it is set to read-only, the timeline of a primary, the id of its
cluster, and which standbys its commits wait for."""
STATE_OF_SEVERAL: Final = _state(_STANDBY_TIMELINE)
"""The same, with the timeline of a standby, too. To plan it takes a fresh session milliseconds."""
STATE_WITHOUT_TIMELINE: Final = f"{_ROLE}, NULL::bigint, NULL::bigint, {_WAITS_FOR}"
"""The same for a server that does not tell, such as some hosted ones."""
OF_STORE: Final = (
    f"(SELECT store_id FROM {schema.STORE_TABLE}), "
    f"(SELECT ARRAY[version, timeline] FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1)"
)
"""SQL: the id of the store, the version counter, and the timeline of the last commit."""
HAS_STORE: Final = (
    "SELECT count(*) = 2 FROM pg_attribute WHERE attrelid IN "
    f"(to_regclass('{schema.STORE_TABLE}'), to_regclass('{schema.VERSION_COUNTER_TABLE}')) "
    "AND attname IN ('store_id', 'timeline') AND has_table_privilege(attrelid, 'SELECT')"
)
"""Selects whether these can be read: the tables may be yet to be made, migrated or granted."""


class HostState(Struct, frozen=True, kw_only=True):
    """What a host has answered."""

    name: str
    error: DatabaseError | None = None
    """Why it could not be asked; then nothing else is known of it."""
    is_standby: bool = False
    is_writable: bool = False
    timeline: int = 0
    """0 if it is not known."""
    cluster: int | None = None
    """The same for a primary and its standbys, and for no other server."""
    store: str | None = None
    """The id of the store that it holds; None as long as that is not known."""
    synchronous: str | None = None
    """Which standbys its commits wait for."""
    version: int | None = None
    """What its version counter showed."""
    asked_at: float = 0.0
    """When it was asked, by the event loop's time."""

    @property
    def role(self) -> str:
        if self.error is not None:
            return "unreachable"
        return "standby" if self.is_standby else "primary" if self.is_writable else "read-only"

    @property
    def described(self) -> str:
        """For messages."""
        if self.error is not None:
            return str(self.error)
        role = self.role if self.role == "read-only" else f"a {self.role}"
        return f"{self.name} is {role}{f' on timeline {self.timeline}' if self.timeline else ''}"


def name_of(host: Host) -> str:
    """A host for messages."""
    return f"{host['host']}:{host['port']}" if "port" in host else str(host.get("host", ""))
