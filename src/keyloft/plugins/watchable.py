"""What a plugin can watch: its keys, or those that begin with a text."""

from collections.abc import Sequence

from keyloft.core.records import Get, PluginKey, Scan, Space
from keyloft.plugins import rules


class WatchablePlugins:
    """The plugins' entries, as leases of watches name them."""

    def names(self, about: str) -> tuple[str, ...]:
        return (about,)

    def owner(self, names: Sequence[str]) -> str:
        return names[0]

    def asks(self, names: Sequence[str], prefix: str | None, keys: Sequence[str] | None) -> tuple[Get | Scan, ...]:
        [plugin] = names
        if keys is None:
            return (rules.prefix_scan(plugin, prefix),)
        found = [rules.key(key, "null", f"keys[{at}]") for at, key in enumerate(keys)]
        return tuple([Get(Space.PLUGINS, (plugin, key)) for key in found])

    def key(self, key: PluginKey) -> str:
        return key[1]
