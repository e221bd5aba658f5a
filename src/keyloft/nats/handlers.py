"""What the reader of messages calls with each of them, and what it gets back."""

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias


class RefusedNames(NamedTuple):
    """Says that messages of all subjects are refused but for those that are known."""

    knows: Callable[[bytes], bool]
    """Whether a subject is known, and its message is to be handled."""
    replies: list[bytes]
    """Where the reply subjects of the others go."""


Handled: TypeAlias = Coroutine[Any, Any, None] | RefusedNames | list[bytes] | None
"""What a handler returns. A coroutine: no further message is read before it is done. A list: all messages of the same
subject that follow before the next iteration of the event loop are refused; their reply subjects go to this list.
RefusedNames: the same for all messages of its subscription whose subject is not known."""

Handler: TypeAlias = Callable[[bytes, bytes, bytes], Handled]
"""Called with a message's subject, reply subject and data. It may raise UnicodeDecodeError: the message is left out."""

EarlyRefusal: TypeAlias = Callable[[bytes, bytes, int], bool]
"""Called with the subject, the reply subject and the size of a large message that has not arrived yet; returns whether
it was refused: then its data is left out."""
