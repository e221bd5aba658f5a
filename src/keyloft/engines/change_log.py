"""The rows of the change log: which keys a group of commits changed, and how. They hold no values.

A group leaves one row, or several parts if it changed many keys. A row counts versions from the version before its
group, so that it can be made before the database has given the versions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import msgspec
from msgspec import Struct

from keyloft import limits
from keyloft.core.maintenance import LogRow
from keyloft.core.records import Address, ChangeKind, LoggedChange, LogPosition, Space, appended_key
from keyloft.errors import ClockSetBack, HistoryGone, InvalidArgument, Undecodable


class KeptHistory(Struct, frozen=True, kw_only=True):
    """How long the change log reaches back; the newest row is always kept."""

    seconds: float = limits.HISTORY_SECONDS
    mib: float = limits.HISTORY_MIB

    @classmethod
    def of(cls, seconds: float, mib: float) -> "KeptHistory":
        """As callers give it.

        Raises:
            InvalidArgument: A number is out of range.
        """
        for argument, number in (("history_seconds", seconds), ("history_mib", mib)):
            if type(number) not in (int, float) or not 0 <= number < math.inf:
                unit = "seconds" if argument == "history_seconds" else "MiB"
                raise InvalidArgument(f"{argument}: expected a number of {unit}, 0 or more")
        return cls(seconds=seconds, mib=mib)

    @property
    def milliseconds(self) -> int:
        return round(1000 * self.seconds)

    @property
    def bytes(self) -> int:
        return round(1024 * 1024 * self.mib)

    def oldest_time(self, now: int) -> int:
        """The time before which rows may be removed."""
        return now - self.milliseconds

    def oldest_size(self, size: int) -> int:
        """The size, of a log of this size, up to which rows may be removed."""
        return size - self.bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_SPACES: Final = tuple(Space)
_NUMBERS: Final = {space: number for number, space in enumerate(_SPACES)}
_KINDS: Final = tuple(ChangeKind)
_CHANGES_PER_PART: Final = 1024
_CHECKSUM_BYTES: Final = 4
EMPTY: Final = _encode([])
"""The part of a group that changed nothing. All others end with their checksum."""


def pack(
    changes: Sequence[LoggedChange], base: int, appended: Mapping[Address, tuple[bytes, bytes]] | None = None
) -> list[bytes]:
    """The parts that log some changes, at least one.

    Args:
        changes: In the order of their versions.
        base: The version before the group.
        appended: For each key that contains its version, what stands before and after the version.
    """
    if len(changes) == 1 and not appended:  # a lone caller's
        [c] = changes
        return [pack_one(c.space, c.kind, c.key, c.version - base)]
    if len(changes) <= _CHANGES_PER_PART and not appended:  # most groups
        return _split([(c.version - base, _NUMBERS[c.space], c.kind, c.key) for c in changes]) if changes else [EMPTY]
    parts: list[bytes] = []
    for first in range(0, len(changes), _CHANGES_PER_PART):
        some = changes[first : first + _CHANGES_PER_PART]
        packed: list[tuple[Any, ...]] = [(c.version - base, _NUMBERS[c.space], c.kind, c.key) for c in some]
        if appended:
            for at, change in enumerate(some):
                if around := appended.get((change.space, change.key)):
                    packed[at] = (*packed[at][:3], *around)
        parts += _split(packed)
    return parts or [EMPTY]


def pack_one(space: Space, kind: ChangeKind, key: Any, offset: int = 1) -> bytes:
    """The part that logs one change; `offset` counts versions from the one before the group."""
    data = _encode([(offset, _NUMBERS[space], kind, key)])
    return data + crc32(data).to_bytes(_CHECKSUM_BYTES)  # as `_checked` does it, without the call


def _checked(data: bytes) -> bytes:
    return data + crc32(data).to_bytes(_CHECKSUM_BYTES)


def _split(packed: list[tuple[Any, ...]]) -> list[bytes]:
    data = _encode(packed)
    if len(data) <= limits.LOG_PART_BYTES or len(packed) == 1:
        return [_checked(data)]
    half = len(packed) // 2
    return _split(packed[:half]) + _split(packed[half:])


def rows_of(changes: Sequence[LoggedChange], base: int, version: int, now: int, size: int) -> list[LogRow]:
    """The rows that log the changes of a group.

    Args:
        changes: In the order of their versions.
        base: The version before the group.
        version: That of its last commit.
        now: Its time.
        size: Of the log before it, in bytes.
    """
    rows: list[LogRow] = []
    for part, packed in enumerate(pack(changes, base)):
        size += len(packed)
        rows.append(LogRow(version, part, base, now, size, packed))
    return rows


def unpack(base: int, at: int, part: bytes) -> list[LoggedChange]:
    """The changes of a part, whose group began after version `base` and was committed `at` that time.

    Raises:
        Undecodable: It does not match its checksum.
    """
    if part == EMPTY:
        return []
    data, checksum = part[:-_CHECKSUM_BYTES], part[-_CHECKSUM_BYTES:]
    if crc32(data).to_bytes(_CHECKSUM_BYTES) != checksum:
        raise Undecodable(f"the change log is damaged after version {base}: run `keyloft check`")
    return [_change(base, at, *columns) for columns in _decode(data)]


def _change(base: int, at: int, offset: int, space: int, kind: int, key: Any, *suffix: bytes) -> LoggedChange:
    version = base + offset
    if suffix:
        key = appended_key(_SPACES[space], key, version, *suffix)
    elif type(key) is list:
        key = tuple(key)
    return LoggedChange(version, _SPACES[space], key, _KINDS[kind], at)


def check_kept(after: LogPosition, oldest_base: int, latest: int) -> None:
    """Refuse a position whose row the log does not hold.

    Args:
        after: The position.
        oldest_base: The version before the group of the oldest row.
        latest: The version of the newest row.

    Raises:
        HistoryGone: The position is older or newer than what the log holds.
    """
    if not oldest_base < after.version <= latest:
        raise HistoryGone(after.version, oldest_base + 1, latest)


def is_of_group(version: int, base: int, end: int) -> bool:
    """Whether a group of commits that began after version `base` has given this version; `end` is its last one.

    When a copy lets the counter jump, the versions that are skipped were never given here. If a caller names one of
    them, it is a version of another database, and says nothing about what this one has logged.
    """
    # The version just before a jump is accepted: a watch names it while it reports the changes of the jump.
    return max(base, end - end % limits.VERSION_JUMP - 2) < version <= end


def commit_time(clock: int, last_commit: int, database: str) -> int:
    """The time of a commit, which is never before the last one: no expired entry comes back to life.

    Raises:
        ClockSetBack: The last commit is far ahead of the clock.
    """
    if clock >= last_commit:
        return clock
    ahead = (last_commit - clock) / 1000
    if ahead > limits.CLOCK_AHEAD_SECONDS:
        raise ClockSetBack(
            f"{database}: the time of the last commit is {ahead:.0f} s ahead of this machine's clock; nothing was "
            "written: set the clock right, or wait until it has caught up"
        )
    return last_commit
