"""What the function of an `update` makes of a value."""

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from keyloft.core.values import decode_json, encode_json
from keyloft.errors import InvalidArgument


async def updated(fn: Callable[[Any], Any], given: Any, before: Callable[[], Any], argument: str = "fn") -> Any:
    """Call the function of an update, and await what it returns if need be.

    Args:
        fn: Takes the value and returns the new one.
        given: The value, which `fn` may change.
        before: An equal value that `fn` has not changed.
        argument: The name of `fn`, as the caller wrote it.

    Raises:
        InvalidArgument: It changed the value in place and returned None.
    """
    value = fn(given)
    if isawaitable(value):
        value = await value
    # None is a value like any other, but `lambda players: players.append("alice")` did not mean it.
    if value is None and isinstance(given, (list, dict)) and given != before():
        raise InvalidArgument(
            f"{argument}: it changed the value in place and returned None, and None would be stored; return the new "
            "value, as in update(key, lambda names: [*names, name])"
        )
    return value


def kept(value: Any, limit: int, most_levels: int) -> Callable[[], Any]:
    """Keeps a value that was read from JSON as it is now, whatever becomes of it; arguments as of `encode_json`."""
    if not isinstance(value, (list, dict)):
        return lambda: value
    data = encode_json(value, limit, most_levels)
    return lambda: decode_json(data)
