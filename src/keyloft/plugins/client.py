"""A plugin's view of its storage over NATS: four calls instead of subjects and JSON."""

from typing import Any, Final

import msgspec
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.lazy import PagedList
from keyloft.nats.client import ServiceClient
from keyloft.nats.connection import Login
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.plugins import rules

PREFIX: Final = "db.kv"


class DatabaseClient(ServiceClient):
    """The storage of one plugin, over NATS.

    Example:
        async with await DatabaseClient.connect("nats://127.0.0.1:4222", plugin_name="trivia") as client:
            await client.kv.set("score", 100)
            score = await client.kv.get("score", default=0)
    """

    def __init__(
        self, nats: Nats, plugin_name: str, *, prefix: str = PREFIX, timeout: float = limits.PATIENCE_SECONDS
    ) -> None:
        """Args:
        nats: A connected client of nats-py; the caller closes it. With `connect`, a request that NATS refuses raises
            `NotPermitted` at once; here it times out, since NATS reports refusals to the connection alone.
        plugin_name: Whose storage.
        prefix: The subject before `.<plugin>.<operation>`, as the service has it.
        timeout: How many seconds a request waits for its reply.
        """
        self.plugin_name = rules.plugin_name(plugin_name)
        self.kv = PluginKV(self)
        self._prefix = prefix
        owner = f"the plugin {plugin_name}"
        super().__init__(nats, owner=owner, subjects=f"{prefix}.<plugin>.<operation>", log_in_as=owner, timeout=timeout)

    @classmethod
    async def connect(
        cls,
        url: str | list[str] = "nats://127.0.0.1:4222",
        *,
        plugin_name: str,
        login: Login | None = None,
        prefix: str = PREFIX,
        timeout: float = limits.PATIENCE_SECONDS,  # noqa: ASYNC109 (later requests have it, too)
        **options: Any,
    ) -> "DatabaseClient":
        """Connect to NATS as a plugin. `aclose` ends the connection.

        Args:
            url: The address of NATS; several for a cluster. A user and password can be part of it.
            plugin_name: Whose storage.
            login: Credentials, where they are not part of the URL.
            prefix: The subject before `.<plugin>.<operation>`, as the service has it.
            timeout: How many seconds a request waits for its reply. Connecting takes 3 seconds at most.
            options: Passed on to `nats.connect`.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
            InvalidArgument: The URL is not an address of NATS.
        """
        client = cls(Nats(), plugin_name, prefix=prefix, timeout=timeout)
        return await client._connect(
            url, name=f"keyloft plugin {plugin_name}", login=login, inbox=f"_INBOX_{plugin_name}", options=options
        )

    async def request(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            KeyloftError: The service refused it; the class of the error has the reason.
            NoService: No service is running on this NATS.
            NotPermitted: NATS does not let this user send this request, or receive its reply.
            TimedOut: No reply arrived in time.
        """
        return await self._request(self.subject(operation), fields)

    def subject(self, operation: str) -> str:
        """Where requests for an operation are sent."""
        return f"{self._prefix}.{self.plugin_name}.{operation}"


class PluginKV:
    """The keys and values of one plugin."""

    def __init__(self, client: DatabaseClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<PluginKV of {self._client!r}>"

    async def get(self, key: str, default: Any = None) -> Any:
        """The value at a key, or the default where there is none."""
        reply = await self._client.request("get", {"key": rules.key(key)})
        return reply["value"] if reply["exists"] else default

    async def set(self, key: str, value: Any, *, ttl: int | None = None, ttl_seconds: int | None = None) -> None:
        """Store a value. When this returns, it is on disk.

        Args:
            key: Any text of up to 255 characters.
            value: Anything that JSON can hold, up to 64 KB as JSON.
            ttl: After so many seconds the entry is gone; None keeps it.
            ttl_seconds: The same as `ttl`.

        Raises:
            InvalidArgument: A TTL is out of range, or the two differ.
            ValueTooLarge: It takes more than 64 KB as JSON.
            InvalidValue: It is not JSON, or would not be read back as an equal value.
        """
        rules.ttl_under_either_name(ttl_seconds, ttl)
        seconds = ttl_seconds if ttl is None else ttl
        fields = {"key": rules.key(key), "value": msgspec.Raw(rules.value(value)), "ttl": seconds}
        await self._client.request("set", fields)

    async def delete(self, key: str) -> bool:
        """Remove an entry; returns whether there was one."""
        reply = await self._client.request("delete", {"key": rules.key(key)})
        return bool(reply["deleted"])

    def list(self, prefix: str = "", *, limit: int | None = None) -> "Keys":
        """The keys that begin with a text, in their order, however many there are.

        Example:
            async for key in client.kv.list("user:"):
                ...
            first = await client.kv.list("user:", limit=10)
        """
        return Keys(self._client, rules.text(prefix, "prefix"), limit)

    def watch(self, *keys: str, prefix: str | None = None, since: int | None = None) -> RemoteWatch:
        """Changes as they happen, by any process: puts, deletes, expiries. It renews itself; a change may come twice.

        Args:
            keys: The keys to watch; without any, all that begin with `prefix`.
            prefix: Any text; without it and without keys, all keys of the plugin.
            since: Report what changed after this version, a `reported_to` of an earlier watch; None for what changes
                from now on.

        Raises:
            InvalidArgument: Keys and a prefix are given, or one of them can't exist.
            HistoryGone: By the iteration: the service no longer knows what changed since then. List, then watch again.

        Example:
            async with client.kv.watch(prefix="user:") as changes:
                async for event in changes:
                    print(event.key, "is gone" if event.deleted else await client.kv.get(event.key))
        """
        known = [rules.key(key) for key in keys]
        text = None if prefix is None else rules.text(prefix, "prefix")
        return self._client._watch(self._client.subject("watch"), text, known, since)


class Keys(PagedList[str]):
    """Keys on request: iterate them with `async for`, or `await` them all."""

    what = "keys"

    def __init__(self, client: DatabaseClient, prefix: str, limit: int | None) -> None:
        super().__init__(client, limit)
        self._client = client
        self._prefix = prefix

    async def _page(self, limit: int, after: str | None) -> tuple[list[str], str | None]:
        reply = await self._client.request("list", {"prefix": self._prefix, "limit": limit, "after": after})
        return reply["keys"], reply["keys"][-1] if reply["truncated"] else None
