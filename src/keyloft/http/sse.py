"""Server-sent events: writes changes as chunks of a response's body, the same bytes for all listeners."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from keyloft import limits
from keyloft.core.records import Change
from keyloft.http.wire import shown_key, to_json, wire_entry

HEARTBEAT: Final = b"3\r\n:\n\n\r\n"
"""A comment, which keeps a connection alive; as a chunk of the body, like events."""


def change_events(changes: Sequence[Change], version: int) -> Iterator[bytes]:
    """The events of changes: mostly one; if the changes are long, several, of which only the last has an id."""
    some: list[bytes] = []
    weight = 0
    for left, change in zip(range(len(changes) - 1, -1, -1), changes, strict=True):
        some.append(to_json(wire_entry(shown_key(change.key), change.record)))
        weight += len(some[-1])
        if weight > limits.HTTP_EVENT_BYTES and left:
            yield _change_event(some, None)
            some, weight = [], 0
    yield _change_event(some, version)


def _change_event(entries: Iterable[bytes], version: int | None) -> bytes:
    return event_text("change", version, b'{"entries":[%b]}' % b",".join(entries))


def as_chunk(data: bytes) -> bytes:
    """Bytes as a chunk of the body of an HTTP response."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event_text(name: str, version: int | None, data: bytes) -> bytes:
    """An event as SSE has it. The data is JSON, which has no line breaks."""
    known = b"" if version is None else b"id: %d\n" % version
    return b"event: %b\n%bdata: %b\n\n" % (name.encode(), known, data)
