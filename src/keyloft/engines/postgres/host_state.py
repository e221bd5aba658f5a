"""The state of a host, as it answers: primary or standby, its timeline, its store, and its position in the log."""

from collections.abc import Mapping, Sequence
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


def _state(standby_timeline: str, *replication: str) -> str:
    timeline = f"CASE WHEN pg_is_in_recovery() THEN {standby_timeline} ELSE {schema.TIMELINE} END"
    shown = ", ".join(replication) or _NO_REPLICATION
    return f"{_ROLE}, {timeline}, (pg_control_system()).system_identifier, {_WAITS_FOR}, {shown}"


_NO_REPLICATION: Final = "NULL, NULL::text[]"
STATE: Final = _state("NULL")
"""SQL: whether the server is a standby, whether it is set to read-only, the timeline of a primary, the id of its
cluster, which standbys its commits wait for, and two NULLs."""
STATE_OF_SEVERAL: Final = _state(_STANDBY_TIMELINE, _RECEIVER, _STREAMS)
"""The same, with the timeline of a standby, too, the name under which it receives, and the names of those to which the
server sends, each after its sync_state. To plan it takes a fresh session milliseconds."""
STATE_WITHOUT_TIMELINE: Final = f"{_ROLE}, NULL::bigint, NULL::bigint, {_WAITS_FOR}, {_NO_REPLICATION}"
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
    receives_as: str | None = None
    """The name under which a standby receives, and its primary knows it; None if that is not known."""
    streams: Sequence[str] = ()
    """To whom a primary sends: names, each after its sync_state."""
    last_commit: int = 0
    """The timeline of the last commit that it shows; 0 if that is not known."""
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
        timeline = f" on timeline {self.timeline}" if self.timeline else ""
        newer = f" with a commit of timeline {self.last_commit}" if self.last_commit > self.timeline > 0 else ""
        return f"{self.name} is {role}{timeline}{newer}"

    @property
    def may_serve(self) -> bool:
        """Whether clients that took it for the primary may still be answered."""
        return not self.is_standby if self.error is None else not is_down(self.error)

    @property
    def is_unused(self) -> bool:
        """Whether a primary shows no commit of its timeline yet."""
        return self.timeline > 0 and self.last_commit not in (0, self.timeline)

    def supersedes(self, other: "HostState") -> bool:
        """Whether this host follows a later timeline than another one.

        A standby may tell its own timeline late, and shows a commit there before. The counter's row alone proves
        nothing: in a cluster that was filled from a dump, its timeline is that of another cluster. But the first
        commit on a new timeline lets the version jump, so it is then higher, too.
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
