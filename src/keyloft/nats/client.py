"""The client side of a service on NATS: a request, and its outcome: a reply, a refusal, or no answer."""

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from nats import errors as nats_errors
from nats.aio.client import Client as Nats

from keyloft import errors, limits
from keyloft.core.addresses import check_nats_address
from keyloft.core.closing import AsyncClosing
from keyloft.errors import InvalidArgument, KeyloftError, NotPermitted, Unanswered
from keyloft.nats.connection import Login, connect, inbox_prefix, servers, shown
from keyloft.nats.errors import NEWER_PERMISSIONS, refused
from keyloft.nats.events import WATCH
from keyloft.nats.gathering import CLIENT_CLOSED, FoundValue, RequestSender
from keyloft.nats.messages import PERMISSION
from keyloft.nats.payloads import to_json
from keyloft.nats.remote_watch import RemoteWatch

_NOT_CONNECTED: Final = (
    nats_errors.ConnectionClosedError,
    nats_errors.ConnectionDrainingError,
    nats_errors.OutboundBufferLimitError,
)


class ServiceClient(AsyncClosing):
    """What the clients of all services share: the connection, and requests over it."""

    _gathered: frozenset[str] = frozenset()
    """The operations whose requests may travel in one message, if the service has `many`."""

    def __init__(self, nats: Nats, *, owner: str, subjects: str, log_in_as: str, timeout: float) -> None:
        """Args:
        nats: A connected client of nats-py; the caller closes it.
        owner: Whose data this is, for `repr`.
        subjects: The subjects of the service, for error messages.
        log_in_as: The user that may send these requests, for error messages.
        timeout: How many seconds a request waits for its reply.
        """
        if not isinstance(nats, Nats):
            raise InvalidArgument("nats: expected a connected client of nats-py; with a URL, use connect(…)")
        self.nats = nats
        """The connection."""
        self._owner = owner
        self._subjects = subjects
        self._log_in_as = log_in_as
        self._timeout = timeout
        self._user = "this login"
        self._inbox = ""
        self._owns_connection = False
        self._is_closed = False
        self.sender: RequestSender | None = None
        """Sends the requests; made with the first one. Public for tests."""
        self.watches: dict[RemoteWatch, str] = {}
        """The open watches, each with the subject of its events."""

    def __repr__(self) -> str:
        state = "connected" if self.nats.is_connected else "not connected"
        if self._is_closed or self.nats.is_closed:
            state = "closed"
        return f"<{type(self).__name__} of {self._owner} at {servers(self.nats)}, {state}>"

    async def _connect(
        self, url: str | Sequence[str], *, name: str, login: Login | None, inbox: str, options: dict[str, Any]
    ) -> Self:
        """Make a connection for this client alone; on such a connection, NATS's refusals are received.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
            InvalidArgument: The URL is not an address of NATS, or a file of the login can't be read.
            TypeError: `nats.connect` has no such option.
        """
        # Replies arrive at subjects that no other user may subscribe to: `keyloft nats-config` grants just these.
        options.setdefault("inbox_prefix", inbox)
        self._inbox = inbox_prefix(options)
        urls = [url] if isinstance(url, str) else list(url)
        for one in urls:
            check_nats_address(one, "url")
        try:
            if user := (login and login.user) or unquote(urlsplit(urls[0]).username or ""):
                self._user = f"user {user}"
            async with asyncio.timeout(min(self._timeout, limits.CONNECT_SECONDS)):
                self.nats = await connect(
                    urls,
                    name=name,
                    login=login,
                    on_error=self._on_error,
                    subjects=self._subjects_in_use,
                    gives_up=True,
                    **options,
                )
        except TimeoutError:
            cure = "is it running, and is the address right? `keyloft serve` starts one with the service"
            raise Unanswered(f"no NATS server answers at {shown(urls)}: {cure}") from None
        except (KeyloftError, TypeError):
            raise
        except Exception as error:
            raise Unanswered(f"the connection to NATS failed: {error or type(error).__name__}") from error
        self._owns_connection = True
        return self

    async def aclose(self) -> None:
        """End the watches, refuse further requests, and end the connection if `connect` made it.

        A second call does nothing.
        """
        for watch in list(self.watches):
            await watch.aclose()
        self._is_closed = True
        if self.sender is not None:
            await self.sender.aclose()
        if self._owns_connection and not self.nats.is_closed:
            await self.nats.close()

    close = aclose

    async def ask(self, subject: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for its reply: `_request`, for a `RemoteWatch`."""
        prefix, _, operation = subject.rpartition(".")
        return await self._request(prefix, operation, fields)

    def _watch(self, subject: str, prefix: str | None, keys: Sequence[str], since: int | None) -> RemoteWatch:
        """A watch of keys that begin with a text, or of some keys.

        Raises:
            InvalidArgument: Both are given, or `since` is no version.
        """
        if keys and prefix is not None:
            raise InvalidArgument("prefix, keys: expected one of them, got both")
        if since is not None and (type(since) is not int or since < 0):
            raise InvalidArgument("since: expected a version, a whole number of at least 0")
        return RemoteWatch(self, subject, {"keys": list(keys)} if keys else {"prefix": prefix}, since)

    async def _request(self, prefix: str, operation: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Args:
            prefix: The subject before the operation.
            operation: The name of the operation.
            fields: The fields of the request.

        Raises:
            KeyloftError: The service refused it; the class of the error has the reason.
            NoService: No service is running on this NATS.
            NotPermitted: NATS does not let this user send this request, or receive its reply.
            TimedOut: No reply arrived in time.
            Closed: This client is closed.
        """
        sender = self.sender or self._make_sender()
        reply = await sender.ask(prefix, operation, to_json(fields)[1:])
        if type(reply) is FoundValue:
            return {"success": True, "exists": True, "value": reply.value}
        return {**self._accepted(reply)}  # several callers may have the same one

    def _make_sender(self) -> RequestSender:
        """Make the sender of requests, for the first of them."""
        if self._is_closed:
            raise errors.Closed(CLIENT_CLOSED)
        self.sender = RequestSender(
            self.nats,
            timeout=self._timeout,
            gathered=self._gathered,
            timed_out=self._timed_out,
            explained=self._explained,
        )
        return self.sender

    def _explained(self, error: Exception) -> Exception:
        """The error for a caller whose request was not sent, or not delivered."""
        if isinstance(error, nats_errors.NoRespondersError):
            url = self.nats.connected_url
            where = servers(self.nats) if url is None else shown([url.geturl()])
            cure = f"`keyloft serve --nats {where}` starts one there"
            return errors.NoService(f"no service answers {self._subjects} at {where}: {cure}")
        if isinstance(error, _NOT_CONNECTED):
            explained: Exception = Unanswered(f"not connected to NATS: {error}")
        else:
            # A copy for each caller: an exception that is raised in many tasks would collect all their tracebacks.
            try:
                explained = copy(error)
            except Exception:  # its class takes other arguments than it keeps
                explained = Unanswered(f"the request failed: {error}")
        explained.__cause__ = error
        return explained

    def _timed_out(self, subject: str) -> errors.TimedOut:
        state = "the service is slow or gone" if self.nats.is_connected else "the connection to NATS is lost"
        waited = f"no answer to {subject} within {self._timeout:g} s ({state})"
        return errors.TimedOut(f"{waited}; it may have been carried out, or not")

    def _accepted(self, reply: Any) -> dict[str, Any]:
        """A reply to a request that was carried out.

        Raises:
            KeyloftError: The service refused it.
            Unanswered: It is not a reply of the service.
        """
        if not isinstance(reply, dict) or "success" not in reply:
            raise Unanswered("the reply has no field success: another program answers on this subject")
        if not reply["success"]:
            raise self._refused(reply)
        return reply

    def _refused(self, reply: Mapping[str, Any]) -> KeyloftError:
        """The exception for a reply that reports an error."""
        return refused(reply)

    def _subjects_in_use(self) -> list[str]:
        """The subjects of the requests that wait for a reply."""
        return [] if self.sender is None else [message.subject for message in self.sender.sent]

    def _on_error(self, error: Exception) -> None:
        """Find the requests that NATS has refused: it reports a refusal to the connection, not to the request."""
        if (found := PERMISSION.search(str(error))) is None:
            return
        kind, refused_subject = found.group(1).lower(), found.group(2).lower()  # nats-py reports them in lower case
        for watch, events in list(self.watches.items()):
            if kind == "subscription" and refused_subject == events.lower():
                action = f"subscribe to {events}, where its events arrive"
                watch.fail(NotPermitted(f"NATS refused this watch: {self._user} may not {action}. {NEWER_PERMISSIONS}"))
                return
        if self.sender is None:
            return
        if kind != "publish":
            self.sender.subscribe_again()
        for message in self.sender.sent:
            if kind == "publish" and refused_subject != message.subject.lower():
                continue
            if kind == "publish" and message.is_many:
                self.sender.send_singly(message)
                continue
            subscribe = f"subscribe to {self._inbox}.>, where its replies arrive"
            action = f"publish to {message.subject}" if kind == "publish" else subscribe
            text = f"NATS refused this request: {self._user} may not {action}. Log in as {self._log_in_as}"
            if message.subject.endswith(f".{WATCH}"):
                text += f"; {NEWER_PERMISSIONS}"
            self.sender.fail(message, NotPermitted(text))
