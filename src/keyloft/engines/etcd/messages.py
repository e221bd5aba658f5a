"""The messages and methods of etcd's API that this engine uses, as protobuf classes made when this module is imported.

They are in a descriptor pool of their own: another etcd client in the same process has messages of the same names, and
code that a protobuf compiler made would fit few versions of the protobuf library. Enums are written as the int32 that
they are on the wire.
"""

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped,unused-ignore]

_FIELDS: Final = {
    "ResponseHeader": "cluster_id 1 uint64, member_id 2 uint64, revision 3 int64, raft_term 4 uint64",
    "KeyValue": "key 1 bytes, create_revision 2 int64, mod_revision 3 int64, version 4 int64, value 5 bytes",
    "RangeRequest": "key 1 bytes, range_end 2 bytes, limit 3 int64, revision 4 int64, sort_order 5 int32, "
    "serializable 7 bool, keys_only 8 bool, count_only 9 bool, min_mod_revision 10 int64",
    "RangeResponse": "header 1 ResponseHeader, kvs 2 KeyValue*, more 3 bool, count 4 int64",
    "PutRequest": "key 1 bytes, value 2 bytes",
    "PutResponse": "header 1 ResponseHeader",
    "DeleteRangeRequest": "key 1 bytes, range_end 2 bytes",
    "DeleteRangeResponse": "header 1 ResponseHeader, deleted 2 int64",
    "RequestOp": "request_range 1 RangeRequest?, request_put 2 PutRequest?, "
    "request_delete_range 3 DeleteRangeRequest?, request_txn 4 TxnRequest?",
    "ResponseOp": "response_range 1 RangeResponse?, response_put 2 PutResponse?, "
    "response_delete_range 3 DeleteRangeResponse?, response_txn 4 TxnResponse?",
    "Compare": "result 1 int32, target 2 int32, key 3 bytes, version 4 int64?, mod_revision 6 int64?",
    "TxnRequest": "compare 1 Compare*, success 2 RequestOp*, failure 3 RequestOp*",
    "TxnResponse": "header 1 ResponseHeader, succeeded 2 bool, responses 3 ResponseOp*",
    "CompactionRequest": "revision 1 int64, physical 2 bool",
    "CompactionResponse": "header 1 ResponseHeader",
    "WatchCreateRequest": "key 1 bytes, range_end 2 bytes, start_revision 3 int64, "
    "progress_notify 4 bool, filters 5 int32*",
    "WatchRequest": "create_request 1 WatchCreateRequest?",
    "Event": "type 1 int32, kv 2 KeyValue",
    "WatchResponse": "header 1 ResponseHeader, watch_id 2 int64, created 3 bool, canceled 4 bool, "
    "compact_revision 5 int64, cancel_reason 6 string, events 11 Event*",
    "AuthenticateRequest": "name 1 string, password 2 string",
    "AuthenticateResponse": "header 1 ResponseHeader, token 2 string",
    "StatusRequest": "",
    "StatusResponse": "header 1 ResponseHeader, version 2 string, db_size 3 int64, leader 4 uint64, "
    "errors 8 string*, db_size_in_use 9 int64, is_learner 10 bool, db_size_quota 12 int64",
    "AlarmRequest": "action 1 int32, member_id 2 uint64, alarm 3 int32",
    "AlarmMember": "member_id 1 uint64, alarm 2 int32",
    "AlarmResponse": "header 1 ResponseHeader, alarms 2 AlarmMember*",
    "Member": "id 1 uint64, name 2 string, client_urls 4 string*, is_learner 5 bool",
    "MemberListRequest": "",
    "MemberListResponse": "header 1 ResponseHeader, members 2 Member*",
    "DefragmentRequest": "",
    "DefragmentResponse": "header 1 ResponseHeader",
}
"""Of each message: the name, number and type of its fields. A star marks a repeated field, a question mark one of which
a message holds one at most."""

_PACKAGE: Final = "keyloft.etcd"


def _file() -> Any:
    """The description of all messages, as a protobuf compiler would make it."""
    file = descriptor_pb2.FileDescriptorProto(name="keyloft/etcd.proto", package=_PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _FIELDS.items():
        description = file.message_type.add(name=message)
        for field in filter(None, fields.split(", ")):
            name, number, kind = field.split()
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            added = description.field.add(name=name, number=int(number), label=label)
            if kind.endswith("?"):
                if not description.oneof_decl:
                    description.oneof_decl.add(name="choice")
                added.oneof_index = 0
            kind = kind.rstrip("*?")
            if kind in _FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


KeyValue: Final = _message("KeyValue")
RangeRequest: Final = _message("RangeRequest")
PutRequest: Final = _message("PutRequest")
DeleteRangeRequest: Final = _message("DeleteRangeRequest")
RequestOp: Final = _message("RequestOp")
Compare: Final = _message("Compare")
TxnRequest: Final = _message("TxnRequest")
CompactionRequest: Final = _message("CompactionRequest")
WatchCreateRequest: Final = _message("WatchCreateRequest")
WatchRequest: Final = _message("WatchRequest")
AuthenticateRequest: Final = _message("AuthenticateRequest")
StatusRequest: Final = _message("StatusRequest")
AlarmRequest: Final = _message("AlarmRequest")
MemberListRequest: Final = _message("MemberListRequest")
DefragmentRequest: Final = _message("DefragmentRequest")

METHODS: Final = {
    "Range": ("KV", RangeRequest, _message("RangeResponse")),
    "Txn": ("KV", TxnRequest, _message("TxnResponse")),
    "Compact": ("KV", CompactionRequest, _message("CompactionResponse")),
    "Watch": ("Watch", WatchRequest, _message("WatchResponse")),
    "Authenticate": ("Auth", AuthenticateRequest, _message("AuthenticateResponse")),
    "Status": ("Maintenance", StatusRequest, _message("StatusResponse")),
    "Alarm": ("Maintenance", AlarmRequest, _message("AlarmResponse")),
    "MemberList": ("Cluster", MemberListRequest, _message("MemberListResponse")),
    "Defragment": ("Maintenance", DefragmentRequest, _message("DefragmentResponse")),
}
"""The service, the request and the response of each method."""

DESCENDING: Final = 2
"""A `sort_order` of a RangeRequest."""
GREATER: Final = 1
"""A `result` of a Compare."""
COMPARE_VERSION: Final = 0
COMPARE_MOD_REVISION: Final = 2
NO_DELETE: Final = 1
"""A filter of a WatchCreateRequest."""
DEACTIVATE: Final = 2
"""An `action` of an AlarmRequest."""
NOSPACE: Final = 1
CORRUPT: Final = 2
"""Kinds of alarms."""


def path(method: str) -> str:
    """The address of a method."""
    return f"/etcdserverpb.{METHODS[method][0]}/{method}"
