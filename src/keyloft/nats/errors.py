"""Errors as they travel over NATS: the code and message of a reply, and the exception that a client raises for it."""

from collections.abc import Mapping
from typing import Any, Final

from keyloft import errors
from keyloft.nats.payloads import to_json

NEWER_PERMISSIONS: Final = "`keyloft nats-config --replace` writes a configuration that allows it"
"""The cure for what the permissions of an older configuration of NATS don't allow."""


class NoTlsError(ConnectionError):
    """The server does not offer TLS, which its address or a certificate asks for; nothing was sent to it."""

    def __str__(self) -> str:
        return "this server does not offer TLS, which its address (tls://…) or a certificate asks for; nothing was sent"


FAILED: Final = "the database failed, and this request was not carried out; the service's log has the reason"
HELD_BY_OTHERS: Final = (
    "other writers held the database for too long, and this request was not carried out: try again later"
)
"""The messages for callers if the database failed or was busy: its own may name hosts or files."""


_KINDS: Final = (
    errors.InvalidJson,
    errors.MissingField,
    errors.InvalidArgument,
    errors.ValueTooLarge,
    errors.InvalidPluginName,
    errors.InvalidSubject,
    errors.NotACounter,
    errors.QuotaExceeded,
    errors.ReplyTooLarge,
    errors.VersionConflict,
    errors.StaleFence,
    errors.NothingToRestore,
    errors.HistoryGone,
    errors.WatchExpired,
    errors.NotPermitted,
    errors.Busy,
    errors.DatabaseError,
    errors.KeyloftError,
)
WIRE_ERRORS: Final[Mapping[str, type[errors.KeyloftError]]] = {kind.code: kind for kind in _KINDS}
"""All codes that a service replies with, and what a client raises for them."""


def wire_code(error: BaseException) -> str:
    """The code under which an error travels: its own, or that of its nearest base class that has one on the wire."""
    for kind in type(error).__mro__:
        if (code := vars(kind).get("code")) in WIRE_ERRORS:
            return str(code)
    return errors.KeyloftError.code


def is_unexpected(error: Exception) -> bool:
    """Whether a service logs the traceback: of a bug, or of a database's failure that has no class of its own."""
    return not isinstance(error, errors.KeyloftError) or (
        type(error) is errors.DatabaseError and not error.is_for_callers
    )


def overloaded(message: str) -> errors.Busy:
    """The error of a request for which a service has no room now."""
    error = errors.Busy(message)
    error.is_for_callers = True
    return error


def refusal(error: BaseException, more: Mapping[str, Any] | None = None) -> bytes:
    """The reply for an error. Messages of a database or a bug stay in the service's log: they may name hosts or files.

    Args:
        error: Why the request is refused.
        more: Further fields of the reply.
    """
    code, message = wire_code(error), str(error)
    if isinstance(error, errors.CommitUnknown):
        message = "the connection to the database was lost during this write: it may have been made; read to find out"
    elif isinstance(error, errors.DatabaseError) and not error.is_for_callers:
        message = HELD_BY_OTHERS if code == errors.Busy.code else FAILED
    elif code == errors.KeyloftError.code:
        message = "the service failed unexpectedly; its log has the reason"
    return to_json({"success": False, "error_code": code, "message": message, **(more or {})})


def refused(reply: Mapping[str, Any]) -> errors.KeyloftError:
    """The exception for a reply that reports an error."""
    code, message = str(reply.get("error_code")), str(reply.get("message"))
    kind = WIRE_ERRORS.get(code, errors.KeyloftError)
    if kind is errors.HistoryGone:
        return errors.HistoryGone(message=message)
    if kind is errors.ValueTooLarge:
        return errors.ValueTooLarge(None, None, message)
    return errors.NotACounter(None, message=message) if kind is errors.NotACounter else kind(message)
