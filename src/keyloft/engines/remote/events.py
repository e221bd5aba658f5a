"""Reads a stream of server-sent events, piece by piece."""

from msgspec import Struct


class ServerEvent(Struct):
    """One event of a stream."""

    kind: str
    data: bytes
    id: int | None = None
    """The version that this event completes; None for all but the last part of a change sent as several events."""


class EventParser:
    """Takes the bytes of a stream as they arrive, and gives the events that are complete."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        """Up to this position, the rest is known to hold no end of a line."""
        self._kind = ""
        self._id: int | None = None
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """The events that this piece completes; comments are left out."""
        self._rest += piece
        found: list[ServerEvent] = []
        begin = 0
        while (end := self._rest.find(b"\n", max(begin, self._searched))) >= 0:
            line = bytes(self._rest[begin:end]).removesuffix(b"\r")
            begin = end + 1
            if line:
                self._take(line)
            elif self._kind or self._data:
                found.append(ServerEvent(self._kind, b"\n".join(self._data), self._id))
                self._kind, self._id, self._data = "", None, []
        del self._rest[:begin]
        self._searched = len(self._rest)
        return found

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._kind = value.decode()
        elif name == b"id":
            self._id = int(value)
        elif name == b"data":
            self._data.append(value)
