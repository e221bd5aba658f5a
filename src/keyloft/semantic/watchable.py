"""What a workflow can watch over NATS: entries of its project, or those whose paths begin with a text."""

from collections.abc import Sequence

from keyloft.core.records import NO_LIMIT, Get, Scan
from keyloft.semantic import keys, wire
from keyloft.semantic.keys import SPACE, Project


class WatchableProjects:
    """The entries of projects, as leases of watches name them; keys are paths within the project."""

    def names(self, about: Project) -> tuple[str, ...]:
        return about.tenant, about.name

    def owner(self, names: Sequence[str]) -> str:
        return names[0]

    def asks(self, names: Sequence[str], prefix: str | None, keys_: Sequence[str] | None) -> tuple[Get | Scan, ...]:
        project = Project(*names)
        if keys_ is None:
            return (Scan(SPACE, *keys.parse_prefix(wire.prefix_within(project, prefix or "")).entries, NO_LIMIT),)
        return tuple([Get(SPACE, keys.parse(wire.key_within(project, key)).entry) for key in keys_])

    def key(self, key: bytes) -> str:
        return keys.path_of(keys.key_of_row(key))
