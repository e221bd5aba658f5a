"""A workflow's view of its state over NATS: the calls of `SemanticStore`, for one tenant and project."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw
from msgspec.structs import replace
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import InvalidArgument
from keyloft.nats.client import RemoteList, ServiceClient
from keyloft.nats.connection import Login
from keyloft.semantic import keys, planning, wire
from keyloft.semantic.envelope import Envelope, ExpectedVersion, Semantics, request_name
from keyloft.semantic.planning import Change, Delete, Put


class SemanticClient(ServiceClient):
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
        nats: A connected client of nats-py; the caller closes it. With `connect`, a request that NATS refuses raises
            `NotPermitted` at once; here it times out, since NATS reports refusals to the connection alone.
        tenant: Whose state.
        project: Of which project.
        prefix: The subject before `.<tenant>.<project>.<operation>`, as the service has it.
        timeout: How many seconds a request waits for its answer.
        """
        self._spot = wire.Spot(keys.tenant_id(tenant), keys.project_id(project))
        self._prefix = prefix
        super().__init__(
            nats,
            owner=f"the project {tenant}/{project}",
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
        """Connect to NATS as a tenant. `aclose` ends the connection.

        Args:
            url: Where NATS is; several for a cluster. A user and password can be part of it.
            tenant: Whose state.
            project: Of which project.
            login: Credentials, where they are not part of the URL.
            prefix: The subject before `.<tenant>.<project>.<operation>`, as the service has it.
            timeout: How many seconds a request waits for its answer. Connecting takes 3 seconds at most.
            options: Passed on to `nats.connect`.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
        """
        client = cls(Nats(), tenant, project, prefix=prefix, timeout=timeout)
        return await client._connect(
            url,
            name=f"keyloft tenant {tenant}",
            login=login,
            inbox=f"_INBOX_{keys.tenant_user(tenant)}",
            options=options,
        )

    async def get(self, path: str) -> Envelope | None:
        """The entry at a path, or None."""
        self._spot.key(path)
        reply = await self._send("get", {"key": path})
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
        entry = wire.envelope_of((await self._send("put", fields))["entry"])
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
        return wire.envelope_of((await self._send("delete", fields))["entry"])

    async def batch(
        self, operations: Iterable[Put | Delete], *, request_id: str | None = None
    ) -> Sequence[Envelope | None]:
        """Make several puts and deletes, all or none; their keys are paths within the project."""
        asked = []
        for operation in operations:
            whole = replace(operation, key=self._spot.key(operation.key))
            change = planning.putting(whole) if isinstance(whole, Put) else planning.deleting(whole)
            asked.append(_fields(change) | {"operation": change.action})
        reply = await self._send("batch", {"operations": asked, "requestId": request_name(request_id)})
        return [wire.envelope_of(entry) for entry in reply["entries"]]

    def list(self, prefix: str = "", *, values: bool = False, limit: int | None = None) -> "RemoteEnvelopes":
        """The entries whose paths begin with a text, however many there are: await them, or use `async for`."""
        if prefix.startswith("tenant/"):
            raise InvalidArgument("prefix: it is of the path within the project, without tenant and project")
        keys.below(self._spot.prefix + prefix)
        return RemoteEnvelopes(self._send, self._spot, prefix, values, limit)

    async def _send(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._request(f"{self._prefix}.{self._spot.tenant}.{self._spot.project}.{operation}", fields)


class RemoteEnvelopes(RemoteList[Envelope]):
    """Entries on request: iterate them with `async for`, or `await` them all."""

    what = "entries"

    def __init__(self, send: Any, spot: wire.Spot, prefix: str, values: bool, limit: int | None) -> None:
        super().__init__(limit)
        self._send = send
        self._spot = spot
        self._prefix = prefix
        self._values = values

    async def _page(self, limit: int, after: str | None) -> tuple[list[Envelope], str | None]:
        fields = {"prefix": self._prefix, "values": self._values, "limit": limit, "after": after}
        reply = await self._send("list", fields)
        found = [entry for entry in map(wire.envelope_of, reply["entries"]) if entry is not None]
        return found, found[-1].key.removeprefix(self._spot.prefix) if reply["truncated"] else None


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
