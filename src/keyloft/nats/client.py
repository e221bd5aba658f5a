"""Requests to a service on NATS, and what can become of them: an answer, a refusal, or nobody there.

NATS tells of a request that it does not let through by the way, to the connection's error callback. A `Caller` brings
that together with whoever waits for the answer.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from nats.aio.client import Client as Nats
from nats.errors import ConnectionClosedError, ConnectionDrainingError, NoRespondersError, OutboundBufferLimitError
from nats.errors import TimeoutError as NatsTimeoutError

from keyloft.core.values import decode_json
from keyloft.errors import InvalidArgument, KeyloftError, NoService, NotPermitted, TimedOut, Unanswered, Undecodable
from keyloft.nats.connection import Login, connect

_CONNECT_SECONDS: Final = 3.0
_PERMISSION: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_to_json = msgspec.json.Encoder().encode


class Caller:
    """Asks a service over a connection to NATS."""

    def __init__(
        self, nats: Nats, *, subjects: str, log_in_as: str, timeout: float, refused: Callable[[Any], KeyloftError]
    ) -> None:
        """Args:
        nats: A connected client, which stays the caller's to close.
        subjects: What is served, to be told when nobody does.
        log_in_as: Whom to log in as, to be told when NATS refuses.
        timeout: How many seconds a request waits for its answer.
        refused: The error that a reply tells of.
        """
        if not isinstance(nats, Nats):
            raise InvalidArgument("nats is a connected client of nats-py; with a URL, use connect(…)")
        self.nats = nats
        self._subjects = subjects
        self._log_in_as = log_in_as
        self._timeout = timeout
        self._refused = refused
        self._is_ours = False
        self._waiting: dict[str, set[asyncio.Future[NotPermitted]]] = {}

    async def connect(
        self, url: str | list[str], *, name: str, login: Login | None, inbox: str, options: dict[str, Any]
    ) -> None:
        """Make a connection of its own, on which a refusal by NATS is heard.

        Raises:
            Unanswered: NATS can't be reached, or refuses this user.
        """
        # Replies come to subjects that nobody else may listen to: `keyloft nats-config` grants just these.
        options.setdefault("inbox_prefix", inbox)
        try:
            self.nats = await asyncio.wait_for(
                connect(url, name=name, login=login, on_error=self._nats_said, **options),
                min(self._timeout, _CONNECT_SECONDS),
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
        self._is_ours = True

    async def close(self) -> None:
        """End the connection, if it is its own."""
        if self._is_ours and not self.nats.is_closed:
            await self.nats.close()

    async def request(self, subject: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the service and wait for its reply.

        Raises:
            KeyloftError: It refused; the kind of the error tells why.
            NoService: Nobody serves this subject on this NATS.
            NotPermitted: NATS lets this user not send this request, or not receive its reply.
            TimedOut: No reply came in time.
        """
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
            raise NoService(f"nobody serves {self._subjects} on this NATS: start one with `keyloft serve`") from None
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
            raise self._refused(reply)
        return reply

    def _nats_said(self, error: Exception) -> None:
        """NATS tells of a refused request by the way, with its subject: it belongs to whoever waits for that."""
        if (found := _PERMISSION.search(str(error))) is None:
            return
        action, subject = found.groups()
        if action.lower() == "publish":
            told = f"NATS does not let this user send to {subject}: log in as {self._log_in_as}"
            waiting = self._waiting.get(subject.lower(), set())
        else:
            told = f"NATS does not let this user receive replies at {subject}: log in as {self._log_in_as}"
            waiting = set().union(*self._waiting.values())
        for future in waiting:
            if not future.done():
                future.set_result(NotPermitted(told))
