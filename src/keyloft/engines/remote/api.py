"""Sends requests to the HTTP API of a service: pooled connections, bounded concurrency, retries for a limited time."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import msgspec
from yarl import URL

from keyloft import limits
from keyloft.core.records import Batch, Committed, Conflict
from keyloft.core.urls import HttpAddress
from keyloft.engines.remote import batches, errors
from keyloft.engines.remote.entries import (
    ApiEntries,
    ApiEntry,
    ServiceInfo,
    read_count,
    read_entries,
    read_entry,
    read_info,
)
from keyloft.engines.remote.errors import HttpAnswer, NotAnswered, NotSent
from keyloft.errors import CannotOpen, Closed, InvalidArgument

T = TypeVar("T")

logger = logging.getLogger(__name__)

_JSON: Final = {"Content-Type": "application/json"}
_PATH_CHARACTERS: Final = "/%=~!$&'()*+,;:@"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class HttpApi:
    """The API of one store of a service."""

    def __init__(self, address: HttpAddress, token: str | None, patience: float) -> None:
        """Prepare to call a service; nothing is sent yet.

        Args:
            address: The service's.
            token: Says who calls. It is sent with each request, and shown nowhere.
            patience: For how many seconds a request is repeated while the service does not answer.

        Raises:
            InvalidArgument: The token has characters that no token has.
            CannotOpen: The file with certificates can't be read.
        """
        self.name = address.name
        self.patience = patience
        self._has_token = token is not None
        self._service = f"{address.origin}/v1"
        self._base = self._service if address.store is None else f"{self._service}/db/{quote(address.store, safe='')}"
        self._slots = asyncio.Semaphore(limits.HTTP_CLIENT_REQUESTS)
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False
        _warn_of_plain_text(address, token)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                ssl=_trusted(address),
                keepalive_timeout=limits.HTTP_CLIENT_IDLE_SECONDS,
            ),
            headers={"User-Agent": "keyloft", "Accept-Encoding": "identity", **_authorization(token)},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.HTTP_CLIENT_CONNECT_SECONDS),
        )

    def __repr__(self) -> str:
        return f"<HttpApi of {self.name}>"

    async def info(self) -> ServiceInfo:
        """What the service tells about itself."""
        return self._accepted(await self._read("GET", f"{self._service}/info"), read_info)

    async def get(self, key: str) -> ApiEntry | None:
        """The entry at a key, or None."""
        reply = await self._read("GET", f"{self._base}/kv/{quote(key, safe=_PATH_CHARACTERS)}")
        if reply.status == 404 and errors.problem_of(reply).code == errors.NOT_FOUND:
            return None
        return self._accepted(reply, read_entry)

    async def get_many(self, keys: Sequence[str]) -> ApiEntries:
        """The entries at several keys, from one view."""
        request = msgspec.json.encode({"keys": keys})
        return self._accepted(await self._read("POST", f"{self._base}/get", request), read_entries)

    async def page(self, parameters: Mapping[str, str]) -> ApiEntries:
        """One page of a list."""
        return self._accepted(await self._read("GET", f"{self._base}/kv{_query(parameters.items())}"), read_entries)

    async def count(self, parameters: Mapping[str, str]) -> int:
        """How many entries there are in a range."""
        url = f"{self._base}/kv{_query([*parameters.items(), ('count', 'true')])}"
        return self._accepted(await self._read("GET", url), read_count).count

    async def commit(self, batch: Batch) -> Committed | Conflict:
        """Send a batch; send it again only while the service has surely not carried it out.

        Raises:
            CommitUnknown: The connection was lost after some of the request was sent, or the answer can't be read.
            KeyloftError: The service has refused the batch.
        """
        request = batches.commit_body(batch)
        began, attempt = _time(), 0
        while True:
            try:
                reply = await self._send("POST", f"{self._base}/atomic", request, began)
            except NotSent as failure:
                await self._pause(failure, began, attempt)
            except NotAnswered as failure:
                raise errors.commit_unknown(self.name, errors.reason(failure)) from failure
            else:
                if reply.status in (200, 412):
                    try:
                        return batches.outcome(batch, reply.status, reply.body)
                    except (msgspec.MsgspecError, ValueError) as failure:
                        raise errors.commit_unknown(self.name, "its answer can't be read") from failure
                if errors.is_unknown(reply):
                    raise errors.commit_unknown(
                        self.name, f"it answered with status {reply.status}, not as Keyloft does,"
                    )
                if not errors.may_be_repeated(reply) or not await self._wait(began, attempt, reply.retry_after):
                    raise errors.refusal(self.name, reply, has_token=self._has_token)
            attempt += 1

    async def stream(self, parameters: list[tuple[str, str]], last_event: int | None) -> aiohttp.ClientResponse:
        """Begin to watch; the caller closes the response.

        Raises:
            KeyloftError: The service has refused the watch.
            ClientError, TimeoutError: The service does not answer.
        """
        self._check_open()
        headers = {"Accept": "text/event-stream"}
        if last_event is not None:
            headers["Last-Event-ID"] = str(last_event)
        url = URL(f"{self._base}/watch{_query(parameters)}", encoded=True)
        response = await self._session.get(url, headers=headers, allow_redirects=False)
        if response.status == 200 and response.content_type == "text/event-stream":
            return response
        reply = HttpAnswer(response.status, await response.read())
        if errors.may_be_repeated(reply) or errors.is_gateway_failure(reply):
            raise aiohttp.ClientConnectionError(f"status {reply.status}")
        raise errors.refusal(self.name, reply, has_token=self._has_token)

    async def aclose(self) -> None:
        self._is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.HTTP_CLIENT_CLOSE_SECONDS):
                await self._idle.wait()
        await self._session.close()

    def _accepted(self, reply: HttpAnswer, decode: Callable[[bytes], T]) -> T:
        if reply.status != 200:
            raise errors.refusal(self.name, reply, has_token=self._has_token)
        return errors.read(self.name, decode, reply)

    async def _read(self, method: str, url: str, body: bytes | None = None) -> HttpAnswer:
        """Send a request that changes nothing, again and again until the service answers.

        Raises:
            DatabaseError: The service has not answered in time.
        """
        began, attempt = _time(), 0
        while True:
            try:
                reply = await self._send(method, url, body, began)
            except NotAnswered as failure:
                await self._pause(failure, began, attempt)
            else:
                again = errors.may_be_repeated(reply) or errors.is_gateway_failure(reply)
                if not again or not await self._wait(began, attempt, reply.retry_after):
                    return reply
            attempt += 1

    async def _send(self, method: str, url: str, body: bytes | None, began: float) -> HttpAnswer:
        """Send a request once."""
        self._check_open()
        self._running += 1
        self._idle.clear()
        try:
            # Waiting for a slot needs no timeout: the requests that hold slots have timeouts of their own.
            async with (
                self._slots,
                asyncio.timeout_at(max(began + self.patience, _time() + limits.HTTP_CLIENT_PAUSES[1])),
            ):
                headers = None if body is None else _JSON
                asked = self._session.request(
                    method, URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
                )
                async with asked as response:
                    return HttpAnswer(response.status, await response.read(), response.headers.get("Retry-After"))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _pause(self, failure: BaseException, began: float, attempt: int) -> None:
        """Wait before the next try.

        Raises:
            DatabaseError: Another try would not help, or time is up.
        """
        if not attempt and not errors.never_helps(failure):
            left = max(0.0, began + self.patience - _time())
            logger.warning("%s does not answer (%s), trying for %.0f s", self.name, errors.reason(failure), left)
        if errors.never_helps(failure) or not await self._wait(began, attempt):
            raise errors.explain(self.name, failure) from failure

    async def _wait(self, began: float, attempt: int, wanted: str | None = None) -> bool:
        """Wait before another try, for as long as the service asks if it does; returns False if time is up."""
        seconds = pause_seconds(attempt)
        if wanted is not None and wanted.isdecimal():
            seconds = max(seconds, float(wanted))
        if _time() + seconds > began + self.patience:
            return False
        await asyncio.sleep(seconds)
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed


def pause_seconds(attempt: int) -> float:
    """How long to wait after a failed attempt; the first one is 0."""
    shortest, longest = limits.HTTP_CLIENT_PAUSES
    return float(min(longest, shortest * 2 ** min(attempt, 30)))


def _time() -> float:
    return asyncio.get_running_loop().time()


def _query(parameters: Iterable[tuple[str, str]]) -> str:
    query = urlencode(list(parameters), quote_via=quote, safe="")
    return f"?{query}" if query else ""


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token or " " in token:
        raise InvalidArgument(
            "token: expected the text that `keyloft token new` printed, without spaces or `Bearer`; the variable "
            "KEYLOFT_HTTP_TOKEN sets it, too"
        )
    return {"Authorization": f"Bearer {token}"}


def _warn_of_plain_text(address: HttpAddress, token: str | None) -> None:
    url = urlsplit(address.origin)
    if token is not None and url.scheme == "http" and url.hostname not in _LOOPBACK:
        logger.warning("%s: the token and all values travel unencrypted: use https://", address.name)


def _trusted(address: HttpAddress) -> ssl.SSLContext | bool:
    if address.ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=address.ca)
    except (OSError, ssl.SSLError) as error:
        raise CannotOpen(f"{address.name}: ca={address.ca} can't be read as certificates: {error.strerror}") from None
