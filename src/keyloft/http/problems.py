"""Errors as HTTP answers: problem+json (RFC 9457) with the codes of the product."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from keyloft import errors
from keyloft.core import key_text
from keyloft.http.replies import Headers, HttpReply
from keyloft.nats.errors import FAILED, HELD_BY_OTHERS

PROBLEM: Final = b"application/problem+json"

_NO_SUCH_PATH: Final = (
    "there is nothing at this path; /openapi.json lists all paths; a service without a token has no API"
)

_STATUSES: Final[tuple[tuple[type[errors.KeyloftError], int], ...]] = (
    (errors.InvalidJson, 400),
    (errors.ValueTooLarge, 413),
    (errors.ReplyTooLarge, 413),
    (errors.InvalidSubject, 404),
    (errors.InvalidInput, 422),
    (errors.NotACounter, 422),
    (errors.CounterOutOfRange, 422),
    (errors.NothingToRestore, 404),
    (errors.VersionConflict, 412),
    (errors.StaleFence, 412),
    (errors.HistoryGone, 410),
    (errors.WatchExpired, 410),
    (errors.NotPermitted, 403),
    (errors.QuotaExceeded, 429),
    (errors.Busy, 429),
    (errors.DatabaseError, 503),
    (errors.Closed, 503),
)
"""The status of each kind of error; the first row that fits counts. An error without a row is a defect: 500."""


class Problem(Exception):
    """The refusal of a request, with everything that its answer says."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: Headers = (), more: Mapping[str, Any] | None = None
    ) -> None:
        """Describe the answer.

        Args:
            status: The HTTP status.
            code: An error code of Keyloft.
            detail: What was wrong, and what to do.
            headers: Further headers of the answer.
            more: Further members of its body.
        """
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = headers
        self.more = more or {}

    def reply(self) -> HttpReply:
        """The answer."""
        body = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": str(self),
            "code": self.code,
            **self.more,
        }
        return HttpReply(msgspec.json.encode(body), self.status, PROBLEM, self.headers)


def status_of(kind: type[errors.KeyloftError]) -> int:
    """The status of a kind of error."""
    return next((status for each, status in _STATUSES if issubclass(kind, each)), 500)


def problem_of(error: errors.KeyloftError) -> Problem:
    """The answer to an error. Messages of a database or of a defect stay in the log: they may name hosts or files."""
    status = status_of(type(error))
    detail = str(error)
    headers: Headers = ((b"retry-after", b"1"),) if status in (429, 503) else ()
    if isinstance(error, errors.ValueTooLarge):
        # An argument of `keyloft.open`, which HTTP clients do not call.
        detail = detail.partition("; max_value_bytes")[0]
    elif isinstance(error, errors.CommitUnknown):
        detail = "the connection to the database was lost during this write: it may have been made; read to find out"
        headers = ()
    elif isinstance(error, errors.Closed):
        return Problem(status, errors.Unreachable.code, "the service is ending; nothing was written", headers=headers)
    elif isinstance(error, errors.DatabaseError) and not error.is_for_callers:
        detail = HELD_BY_OTHERS if isinstance(error, errors.Busy) else FAILED
    elif status == 500:
        detail = "the service failed unexpectedly; its log has the reason"
    return Problem(status, error.code, detail, headers=headers, more=_particulars(error))


def _particulars(error: errors.KeyloftError) -> dict[str, Any]:
    """Fields that a client needs to raise the same error."""
    if isinstance(error, (errors.NotACounter, errors.CounterOutOfRange)) and isinstance(error.key, tuple):
        return {"key": key_text.write(error.key)}
    if isinstance(error, errors.ValueTooLarge) and error.limit is not None:
        return {"size": error.size, "limit": error.limit}
    return {}


def is_unexpected(error: errors.KeyloftError) -> bool:
    """Whether the service logs an error: a failure of the database, or a defect."""
    return isinstance(error, errors.DatabaseError) or problem_of(error).status == 500


def absent(key: str) -> Problem:
    """The answer for a key without an entry."""
    return Problem(404, "NOT_FOUND", f"nothing is stored at {key}")


def no_such_path() -> Problem:
    return Problem(404, "NOT_FOUND", _NO_SUCH_PATH)
