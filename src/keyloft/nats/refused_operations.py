"""Stand for the operations of messages that are refused; they are refused in their owner's turn, as if read."""

from typing import Any, NoReturn

from keyloft.errors import KeyloftError
from keyloft.nats.requests import NoOperation, Operation


class RefusedOperation(NoOperation):
    """Stands for what can't be carried out, such as the operation of a subject that names none: it is refused."""

    def __init__(self, kind: type[KeyloftError], message: str) -> None:
        """`kind` and `message` of the error; not the error itself, whose traceback would keep each message."""
        self._kind = kind
        self._message = message

    def read(self, about: Any, data: bytes, /) -> NoReturn:
        raise self._kind(self._message)


class TooLargeMessage(NoOperation):
    """Stands for the operation of a message that is larger than the operation takes, and was skipped unread."""

    def __init__(self, operation: Operation, size: int) -> None:
        """`size` is how many bytes the message had."""
        self.name = operation.name
        self._operation = operation
        self._size = size

    def read(self, about: Any, data: bytes, /) -> NoReturn:
        raise self._operation.too_large(self._size)
