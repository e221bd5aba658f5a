"""Finds the services that would share this service's requests, and refuses to join those of another store.

Services of one queue group share the requests below their prefixes: NATS sends each request to one of them. If they
served different databases, a plugin would read sometimes from one, sometimes from the other.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import StoreId
from keyloft.errors import AnotherStore, KeyloftError
from keyloft.nats.errors import NEWER_PERMISSIONS
from keyloft.nats.messages import NatsConnection
from keyloft.plugins.service import DatabaseService
from keyloft.semantic.service import SemanticService
from keyloft.server.banner import database_name
from keyloft.server.config import Config
from keyloft.server.isolation import INFO, SERVICE

logger = logging.getLogger(__name__)

NEW_STORE: Final = "of a new file"
"""Stands for the id of a store that is not made yet: no service can have the same."""


class _Endpoint(Struct):
    subject: str = ""
    queue_group: str = ""


class Member(Struct):
    """A service as `$SRV.INFO` shows it. Services of other programs answer there, too."""

    name: str
    metadata: Mapping[str, str] = {}
    endpoints: Sequence[_Endpoint] = ()

    @property
    def store(self) -> str | None:
        """The id of its store; None if the service does not say, as an earlier version of Keyloft."""
        return self.metadata.get("store")

    @property
    def where(self) -> str:
        """Its store, database, process and machine, for messages."""
        about = self.metadata
        process = f"{about.get('database')}, process {about.get('pid')} on {about.get('host')}"
        return f"store {self.store or 'unknown'} ({process})"

    def is_same(self, other: "Member") -> bool:
        """Whether both are the same process."""
        return all([self.metadata.get(name) == other.metadata.get(name) for name in ("store", "host", "pid")])

    def prefixes(self) -> list[str]:
        """The beginnings of the subjects that it serves."""
        if named := self.metadata.get("prefixes"):
            return named.split(" ")
        return [endpoint.subject.partition(".*")[0] for endpoint in self.endpoints]

    def shares(self, name: str, queue: str, prefixes: Sequence[str]) -> bool:
        """Whether it would get some of the requests to a service with this name, queue group and prefixes."""
        return (
            self.name == name
            and any([endpoint.queue_group == queue for endpoint in self.endpoints])
            and any([_overlap(one, other) for one in prefixes for other in self.prefixes()])
        )


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


async def new_store() -> str:
    """The id of a store that is not made yet."""
    return NEW_STORE


def store_of(engine: Engine, known: str) -> Callable[[], Awaitable[str]]:
    """Reads the id of a store, which a restore changes. While the database does not answer, the last one counts.

    Callers share a read, and none waits for a database that has not answered the read before: who looks for services
    waits for a second or two for all of them.
    """
    reading: asyncio.Task[None] | None = None
    is_late = False

    async def refresh() -> None:
        nonlocal known, is_late
        try:
            async with asyncio.timeout(limits.STORE_ID_SECONDS):
                [known] = await engine.read(StoreId())
            is_late = False
        except (KeyloftError, TimeoutError):
            is_late = True

    async def read() -> str:
        nonlocal reading
        if reading is None or reading.done():
            reading = asyncio.create_task(refresh(), name="keyloft store id")
        if not is_late:
            await asyncio.shield(reading)
        return known

    return read


class QueueGroup:
    """The services that share the requests of this one."""

    def __init__(self, config: Config, store: Callable[[], Awaitable[str]]) -> None:
        """`store` reads the id of this service's store."""
        self._store = store
        self._queue = config.queue
        self._database = database_name(config.database)
        self._served = {DatabaseService.name: config.prefixes, SemanticService.name: [config.semantic_prefix]}
        self._may_ask = True
        self._has_warned = False
        self._known: set[str] = set()

    @property
    def subjects(self) -> list[str]:
        """The subjects that this service subscribes to."""
        return [f"{prefix}.>" for prefixes in self._served.values() for prefix in prefixes]

    async def metadata(self, name: str) -> dict[str, str]:
        """What the service with this name says about itself in `$SRV.PING` and `$SRV.INFO`."""
        return self._about(name, await self._store())

    def _about(self, name: str, store: str) -> dict[str, str]:
        return {
            "store": store,
            "database": self._database,
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "prefixes": " ".join(self._served[name]),
        }

    def warn_of_unknown(self) -> None:
        """Warn once if `check` could not ask. To be called after the start: a user that may not serve gets an error."""
        if not self._may_ask and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "whether other services here serve the same store is not known: NATS refuses to let this user "
                "publish to %s. %s",
                INFO,
                NEWER_PERMISSIONS,
            )

    async def check(self, nats: NatsConnection, user: str | None) -> None:
        """Find the members, and refuse to join those of another store.

        Args:
            nats: The connection on which the members are asked.
            user: The user of that connection; None if it is not known.

        Raises:
            AnotherStore: Another store is served here. The message names both stores, and what to do.
        """
        while True:
            store = await self._store()
            services = await find_services(nats, user)
            self._may_ask = services is not None
            try:
                return self._compare(store, services or [])
            except AnotherStore:
                if await self._store() == store:
                    raise
                # A restore has replaced the store meanwhile, and members have answered with the new id.

    def _compare(self, store: str, services: Sequence[Member]) -> None:
        for name, prefixes in self._served.items():
            mine = Member(name, self._about(name, store))
            members = [one for one in services if one.shares(name, self._queue, prefixes) and not one.is_same(mine)]
            others = [member for member in members if member.store not in (None, store)]
            if others:
                raise AnotherStore(_refusal(mine, others))
            for member in members:
                if member.store is None:
                    logger.warning("another service here does not say which store it serves: %s", member.where)
                elif member.where not in self._known:
                    self._known.add(member.where)
                    logger.info("sharing the requests with another instance on %s", member.where)


def _refusal(mine: Member, others: Sequence[Member]) -> str:
    more = f", and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{', '.join(mine.prefixes())}: served here already from another database, {others[0].where}{more}; this "
        f"service has {mine.where}. Each request would go to one of them. Stop one, let all use the same --database, "
        "or give each its own --prefixes and --semantic-prefix, or its own NATS server. If the database was "
        "restored while one of them ran, stop all of them before you start the first"
    )


async def find_services(nats: NatsConnection, user: str | None) -> list[Member] | None:
    """All services on NATS that answer within a second; None if this user may not ask."""
    inbox = nats.new_inbox()
    if user == SERVICE:
        inbox = f"_INBOX_{SERVICE}.{inbox.rpartition('.')[2]}"
    found: list[Member] = []
    is_alone = asyncio.Event()

    async def receive(message: Msg) -> None:
        if not message.data and (message.headers or {}).get("Status") == "503":
            is_alone.set()  # no service is there
            return
        try:
            found.append(msgspec.json.decode(message.data, type=Member))
        except msgspec.MsgspecError:
            logger.debug("a service answers %s in another form", INFO)

    subscription = await nats.subscribe(inbox, cb=receive)
    try:
        await nats.publish(INFO, b"", reply=inbox)
        # nats-py sends a ping before what is in its buffer. The first flush sends the buffer, the second waits for it.
        for _ in range(2):
            await nats.flush()
        if inbox.lower() in nats.refused or INFO.lower() in nats.refused:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.MEMBERS_SECONDS):
                await is_alone.wait()
        return found
    finally:
        await subscription.unsubscribe()
