"""The operation `watch` of both services: asks for a lease, renews it, or ends it."""

from collections.abc import Collection, Hashable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError

from keyloft import limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import Batch, Changes, Check, Committed, Delete, Get, Latest, LogPosition, Touch
from keyloft.errors import HistoryGone, InvalidArgument, NotPermitted, Stalled, WatchExpired
from keyloft.nats import payloads
from keyloft.nats.errors import NEWER_PERMISSIONS
from keyloft.nats.events import EVENTS, WATCH
from keyloft.nats.leases import SPACE, Lease, new_id, read_lease, stored
from keyloft.nats.messages import NatsConnection
from keyloft.nats.publications import Watchable
from keyloft.nats.publisher import EventPublisher
from keyloft.nats.requests import Call

_NEW: Final = ("prefix", "keys")
_FIELDS: Final = (*_NEW, "since", "subject", "end")
_MOST_VERSION: Final = 2**63 - 1


class WatchRequest(Struct, frozen=True, kw_only=True):
    """What a message asks for: a new lease; with a subject, the renewal or the end of one."""

    names: tuple[str, ...]
    prefix: str | None
    keys: tuple[str, ...] | None
    since: int | None
    subject: str | None
    end: bool


class WatchOperation(Call):
    """Lets clients follow changes. A lease stores the watched keys, the subject of the events, and how far they are.

    Nothing is published before the client has renewed its lease for the first time, because it can subscribe only when
    it knows the subject. With `since`, a renewal begins again from there: the client has missed something.
    """

    name = WATCH
    most_bytes = limits.WATCH_REQUEST_BYTES
    shows_entries = False

    def __init__(self, nats: Nats, prefix: str, watchable: Watchable, lease_seconds: float) -> None:
        """Args:
        nats: The connection of the service.
        prefix: What the subjects of requests and events begin with, up to the dot before the owner.
        watchable: What can be watched.
        lease_seconds: How long a lease lasts unless it is renewed.
        """
        self._nats = nats
        self._permitted_at: int | None = None
        """How many times the connection had been restored when publishing events was last found to be permitted."""
        self._prefix = prefix
        self._watchable = watchable
        self._expire_in = round(1000 * lease_seconds)
        self._expires_in = lease_seconds
        self._served: tuple[Engine, EventPublisher] | None = None

    def serve(self, engine: Engine, publisher: EventPublisher) -> None:
        """Set the engine and the publisher: from now on, watches can be carried out."""
        self._served = engine, publisher

    def read(self, about: Any, data: bytes, /) -> WatchRequest:
        return read_watch(self._watchable, about, data)

    def keys_read(self, content: WatchRequest) -> Collection[Hashable] | None:
        # A new watch begins after all that its owner has written before.
        return None if content.subject is None else ()

    def key(self, content: WatchRequest) -> str:
        return content.subject or content.prefix or ""

    async def carry_out(self, content: WatchRequest) -> tuple[bytes, None]:
        assert self._served is not None, "no request arrives before the service has started"
        engine, publisher = self._served
        if content.subject is None:
            lease = await self._begin(engine, publisher, content)
        elif content.end:
            done = await write(engine, Delete(SPACE, self._row(publisher, content)))
            return payloads.to_json({"success": True, "existed": done.found[0]}), None
        else:
            lease = await self._renew(engine, publisher, content)
        reply = {"subject": lease.subject, "version": lease.since, "run": lease.run, "expires_in": self._expires_in}
        return payloads.to_json({"success": True, **reply}), None

    async def _begin(self, engine: Engine, publisher: EventPublisher, request: WatchRequest) -> Lease:
        subject = f"{self._prefix}{'.'.join(request.names)}.{EVENTS}.{(lease_id := new_id())}"
        await self._check_permitted(subject)
        row = publisher.rows.lease(request.names, lease_id)
        async with publisher.beginning(row, self._watchable.owner(request.names), request.keys):
            if request.since is None:
                [since] = await engine.read(Latest())
            else:
                since = request.since
                await engine.read(Changes(LogPosition(since)))  # raises HistoryGone
            lease = Lease(
                subject=subject,
                names=request.names,
                publisher=publisher.instance.id,
                since=since,
                prefix=request.prefix,
                keys=request.keys,
            )
            done = await write(engine, stored(row, lease, expire_in=self._expire_in))
            publisher.know(row, lease, done.version)
        return lease

    async def _check_permitted(self, subject: str) -> None:
        """Make sure that this service may publish events: NATS reports a refusal to the connection alone.

        Raises:
            NotPermitted: NATS refuses it.
        """
        nats = self._nats
        if not isinstance(nats, NatsConnection) or self._permitted_at == nats.stats["reconnects"]:
            return
        reconnects = nats.stats["reconnects"]
        try:
            await nats.publish(subject, b"{}")
            await nats.flush()
        except (NatsError, TimeoutError) as error:
            raise Stalled(f"the service could not publish to {subject}: {error or type(error).__name__}") from None
        if subject.lower() in nats.refused_events:
            refused = f"{self._prefix}*.{EVENTS}.*"
            raise NotPermitted(f"watch: NATS does not let the service publish to {refused}: {NEWER_PERMISSIONS}")
        self._permitted_at = reconnects

    async def _renew(self, engine: Engine, publisher: EventPublisher, request: WatchRequest) -> Lease:
        row = self._row(publisher, request)
        while True:
            known = publisher.leases.get(row)
            if known is not None and known.lease.run and known.lease.gone is None and request.since is None:
                lease = known.lease
                [existed] = (await write(engine, Touch(SPACE, row, self._expire_in))).found
                if not existed:
                    raise _expired()
                return lease
            [record] = await engine.read(Get(SPACE, row))
            if record is None:
                raise _expired()
            lease = read_lease(record.value)
            if lease.gone is not None and request.since is None:
                raise HistoryGone(message=lease.gone)
            if request.since is not None:
                await engine.read(Changes(LogPosition(request.since)))  # raises HistoryGone
                lease = replace(lease, since=request.since, gone=None)
            elif lease.run:
                publisher.know(row, lease, record.version)
                continue
            lease = replace(lease, run=lease.run + 1)
            begun = stored(row, lease, expire_in=self._expire_in)
            done = await engine.commit(Batch((begun,), (Check(SPACE, row, record.version),)))
            if isinstance(done, Committed):
                return lease

    def _row(self, publisher: EventPublisher, request: WatchRequest) -> bytes:
        """The row of a lease of this owner, and of no other."""
        assert request.subject is not None
        before = f"{'.'.join(request.names)}.{EVENTS}."
        _, found, lease_id = request.subject.rpartition(f"{before}")
        if not found or not lease_id.isalnum() or not lease_id.isascii():
            raise InvalidArgument(f"subject: expected one below {self._prefix}{before}, as the service has answered it")
        return publisher.rows.lease(request.names, lease_id)


def read_watch(watchable: Watchable, about: Any, data: bytes) -> WatchRequest:
    """What a message asks to watch.

    Args:
        watchable: What can be watched.
        about: What its subject names: a plugin, or a project.
        data: The message.

    Raises:
        KeyloftError: It is refused.
    """
    fields = _fields(data)
    prefix, keys, since, subject, end = [fields.get(name) for name in _FIELDS]
    if since is not None and (type(since) is not int or not 0 <= since <= _MOST_VERSION):
        raise InvalidArgument(f"since: expected a version, a whole number from 0 to {_MOST_VERSION}")
    if end is not None and type(end) is not bool:
        raise InvalidArgument("end: expected true or false")
    names = watchable.names(about)
    if subject is None:
        if end is not None:
            raise InvalidArgument("end: expected together with the subject of the watch that is to end")
        _check_keys(prefix, keys)
        watchable.asks(names, prefix, keys)  # refuses what can't be watched
    else:
        if not isinstance(subject, str):
            raise InvalidArgument("subject: expected the subject that the service has answered, a string")
        if given := [name for name in _NEW if fields.get(name) is not None]:
            raise InvalidArgument(f"{given[0]}: a watch keeps what it watches; leave it out to renew or end it")
    return WatchRequest(
        names=names,
        prefix=prefix,
        keys=None if keys is None else tuple(keys),
        since=since,
        subject=subject,
        end=bool(end),
    )


def _check_keys(prefix: object, keys: object) -> None:
    if keys is None:
        return
    if prefix is not None:
        raise InvalidArgument("prefix, keys: expected one of them, got both")
    if not isinstance(keys, list) or not 1 <= len(keys) <= limits.LEASE_KEYS:
        raise InvalidArgument(f"keys: expected an array of 1 to {limits.LEASE_KEYS} keys")


def _fields(data: bytes) -> dict[str, Any]:
    if len(data) > (most := limits.WATCH_REQUEST_BYTES):
        raise payloads.too_large(len(data), most)
    fields, _ = payloads.read(b"{}" if payloads.is_empty(data) else data)
    payloads.refuse_unknown(fields, _FIELDS)
    return fields


def _expired() -> WatchExpired:
    return WatchExpired("this watch has ended or was not renewed in time: ask for a new one, with since")
