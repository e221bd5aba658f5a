"""What a workflow can watch over NATS: entries of its project, or those whose paths begin with a text."""

from collections.abc import Sequence

from keyloft.core.records import NO_LIMIT, Get, Scan
from keyloft.errors import InvalidInput
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
        try:
            if keys_ is None:
                whole = wire.prefix_within(project, "" if prefix is None else prefix)
                return (Scan(SPACE, *keys.parse_prefix(whole).entries, NO_LIMIT),)
            found = [wire.key_within(project, key, f"keys[{at}]") for at, key in enumerate(keys_)]
        except InvalidInput as error:
            raise wire.as_sent(error) from None
        return tuple([Get(SPACE, keys.parse(key).entry) for key in found])

    def key(self, key: bytes) -> str:
        return keys.path_of(keys.key_of_row(key))
