"""When entries expire, as callers say it: after some time, or at a moment."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from keyloft import limits
from keyloft.core.schema import LAST_MOMENT
from keyloft.errors import InvalidArgument

UNSET: Final[Any] = object()
"""For `expire_in`, where None has a meaning."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def expiry(
    expire_in: float | timedelta | None, expire_at: datetime | None, never: str = "None"
) -> tuple[int | None, int | None]:
    """`expire_in` and `expire_at` as mutations have them, in milliseconds; at most one of them is not None.

    Args:
        expire_in: As the caller gave it.
        expire_at: As the caller gave it.
        never: How the caller writes that an entry does not expire, for the message.

    Raises:
        InvalidArgument: One of them is wrong, or both are given.
    """
    if expire_at is None:
        return (None, None) if expire_in is None else (expire_in_milliseconds(expire_in, never), None)
    if expire_in is not None:
        raise InvalidArgument("expire_in, expire_at: expected one of them, got both")
    return None, expire_at_milliseconds(expire_at)


def new_expiry(expire_in: float | timedelta | None, expire_at: datetime | None) -> tuple[int | None, int | None]:
    """The same for a touch, which must have one of them; `expire_in=None` stands for no expiry.

    Raises:
        InvalidArgument: One of them is wrong, or none or both are given.
    """
    if expire_in is UNSET and expire_at is None:
        raise InvalidArgument("expire_in: expected seconds, a timedelta or None, which is for an entry without expiry")
    return expiry(None if expire_in is UNSET else expire_in, expire_at)


def expire_in_milliseconds(expire_in: float | timedelta | None, never: str = "None") -> int | None:
    """The `expire_in` of a caller in whole milliseconds, rounded up.

    Raises:
        InvalidArgument: It is not positive, or longer than a thousand years.
    """
    if expire_in is None:
        return None
    if isinstance(expire_in, bool) or not isinstance(expire_in, (int, float, timedelta)):
        raise InvalidArgument(f"expire_in: expected seconds or a timedelta, got {type(expire_in).__name__}")
    seconds = expire_in.total_seconds() if isinstance(expire_in, timedelta) else expire_in
    if not 0 < seconds <= limits.LONGEST_EXPIRY_SECONDS:
        raise InvalidArgument(
            f"expire_in: expected more than 0 and at most {limits.LONGEST_EXPIRY_SECONDS:,} seconds; "
            f"{never} is for an entry that never expires"
        )
    # Rounded first: 0.1 s is not 100.00000000000001 ms.
    return max(1, -int(-round(seconds * 1000, 6) // 1))


def expire_at_milliseconds(expire_at: datetime) -> int:
    """The `expire_at` of a caller in milliseconds since 1970, rounded up; a moment in the past is allowed.

    Raises:
        InvalidArgument: The moment is not a datetime, or has no time zone.
    """
    if not isinstance(expire_at, datetime):
        raise InvalidArgument(f"expire_at: expected a datetime, got {type(expire_at).__name__}")
    if expire_at.utcoffset() is None:
        raise InvalidArgument(
            "expire_at: expected a datetime with a time zone, as in datetime.now(UTC) + timedelta(days=1)"
        )
    return min(LAST_MOMENT, max(0, -((_EPOCH - expire_at) // _MILLISECOND)))
