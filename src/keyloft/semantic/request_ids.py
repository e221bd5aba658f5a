"""Makes request ids that a workflow can make again, so that a repeated request is recognised."""

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
        workflow_id: What the workflow is called: up to 100 characters, none of which is a control character. A longer
            one is made shorter by `shortened`.
        at: The time for which the run was planned, with a time zone. Not the time of the attempt: a second attempt
            would have another one.

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
