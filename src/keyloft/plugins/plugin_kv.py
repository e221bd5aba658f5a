"""The keys and values of one plugin over NATS: a method for each operation of its storage."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import msgspec

from keyloft import limits
from keyloft.core.backoff import back_off
from keyloft.core.update_turns import UpdateTurns
from keyloft.core.updated_values import copy_maker, updated
from keyloft.errors import InvalidArgument, VersionConflict
from keyloft.nats.gathering import FoundValue
from keyloft.nats.payloads import to_json
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.plugins import rules
from keyloft.plugins.entries import PluginEntry, UsedStorage
from keyloft.plugins.listing import Keys, KeysWithValues

if TYPE_CHECKING:
    from keyloft.plugins.client import DatabaseClient

_NO_DEFAULT: Final = object()


class PluginKV:
    """The keys and values of one plugin."""

    def __init__(self, client: "DatabaseClient") -> None:
        self._client = client
        self._update_turns = UpdateTurns()

    def __repr__(self) -> str:
        return f"<PluginKV of {self._client!r}>"

    # One entry

    @overload
    async def get(self, key: str, default: Any = None, *, meta: Literal[False] = False) -> Any: ...
    @overload
    async def get(self, key: str, default: Any = None, *, meta: Literal[True]) -> PluginEntry: ...
    async def get(self, key: str, default: Any = None, *, meta: bool = False) -> Any:
        """The value at a key, or the default where there is none; with `meta`, its version and times, too.

        Example:
            score = await client.kv.get("score", default=0)
            entry = await client.kv.get("score", default=0, meta=True)      # entry.value, .version, .ttl, …
        """
        if not meta:
            client = self._client
            answer = await client._send("get", b'"key":%b}' % to_json(rules.key(key)))
            if type(answer) is FoundValue:
                return answer.value
            reply = client._accepted(answer)
            return reply["value"] if reply["exists"] else default
        reply = await self._client.request("get", {"key": rules.key(key), "meta": True})
        if not reply["exists"]:
            return PluginEntry(value=default, version=0)
        created, updated = [datetime.fromisoformat(reply[name]) for name in ("created_at", "updated_at")]
        return PluginEntry(
            value=reply["value"], version=reply["version"], ttl=reply["ttl"], created_at=created, updated_at=updated
        )

    @overload
    async def set(
        self, key: str, value: Any, *, ttl: int | None = None, ttl_seconds: int | None = None, keep_ttl: bool = False
    ) -> None: ...
    @overload
    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: int | None = None,
        ttl_seconds: int | None = None,
        keep_ttl: bool = False,
        if_absent: Literal[True],
    ) -> int: ...
    @overload
    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: int | None = None,
        ttl_seconds: int | None = None,
        keep_ttl: bool = False,
        expected_version: int,
    ) -> int: ...
    @overload
    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: int | None = None,
        ttl_seconds: int | None = None,
        keep_ttl: bool = False,
        if_absent: bool = False,
        expected_version: int | None = None,
    ) -> int | None: ...
    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: int | None = None,
        ttl_seconds: int | None = None,
        keep_ttl: bool = False,
        if_absent: bool = False,
        expected_version: int | None = None,
    ) -> int | None:
        """Store a value. When this returns, it is on disk.

        Args:
            key: Any text of up to 255 characters.
            value: Anything that JSON can hold, up to 64 KB as JSON.
            ttl: The entry expires after this many seconds; None keeps it.
            ttl_seconds: The same as `ttl`.
            keep_ttl: An entry that is there keeps its TTL.
            if_absent: Store it only if there is no entry.
            expected_version: Store it only if the entry has this version; 0 if there must be none.

        Returns:
            The new version, of a set with a condition; else None.

        Raises:
            VersionConflict: The condition does not hold; `current` has the stored value and version, or is None.
            QuotaExceeded: The plugin would store more than it may.
            InvalidArgument: A TTL or version is out of range, or two arguments contradict each other.
            ValueTooLarge: It takes more than 64 KB as JSON.
            InvalidValue: It is not JSON, or would not be read back as an equal value.

        Example:
            await client.kv.set("theme", "dark")
            await client.kv.set("owner", "alice", if_absent=True)
        """
        name, data = rules.key(key), rules.value(value)
        if ttl is ttl_seconds is expected_version is None and keep_ttl is if_absent is False:  # most of them
            client = self._client
            client._accepted(await client._send("set", b'"key":%b,"value":%b}' % (to_json(name), data)))
            return None
        fields: dict[str, Any] = {"key": name, "value": msgspec.Raw(data)}
        seconds = _ttl(ttl, ttl_seconds)
        if seconds is not None:
            fields["ttl"] = seconds
        expected = rules.expected_version(if_absent, expected_version)
        if rules.keep_ttl(keep_ttl, seconds):
            fields["keep_ttl"] = True
        if expected is None:
            await self._client.request("set", fields)
            return None
        reply = await self._client.request("set", fields | {"expected_version": expected})
        return int(reply["version"])

    async def update(
        self,
        key: str,
        fn: Callable[[Any], Any | Awaitable[Any]],
        default: Any = None,
        *,
        ttl: int | None = None,
        ttl_seconds: int | None = None,
    ) -> Any:
        """Read a value, change it, and store it, again if another writer was faster: no change is lost.

        Args:
            key: Any text of up to 255 characters.
            fn: Called with the stored value, or a copy of the default; returns the new one, or awaits it. It may be
                called several times. One that changes a list or dict in place returns that list or dict.
            default: For a key without an entry.
            ttl: The entry expires after this many seconds; None keeps the TTL that it has.
            ttl_seconds: The same as `ttl`.

        Returns:
            The value that was stored.

        Raises:
            VersionConflict: Other writers were faster a hundred times.
            QuotaExceeded: The plugin would store more than it may.
            InvalidValue: What `fn` returned can't be stored.
            InvalidArgument: `fn` changed the value in place and returned None, or updates the same key, itself or in
                a task that it begins; nothing was written.

        Example:
            await client.kv.update("players", lambda players: [*players, "alice"], default=[])
        """
        seconds = _ttl(ttl, ttl_seconds)
        async with self._update_turns.take(rules.key(key), "fn") as turn:
            for attempt in range(limits.UPDATE_ATTEMPTS):
                entry = await self.get(key, meta=True)
                if entry.exists:
                    given = entry.value
                    before = copy_maker(given, limits.PLUGIN_VALUE_BYTES, limits.PLUGIN_VALUE_DEPTH)
                else:
                    given, before = deepcopy(default), lambda: default
                with turn.function():
                    value = await updated(fn, given, before, is_default=not entry.exists)
                try:
                    await self.set(key, value, ttl=seconds, keep_ttl=seconds is None, expected_version=entry.version)
                except VersionConflict:
                    if attempt + 1 == limits.UPDATE_ATTEMPTS:
                        raise
                    await back_off(attempt)
                else:
                    break
        return value

    async def incr(self, key: str, by: int = 1, *, ttl: int | None = None, ttl_seconds: int | None = None) -> int:
        """Add to an integer; no addition of concurrent callers is lost. An absent integer counts as 0.

        Args:
            key: Any text of up to 255 characters.
            by: What to add; may be negative.
            ttl: A new entry expires after this many seconds; one that is there keeps its TTL.
            ttl_seconds: The same as `ttl`.

        Returns:
            The new number.

        Raises:
            NotACounter: Something else than an integer is stored.
            QuotaExceeded: The plugin would store more than it may.
            TimedOut: No reply arrived in time. It may have been added: to repeat it may add twice.

        Example:
            games = await client.kv.incr("games")
        """
        fields = {"key": rules.key(key), "by": rules.increment(by)}
        if (seconds := _ttl(ttl, ttl_seconds)) is not None:
            fields["ttl"] = seconds
        return int((await self._client.request("incr", fields))["value"])

    async def touch(self, key: str, ttl: int | None) -> bool:
        """Give an entry another TTL, or none; its value and version stay. Returns whether there is such an entry."""
        rules.ttl(ttl)
        return bool((await self._client.request("touch", {"key": rules.key(key), "ttl": ttl}))["exists"])

    async def delete(self, key: str) -> bool:
        """Remove an entry; returns whether there was one."""
        reply = await self._client.request("delete", {"key": rules.key(key)})
        return bool(reply["deleted"])

    # Several entries

    async def get_many(self, keys: Iterable[str], default: Any = _NO_DEFAULT) -> dict[str, Any]:
        """The values of several keys, in the order given.

        Args:
            keys: Any number of them; a request reads up to 1,000, and fewer if their values are large.
            default: The value of a key without an entry; if there is no default, such a key is left out.

        Example:
            scores = await client.kv.get_many(["score:alice", "score:bob"], default=0)
        """
        wanted = rules.distinct_keys(keys)
        found: dict[str, Any] = {}
        for first in range(0, len(wanted), limits.KEYS_AT_ONCE):
            rest: Sequence[str] = wanted[first : first + limits.KEYS_AT_ONCE]
            while rest:
                reply = await self._client.request("get_many", {"keys": rest})
                found.update(reply["values"])
                rest = reply.get("rest", ())
        if default is _NO_DEFAULT:
            return {key: found[key] for key in wanted if key in found}
        return {key: found.get(key, default) for key in wanted}

    async def set_many(
        self, entries: Mapping[str, Any], *, ttl: int | None = None, ttl_seconds: int | None = None
    ) -> int:
        """Store several values, all or none of them; returns how many.

        Args:
            entries: The values by key: up to 1,000, and as much as one NATS message holds, 1 MiB by default.
            ttl: The entries expire after this many seconds; None keeps them.
            ttl_seconds: The same as `ttl`.

        Raises:
            QuotaExceeded: The plugin would store more than it may.
            InvalidArgument: There are too many, or they are too large for one message.
            ValueTooLarge: One of them takes more than 64 KB as JSON.
            InvalidValue: One of them is not JSON, or would not be read back as an equal value.

        Example:
            await client.kv.set_many({"score:alice": 7, "score:bob": 9})
        """
        values = {key: msgspec.Raw(value) for key, value in rules.entries(entries).items()}
        fields = {"entries": values, "ttl": _ttl(ttl, ttl_seconds)}
        size, most = len(to_json(fields)), self._client.nats.max_payload
        if size > most:
            raise InvalidArgument(
                f"entries: expected at most {most:,} bytes in all, got {size:,}: send fewer at a time"
            )
        return int((await self._client.request("set_many", fields))["count"])

    async def delete_many(self, keys: Iterable[str] | None = None, *, prefix: str | None = None) -> int:
        """Remove several entries; returns how many there were.

        Args:
            keys: Up to 1,000, which are removed together, or none of them.
            prefix: Instead of them, what the keys begin with, however many; they are removed some hundred at a time.
                The empty text is for all of the plugin's.

        Example:
            await client.kv.delete_many(["session:alice", "session:bob"])
            await client.kv.delete_many(prefix="session:")
        """
        if (keys is None) == (prefix is None):
            raise InvalidArgument("keys, prefix: expected one of them")
        if keys is not None:
            names = rules.distinct_keys(keys)
            rules.number(len(names), "keys")
            return int((await self._client.request("delete_many", {"keys": names}))["count"])
        fields, count, truncated = {"prefix": rules.text(prefix, "prefix"), "limit": limits.MOST_LISTED_KEYS}, 0, True
        while truncated:
            reply = await self._client.request("delete_many", fields)
            count, truncated = count + reply["count"], reply["truncated"]
        return count

    @overload
    def list(self, prefix: str = "", *, limit: int | None = None, values: Literal[False] = False) -> Keys: ...
    @overload
    def list(self, prefix: str = "", *, limit: int | None = None, values: Literal[True]) -> KeysWithValues: ...
    def list(self, prefix: str = "", *, limit: int | None = None, values: bool = False) -> Keys | KeysWithValues:
        """The keys that begin with a text, in their order, however many there are; with `values`, tuples of both.

        Example:
            async for key in client.kv.list("user:"):
                ...
            first = await client.kv.list("user:", limit=10)
            users = dict(await client.kv.list("user:", values=True))
        """
        kind, client = KeysWithValues if values else Keys, self._client
        return kind(client, client.request, rules.text(prefix, "prefix"), limit)

    async def count(self, prefix: str = "") -> int:
        """How many keys begin with a text."""
        return int((await self._client.request("count", {"prefix": rules.text(prefix, "prefix")}))["count"])

    async def usage(self) -> UsedStorage:
        """What the plugin stores, a minute old at most, and how much it may store."""
        reply = await self._client.request("usage", {})
        quota = reply.get("quota", {})
        return UsedStorage(reply["keys"], reply["bytes"], quota.get("keys"), quota.get("bytes"))

    def watch(self, *keys: str, prefix: str | None = None, since: int | None = None) -> RemoteWatch:
        """Changes as they happen, by any process: puts, deletes, expiries. It renews itself; a change may come twice.

        Args:
            keys: The keys to watch; without any, all that begin with `prefix`.
            prefix: Any text; without it and without keys, all keys of the plugin.
            since: Report what changed after this version, a `reported_to` of an earlier watch; None for what changes
                from now on.

        Raises:
            InvalidArgument: Keys and a prefix are given, or one of them can't exist.
            HistoryGone: By the iteration: the service no longer knows what changed since then. List, then watch again.

        Example:
            async with client.kv.watch(prefix="user:") as changes:
                async for event in changes:
                    print(event.key, "is gone" if event.deleted else await client.kv.get(event.key))
        """
        known = [rules.key(key) for key in keys]
        text = None if prefix is None else rules.text(prefix, "prefix")
        return self._client._watch(self._client.subject("watch"), text, known, since)


def _ttl(ttl: int | None, ttl_seconds: int | None) -> int | None:
    """A TTL under either name, in seconds."""
    rules.ttl_under_either_name(ttl_seconds, ttl)
    return ttl_seconds if ttl is None else ttl
