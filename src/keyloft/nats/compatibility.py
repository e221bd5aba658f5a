"""Checks that the installed nats-py has the parts that `messages.py`, `subscribing.py` and `transport.py` rely on."""

import importlib.metadata
import inspect
from collections.abc import Mapping, Sequence
from typing import Final

from nats.aio.client import Client as Nats
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from keyloft.errors import IncompatibleLibrary

NATS_PY: Final = ">=2.16,<2.17"
"""The versions of nats-py whose private parts are known to fit; `pyproject.toml` has the same bounds."""


def incompatible(changed: str) -> IncompatibleLibrary:
    """The error that says what has changed in nats-py, and which versions work."""
    return IncompatibleLibrary(
        f"nats-py {importlib.metadata.version('nats-py')} can't be used, its internals have changed: {changed}. "
        f'Keyloft works with nats-py {NATS_PY}: pip install "nats-py[nkeys]{NATS_PY}"'
    )


try:
    from nats.protocol.parser import Parser
except ImportError as error:
    raise incompatible(str(error)) from error


_ABSENT: Final = "absent"
_CLIENT_METHODS: Final = {
    "_process_info": "async (info, initial_connection=False)",
    "_process_msg": "async (sid, subject, reply, data, headers)",
    "_read_loop": "async ()",
    "_send_ping": "async (future=None)",
    "_process_pong": "async ()",
    "_send_command": "async (cmd, priority=False)",
    "_flush_pending": "async (force_flush=False)",
    "force_reconnect": "async ()",
}
_LIMITS_OF_SUBSCRIPTION: Final = "pending_msgs_limit=524288, pending_bytes_limit=134217728"
_ADDED: Final = {
    Nats: (
        *(
            "_handlers",
            "_is_tls_wanted",
            "_receive_at_once",
            "_refusing",
            "_socket",
            "handle",
            "note_refusal",
            "read_bytes",
            "refused",
        ),
        *("parser", "refused_events", "sending"),
    ),
    TcpTransport: ("_receiver", "receive_for"),
    Parser: (
        *("_awaited", "_enough", "_large", "_receive_rest", "_rest", "_space", "_wait_for", "fill", "leave_out"),
        *("missing", "take", "unwanted"),
    ),
}
PARTS: Final[Sequence[tuple[type, Mapping[str, str]]]] = (
    (Nats, _CLIENT_METHODS),
    (Nats, {"subscribe": f"async (subject, queue='', cb=None, future=None, max_msgs=0, {_LIMITS_OF_SUBSCRIPTION})"}),
    (Nats, {"_current_server": "NoneType", "options": "dict"}),
    (Nats, {"_ps": "Parser", "_subs": "dict", "_pongs": "list", "_transport": "NoneType"}),
    (Nats, {"_pending": "list", "_pending_data_size": "int"}),
    (Nats, {"is_connected": "bool", "is_draining_pubs": "bool", "max_payload": "int", "pending_data_size": "int"}),
    (TcpTransport, {"connect": "async (uri, buffer_size, connect_timeout)", "read": "async (buffer_size)"}),
    (TcpTransport, {"at_eof": "()", "write": "(payload)", "_io_reader": "NoneType", "_io_writer": "NoneType"}),
    (TcpTransport, {"drain": "async ()", "writelines": "(payload)"}),
    (TcpTransport, {"connect_tls": "async (uri, ssl_context, buffer_size, connect_timeout)"}),
    (Parser, {"parse": "async (data=b'')", "reset": "()", "nc": "Client", "buf": "bytearray", "state": "int"}),
    (Subscription, {"_id": "int", "pending_msgs": "int", "pending_bytes": "int"}),
    *[(owner, dict.fromkeys(names, _ABSENT)) for owner, names in _ADDED.items()],
)
"""What these modules use of nats-py: methods with their parameters, attributes with their types, and names it adds to
nats-py's classes, which must not have them. A test compares this table with its code."""


def check_nats_py() -> None:
    """Make sure that nats-py has every part that Keyloft uses, in the shape that it expects.

    Raises:
        IncompatibleLibrary: It does not; the message names what has changed, and the versions that work.
    """
    try:
        client = Nats()
        owners = {
            Nats: client,
            Parser: Parser(client),
            Subscription: Subscription(client),
            TcpTransport: TcpTransport(),  # type: ignore[no-untyped-call]
        }
    except Exception as error:
        raise incompatible(f"Client(), Parser(client) or Subscription(client) fails: {error}") from error
    changed = [
        f"{owner.__name__}.{name} is {found}, expected {expected}"
        for owner, parts in PARTS
        for name, expected in parts.items()
        if (found := _shape(owners[owner], name)) != expected
    ]
    if changed:
        raise incompatible("; ".join(changed))


def _shape(owner: object, name: str) -> str:
    if not inspect.isroutine(part := getattr(owner, name, _ABSENT)):
        return _ABSENT if part is _ABSENT else type(part).__name__
    parameters = [one.replace(annotation=one.empty) for one in inspect.signature(part).parameters.values()]
    return ("async " if inspect.iscoroutinefunction(part) else "") + str(inspect.Signature(parameters))
