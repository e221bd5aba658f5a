"""A plugin's view of its storage: four calls instead of subjects and JSON."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final

import msgspec
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.lazy import LazyList
from keyloft.errors import InvalidArgument
from keyloft.nats.client import Caller
from keyloft.nats.connection import Login
from keyloft.nats.errors import refused
from keyloft.plugins import rules

PREFIX: Final = "db.kv"


class DatabaseClient:
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
        nats: A connected client, which stays the caller's to close. `connect` makes one, and learns more from it:
            that NATS refused a request is told to a connection's error callback only.
        plugin_name: Whose storage.
        prefix: The subject before `.<plugin>.<operation>`, as the service has it.
        timeout: How many seconds a request waits for its answer.
        """
        self.plugin_name = rules.plugin_name(plugin_name)
        self.kv = PluginKV(self)
        self._prefix = prefix
        self._caller = Caller(
            nats,
            subjects=f"{prefix}.<plugin>.<operation>",
            log_in_as=f"the plugin {plugin_name}",
            timeout=timeout,
            refused=refused,
        )

    @property
    def nats(self) -> Nats:
        """The connection."""
        return self._caller.nats

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
        """Connect to NATS as a plugin. `close` ends the connection.

        Args:
            url: Where NATS is; several for a cluster. A user and password can be part of it.
            plugin_name: Whose storage.
            login: Credentials, where they are not part of the URL.
            prefix: The subject before `.<plugin>.<operation>`, as the service has it.
            timeout: How many seconds a request waits for its answer. To connect takes 3 at the most.
            options: Passed on to `nats.connect`.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
        """
        client = cls(Nats(), plugin_name, prefix=prefix, timeout=timeout)
        await client._caller.connect(
            url, name=f"keyloft plugin {plugin_name}", login=login, inbox=f"_INBOX_{plugin_name}", options=options
        )
        return client

    async def close(self) -> None:
        """End the connection, if `connect` made it."""
        await self._caller.close()

    async def __aenter__(self) -> "DatabaseClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def request(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask the service and wait for its reply.

        Raises:
            KeyloftError: It refused; the kind of the error tells why.
            NoService: Nobody serves plugins on this NATS.
            NotPermitted: NATS lets this user not send this request, or not receive its reply.
            TimedOut: No reply came in time.
        """
        return await self._caller.request(f"{self._prefix}.{self.plugin_name}.{operation}", fields)


class PluginKV:
    """The keys and values of one plugin."""

    def __init__(self, client: DatabaseClient) -> None:
        self._client = client

    async def get(self, key: str, default: Any = None) -> Any:
        """The value at a key, or the default where there is none."""
        reply = await self._client.request("get", {"key": rules.key(key)})
        return reply["value"] if reply["exists"] else default

    async def set(self, key: str, value: Any, *, ttl: int | None = None) -> None:
        """Store a value; with a TTL it is gone after so many seconds. When this returns, it is on disk.

        Raises:
            ValueTooLarge: It takes more than 64 KB as JSON.
            InvalidValue: It is not JSON, or would not come back equal.
        """
        fields: dict[str, Any] = {"key": rules.key(key), "value": msgspec.Raw(rules.value(value))}
        if rules.ttl(ttl) is not None:
            fields["ttl"] = ttl
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
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgument("limit is an int of at least 1; leave it out for no limit")
        return Keys(self._client, rules.text(prefix, "prefix"), limit)


class Keys(LazyList[str]):
    """Keys on request: iterate them with `async for`, or `await` them all."""

    what = "keys"

    def __init__(self, client: DatabaseClient, prefix: str, limit: int | None) -> None:
        self._client = client
        self._prefix = prefix
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[str]:
        left, after = self._limit, None
        while left is None or left > 0:
            wanted = limits.LISTED_KEYS if left is None else min(left, limits.LISTED_KEYS)
            reply = await self._client.request("list", {"prefix": self._prefix, "limit": wanted, "after": after})
            for key in reply["keys"]:
                yield key
            if not reply["truncated"]:
                return
            after = reply["keys"][-1]
            left = None if left is None else left - len(reply["keys"])
