"""The OpenAPI document of the HTTP API, made from the tables of routes and the structs of messages."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

import keyloft
from keyloft.http.batches import WantedKeys, WireBatch
from keyloft.http.descriptions import PROBLEMS, fields, parameter, problem_answer, text_operation
from keyloft.http.kv import NewExpiry
from keyloft.http.replies import HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.wire import WireEntry

_STRUCTS: Final = (WireEntry, NewExpiry, WantedKeys, WireBatch)
_PATH_PARAMETERS: Final = {
    "key": "A key as text, as in users/=42/a%2Fb; its slashes are sent as they are.",
    "store": "The name of a store.",
    "plugin": "The name of a plugin.",
    "tenant": "A tenant.",
    "project": "A project of the tenant.",
}
_PROBLEM: Final = {
    **fields(
        type={"type": "string"},
        title={"type": "string"},
        status={"type": "integer"},
        detail={"type": "string"},
        code={"type": "string"},
    ),
    "description": "RFC 9457, with the code of the error. A conflict also has `current`, or `conflicts`.",
}


def document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The document of some routes; those without a description are left out."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in routes:
        names = re.findall(r"{(\w+)", route.path)
        given = [parameter(name, _PATH_PARAMETERS.get(name, name), place="path") for name in names]
        for path, operations in route.paths.items():  # these have their path parameters already
            paths[path] = {method.lower(): operation for method, operation in operations.items()}
        for method, operation in route.described.items():
            made = {**operation, "parameters": [*given, *operation["parameters"]]}
            if "store" in names:
                made["operationId"] += "OfStore"
            paths.setdefault(re.sub(r"{(\w+):\w+}", r"{\1}", route.path), {})[method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Keyloft",
            "version": keyloft.__version__,
            "description": "An ordered, versioned, durable key-value store over HTTP. Keys are text, as on the command "
            "line; versionstamps and U64 are decimal strings; times are RFC 3339.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Problem": _PROBLEM, **schemas},
            "responses": {f"Problem{status}": problem_answer(status) for status in PROBLEMS},
        },
    }


def routes_with_document(routes: Sequence[ApiRoute]) -> Sequence[ApiRoute]:
    """The routes, and one more for the document that describes them."""
    made: list[bytes] = []

    async def show(request: HttpRequest) -> HttpReply:
        if not made:
            made.append(msgspec.json.encode(document(all_routes)))
        return HttpReply(made[0])

    own = ApiRoute(path="/openapi.json", handlers={"GET": show}, is_public=True, described=_OWN)
    all_routes = [*routes, own]
    return all_routes


_OWN: Final = text_operation("getOpenapi", "This document")
_OWN["GET"]["responses"]["200"] = {
    "description": "The document.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}
