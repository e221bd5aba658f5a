"""How much each plugin may store."""

from collections.abc import Mapping

from msgspec import Struct


class Quota(Struct, frozen=True):
    """How much a plugin may store; None for any number."""

    keys: int | None = None
    bytes: int | None = None
    """The bytes of its values, as stored."""


class Quotas(Struct, frozen=True):
    """The quotas of all plugins: one by default, and others by name."""

    default: Quota = Quota()
    named: Mapping[str, Quota] = {}

    def of(self, plugin: str) -> Quota | None:
        """The quota of a plugin, or None if it has none."""
        quota = self.named.get(plugin, self.default)
        return None if quota.keys is None and quota.bytes is None else quota
