"""What went wrong in etcd, by gRPC's status: what may be repeated, and the error that a caller gets."""

from typing import Any, Final

import grpc  # type: ignore[import-untyped,unused-ignore]

from keyloft.errors import Busy, CannotOpen, CommitUnknown, DatabaseError, DiskFull, Unreachable

Failure: Final = grpc.aio.AioRpcError
_Code: Final = grpc.StatusCode

# After these, it is not known whether the request was carried out.
_LOST: Final = (
    _Code.UNAVAILABLE,
    _Code.DEADLINE_EXCEEDED,
    _Code.UNKNOWN,
    _Code.CANCELLED,
    _Code.INTERNAL,
    _Code.ABORTED,
)

# In gRPC's details, if the two sides don't agree on TLS. A member that refuses a client's certificate breaks off after
# the handshake: «Unwrap failed».
_TLS_FAILED: Final = ("handshake", "Handshake", "Verification Check failed", "Unwrap failed")
_CLOSED: Final = "Socket closed"
_NOT_CONNECTED: Final = "failed to connect to all addresses"


def details(error: Any) -> str:
    """What the server, or gRPC, says; it quotes neither keys nor values."""
    return str(error.details() or error.code().name).replace("etcdserver: ", "")


def is_lost(error: Any) -> bool:
    """Whether the request may have been carried out or not, and another member should be asked."""
    return error.code() in _LOST and not is_forbidden(error)


def was_sent(error: Any) -> bool:
    """Whether a request may have left this machine: gRPC says by its details alone that there was no connection."""
    return not (error.code() is _Code.UNAVAILABLE and str(error.details()).startswith(_NOT_CONNECTED))


def is_forbidden(error: Any) -> bool:
    """Whether the user lacks a permission; nothing was carried out. For operators' requests the code is UNKNOWN."""
    return error.code() is _Code.PERMISSION_DENIED or "permission denied" in details(error)


def is_logged_out(error: Any) -> bool:
    """Whether the server no longer knows this client's login; nothing was carried out."""
    said = details(error)
    return error.code() is _Code.UNAUTHENTICATED or "invalid auth token" in said or "auth store is old" in said


def is_compacted(error: Any) -> bool:
    """Whether the revision to be read is gone."""
    return error.code() is _Code.OUT_OF_RANGE and "compacted" in details(error)


def is_overloaded(error: Any) -> bool:
    """Whether the server has refused the request for now; nothing was carried out."""
    return error.code() is _Code.RESOURCE_EXHAUSTED and "too many requests" in details(error)


def may_succeed_later(error: Any) -> bool:
    return is_lost(error) or is_logged_out(error) or is_overloaded(error)


def of_another_cluster(endpoint: str) -> Any:
    """The failure of a request that a member of another cluster has answered."""
    nothing = grpc.aio.Metadata()
    return Failure(_Code.UNAVAILABLE, nothing, nothing, f"{endpoint} belongs to another cluster than the first member")


def unreachable(name: str, last: Any = None) -> Unreachable:
    """The error for a call that no member has answered in time."""
    said = "" if last is None else details(last)
    advice = "more than half of its members must run and reach each other"
    if any(sign in said for sign in _TLS_FAILED):
        advice = (
            "no TLS connection was made: check ca, cert, key and server_name in the URL, the names and dates of the "
            "certificates, and whether the members use TLS"
        )
    elif _CLOSED in said:
        advice += "; if they use TLS, the URL needs tls=true or ca=FILE"
    return Unreachable(f"{name} does not answer{f' ({said})' if said else ''}: {advice}")


def commit_unknown(name: str) -> CommitUnknown:
    return CommitUnknown(
        f"{name} was lost during a commit, and has not answered since: all of the batch was written, or nothing; "
        "read the entry to find out"
    )


def lost_races(name: str) -> Busy:
    return Busy(f"{name}: other processes were faster each time; nothing was written: try again")


def explain(name: str, error: Any) -> DatabaseError:
    """The error for a request that was not carried out."""
    code, said = error.code(), details(error)
    if code is _Code.RESOURCE_EXHAUSTED and "space" in said:
        return DiskFull(
            f"{name} has used up its quota, so it refuses writes: run `keyloft compact`, and raise the "
            "quota (--quota-backend-bytes) if that frees too little"
        )
    if "too large" in said or "larger than max" in said:
        return DatabaseError(
            f"{name} refuses a request of this size; nothing was written: start etcd with --max-request-bytes of "
            "1.5 MiB or more, or write less in one batch"
        )
    if code is _Code.DATA_LOSS or "corrupt" in said:
        return DatabaseError(
            f"{name} has raised the alarm CORRUPT: a member's data differs from that of the others; replace that "
            "member, then `etcdctl alarm disarm`"
        )
    if is_forbidden(error) or code is _Code.UNAUTHENTICATED or "user name is empty" in said:
        return CannotOpen(
            f"{name} refuses this user: it needs a role that may read and write all keys of the prefix, and the role "
            "root to compact"
        )
    if code is _Code.INVALID_ARGUMENT and "authentication failed" in said:
        return CannotOpen(f"{name} refuses this user or password")
    if may_succeed_later(error):
        return unreachable(name, error)
    return DatabaseError(f"{name} has refused a request: {said}")
