"""What a plugin may store and request: the same rules for names, keys, values, TTLs and lists in every interface.

An error names the argument, and calls None what its caller calls it, which is `null` in JSON.
"""

import re
from typing import Final

from keyloft import limits
from keyloft.core import values
from keyloft.core.lazy import check_limit
from keyloft.core.records import PluginKey, Scan, Space
from keyloft.errors import InvalidArgument, InvalidKey, InvalidPluginName, InvalidValue, ValueTooLarge

PREFIXES: Final = ("db.kv", "rosey.db.kv")
"""The subjects before `.<plugin>.<operation>`, unless configured otherwise."""
QUEUE: Final = "keyloft"
"""The queue group in which instances of the service share the requests, unless configured otherwise."""

OPERATIONS: Final = ("set", "get", "delete", "list")
"""What plugins can ask for."""

_NAME: Final = re.compile(r"[a-z0-9_-]+", re.ASCII)
# No key has more than 255 characters, so a prefix with this appended sorts after all keys with that prefix.
_BEYOND: Final = "\U0010ffff" * (limits.PLUGIN_KEY_CHARACTERS + 1)


def plugin_name(name: object, argument: str = "plugin_name") -> str:
    """Check a plugin's name, which the caller gave as `argument`.

    Raises:
        InvalidPluginName: No plugin can have this name.
    """
    if not isinstance(name, str) or not name:
        raise InvalidPluginName(f"{argument} must be a non-empty string{_but_not(name, str)}")
    if len(name) > limits.PLUGIN_NAME_CHARACTERS:
        raise InvalidPluginName(f"{argument} must be ≤{limits.PLUGIN_NAME_CHARACTERS} characters, not {len(name)}")
    if _NAME.fullmatch(name) is None:
        allowed = "lowercase letters, numbers, hyphens, and underscores (a-z 0-9 - _)"
        raise InvalidPluginName(f"{argument} must contain only {allowed}; this one is {name!a}")
    return name


def key(name: object, none: str = "None") -> str:
    """Check a key.

    Raises:
        InvalidKey: No entry can have this key.
    """
    if not isinstance(name, str) or not name:
        raise InvalidKey(f"key must be a non-empty string{_but_not(name, str, none)}")
    return _storable(name, "key")


def value(content: object) -> bytes:
    """The stored form of a value.

    Raises:
        InvalidValue: It is not JSON, or would not be read back as an equal value; a TypeError, too, for a wrong type.
        ValueTooLarge: Its stored form is over 64 KB.
    """
    try:
        data = values.encode_json(content, limits.PLUGIN_VALUE_BYTES, limits.PLUGIN_VALUE_DEPTH)
    except ValueTooLarge:
        raise
    except InvalidValue as error:
        raise type(error)(f"value is not JSON-serializable: {str(error).removeprefix('value: ')}") from error
    if len(data) > limits.PLUGIN_VALUE_BYTES:
        raise ValueTooLarge(len(data), limits.PLUGIN_VALUE_BYTES)
    return data


def ttl(seconds: object, argument: str = "ttl", none: str = "None") -> int | None:
    """A TTL in milliseconds; None for an entry that never expires.

    Raises:
        InvalidArgument: It is not a whole number of seconds in range.
    """
    if seconds is None:
        return None
    if type(seconds) is not int or not 1 <= seconds <= limits.LONGEST_TTL_SECONDS:
        rule = f"must be a whole number of seconds from 1 to {limits.LONGEST_TTL_SECONDS}{_but_not(seconds, int)}"
        raise InvalidArgument(f"{argument} {rule}; {none} is for an entry that never expires")
    return seconds * 1000


def ttl_under_either_name(ttl_seconds: object, ttl_: object) -> int | None:
    """A TTL in milliseconds that a caller may give as `ttl_seconds` or as `ttl`.

    Raises:
        InvalidArgument: It is not a whole number of seconds in range, or the two differ.
    """
    given, alias = ttl(ttl_seconds, "ttl_seconds"), ttl(ttl_, "ttl")
    if given and alias and given != alias:
        rule = "expected one of them, since both name the same, got two different numbers"
        raise InvalidArgument(f"ttl and ttl_seconds: {rule}")
    return given or alias


def limit(keys: object) -> int:
    """How many keys a list may show; None for the default.

    Raises:
        InvalidArgument: It is not a whole number in range.
    """
    return check_limit(keys, limits.LISTED_KEYS, limits.MOST_LISTED_KEYS)


def text(content: object, field: str) -> str:
    """Check the prefix of a list, or the key that it continues after; None counts as the empty text.

    Raises:
        InvalidArgument: No key can begin with this.
    """
    if content is None:
        return ""
    if not isinstance(content, str):
        raise InvalidArgument(f"{field} must be a string{_but_not(content, str)}")
    return _storable(content, field, InvalidArgument)


def listing(plugin: str, prefix: object, keys: object, after: object) -> Scan:
    """The scan that lists keys: one more than wanted, so that it shows whether there are more."""
    first, last_seen = text(prefix, "prefix"), text(after, "after")
    continues = last_seen >= first and last_seen != ""
    start: PluginKey = (plugin, last_seen if continues else first)
    return Scan(Space.PLUGINS, start, (plugin, first + _BEYOND), limit(keys) + 1, keys_only=True, after=continues)


def _but_not(content: object, expected: type, none: str = "None") -> str:
    """The end of an error for an argument of another type."""
    return "" if type(content) is expected else f", not {none if content is None else type(content).__name__}"


def _storable(name: str, field: str, error: type[InvalidKey] | type[InvalidArgument] = InvalidKey) -> str:
    if len(name) > limits.PLUGIN_KEY_CHARACTERS:
        raise error(f"{field} must be ≤{limits.PLUGIN_KEY_CHARACTERS} characters, not {len(name)}")
    if "\x00" in name:
        raise error(f"{field} must not contain the character NUL, which SQL databases can't store")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise error(f"{field} must be Unicode text, without lone surrogates") from None
    return name
