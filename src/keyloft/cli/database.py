"""Opens the database that a command names."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, ClassVar, TypeVar

import keyloft
from keyloft import Store, admin, limits
from keyloft.admin.databases import opened
from keyloft.cli.options import Settings, option
from keyloft.cli.terminal import sized
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import CannotOpen
from keyloft.server.config import load

T = TypeVar("T")


class NamedDatabase(Settings, frozen=True, kw_only=True):
    """The database that --database, the environment or the file of --config names."""

    names: ClassVar[tuple[str, ...]] = ("database",)

    @property
    def shown(self) -> str:
        """Its path or URL, without user and password."""
        return DatabaseUrl.parse(self.config().database).shown

    def url(self, *, make: bool = False) -> str:
        """Its path or URL. The file must exist, unless the command may make it.

        Raises:
            CannotOpen: The file does not exist.
        """
        url = self.config().database
        file = DatabaseUrl.parse(url).file
        if not make and file is not None and not file.exists():
            raise CannotOpen(f"there is no file {file}: name another with --database or KEYLOFT_DATABASE_URL")
        return url

    def with_store(self, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
        """Open its tuple store, and work with it.

        Args:
            work: Called with the open store.
            make: Make the file, and the tables; a command that only reads makes neither.

        Raises:
            CannotOpen: There is no such file.
            NotADatabase: There are no tables of Keyloft.
        """
        url = self.url(make=make)
        kept = load(self.flags, only=("history_seconds", "history_mib"))

        async def working() -> T:
            if not make:
                # A store would wait for a minute for a server that was named by mistake, and make tables there.
                is_service = DatabaseUrl.parse(url).http is not None
                async with keyloft.open(url, patience=limits.OPERATOR_SERVER_SECONDS) if is_service else opened(url):
                    pass
            async with keyloft.open(
                url,
                name=self.store_name,
                max_value_bytes=limits.LARGEST_VALUE_BYTES,
                sweep_every=None,
                # A write may trim the change log, and must leave as much as the service would.
                history_seconds=kept.history_seconds,
                history_mib=kept.history_mib,
            ) as kv:
                return await work(kv)

        return run_quietly(working())

    @property
    def store_name(self) -> str | None:
        """The name of the tuple store; None is the unnamed one."""
        return None


class TupleDatabase(NamedDatabase, frozen=True, kw_only=True):
    """The database, and one of its tuple stores."""

    name: Annotated[str | None, option("NAME", "One of several stores in the database. [default: the unnamed one]")] = (
        None
    )

    @property
    def store_name(self) -> str | None:
        return self.name


def run_quietly(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop, to its end, without logging: errors that concern the user are raised."""
    logging.getLogger("keyloft").addHandler(logging.NullHandler())
    return asyncio.run(work)


def size_on_disk(usage: admin.DiskUsage | admin.StatsReport) -> str:
    """The size of a database, and of its write-ahead log where there is one."""
    wal = f" and {sized(usage.wal_bytes)} of write-ahead log" if usage.wal_bytes else ""
    return f"{sized(usage.database_bytes)}{wal}"
