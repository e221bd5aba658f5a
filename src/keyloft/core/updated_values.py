"""Calls the function of an `update`, and refuses a change in place that returns None."""

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from keyloft.core.values import decode_json, encode_json
from keyloft.errors import InvalidArgument


async def updated(
    fn: Callable[[Any], Any],
    given: Any,
    before: Callable[[], Any],
    argument: str = "fn",
    *,
    is_default: bool = False,
) -> Any:
    """The value that the function of an update returns; an awaitable is awaited.

    Args:
        fn: Takes the value and returns the new one.
        given: The value, which `fn` may change in place.
        before: Returns the value as it was before `fn` was called.
        argument: The name of `fn`, as the caller wrote it.
        is_default: Whether the value is the default, because nothing is stored.

    Raises:
        InvalidArgument: `fn` is no function; or it changed the value in place and returned None.
    """
    if not callable(fn):
        raise InvalidArgument(
            f"{argument}: expected a function that takes the value and returns the new one, got {type(fn).__name__}"
        )
    try:
        value = fn(given)
        if isawaitable(value):
            value = await value
    except (TypeError, AttributeError) as error:
        if given is None and is_default:
            error.add_note(
                f"nothing is stored at this key, so {argument} was called with None: pass default=, as in "
                "update(key, lambda n: n + 1, default=0)"
            )
        raise
    # None can be stored, but `lambda players: players.append("alice")` returns None by mistake.
    if value is None and isinstance(given, (list, dict)) and given != before():
        raise InvalidArgument(
            f"{argument}: the function changed the value in place and returned None, so None would be stored; return "
            "the new value, as in update(key, lambda names: [*names, name])"
        )
    return value


def copy_maker(value: Any, limit: int, most_levels: int) -> Callable[[], Any]:
    """Returns a function that makes copies of a JSON value as it is now, even if the value is changed in place later.

    `limit` and `most_levels` are those of `encode_json`.
    """
    if not isinstance(value, (list, dict)):
        return lambda: value
    data = encode_json(value, limit, most_levels)
    return lambda: decode_json(data)
