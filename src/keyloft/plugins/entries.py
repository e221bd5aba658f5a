"""A plugin's entry with what is known of it besides its value, and the error of a set whose condition failed."""

from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from keyloft.core.records import Conflict, Record
from keyloft.core.schema import LAST_MOMENT
from keyloft.errors import VersionConflict


class PluginEntry(Struct, frozen=True, kw_only=True):
    """An entry of a plugin, or its absence.

    Example:
        score = await client.kv.get("score", default=0, meta=True)
        await client.kv.set("score", score.value + 1, expected_version=score.version)
    """

    value: Any
    """The stored value; the caller's default if there is no entry."""
    version: int
    """The version of the entry, which grows with each set; 0 if there is no entry."""
    ttl: int | None = None
    """The entry expires after this many seconds, rounded up; None if it never expires."""
    created_at: datetime | None = None
    """When the key was set for the first time since it was absent; None if there is no entry."""
    updated_at: datetime | None = None
    """When its value was last set; None if there is no entry."""

    @property
    def exists(self) -> bool:
        return self.version > 0


class CurrentValue(Struct, frozen=True):
    """What is stored at the key of a set whose condition failed."""

    value: Any
    version: int


class UsedStorage(Struct, frozen=True):
    """What a plugin stores, and how much it may store."""

    keys: int
    bytes: int
    """The bytes of its values, as stored."""
    most_keys: int | None = None
    most_bytes: int | None = None
    """The quota; None for any number."""


def entry_fields(record: Record, now: int) -> dict[str, Any]:
    """What is known of an entry besides its value.

    Args:
        record: The entry, read with its times.
        now: The time of the read.
    """
    left = None if record.expires_at is None else -(-(record.expires_at - now) // 1000)
    times = {"created_at": _moment(record.created_at), "updated_at": _moment(record.updated_at)}
    return {"version": record.version, "ttl": left, **times}


def condition_failed(conflict: Conflict, current: CurrentValue | None) -> VersionConflict:
    """The error for a set whose condition failed; `current` is what is stored."""
    [failed] = conflict.failed
    expected = "no entry" if failed.check.version is None else f"version {failed.check.version}"
    found = "no entry" if failed.current is None else f"version {failed.current.version}"
    return VersionConflict(
        f"key {failed.check.key[1]!r}: expected {expected}, got {found}; nothing was written: get it with its version, "
        "and set it again",
        current=current,
    )


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(min(max(milliseconds, 0), LAST_MOMENT) / 1000, UTC)
