"""A plugin's view of its storage over NATS: calls instead of subjects and JSON."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import KeyloftError, VersionConflict
from keyloft.nats.client import ServiceClient
from keyloft.nats.connection import Login
from keyloft.plugins import rules
from keyloft.plugins.entries import CurrentValue
from keyloft.plugins.plugin_kv import PluginKV


class DatabaseClient(ServiceClient):
    """The storage of one plugin, over NATS.

    Example:
        async with await DatabaseClient.connect("nats://127.0.0.1:4222", plugin_name="trivia") as client:
            await client.kv.set("score", 100)
            score = await client.kv.get("score", default=0)
    """

    def __init__(
        self,
        nats: Nats,
        plugin_name: str,
        *,
        prefix: str = rules.PREFIXES[0],
        timeout: float = limits.PATIENCE_SECONDS,
        gather: bool = True,
    ) -> None:
        """Args:
        nats: A connected client of nats-py; the caller closes it. With `connect`, a request that NATS refuses raises
            `NotPermitted` at once; here it times out, since NATS reports refusals to the connection alone.
        plugin_name: The plugin that the storage belongs to.
        prefix: The subject before `.<plugin>.<operation>`, as the service has it.
        timeout: How many seconds a request waits for its reply.
        gather: Whether calls that are made together travel in one message; False sends a message per call.
        """
        self.plugin_name = rules.plugin_name(plugin_name)
        self._gathered = rules.GATHERED if gather else frozenset()
        self.kv = PluginKV(self)
        self._subjects_before = f"{prefix}.{plugin_name}"
        owner = f"the plugin {plugin_name}"
        super().__init__(nats, owner=owner, subjects=f"{prefix}.<plugin>.<operation>", log_in_as=owner, timeout=timeout)

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": write client.kv.{name}" if hasattr(PluginKV, name) and not name.startswith("_") else ""
            raise AttributeError(f"a DatabaseClient has no {name}{hint}", name=name, obj=self)

    @classmethod
    async def connect(
        cls,
        url: str | list[str] = "nats://127.0.0.1:4222",
        *,
        plugin_name: str,
        login: Login | None = None,
        prefix: str = rules.PREFIXES[0],
        timeout: float = limits.PATIENCE_SECONDS,  # noqa: ASYNC109 (later requests have it, too)
        gather: bool = True,
        **options: Any,
    ) -> "DatabaseClient":
        """Connect to NATS as a plugin. `aclose` ends the connection.

        Args:
            url: The address of NATS; several for a cluster. A user and password can be part of it.
            plugin_name: The plugin that the storage belongs to.
            login: Credentials, where they are not part of the URL.
            prefix: The subject before `.<plugin>.<operation>`, as the service has it.
            timeout: How many seconds a request waits for its reply. Connecting takes 3 seconds at most.
            gather: Whether calls that are made together travel in one message; False sends a message per call.
            options: Passed on to `nats.connect`.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
            InvalidArgument: The URL is not an address of NATS.
        """
        client = cls(Nats(), plugin_name, prefix=prefix, timeout=timeout, gather=gather)
        return await client._connect(
            url, name=f"keyloft plugin {plugin_name}", login=login, inbox=f"_INBOX_{plugin_name}", options=options
        )

    def request(self, operation: str, fields: dict[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Send a request and wait for its reply.

        Raises:
            KeyloftError: The service refused it; the class of the error has the reason.
            NoService: No service is running on this NATS.
            NotPermitted: NATS does not let this user send this request, or receive its reply.
            TimedOut: No reply arrived in time.
        """
        return self._request(self._subjects_before, operation, fields)

    def _send(self, operation: str, fields: bytes) -> "asyncio.Future[Any]":
        """Send a request that is JSON already, without the brace that opens it; `_accepted` reads its reply.

        A future is faster than a coroutine.
        """
        return (self.sender or self._make_sender()).ask(self._subjects_before, operation, fields)

    def subject(self, operation: str) -> str:
        """Where requests for an operation are sent."""
        return f"{self._subjects_before}.{operation}"

    def _refused(self, reply: Mapping[str, Any]) -> KeyloftError:
        error = super()._refused(reply)
        if isinstance(error, VersionConflict) and (current := reply.get("current")):
            error.current = CurrentValue(current["value"], current["version"])
        return error
