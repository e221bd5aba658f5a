"""The functions that the parser of messages calls with each message, and what they return."""

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias


class RefusedNames(NamedTuple):
    """Says that all but known subjects are refused."""

    knows: Callable[[bytes], bool]
    """Whether a subject is known, and its message is to be handled."""
    replies: list[bytes]
    """The list that gets the reply subjects of refused messages."""


Handled: TypeAlias = Coroutine[Any, Any, None] | RefusedNames | list[bytes] | None
"""What a handler returns. A coroutine: no further message is read before it is done. A list: all messages of the same
subject that follow before the next iteration of the event loop are refused; their reply subjects go to this list.
RefusedNames: the same for all messages of its subscription whose subject is not known."""

Handler: TypeAlias = Callable[[bytes, bytes, bytes], Handled]
"""Called with a message's subject, reply subject and data. It may raise UnicodeDecodeError: the message is skipped."""

EarlyRefusal: TypeAlias = Callable[[bytes, bytes, int], bool]
"""Called with the subject, the reply subject and the size of a large message that has not arrived yet; returns whether
it was refused: then its data is skipped."""
