"""OpenFeature's remote evaluation (OFREP) of the flags of a project: one flag, or all of them with an ETag.

Every client gets the stored value of a flag: the evaluation context is checked, but has no influence on the value.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from keyloft import limits
from keyloft.errors import InvalidJson, InvalidKey, KeyloftError
from keyloft.http import ofrep_schemas
from keyloft.http.conditions import names_tag
from keyloft.http.context import HttpContext
from keyloft.http.operations import SEMANTIC, OperationHandler, semantic_operations
from keyloft.http.problems import Problem, problem_of
from keyloft.http.replies import Headers, HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute, HttpHandler
from keyloft.http.service_access import refusal_of, was_carried_out
from keyloft.nats import payloads
from keyloft.semantic import keys

_BASE: Final = f"{SEMANTIC}/ofrep/v1"
_FLAGS: Final = "flags/"
_KEY_PARTS: Final = 5
"""How many parts of a whole key stand before the name of a flag: tenant/…/project/…/flags/."""
_NULL: Final = b"null"
_VARIANTS: Final = {b"true": "on", b"false": "off", _NULL: "default"}


class _Flag(Struct):
    """The fields of an entry that an evaluation needs."""

    key: str
    value: Raw
    version: int
    updated_at: str = msgspec.field(name="updatedAt")

    def evaluated(self) -> "Evaluation":
        text = bytes(self.value)
        return Evaluation(
            key=self.key.split("/", _KEY_PARTS)[_KEY_PARTS],
            # Where the value is left out, a client takes the default that its code names.
            value=UNSET if text == _NULL else self.value,
            reason="DEFAULT" if text == _NULL else "STATIC",
            variant=_VARIANTS.get(text, f"version-{self.version}"),
            metadata={"version": self.version, "updatedAt": self.updated_at},
        )


class _GotFlag(Struct):
    entry: _Flag | None


class _ListedFlags(Struct):
    entries: list[_Flag]
    truncated: bool


class Evaluation(Struct, kw_only=True):
    """A flag as OFREP answers it."""

    key: str
    value: Raw | UnsetType = UNSET
    reason: str
    variant: str
    metadata: dict[str, Any]


class EvaluationFailed(Exception):
    """A request that OFREP answers with an error of its own."""

    def __init__(self, status: int, code: str, details: str, headers: Headers = ()) -> None:
        super().__init__(details)
        self.status = status
        self.code = code
        self.headers = headers

    def reply(self, key: str | None) -> HttpReply:
        """The answer; `key` is the flag's, if one was asked for."""
        body = {"errorCode": self.code, "errorDetails": str(self)}
        shown = body if key is None else {"key": key, **body}
        return HttpReply(msgspec.json.encode(shown), self.status, headers=self.headers)


_read_flag = msgspec.json.Decoder(_GotFlag).decode
_read_flags = msgspec.json.Decoder(_ListedFlags).decode
_CONFIGURATION: Final = msgspec.json.encode(
    {
        "name": "Keyloft",
        "capabilities": {
            "cacheInvalidation": {
                "polling": {"enabled": True, "minPollingIntervalMs": limits.OFREP_POLLING_MILLISECONDS}
            },
            "flagEvaluation": {"supportedTypes": ["boolean", "string", "int", "float", "object"]},
            "caching": {"enabled": False},
        },
    }
)


class FlagEvaluation:
    """Answers the requests of OpenFeature's providers."""

    def __init__(self, semantic: OperationHandler) -> None:
        self._semantic = semantic

    async def one(self, request: HttpRequest) -> HttpReply:
        """Evaluate one flag."""
        key = unquote(request.parameter("key") or "")
        names = self._permitted(request)
        try:
            await _check_context(request)
            _check_name(key)
            data = msgspec.json.encode({"key": f"{_FLAGS}{key}"})
            flag = _read_flag(await self._ask(request, names, "get", data)).entry
            if flag is None:
                raise _not_found()
        except EvaluationFailed as failed:
            return failed.reply(key)
        self._semantic.log(request.token, names, "get", data, is_read=True)
        return HttpReply(msgspec.json.encode(flag.evaluated()))

    async def all(self, request: HttpRequest) -> HttpReply:
        """Evaluate all flags; a client that has them already gets 304."""
        names = self._permitted(request)
        try:
            await _check_context(request)
            flags = await self._listed(request, names)
        except EvaluationFailed as failed:
            return failed.reply(None)
        self._semantic.log(request.token, names, "list", b'{"prefix":"flags/"}', is_read=True)
        body = msgspec.json.encode({"flags": [flag.evaluated() for flag in flags]})
        return _with_tag(request, body)

    async def configuration(self, request: HttpRequest) -> HttpReply:
        """Say which features of OFREP providers may use."""
        self._permitted(request)
        return _with_tag(request, _CONFIGURATION)

    def _permitted(self, request: HttpRequest) -> list[str]:
        names = self._semantic.names_of(request)
        request.expect_query()
        self._semantic.check_scope(request.token, names)
        return names

    async def _listed(self, request: HttpRequest, names: list[str]) -> list[_Flag]:
        flags: list[_Flag] = []
        asked: dict[str, Any] = {"prefix": _FLAGS, "values": True}
        size = 0
        while True:
            reply = await self._ask(request, names, "list", msgspec.json.encode(asked))
            size += len(reply)
            if size > limits.OFREP_FLAGS_BYTES:
                rule = f"all flags of a project together may have {limits.OFREP_FLAGS_BYTES:,} bytes"
                raise EvaluationFailed(500, "GENERAL", f"{rule}: evaluate them one by one")
            page = _read_flags(reply)
            flags += page.entries
            if not page.truncated:
                return flags
            asked["after"] = page.entries[-1].key.split("/", _KEY_PARTS - 1)[_KEY_PARTS - 1]

    async def _ask(self, request: HttpRequest, names: list[str], operation: str, data: bytes) -> bytes:
        """The reply of the service.

        Raises:
            EvaluationFailed: It is an error.
        """
        try:
            reply = await self._semantic.access.ask(request, names, operation, data)
            problem = None if was_carried_out(reply) else refusal_of(reply)
        except KeyloftError as error:
            problem = problem_of(error)
        except Problem as error:
            problem = error
        if problem is None:
            return reply
        status = 400 if problem.status == 422 else problem.status  # OFREP has no 422
        raise EvaluationFailed(status, "GENERAL", str(problem), problem.headers)


def _with_tag(request: HttpRequest, body: bytes) -> HttpReply:
    """An answer with an ETag; 304 if the client has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
    headers: Headers = ((b"etag", tag.encode()),)
    if names_tag(request.header(b"if-none-match"), tag):
        return HttpReply(status=304, headers=headers)
    return HttpReply(body, headers=headers)


def _not_found() -> EvaluationFailed:
    return EvaluationFailed(404, "FLAG_NOT_FOUND", "this flag is not set")


def _check_name(key: str) -> None:
    """Answer a name that no flag can have as not found, before the service logs it as an invalid key.

    Raises:
        EvaluationFailed: No flag can have this name.
    """
    try:
        keys.parse(f"tenant/a/project/a/{_FLAGS}{key}")
    except InvalidKey:
        raise _not_found() from None


async def _check_context(request: HttpRequest) -> None:
    """Refuse a body that is not one of OFREP.

    Raises:
        EvaluationFailed: It has another form.
    """
    data = await request.body(limits.OFREP_REQUEST_BYTES)
    if payloads.is_empty(data):
        return
    try:
        fields, _ = payloads.read(data)
    except InvalidJson as error:
        raise EvaluationFailed(400, "PARSE_ERROR", str(error)) from None
    except KeyloftError as error:
        raise EvaluationFailed(400, "INVALID_CONTEXT", str(error)) from None
    context = fields.get("context", {})
    if not isinstance(context, dict):
        raise EvaluationFailed(400, "INVALID_CONTEXT", "context: expected an object")
    if not isinstance(context.get("targetingKey", ""), str):
        raise EvaluationFailed(400, "INVALID_CONTEXT", "context.targetingKey: expected a string")


def routes(context: HttpContext) -> list[ApiRoute]:
    """The routes of OFREP."""
    flags = FlagEvaluation(semantic_operations(context))
    return [
        _route(f"{_BASE}/evaluate/flags/{{key}}", {"POST": flags.one}, ofrep_schemas.ONE),
        _route(f"{_BASE}/evaluate/flags", {"POST": flags.all}, ofrep_schemas.ALL),
        _route(f"{_BASE}/configuration", {"GET": flags.configuration}, ofrep_schemas.CONFIGURATION),
    ]


def _route(path: str, handlers: Mapping[str, HttpHandler], described: Mapping[str, Any]) -> ApiRoute:
    return ApiRoute(path=path, handlers=handlers, paths={path: described})
