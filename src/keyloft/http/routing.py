"""Routes: which handler answers which path and method, after checks of host, origin and token."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft.errors import KeyloftError
from keyloft.http.context import HttpContext
from keyloft.http.problems import Problem, is_unexpected, problem_of
from keyloft.http.replies import AsgiReceive, AsgiScope, AsgiSend, Headers, HttpReply
from keyloft.http.requests import ClientGone, HttpRequest, header_of
from keyloft.http.tokens import PUBLIC, AccessToken

logger = logging.getLogger(__name__)

HttpHandler: TypeAlias = Callable[[HttpRequest], Awaitable[HttpReply | None]]
"""Answers a request; None if it has sent the answer itself, as a stream."""

_BEARER: Final = "bearer "
_NO_TOKEN: Final = "Authorization: expected `Bearer` and a token; `keyloft token new` makes one"
_NO_BEARER: Final = "Authorization: expected `Bearer` before the token, as in Authorization: Bearer kl_…"
_WRONG_TOKEN: Final = "Authorization: expected `Bearer` and a valid token; this one is wrong, or has expired"


class ApiRoute(Struct, frozen=True, kw_only=True):
    """One path and its methods."""

    path: str
    """As Starlette has it: /v1/kv/{key:path}."""
    handlers: Mapping[str, HttpHandler]
    """By method; HEAD is answered as GET is."""
    is_public: bool = False
    """Whether the route needs no token and accepts any Host."""
    described: Mapping[str, Any] = {}
    """By method, the operation as OpenAPI describes it."""
    paths: Mapping[str, Mapping[str, Any]] = {}
    """The same by path and method, where one handler answers several paths."""


class HttpEndpoint:
    """An ASGI application for one route: checks host, origin and token, calls the handler, answers errors."""

    def __init__(self, context: HttpContext, route: ApiRoute) -> None:
        self._context = context
        self._is_public = route.is_public
        self._meter = context.meters.of(route.path)
        self._handlers = dict(route.handlers)
        if "GET" in self._handlers:
            self._handlers.setdefault("HEAD", self._handlers["GET"])
        self._allowed = ", ".join(self._handlers).encode()

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        began = perf_counter()
        more: Headers = ()
        reply: HttpReply | None
        try:
            token = PUBLIC
            if not self._is_public:
                if (allowed := self._context.origins.preflight(scope)) is not None:
                    self._meter.answered(204, perf_counter() - began)
                    return await HttpReply(status=204, headers=allowed).send(send)
                more = self._context.origins.check(scope)
                token = await self._authenticated(scope)
            if (connection := scope["connection"]).is_unread:
                await connection.has_read()
            handler = self._handlers.get(scope["method"])
            if handler is None:
                raise Problem(
                    405,
                    "METHOD_NOT_ALLOWED",
                    f"this path takes {self._allowed.decode()}",
                    headers=((b"allow", self._allowed),),
                )
            reply = await handler(HttpRequest(scope, receive, send, token, more))
            if reply is None:
                return self._meter.ended(200)
        except Problem as problem:
            reply = problem.reply()
        except KeyloftError as error:
            if is_unexpected(error):
                self._context.failures.failed("a request", error)
            reply = problem_of(error).reply()
        except ClientGone:
            return self._meter.ended(0)
        except Exception:
            logger.exception("a request over HTTP failed unexpectedly")
            reply = problem_of(KeyloftError()).reply()
        self._meter.answered(reply.status, perf_counter() - began)
        return await reply.send(send, more)

    async def _authenticated(self, scope: AsgiScope) -> AccessToken:
        """The token of a request.

        Raises:
            Problem: The request has no token, or a wrong one.
        """
        given = header_of(scope["headers"], b"authorization")
        challenge: Headers = ((b"www-authenticate", b'Bearer realm="keyloft"'),)
        if given is None:
            raise Problem(401, "UNAUTHORIZED", _NO_TOKEN, headers=challenge)
        if given[:7].lower() != _BEARER:
            raise Problem(401, "UNAUTHORIZED", _NO_BEARER, headers=challenge)
        if (found := self._context.tokens.find(given[7:].strip())) is not None:
            return found
        await self._context.failed_logins.slow_down(scope["client"][0] if scope["client"] else "")
        raise Problem(401, "UNAUTHORIZED", _WRONG_TOKEN, headers=challenge)


RouteModule: TypeAlias = Callable[[HttpContext], Sequence[ApiRoute]]
"""What a module adds to the server: a function that makes its routes."""
