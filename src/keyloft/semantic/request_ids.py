"""Makes request ids from a workflow's name and time, so that a second attempt has the same id and is recognised."""

from datetime import UTC, datetime
from typing import Final

from keyloft import limits
from keyloft.errors import InvalidArgument
from keyloft.semantic.rules import check_text, wrong

_TIME_CHARACTERS: Final = len("2026-11-16T03:00:00.000001Z/")


def request_id_of(workflow_id: str, at: datetime) -> str:
    """The request id of one run of a workflow, as in `2026-11-16T03:00:00Z/plan`.

    The same workflow and time always give the same id, in every process and time zone. An id is remembered per key, so
    one run may use it for several keys.

    Args:
        workflow_id: The workflow's name: up to 100 characters, without control characters. `shortened` makes a short
            name of a longer one.
        at: The time for which the run was planned, with a time zone; not the time of the attempt, which differs from
            attempt to attempt.

    Raises:
        InvalidArgument: The id is empty or too long, or has control characters; or the time has no time zone.
    """
    check_text(workflow_id, "workflow_id", limits.WRITER_CHARACTERS - _TIME_CHARACTERS)
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise wrong("at", "a datetime with a time zone, as datetime.now(UTC) has", at, datetime)
    try:
        moment = at.astimezone(UTC)
    except OverflowError:
        raise InvalidArgument("at: expected a time whose year in UTC is from 1 to 9999, got one beyond") from None
    return f"{moment.replace(tzinfo=None).isoformat()}Z/{workflow_id}"
