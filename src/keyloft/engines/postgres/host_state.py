"""The state of a host, as it answers: primary or standby, its timeline, its store, and its position in the log."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft.core import schema
from keyloft.engines.postgres.errors import is_down
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
# A standby and its primary know each other by this name. Both views are empty to users who may not see statistics.
_RECEIVER: Final = (
    "(SELECT coalesce(substring(conninfo from '(?:^| )application_name=([^ ]+)'), "
    "nullif(current_setting('cluster_name'), ''), 'walreceiver') FROM pg_stat_wal_receiver "
    "WHERE conninfo IS NOT NULL)"
)
_STREAMS: Final = (
    "(SELECT array_agg(sync_state || ' ' || application_name) FROM pg_stat_replication WHERE state = 'streaming')"
)
# Distinguishes the servers of a cluster, whatever the names and proxies by which they are reached.
_STARTED: Final = "pg_postmaster_start_time()"


def _state(standby_timeline: str, *replication: str) -> str:
    timeline = f"CASE WHEN pg_is_in_recovery() THEN {standby_timeline} ELSE {schema.TIMELINE} END"
    shown = ", ".join(replication) or _NO_REPLICATION
    return f"{_ROLE}, {timeline}, (pg_control_system()).system_identifier, {_WAITS_FOR}, {shown}"


_NO_REPLICATION: Final = "NULL, NULL::text[], NULL::timestamptz"
STATE: Final = _state("NULL")
"""SQL: whether the server is a standby, whether it is set to read-only, the timeline of a primary, the id of its
cluster, which standbys its commits wait for, and three NULLs."""
STATE_OF_SEVERAL: Final = _state(_STANDBY_TIMELINE, _RECEIVER, _STREAMS, _STARTED)
"""STATE, and also the timeline of a standby, the name under which it receives, the names of the standbys to which
the server sends, each after its sync_state, and when the server was started. Planning it takes milliseconds in a fresh
session."""
STATE_WITHOUT_TIMELINE: Final = f"{_ROLE}, NULL::bigint, NULL::bigint, {_WAITS_FOR}, {_NO_REPLICATION}"
"""STATE for a server that does not report its timeline, such as some hosted ones."""
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
"""Selects whether OF_STORE can be read: its tables may not yet be made, migrated or granted."""


class HostState(Struct, frozen=True, kw_only=True):
    """What a host has answered."""

    name: str
    error: DatabaseError | None = None
    """Why the host could not be asked; then nothing else is known of it."""
    is_standby: bool = False
    is_writable: bool = False
    timeline: int = 0
    """0 if the timeline is not known."""
    cluster: int | None = None
    """The id that a primary and its standbys share, and no other server has."""
    store: str | None = None
    """The id of the store that the host holds; None as long as that is not known."""
    synchronous: str | None = None
    """Which standbys the commits of a primary wait for."""
    receives_as: str | None = None
    """The name under which a standby receives, and by which its primary knows it; None if that is not known."""
    streams: Sequence[str] = ()
    """The standbys to which a primary sends: names, each after its sync_state."""
    started: datetime | None = None
    """When the server was started; None if that is not known."""
    last_commit: int = 0
    """The timeline of the last commit that the host shows; 0 if that is not known."""
    version: int | None = None
    """The version counter that the host showed."""
    asked_at: float = 0.0
    """When the host was asked, by the event loop's time."""

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
        timeline = f" on timeline {self.timeline}" if self.timeline else ""
        newer = f" with a commit of timeline {self.last_commit}" if self.last_commit > self.timeline > 0 else ""
        return f"{self.name} is {role}{timeline}{newer}"

    @property
    def may_serve(self) -> bool:
        """Whether the host may still answer clients that take it for the primary."""
        return not self.is_standby if self.error is None else not is_down(self.error)

    @property
    def is_unused(self) -> bool:
        """Whether a primary shows no commit of its timeline yet."""
        return self.timeline > 0 and self.last_commit not in (0, self.timeline)

    def is_same_server(self, other: "HostState") -> bool:
        """Whether two names, or two proxies, lead to one server."""
        return self.started is not None and (self.cluster, self.started) == (other.cluster, other.started)

    def supersedes(self, other: "HostState") -> bool:
        """Whether this host follows a later timeline than another one.

        A standby may report its own timeline late, after it shows a commit of that timeline. The timeline in the row of
        the counter alone proves nothing: in a cluster that was filled from a dump, it is that of another cluster. But
        the first commit on a new timeline lets the version jump, so the version must be higher, too.
        """
        if self.timeline > other.timeline:
            return True
        is_later = self.last_commit > other.timeline > 0
        return is_later and (self.version or 0) > (other.version or 0)

    def sync_state_of(self, standby: "HostState") -> str | None:
        """What a standby is to this primary: sync, quorum, potential or async; None if that is not known."""
        found = {
            state for state, _, name in [each.partition(" ") for each in self.streams] if name == standby.receives_as
        }
        return found.pop() if len(found) == 1 else None


def name_of(host: Host) -> str:
    """A host for messages."""
    return f"{host['host']}:{host['port']}" if "port" in host else str(host.get("host", ""))
