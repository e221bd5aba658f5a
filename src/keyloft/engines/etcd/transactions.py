"""Builds etcd's transactions, nested if there are more operations than one may hold, and reads their replies."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from keyloft.engines.etcd import messages
from keyloft.engines.etcd.messages import Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest

FLAT: Final = 120
"""How many operations a transaction without nested ones may hold."""
_TWO_LEVELS: Final = 64
_THREE_LEVELS: Final = 42
MOST_OPERATIONS: Final = _THREE_LEVELS**3
"""How many operations a transaction with nested ones may hold."""
OPERATION_BYTES: Final = 32
"""About how many bytes an operation takes in a request besides its key and its value."""


def read(key: bytes, end: bytes = b"", **options: Any) -> Any:
    return RequestOp(request_range=RangeRequest(key=key, range_end=end, **options))


def put(key: bytes, value: bytes) -> Any:
    return RequestOp(request_put=PutRequest(key=key, value=value))


def delete(key: bytes, end: bytes = b"") -> Any:
    return RequestOp(request_delete_range=DeleteRangeRequest(key=key, range_end=end))


def is_unchanged(key: bytes, mod_revision: int) -> Any:
    """The comparison that holds while a key is as it was at a revision; 0 if it did not exist."""
    return Compare(target=messages.COMPARE_MOD_REVISION, key=key, mod_revision=mod_revision)


def exists(key: bytes) -> Any:
    """The comparison that holds while there is such a key."""
    return Compare(result=messages.GREATER, target=messages.COMPARE_VERSION, key=key, version=0)


def transaction(compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any] = ()) -> Any:
    """A transaction of up to MOST_OPERATIONS operations in each branch.

    etcd adds up, along each path of nested transactions, the longer branch of each, and allows 128. So both branches
    are nested in the same way.
    """
    most = max(len(success), len(failure))
    return TxnRequest(compare=compare, success=_nested(success, most), failure=_nested(failure, most))


def lookups(keys: Sequence[bytes], revision: int = 0) -> Any:
    """A transaction that looks up each of up to 4,096 keys, at a revision or now.

    It is filled in place: operations that are made first and then copied into it take three times as long.
    """
    request = TxnRequest()
    if len(keys) <= FLAT:
        _add_lookups(request, keys, revision)
    else:
        for first in range(0, len(keys), _TWO_LEVELS):
            _add_lookups(request.success.add().request_txn, keys[first : first + _TWO_LEVELS], revision)
    return request


def _add_lookups(request: Any, keys: Sequence[bytes], revision: int) -> None:
    add = request.success.add
    for key in keys:
        lookup = add().request_range
        lookup.key = key
        if revision:
            lookup.revision = revision


def looked_up(response: Any) -> list[Any]:
    """What the reply to `lookups` has of each key: a list of one stored pair or none."""
    replies = response.responses
    if replies and replies[0].WhichOneof("choice") == "response_txn":
        replies = [reply for nested in replies for reply in nested.response_txn.responses]
    return [reply.response_range.kvs for reply in replies]


def _nested(operations: Sequence[Any], most: int) -> Sequence[Any]:
    if most <= FLAT:
        return operations
    if most <= _TWO_LEVELS**2:
        return _packed(operations, _TWO_LEVELS)
    return _packed(_packed(operations, _THREE_LEVELS), _THREE_LEVELS)


def _packed(operations: Sequence[Any], size: int) -> list[Any]:
    return [
        RequestOp(request_txn=TxnRequest(success=operations[first : first + size]))
        for first in range(0, len(operations), size)
    ]


def replies(response: Any) -> list[Any]:
    """The replies to the reads of a transaction, in their order."""
    return list(_flattened(response.responses))


def _flattened(responses: Sequence[Any]) -> Iterator[Any]:
    for response in responses:
        kind = response.WhichOneof("choice")
        if kind == "response_txn":
            yield from _flattened(response.response_txn.responses)
        elif kind == "response_range":
            yield response.response_range
