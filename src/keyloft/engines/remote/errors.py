"""What went wrong in a request over HTTP: the error that a caller gets, and what may be repeated."""

import os
import ssl
from collections.abc import Callable
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from keyloft import errors
from keyloft.engines.remote.entries import key_of
from keyloft.errors import (
    Busy,
    CannotOpen,
    Closed,
    CommitUnknown,
    CounterOutOfRange,
    DatabaseError,
    HistoryGone,
    InvalidKey,
    KeyloftError,
    NotACounter,
    NotPermitted,
    Unreachable,
    ValueTooLarge,
)

T = TypeVar("T")

_KINDS: Final = (
    errors.InvalidJson,
    errors.MissingField,
    errors.InvalidArgument,
    errors.InvalidCursor,
    errors.InvalidKey,
    errors.KeyTooLarge,
    errors.InvalidValue,
    errors.QuotaExceeded,
    errors.ReplyTooLarge,
    errors.Undecodable,
    errors.VersionConflict,
    errors.NotPermitted,
    errors.DatabaseError,
    errors.CannotOpen,
    errors.ReadOnly,
    errors.DiskFull,
    errors.Unreachable,
    errors.CommitUnknown,
    errors.ClockSetBack,
    errors.Stalled,
    errors.Busy,
    errors.KeyloftError,
)
_BY_CODE: Final = {kind.code: kind for kind in _KINDS}
NOT_FOUND: Final = "NOT_FOUND"
"""The code where nothing is stored at a key, or nothing is at a path."""
_NO_TOKEN: Final = "pass one as keyloft.open(…, token=…), or set KEYLOFT_HTTP_TOKEN; `keyloft token new` makes one"
_URL_FORM: Final = "the URL of a store is https://host:port, or https://host:port/db/NAME; a proxy may add a path"

NotSent: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""The connection could not be made: the request was surely not carried out."""
NotAnswered: Final = (aiohttp.ClientError, TimeoutError, OSError)
"""All failures of a connection. Except for those of `NotSent`, the request may have been carried out."""


class HttpAnswer(Struct):
    """What a server has answered."""

    status: int
    body: bytes
    retry_after: str | None = None


class ApiProblem(Struct):
    """The body of a refusal, by RFC 9457."""

    code: str = ""
    detail: str = ""
    key: str | None = None
    size: int | None = None
    limit: int | None = None


def problem_of(reply: HttpAnswer) -> ApiProblem:
    """Why a request was refused; without a code if something other than Keyloft has answered."""
    try:
        return msgspec.json.decode(reply.body, type=ApiProblem)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ApiProblem()


def refusal(name: str, reply: HttpAnswer, *, has_token: bool = True) -> KeyloftError:
    """The error for a reply that refuses a request.

    Args:
        name: Of the service.
        reply: Its reply.
        has_token: Whether the request carried a token.
    """
    problem = problem_of(reply)
    if reply.status == 401:
        why = "does not accept this token: it is wrong, or was revoked" if has_token else "asks for a token"
        return NotPermitted(f"{name} {why}; {_NO_TOKEN}")
    if not problem.code:
        return unexpected(name, reply)
    if problem.code == NOT_FOUND:
        return CannotOpen(f"{name}: {problem.detail}; {_URL_FORM}")
    if reply.status == 421:
        return CannotOpen(f"{name}: {problem.detail}")
    if reply.status == 403:
        out_of_scope = NotPermitted(f"{name} refused this request: {problem.detail}")
        out_of_scope.is_out_of_scope = True
        return out_of_scope
    return error_of(problem)


def concerns_all(error: KeyloftError) -> bool:
    """Whether every other request would fail in the same way: the error does not depend on the keys."""
    if isinstance(error, NotPermitted):
        return not error.is_out_of_scope
    return isinstance(error, (Unreachable, Busy, Closed, CannotOpen))


def error_of(problem: ApiProblem) -> KeyloftError:
    """The error that a problem stands for."""
    code, message = problem.code, problem.detail
    if code == HistoryGone.code:
        return HistoryGone(message=message)
    if code == ValueTooLarge.code:
        return ValueTooLarge(problem.size, problem.limit, message)
    if code == NotACounter.code:
        return NotACounter(_key(problem), message=message)
    if code == CounterOutOfRange.code:
        return CounterOutOfRange(_key(problem))
    return _BY_CODE.get(code, KeyloftError)(message)


def unexpected(name: str, reply: HttpAnswer) -> DatabaseError:
    """The error for a reply that is not of Keyloft's API."""
    if 300 <= reply.status < 400:
        return CannotOpen(f"{name} sends its callers to another address (status {reply.status}): use that address")
    if reply.status >= 500:
        return Unreachable(
            f"{name} answers with status {reply.status}, and not as Keyloft does: is the service behind a proxy down?"
        )
    return CannotOpen(
        f"{name} answers with status {reply.status}, and not as Keyloft's HTTP API does: check host, port and path; "
        "`keyloft serve --http HOST:PORT` starts a service"
    )


def read(name: str, decode: Callable[[bytes], T], reply: HttpAnswer) -> T:
    """The content of a reply.

    Raises:
        CannotOpen: It is not a reply of Keyloft.
    """
    try:
        return decode(reply.body)
    except (msgspec.MsgspecError, ValueError):
        raise unexpected(name, reply) from None


def may_be_repeated(reply: HttpAnswer) -> bool:
    """Whether a server has refused a request for now, and has surely not carried it out."""
    return reply.status in (429, 503) and problem_of(reply).code in (Busy.code, Closed.code, Unreachable.code)


def is_gateway_failure(reply: HttpAnswer) -> bool:
    """Whether a proxy has answered that it got no answer from the service."""
    return reply.status in (502, 503, 504) and not problem_of(reply).code


def is_unknown(reply: HttpAnswer) -> bool:
    """Whether nothing shows if the request was carried out: the status of a failure, but not from Keyloft."""
    return reply.status >= 500 and not problem_of(reply).code


def never_helps(failure: BaseException) -> bool:
    """Whether another try would fail as well: a certificate or the name of the host is wrong."""
    wrong = aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError, aiohttp.InvalidURL, ssl.SSLError
    return isinstance(failure, wrong)


def explain(name: str, failure: BaseException) -> DatabaseError:
    """The error for a request that was not answered, and that has changed nothing."""
    if isinstance(failure, aiohttp.ClientConnectorCertificateError):
        why = getattr(failure.certificate_error, "verify_message", "") or "it is not trusted"
        return CannotOpen(
            f"{name}: its certificate is refused: {why}; name the authority's file in the URL as ?ca=FILE, and the "
            "host as the certificate does"
        )
    if isinstance(failure, (aiohttp.ClientSSLError, ssl.SSLError)):
        return CannotOpen(f"{name}: no TLS connection could be made; a service without TLS has an http:// URL")
    if isinstance(failure, aiohttp.ClientConnectorDNSError):
        return CannotOpen(f"{name}: there is no host of this name: check the URL, or this machine's name server")
    if isinstance(failure, aiohttp.InvalidURL):
        return CannotOpen(f"{name} is not a URL that can be called")
    hint = ""
    if name.startswith("http://") and not isinstance(failure, (*NotSent, TimeoutError)):
        # A server that expects TLS ends the connection at the first bytes of plain HTTP.
        hint = " A service with TLS has an https:// URL"
    return Unreachable(f"{name} does not answer ({reason(failure)}): is the service running, and the port right?{hint}")


def reason(failure: BaseException) -> str:
    """Why a connection failed, in a few words, without anything that was sent."""
    if isinstance(failure, aiohttp.ClientConnectorError):
        return os.strerror(failure.os_error.errno) if failure.os_error.errno else "no connection could be made"
    return "time is up" if isinstance(failure, TimeoutError) else "the connection was lost"


def commit_unknown(name: str, why: str) -> CommitUnknown:
    return CommitUnknown(
        f"{name}: {why} during a commit: all of the batch was written, or nothing; read the entries to find out"
    )


def _key(problem: ApiProblem) -> Any:
    """The encoded key that an error is about."""
    try:
        return key_of(problem.key or "")
    except InvalidKey:
        return b""
