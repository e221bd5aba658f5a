"""The client side of a service on NATS: a request, and its outcome: a reply, a refusal, or no answer."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import msgspec
from nats.aio.client import Client as Nats
from nats.errors import ConnectionClosedError, ConnectionDrainingError, NoRespondersError, OutboundBufferLimitError
from nats.errors import TimeoutError as NatsTimeoutError

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.values import decode_json
from keyloft.errors import (
    Closed,
    InvalidArgument,
    KeyloftError,
    NoService,
    NotPermitted,
    TimedOut,
    Unanswered,
    Undecodable,
)
from keyloft.nats.connection import Login, connect, servers, shown

_PERMISSION: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_to_json = msgspec.json.Encoder().encode


class ServiceClient(AsyncClosing):
    """What the clients of all services share: the connection, and requests over it."""

    def __init__(
        self,
        nats: Nats,
        *,
        owner: str,
        subjects: str,
        log_in_as: str,
        timeout: float,
        refused: Callable[[Any], KeyloftError],
    ) -> None:
        """Args:
        nats: A connected client of nats-py; the caller closes it.
        owner: Whose data this is, for `repr`.
        subjects: The subjects of the service, for error messages.
        log_in_as: The user that may send these requests, for error messages.
        timeout: How many seconds a request waits for its reply.
        refused: Makes the exception for a reply that reports an error.
        """
        if not isinstance(nats, Nats):
            raise InvalidArgument("nats: expected a connected client of nats-py; with a URL, use connect(…)")
        self.nats = nats
        """The connection."""
        self._owner = owner
        self._subjects = subjects
        self._log_in_as = log_in_as
        self._timeout = timeout
        self._refused = refused
        self._user = "this login"
        self._inbox = ""
        self._owns_connection = False
        self._is_closed = False
        self._waiting: dict[asyncio.Future[NotPermitted], str] = {}
        """The requests without a reply, each with its subject."""

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._is_closed or self.nats.is_closed
            else "connected"
            if self.nats.is_connected
            else "not connected"
        )
        return f"<{type(self).__name__} of {self._owner} at {servers(self.nats)}, {state}>"

    async def _connect(
        self, url: str | list[str], *, name: str, login: Login | None, inbox: str, options: dict[str, Any]
    ) -> Self:
        """Make a connection for this client alone; on such a connection, NATS's refusals are received.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
        """
        # Replies arrive at subjects that no other user may subscribe to: `keyloft nats-config` grants just these.
        self._inbox = options.setdefault("inbox_prefix", inbox)
        urls = [url] if isinstance(url, str) else url
        try:
            if user := (login and login.user) or unquote(urlsplit(urls[0]).username or ""):
                self._user = f"user {user}"
            self.nats = await asyncio.wait_for(
                connect(url, name=name, login=login, on_error=self._on_error, **options),
                min(self._timeout, limits.CONNECT_SECONDS),
            )
        except TimeoutError:
            raise Unanswered(
                f"no NATS server answers at {shown(urls)}: "
                "is it running, and is the address right? `keyloft serve` starts one with the service"
            ) from None
        except KeyloftError:
            raise
        except Exception as error:
            raise Unanswered(f"the connection to NATS failed: {error or type(error).__name__}") from error
        self._owns_connection = True
        return self

    async def aclose(self) -> None:
        """Refuse further requests, and end the connection if `connect` made it. A second call does nothing."""
        self._is_closed = True
        if self._owns_connection and not self.nats.is_closed:
            await self.nats.close()

    close = aclose

    async def _request(self, subject: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            KeyloftError: The service refused it; the class of the error has the reason.
            NoService: No service is running on this NATS.
            NotPermitted: NATS does not let this user send this request, or receive its reply.
            TimedOut: No reply arrived in time.
            Closed: This client is closed.
        """
        if self._is_closed:
            raise Closed("this client is closed: make a new one")
        data = _to_json(fields)
        refused: asyncio.Future[NotPermitted] = asyncio.get_running_loop().create_future()
        self._waiting[refused] = subject
        asking = asyncio.ensure_future(self.nats.request(subject, data, timeout=self._timeout))
        either: list[asyncio.Future[Any]] = [asking, refused]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if refused.done() and not asking.done():
                raise refused.result()
            return self._read((await asking).data)
        except NoRespondersError:
            raise NoService(f"no service answers {self._subjects} on this NATS: `keyloft serve` starts one") from None
        except NatsTimeoutError:
            state = "the service is slow or gone" if self.nats.is_connected else "the connection to NATS is lost"
            raise TimedOut(
                f"no answer to {subject} within {self._timeout:g} s ({state}); it may have been carried out, or not"
            ) from None
        except (ConnectionClosedError, ConnectionDrainingError, OutboundBufferLimitError) as error:
            raise Unanswered(f"not connected to NATS: {error}") from error
        finally:
            asking.cancel()
            del self._waiting[refused]

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            reply = decode_json(data)
        except Undecodable as error:
            raise Unanswered("the reply is not JSON: another program answers on this subject") from error
        if not isinstance(reply, dict) or "success" not in reply:
            raise Unanswered("the reply has no field success: another program answers on this subject")
        if not reply["success"]:
            raise self._refused(reply)
        return reply

    def _on_error(self, error: Exception) -> None:
        """Find the requests that NATS has refused: it reports a refusal to the connection, not to the request."""
        if (found := _PERMISSION.search(str(error))) is None:
            return
        action, refused_subject = found.groups()
        for future, subject in self._waiting.items():
            if action.lower() != "publish":
                reason = f"subscribe to {self._inbox}.>, where its replies arrive"
            elif refused_subject.lower() == subject.lower():  # nats-py reports it in lower case
                reason = f"publish to {subject}"
            else:
                continue
            if not future.done():
                future.set_result(
                    NotPermitted(
                        f"NATS refused this request: {self._user} may not {reason}. Log in as {self._log_in_as}"
                    )
                )
