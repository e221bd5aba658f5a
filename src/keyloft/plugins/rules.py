"""What a plugin may store and request: the same rules for names, keys, values, TTLs and lists in every interface.

An error names the argument, and calls None what its caller calls it, which is `null` in JSON.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Raw, Struct

from keyloft import limits
from keyloft.core import values
from keyloft.core.lazy import check_limit
from keyloft.core.records import NO_LIMIT, Batch, Check, Count, Delete, PluginKey, Scan, Set, Space
from keyloft.core.values import Encoding
from keyloft.errors import InvalidArgument, InvalidKey, InvalidPluginName, InvalidValue, ValueTooLarge
from keyloft.nats.events import WATCH

PREFIXES: Final = ("db.kv", "rosey.db.kv")
"""The subjects before `.<plugin>.<operation>`, unless configured otherwise."""
QUEUE: Final = "keyloft"
"""The queue group in which instances of the service share the requests, unless configured otherwise."""

OPERATIONS: Final = (
    "set",
    "get",
    "delete",
    "list",
    "incr",
    "get_many",
    "set_many",
    "delete_many",
    "count",
    "touch",
    "usage",
    "many",
    WATCH,
)
"""The operations that plugins can ask for."""
GATHERED: Final = frozenset({"set", "get", "delete", "incr", "touch"})
"""The operations that a client gathers into a `many`: short requests with short replies."""
PARTS_OF_MANY: Final = tuple([name for name in OPERATIONS if name not in ("many", WATCH)])
"""The operations that can be a part of `many`."""

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


def key(name: object, none: str = "None", argument: str = "key") -> str:
    """Check a key, which the caller gave as `argument`.

    Raises:
        InvalidKey: No entry can have this key.
    """
    if not isinstance(name, str) or not name:
        raise InvalidKey(f"{argument} must be a non-empty string{_but_not(name, str, none)}")
    if name.isascii() and len(name) <= limits.PLUGIN_KEY_CHARACTERS and "\x00" not in name:
        return name  # most of them
    return _storable(name, argument)


class ManyKeys(Struct, frozen=True):
    """Several keys of a plugin, each once."""

    plugin: str
    names: list[str]

    @property
    def keys(self) -> list[PluginKey]:
        return [(self.plugin, name) for name in self.names]

    @property
    def deletion(self) -> Batch:
        """The batch that deletes all of these keys, or none."""
        return deletion(self.keys)


def many_keys(plugin: str, names: object, none: str = "None") -> ManyKeys:
    """The keys that one request names.

    Raises:
        InvalidArgument: There are too many.
        InvalidKey: No entry can have one of them.
    """
    found = list(_each(names, none))
    number(len(found), "keys")
    return ManyKeys(plugin, distinct_keys(found, none))


def distinct_keys(names: object, none: str = "None") -> list[str]:
    """The keys that a caller names, each once.

    Raises:
        InvalidArgument: They are not a list.
        InvalidKey: No entry can have one of them.
    """
    return list(dict.fromkeys([key(name, none, f"keys[{at}]") for at, name in enumerate(_each(names, none))]))


class ManyValues(Struct, frozen=True):
    """Several values of a plugin, as stored or sent, that are set together."""

    plugin: str
    values: Mapping[str, bytes | Raw]
    expire_in: int | None

    @property
    def batch(self) -> Batch:
        return Batch(
            tuple(
                [
                    Set(Space.PLUGINS, (self.plugin, name), bytes(one), Encoding.JSON, self.expire_in)
                    for name, one in self.values.items()
                ]
            )
        )


def entries(content: object) -> dict[str, bytes]:
    """The stored forms of the values that one request sets, by key.

    Raises:
        InvalidArgument: There are too many, or it is not a mapping.
        InvalidKey: No entry can have one of the keys.
        InvalidValue: One of the values can't be stored.
    """
    if not isinstance(content, Mapping):
        raise InvalidArgument(f"entries must be a dict of values by key, not {type(content).__name__}")
    number(len(content), "entries")
    return {key(name, argument="a key of entries"): value(one) for name, one in content.items()}


def number(entries: int, argument: str) -> None:
    """Check how many keys one request names.

    Raises:
        InvalidArgument: Too many.
    """
    if entries > limits.KEYS_AT_ONCE:
        raise InvalidArgument(f"{argument} must have at most {limits.KEYS_AT_ONCE:,} keys, not {entries:,}: send fewer")


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


def ttl_under_either_name(ttl_seconds: object, ttl_: object, none: str = "None") -> int | None:
    """A TTL in milliseconds that a caller may give as `ttl_seconds` or as `ttl`.

    Raises:
        InvalidArgument: It is not a whole number of seconds in range, or the two differ.
    """
    given, alias = ttl(ttl_seconds, "ttl_seconds", none), ttl(ttl_, "ttl", none)
    if given and alias and given != alias:
        raise InvalidArgument("ttl and ttl_seconds: expected one of them, since both mean the same, got two numbers")
    return given or alias


class ConditionalSet(Struct, frozen=True):
    """A set that is made only if the stored entry is the expected one, or that keeps the entry's TTL."""

    set: Set
    expected_version: int | None
    """0 if there must be no entry; None for any."""

    @property
    def batch(self) -> Batch:
        if self.expected_version is None:
            return Batch((self.set,))
        # Versions begin with 1, so 0 stands for no entry.
        return Batch((self.set,), (Check(self.set.space, self.set.key, self.expected_version or None),))


class PrefixDelete(Struct, frozen=True):
    """A deletion of all keys with a prefix, in slices."""

    scan: Scan
    """The prefix of the keys."""
    limit: int | None
    """How many keys are removed at most; None for all."""


def expected_version(if_absent: object, version: object) -> int | None:
    """The version that the stored entry must have; 0 if there must be none, None if it does not matter.

    Raises:
        InvalidArgument: There are two conditions, or the version is out of range.
    """
    if switch(if_absent, "if_absent"):
        if version is not None:
            raise InvalidArgument("if_absent and expected_version are two conditions: send one of them")
        return 0
    if version is not None and (type(version) is not int or not 0 <= version <= limits.LAST_VERSION):
        rule = f"must be a whole number from 0 to {limits.LAST_VERSION}{_but_not(version, int)}"
        raise InvalidArgument(f"expected_version {rule}; 0 is for a key that must have no entry")
    return version


def keep_ttl(content: object, ttl: int | None) -> bool:
    """Whether a set keeps the TTL of the stored entry.

    Raises:
        InvalidArgument: There is another TTL, too.
    """
    if switch(content, "keep_ttl") and ttl is not None:
        raise InvalidArgument("keep_ttl and ttl contradict each other: send one of them")
    return bool(content)


def switch(content: object, argument: str) -> bool:
    """Check a true or false; None counts as false.

    Raises:
        InvalidArgument: It is neither.
    """
    if content is not None and type(content) is not bool:
        raise InvalidArgument(f"{argument} must be true or false, not {type(content).__name__}")
    return bool(content)


def increment(by: object) -> int:
    """What is added to a counter; None for 1.

    Raises:
        InvalidArgument: It is not a whole number in range.
    """
    if by is None:
        return 1
    most = limits.LARGEST_INCREMENT
    if type(by) is not int or not -most <= by <= most:
        raise InvalidArgument(f"by must be a whole number from -{most} to {most}{_but_not(by, int)}")
    return by


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


def listing(plugin: str, prefix: object, keys: object, after: object, values: object = None) -> Scan:
    """The scan that lists keys, or entries: one more than wanted, so that it shows whether there are more."""
    first, last_seen = text(prefix, "prefix"), text(after, "after")
    continues = last_seen >= first and last_seen != ""
    start, end = _range(plugin, first)
    if continues:
        start = (plugin, last_seen)
    keys_only = not switch(values, "values")
    return Scan(Space.PLUGINS, start, end, limit(keys) + 1, keys_only=keys_only, after=continues)


def counting(plugin: str, prefix: object) -> Count:
    """The count of the keys that begin with a text."""
    return Count(Space.PLUGINS, *_range(plugin, text(prefix, "prefix")))


def prefix_scan(plugin: str, prefix: object) -> Scan:
    """The scan of all keys that begin with a text."""
    return Scan(Space.PLUGINS, *_range(plugin, text(prefix, "prefix")), NO_LIMIT, keys_only=True)


def removal_limit(keys: object) -> int | None:
    """How many keys a removal by prefix may remove; None for all.

    Raises:
        InvalidArgument: It is not a whole number in range.
    """
    return None if keys is None else check_limit(keys, most=limits.MOST_LISTED_KEYS)


def entry_scan(at: PluginKey) -> Scan:
    """The scan of one entry with its times, which a Get does not have. No key has NUL, so none lies in between."""
    plugin, name = at
    return Scan(Space.PLUGINS, at, (plugin, name + "\x01"), 1, times=True)


def deletion(keys: Iterable[PluginKey]) -> Batch:
    """The deletion of all of these keys together."""
    return Batch(tuple([Delete(Space.PLUGINS, at) for at in keys]))


def _each(names: object, none: str) -> Iterable[object]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise InvalidArgument(f"keys must be a list of keys, not {none if names is None else type(names).__name__}")
    return names


def _range(plugin: str, prefix: str) -> tuple[PluginKey, PluginKey]:
    """Where the keys with a prefix begin and end."""
    return (plugin, prefix), (plugin, prefix + _BEYOND)


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
