"""How the commands of `keyloft semantic` reach the store: in a database, or over NATS."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

from keyloft import Store, limits
from keyloft.cli.database import NamedDatabase
from keyloft.cli.nats_server import check_timeout, over_nats
from keyloft.cli.options import seconds_option
from keyloft.core.lazy import LazyList
from keyloft.errors import InvalidArgument
from keyloft.semantic import AuditRecord, DeadLetter, Envelope, SemanticStore, keys
from keyloft.semantic.entry_watches import EntryWatch
from keyloft.server.config import NATS_SETTINGS

if TYPE_CHECKING:
    from keyloft.semantic import SemanticClient

T = TypeVar("T")


class SemanticAccess(NamedDatabase, frozen=True, kw_only=True):
    """The semantic store: in the database, or, with --nats, of the service that answers there."""

    names: ClassVar[tuple[str, ...]] = ("database", "purposes", "audit_key", *NATS_SETTINGS, "semantic_prefix")
    timeout: Annotated[float, seconds_option("How long to wait for an answer over NATS.", limits.PATIENCE_SECONDS)] = (
        limits.PATIENCE_SECONDS
    )

    def with_semantic(
        self, about: str, work: Callable[["OpenedState"], Awaitable[T]], *, argument: str = "key", make: bool = False
    ) -> T:
        """Reach the semantic store, and work with it.

        Args:
            about: The key, prefix or project that the command is about.
            work: Called with the store.
            argument: The name of `about` in messages.
            make: Make the database's file and tables.
        """
        if self.flags.get("nats") is not None:
            named = keys.parse(about, argument) if argument == "key" else keys.parse_prefix(about, argument)
            return self._over_nats(named.project, work)
        settings = self.config()
        chosen: dict[str, Any] = {"purposes": settings.purposes, "audit_key": settings.audit_key, "sweep_every": None}

        async def working(kv: Store) -> T:
            async with SemanticStore(kv, **chosen) as store:
                return await work(store)

        return self.with_store(working, make=make)

    def _over_nats(self, project: keys.Project, work: Callable[["OpenedState"], Awaitable[T]]) -> T:
        for name in ("database", "purposes", "audit_key"):
            if self.flags.get(name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidArgument(f"{flag}: not with --nats: the service has its own")
        from keyloft.semantic import SemanticClient

        check_timeout(self.timeout)
        settings = self.config()
        connect = partial(
            SemanticClient.connect, tenant=project.tenant, project=project.name, prefix=settings.semantic_prefix
        )
        return over_nats(settings, self.timeout, connect, lambda client: work(RemoteState(client)))


class RemoteState:
    """The state of a project over NATS, with whole keys as `SemanticStore` takes them."""

    def __init__(self, client: "SemanticClient") -> None:
        self._client = client
        self.dead_letters = DeadLettersOverNats(client)

    async def get(self, key: str) -> Envelope | None:
        return await self._client.get(_path(key))

    async def put(self, key: str, value: Any, **wanted: Any) -> Envelope:
        return await self._client.put(_path(key), value, **wanted)

    async def delete(self, key: str, **wanted: Any) -> Envelope | None:
        return await self._client.delete(_path(key), **wanted)

    async def restore(self, key: str, **wanted: Any) -> Envelope:
        return await self._client.restore(_path(key), **wanted)

    def list(self, prefix: str, *, values: bool = False, limit: int | None = None) -> LazyList[Envelope]:
        return self._client.list(keys.parse_prefix(prefix).path, values=values, limit=limit)

    def changes(self, prefix: str) -> EntryWatch[dict[str, Envelope | None]]:
        return self._client.changes(keys.parse_prefix(prefix).path)

    def audit(
        self, about: str, *, after: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> LazyList[AuditRecord]:
        key = keys.parse_prefix(about, "about").path or None
        return self._client.audit(key, after=after, limit=limit, reverse=reverse)

    def locks(self, project: str, *, values: bool = False) -> LazyList[Envelope]:
        return self._client.locks(values=values)


class DeadLettersOverNats:
    """The dead letters of a project over NATS, without the values that they hold."""

    def __init__(self, client: "SemanticClient") -> None:
        self._kept = client.dead_letters
        self.retry = self._kept.retry
        self.drop = self._kept.drop

    def list(self, project: str) -> LazyList[DeadLetter]:
        return self._kept.list(values=False)


OpenedState: TypeAlias = SemanticStore | RemoteState


def _path(key: str) -> str:
    return keys.parse(key).path
