"""The methods of `BotDatabase` that read, write or count several entries of a plugin."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from keyloft import limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import Get, Space
from keyloft.core.values import decode_json
from keyloft.errors import InvalidArgument, Undecodable
from keyloft.plugins import rules
from keyloft.plugins.counting import CountingWalk, PluginCount
from keyloft.plugins.rules import ManyValues, PrefixDelete
from keyloft.plugins.stored import remove_keys, remove_prefix, report_broken


class BulkMethods:
    """Several entries of a plugin at once."""

    async def engine(self) -> Engine:
        """The engine, opened."""
        raise NotImplementedError

    async def kv_get_many(self, plugin_name: str, keys: Iterable[str]) -> dict[str, Any]:
        """Read the values of up to 1,000 keys, all of one moment.

        Args:
            plugin_name: The plugin that the keys belong to.
            keys: The names of the keys.

        Returns:
            The values by key, without the keys that have no entry.

        Raises:
            ValueError: There are too many keys, or no plugin or key can have this name.
            DatabaseError: The database failed.

        Example:
            scores = await db.kv_get_many("trivia", ["score:alice", "score:bob"])
        """
        wanted = rules.many_keys(rules.plugin_name(plugin_name), keys)
        records = await (await self.engine()).read(*[Get(Space.PLUGINS, at) for at in wanted.keys])
        found = {}
        for record in records:
            if record is not None:
                try:
                    found[record.key[1]] = decode_json(record.value)
                except Undecodable:
                    report_broken(record)
        return found

    async def kv_set_many(
        self,
        plugin_name: str,
        entries: Mapping[str, Any],
        *,
        ttl_seconds: int | None = None,
        ttl: int | None = None,
    ) -> int:
        """Store up to 1,000 values, all or none of them.

        Args:
            plugin_name: The plugin that the keys belong to.
            entries: The values by key.
            ttl_seconds: The entries expire after this many seconds; None keeps them.
            ttl: The same as `ttl_seconds`.

        Returns:
            How many were stored.

        Raises:
            ValueError: A name, key or TTL is out of range, a value exceeds 64KB, or there are too many.
            TypeError: A value is not JSON-serializable.
            DatabaseError: The database failed; the message says whether the values may be stored.

        Example:
            await db.kv_set_many("trivia", {"score:alice": 7, "score:bob": 9})
        """
        name, expire_in = rules.plugin_name(plugin_name), rules.ttl_under_either_name(ttl_seconds, ttl)
        content = ManyValues(name, rules.entries(entries), expire_in)
        await (await self.engine()).commit(content.batch)
        return len(content.values)

    async def kv_delete_many(
        self, plugin_name: str, keys: Iterable[str] | None = None, *, prefix: str | None = None
    ) -> int:
        """Remove up to 1,000 entries together, or all whose keys begin with a text, some hundred at a time.

        Args:
            plugin_name: The plugin that the keys belong to.
            keys: Their names; all are removed, or none.
            prefix: Instead of them, what the keys begin with; the empty text for all of the plugin's.

        Returns:
            How many entries there were.

        Raises:
            ValueError: There are too many keys, or no plugin or key can have this name.
            DatabaseError: The database failed; of a prefix, some entries may be removed.

        Example:
            await db.kv_delete_many("trivia", prefix="session:")
        """
        name, engine = rules.plugin_name(plugin_name), await self.engine()
        if (keys is None) == (prefix is None):
            raise InvalidArgument("keys, prefix: expected one of them")
        if keys is not None:
            return sum((await write(engine, *rules.many_keys(name, keys).deletion.mutations)).found)
        request = PrefixDelete(rules.prefix_scan(name, prefix), None)
        removed, _ = await remove_prefix(engine, request, partial(remove_keys, engine), limits.SLICE_ITEMS)
        return removed

    async def kv_count(self, plugin_name: str, prefix: str = "") -> int:
        """How many keys of a plugin begin with a text.

        Args:
            plugin_name: The plugin that the keys belong to.
            prefix: What they begin with.

        Raises:
            ValueError: A name or prefix is out of range.
            DatabaseError: The database failed.
        """
        [count] = await (await self.engine()).read(rules.counting(rules.plugin_name(plugin_name), prefix))
        return count

    async def kv_usage(self, plugin_name: str) -> dict[str, int]:
        """What a plugin stores, counted in slices.

        Args:
            plugin_name: The plugin that the entries belong to.

        Returns:
            `{'keys': …, 'bytes': …}`: the number of its entries, and what their values take as stored.

        Raises:
            ValueError: No plugin can have this name.
            DatabaseError: The database failed.
        """
        name, engine = rules.plugin_name(plugin_name), await self.engine()
        walk, counted = CountingWalk((name, "")), dict[str, PluginCount]()
        while name not in counted:
            counted = await walk.step(engine)
        return {"keys": counted[name].keys, "bytes": counted[name].bytes}
