"""A workflow's view of its state over NATS: the calls of `SemanticStore`, for one tenant and project."""

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any

from msgspec import Raw
from msgspec.structs import replace
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.lazy import LazyList
from keyloft.errors import InvalidArgument
from keyloft.nats.client import Caller
from keyloft.nats.connection import Login
from keyloft.semantic import keys, planning, wire
from keyloft.semantic.envelope import Envelope, ExpectedVersion, Semantics, request_name
from keyloft.semantic.planning import Change, Delete, Put


class SemanticClient:
    """The state of one project, over NATS. Keys are paths within the project, as in `docs/onedrive/delta`.

    Example:
        async with await SemanticClient.connect("nats://127.0.0.1:4222", tenant="acme", project="web") as client:
            entry = await client.put(
                "docs/delta", "abc", expected_version=0, writer="harvester:sync", semantics=Semantics("cursor")
            )
            await client.get("docs/delta")
    """

    def __init__(
        self,
        nats: Nats,
        tenant: str,
        project: str,
        *,
        prefix: str = keys.PREFIX,
        timeout: float = limits.PATIENCE_SECONDS,
    ) -> None:
        """Args:
        nats: A connected client, which stays the caller's to close. `connect` makes one, and learns more from it:
            that NATS refused a request is told to a connection's error callback only.
        tenant: Whose state.
        project: Of which project.
        prefix: The subject before `.<tenant>.<project>.<operation>`, as the service has it.
        timeout: How many seconds a request waits for its answer.
        """
        self._spot = wire.Spot(keys.tenant_id(tenant), keys.project_id(project))
        self._prefix = prefix
        self._caller = Caller(
            nats,
            subjects=f"{prefix}.<tenant>.<project>.<operation>",
            log_in_as=f"the tenant {tenant}, whose user is {keys.tenant_user(tenant)}",
            timeout=timeout,
            refused=wire.refused,
        )

    @classmethod
    async def connect(
        cls,
        url: str | list[str] = "nats://127.0.0.1:4222",
        *,
        tenant: str,
        project: str,
        login: Login | None = None,
        prefix: str = keys.PREFIX,
        timeout: float = limits.PATIENCE_SECONDS,  # noqa: ASYNC109 (later requests have it, too)
        **options: Any,
    ) -> "SemanticClient":
        """Connect to NATS as a tenant. `close` ends the connection.

        Args:
            url: Where NATS is; several for a cluster. A user and password can be part of it.
            tenant: Whose state.
            project: Of which project.
            login: Credentials, where they are not part of the URL.
            prefix: The subject before `.<tenant>.<project>.<operation>`, as the service has it.
            timeout: How many seconds a request waits for its answer. To connect takes 3 at the most.
            options: Passed on to `nats.connect`.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
        """
        client = cls(Nats(), tenant, project, prefix=prefix, timeout=timeout)
        await client._caller.connect(
            url,
            name=f"keyloft tenant {tenant}",
            login=login,
            inbox=f"_INBOX_{keys.tenant_user(tenant)}",
            options=options,
        )
        return client

    @property
    def nats(self) -> Nats:
        """The connection."""
        return self._caller.nats

    async def close(self) -> None:
        """End the connection, if `connect` made it."""
        await self._caller.close()

    async def __aenter__(self) -> "SemanticClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, path: str) -> Envelope | None:
        """The entry at a path, or None."""
        self._spot.key(path)
        reply = await self._request("get", {"key": path})
        return wire.envelope_of(reply["entry"])

    async def put(
        self,
        path: str,
        value: Any,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        semantics: Semantics,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope:
        """Store a value, if what is there is what is expected; as `SemanticStore.put`.

        Raises:
            VersionConflict: Something else is there; or the request id was used for another request.
            StaleFence: The lock is no longer held by whoever got this token.
            TimedOut: It may have been made, or not: the same call with the same request id tells.
        """
        asked = Put(self._spot.key(path), value, expected_version, writer, semantics, spec_ref, fence)
        fields = _fields(planning.putting(asked)) | {"requestId": request_name(request_id)}
        entry = wire.envelope_of((await self._request("put", fields))["entry"])
        assert entry is not None
        return entry

    async def delete(
        self,
        path: str,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope | None:
        """Remove an entry, if it is what is expected; returns what was removed."""
        asked = Delete(self._spot.key(path), expected_version, writer, spec_ref, fence)
        fields = _fields(planning.deleting(asked)) | {"requestId": request_name(request_id)}
        return wire.envelope_of((await self._request("delete", fields))["entry"])

    async def batch(
        self, operations: Iterable[Put | Delete], *, request_id: str | None = None
    ) -> Sequence[Envelope | None]:
        """Make several puts and deletes, all or none; their keys are paths within the project."""
        asked = []
        for operation in operations:
            whole = replace(operation, key=self._spot.key(operation.key))
            change = planning.putting(whole) if isinstance(whole, Put) else planning.deleting(whole)
            asked.append(_fields(change) | {"operation": change.action})
        reply = await self._request("batch", {"operations": asked, "requestId": request_name(request_id)})
        return [wire.envelope_of(entry) for entry in reply["entries"]]

    def list(self, prefix: str = "", *, values: bool = False, limit: int | None = None) -> "RemoteEnvelopes":
        """The entries whose paths begin with a text, however many there are: await them, or use `async for`."""
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgument("limit: a whole number of at least 1; leave it out for no limit")
        if prefix.startswith("tenant/"):
            raise InvalidArgument("prefix: it is of the path within the project, without tenant and project")
        keys.below(self._spot.prefix + prefix)
        return RemoteEnvelopes(self._request, self._spot, prefix, values, limit)

    async def _request(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._caller.request(
            f"{self._prefix}.{self._spot.tenant}.{self._spot.project}.{operation}", fields
        )


class RemoteEnvelopes(LazyList[Envelope]):
    """Entries on request: iterate them with `async for`, or `await` them all."""

    what = "entries"

    def __init__(self, request: Any, spot: wire.Spot, prefix: str, values: bool, limit: int | None) -> None:
        self._request = request
        self._spot = spot
        self._prefix = prefix
        self._values = values
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[Envelope]:
        left, after = self._limit, None
        while left is None or left > 0:
            wanted = limits.LISTED_KEYS if left is None else min(left, limits.LISTED_KEYS)
            fields = {"prefix": self._prefix, "values": self._values, "limit": wanted, "after": after}
            reply = await self._request("list", fields)
            found = [wire.envelope_of(entry) for entry in reply["entries"]]
            for entry in found:
                assert entry is not None
                yield entry
                after = entry.key.removeprefix(self._spot.prefix)
            if not reply["truncated"]:
                return
            left = None if left is None else left - len(found)


def _fields(change: Change) -> dict[str, Any]:
    """A put or delete, as it travels."""
    fields: dict[str, Any] = {
        "key": change.place.path,
        "expectedVersion": change.expected_version,
        "lastWriter": change.writer,
        "specRef": change.spec_ref,
        "fence": change.fence,
    }
    if change.semantics is not None:
        fields |= {"value": Raw(change.value), "semantics": change.semantics}
    return fields
