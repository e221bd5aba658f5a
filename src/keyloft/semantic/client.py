"""A client of the semantic service: the calls of `SemanticStore` over NATS, for one tenant and project."""

from collections.abc import Mapping, Sequence
from typing import Any

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.lazy import PagedList
from keyloft.errors import KeyloftError
from keyloft.nats.client import ServiceClient
from keyloft.nats.connection import Login
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.semantic import keys, rules, wire
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.flags import Flags
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.remote import RemoteAuditTrail, RemoteDeadLetters, RemoteLockList, RemoteLocks
from keyloft.semantic.remote_watches import RemoteEntryChanges, RemoteEntryWatch
from keyloft.semantic.workflows import Workflows
from keyloft.semantic.writes import Written


class SemanticClient(ServiceClient, Workflows):
    """The state of one project, over NATS. Keys are paths within the project, as in `docs/onedrive/delta`.

    Example:
        async with await SemanticClient.connect("nats://127.0.0.1:4222", tenant="acme", project="web") as client:
            entry = await client.put(
                "docs/delta", "abc", expected_version=0, writer="harvester:sync", semantics=Semantics("cursor")
            )
            await client.get("docs/delta")
            async with client.lock("locks/sync", writer="harvester:sync") as lock:
                await client.put(…, fence=lock.fence)
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
        tenant: The tenant that the entries belong to.
        project: The project of that tenant.
        prefix: The subject before `.<tenant>.<project>.<operation>`, as the service has it.
        timeout: How many seconds a request waits for its answer.
        """
        self.project = keys.checked_project(tenant, project)
        """Whose entries these are."""
        self.prefix = prefix
        """The beginning of its subjects."""
        self.dead_letters = RemoteDeadLetters(self)
        """Writes that were given up: to be listed, retried or dropped."""
        Workflows.__init__(self, self.dead_letters, RemoteLocks(self))
        ServiceClient.__init__(
            self,
            nats,
            owner=f"the project {tenant}/{project}",
            subjects=f"{prefix}.<tenant>.<project>.<operation>",
            log_in_as=f"the tenant {tenant}, whose user is {keys.tenant_user(tenant)}",
            timeout=timeout,
        )

    @classmethod
    async def connect(
        cls,
        url: str | Sequence[str] = "nats://127.0.0.1:4222",
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
            tenant: The tenant that the entries belong to.
            project: The project of that tenant.
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
        wire.key_within(self.project, key)
        return wire.envelope_of((await self._send("get", {"key": key}))["entry"])

    async def _carry_out(self, request: WriteRequest) -> Written:
        operation, fields = wire.fields_of(request)
        reply = await self._send(operation, fields)
        return [wire.envelope_of(entry) for entry in (reply["entries"] if request.is_batch else [reply["entry"]])]

    def check_intent(self, intent: Intent) -> None:
        wire.key_within(self.project, intent.key)

    def check_key(self, key: object, argument: str = "key") -> str:
        wire.key_within(self.project, key, argument)
        return str(key)

    def list(self, prefix: str = "", *, values: bool = False, limit: int | None = None) -> "RemoteEnvelopes":
        """The entries whose paths begin with a text, however many there are: await it, or use `async for`."""
        wire.prefix_within(self.project, prefix)
        return RemoteEnvelopes(self, prefix, values, limit)

    def watch(self, key: str) -> RemoteEntryWatch:
        self.check_key(key)
        return RemoteEntryWatch(self, key)

    def changes(self, prefix: str = "") -> RemoteEntryChanges:
        return RemoteEntryChanges(self, prefix)

    def events(self, *keys: str, prefix: str | None = None, since: int | None = None) -> RemoteWatch:
        """Changes as they happen, by any process: puts, deletes, expiries. An event may be reported twice.

        Args:
            keys: Paths within the project; without any, all entries whose paths begin with `prefix`.
            prefix: The beginning of a path; without it and without keys, all entries of the project.
            since: Report what changed after this version, a `reported_to` of an earlier watch; None for what changes
                from now on.

        Raises:
            InvalidArgument: Both keys and a prefix are given.
            InvalidKey: A key or the prefix breaks a rule, which the message names.
            HistoryGone: Raised by the iteration: the service no longer knows what changed since then. List, then watch
                again.

        Example:
            async for event in client.events(prefix="flags/"):
                print(event.key, event.version)
        """
        for key in keys:
            wire.key_within(self.project, key)
        if prefix is not None:
            wire.prefix_within(self.project, prefix)
        return self._watch(self._subject("watch"), prefix, keys, since)

    def locks(self, *, values: bool = False, limit: int | None = None) -> RemoteLockList:
        """The locks that are held, in the order of their fencing tokens: await it, or use `async for`.

        Args:
            values: Whether to show values: of a `Lock`, its writer, host and process.
            limit: How many to return at most.
        """
        return RemoteLockList(self, values, limit)

    def audit(
        self, key: str | None = None, *, after: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> RemoteAuditTrail:
        """The audit records of a key, or of the project, in the order of what happened: await it, or use `async for`.

        Args:
            key: The path of an entry; None for the whole project.
            after: Only records after the one with this `sequence`.
            limit: How many to return at most.
            reverse: The last one first.
        """
        if key is not None:
            self.check_key(key)
        rules.check_number(after, "after", "the sequence of an audit record", 2**63 - 1)
        return RemoteAuditTrail(self, key, after=after, limit=limit, reverse=reverse)

    def flags(self, defaults: Mapping[str, Any] | None = None) -> Flags:
        """The feature flags of the project; a flag that is not set has its default."""
        return Flags(self, "flags/", defaults or {})

    async def aclose(self) -> None:
        """Finish the requests of locks, refuse further calls, and end the connection if `connect` made it."""
        if not self._is_closed:
            await self.lock_keeper.background.finish()
            await self.dead_letters.save_last()
        await super().aclose()

    close = aclose

    async def _send(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        return await self.ask(self._subject(operation), fields)

    def _subject(self, operation: str) -> str:
        return f"{self.prefix}.{self.project.tenant}.{self.project.name}.{operation}"


class RemoteEnvelopes(PagedList[Envelope]):
    """Entries of a project over NATS, read as needed: iterate them with `async for`, or `await` them all."""

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
        return found, keys.path_of(found[-1].key) if reply["truncated"] else None
