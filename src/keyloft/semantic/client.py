"""A workflow's view of its state over NATS: the calls of `SemanticStore`, for one tenant and project."""

from collections.abc import Mapping
from typing import Any

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.lazy import PagedList
from keyloft.errors import KeyloftError
from keyloft.nats.client import ServiceClient
from keyloft.nats.connection import Login
from keyloft.semantic import keys, wire
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.writes import Writes, Written


class SemanticClient(ServiceClient, Writes):
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
        self._project = keys.checked_project(tenant, project)
        self._prefix = prefix
        super().__init__(
            nats,
            owner=f"the project {tenant}/{project}",
            subjects=f"{prefix}.<tenant>.<project>.<operation>",
            log_in_as=f"the tenant {tenant}, whose user is {keys.tenant_user(tenant)}",
            timeout=timeout,
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
            InvalidArgument: The URL is not an address of NATS.
        """
        client = cls(Nats(), tenant, project, prefix=prefix, timeout=timeout)
        name, inbox = f"keyloft tenant {tenant}", f"_INBOX_{keys.tenant_user(tenant)}"
        return await client._connect(url, name=name, login=login, inbox=inbox, options=options)

    def _refused(self, reply: Mapping[str, Any]) -> KeyloftError:
        return wire.refused(reply)

    async def get(self, key: str) -> Envelope | None:
        """The entry at a key, or None."""
        wire.key_within(self._project, key)
        return wire.envelope_of((await self._send("get", {"key": key}))["entry"])

    async def write(self, request: WriteRequest) -> Written:
        """Send a write request, as `put`, `delete` and `batch` make them."""
        for intent in request.intents:
            self.check_intent(intent)
        operation, fields = wire.fields_of(request)
        reply = await self._send(operation, fields)
        return [wire.envelope_of(entry) for entry in (reply["entries"] if request.is_batch else [reply["entry"]])]

    def check_intent(self, intent: Intent) -> None:
        wire.key_within(self._project, intent.key)

    def list(self, prefix: str = "", *, values: bool = False, limit: int | None = None) -> "RemoteEnvelopes":
        """The entries whose paths begin with a text, however many there are: await it, or use `async for`."""
        wire.prefix_within(self._project, prefix)
        return RemoteEnvelopes(self, prefix, values, limit)

    async def _send(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._request(f"{self._prefix}.{self._project.tenant}.{self._project.name}.{operation}", fields)


class RemoteEnvelopes(PagedList[Envelope]):
    """Entries on request: iterate them with `async for`, or `await` them all."""

    what = "entries"

    def __init__(self, client: SemanticClient, prefix: str, values: bool, limit: int | None) -> None:
        super().__init__(client, limit)
        self._client = client
        self._prefix = prefix
        self._values = values

    async def _page(self, limit: int, after: str | None) -> tuple[list[Envelope], str | None]:
        fields = {"prefix": self._prefix, "values": self._values, "limit": limit, "after": after}
        reply = await self._client._send("list", fields)
        found = [entry for entry in map(wire.envelope_of, reply["entries"]) if entry is not None]
        return found, found[-1].key.split("/", 4)[4] if reply["truncated"] else None
