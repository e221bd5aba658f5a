"""A plugin's view of its storage: four calls instead of subjects and JSON."""

import asyncio
import re
from collections.abc import AsyncIterator, Generator
from types import TracebackType
from typing import Any, Final

import msgspec
from nats.aio.client import Client as Nats
from nats.errors import ConnectionClosedError, ConnectionDrainingError, NoRespondersError, OutboundBufferLimitError
from nats.errors import TimeoutError as NatsTimeoutError

from keyloft import bus, limits
from keyloft.bus import Login
from keyloft.errors import InvalidArgument, KeyloftError, NoService, NotPermitted, TimedOut, Unanswered, Undecodable
from keyloft.plugins import rules
from keyloft.values import decode_json

PREFIX: Final = "db.kv"
_CONNECT_SECONDS: Final = 3.0
_PERMISSION: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_to_json = msgspec.json.Encoder().encode


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
        if not isinstance(nats, Nats):
            raise InvalidArgument("nats is a connected client of nats-py; with a URL, use DatabaseClient.connect")
        self.nats = nats
        self.plugin_name = rules.plugin_name(plugin_name)
        self.kv = PluginKV(self)
        self._prefix = prefix
        self._timeout = timeout
        self._is_ours = False
        self._waiting: dict[str, set[asyncio.Future[NotPermitted]]] = {}

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
        # Replies come to subjects that no other plugin may listen to: `keyloft nats-config` grants just these.
        options.setdefault("inbox_prefix", f"_INBOX_{plugin_name}")
        try:
            client.nats = await asyncio.wait_for(
                bus.connect(
                    url, name=f"keyloft plugin {plugin_name}", login=login, on_error=client._nats_said, **options
                ),
                min(timeout, _CONNECT_SECONDS),
            )
        except TimeoutError:
            where = url if isinstance(url, str) else ", ".join(url)
            raise Unanswered(
                f"no NATS answers at {where.rpartition('@')[2]}: is it running, and is the address right? "
                "`keyloft serve` starts one with the service"
            ) from None
        except KeyloftError:
            raise
        except Exception as error:
            raise Unanswered(f"NATS can't be used: {error or type(error).__name__}") from error
        client._is_ours = True
        return client

    async def close(self) -> None:
        """End the connection, if `connect` made it."""
        if self._is_ours and not self.nats.is_closed:
            await self.nats.close()

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
        subject = f"{self._prefix}.{self.plugin_name}.{operation}"
        data = _to_json(fields)
        refused: asyncio.Future[NotPermitted] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(subject.lower(), set())  # as nats-py tells of it
        waiting.add(refused)
        asking = asyncio.ensure_future(self.nats.request(subject, data, timeout=self._timeout))
        either: list[asyncio.Future[Any]] = [asking, refused]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if refused.done() and not asking.done():
                raise refused.result()
            return self._read((await asking).data)
        except NoRespondersError:
            raise NoService(
                f"nobody serves {self._prefix}.<plugin>.<operation> on this NATS: start one with `keyloft serve`"
            ) from None
        except NatsTimeoutError:
            state = "the connection to NATS is lost" if not self.nats.is_connected else "the service is slow or gone"
            raise TimedOut(
                f"no answer to {subject} within {self._timeout:g} s ({state}); it may have been carried out, or not"
            ) from None
        except (ConnectionClosedError, ConnectionDrainingError, OutboundBufferLimitError) as error:
            raise Unanswered(f"not connected to NATS: {error}") from error
        finally:
            asking.cancel()
            waiting.discard(refused)
            if not waiting:
                self._waiting.pop(subject.lower(), None)

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            reply = decode_json(data)
        except Undecodable as error:
            raise Unanswered("the reply is not JSON: somebody else answers on this subject") from error
        if not isinstance(reply, dict) or "success" not in reply:
            raise Unanswered("the reply is none of Keyloft's: somebody else answers on this subject")
        if not reply["success"]:
            raise bus.refused(reply)
        return reply

    def _nats_said(self, error: Exception) -> None:
        """NATS tells of a refused request by the way, with its subject: it belongs to whoever waits for that."""
        if (found := _PERMISSION.search(str(error))) is None:
            return
        action, subject = found.groups()
        if action.lower() == "publish":
            told = f"NATS does not let this user send to {subject}: log in as the plugin {self.plugin_name}"
            waiting = self._waiting.get(subject.lower(), set())
        else:
            told = f"NATS does not let this user receive replies at {subject}: log in as the plugin {self.plugin_name}"
            waiting = set().union(*self._waiting.values())
        for future in waiting:
            if not future.done():
                future.set_result(NotPermitted(told))


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


class Keys:
    """Keys on request: iterate them with `async for`, or `await` them all."""

    def __init__(self, client: DatabaseClient, prefix: str, limit: int | None) -> None:
        self._client = client
        self._prefix = prefix
        self._limit = limit

    def __repr__(self) -> str:
        return "<keys on request: await them, or go through them with async for>"

    def __bool__(self) -> bool:
        raise TypeError("these keys are still to be fetched: await them first, or go through them with async for")

    def __await__(self) -> Generator[Any, None, list[str]]:
        return self._all().__await__()

    async def _all(self) -> list[str]:
        return [key async for key in self]

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
