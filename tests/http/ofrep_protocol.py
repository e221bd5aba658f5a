"""What OFREP 0.1 asks of answers, as an OpenAPI document: written down from the protocol, not from the product.

The protocol is described at https://github.com/open-feature/protocol (service/openapi.yaml).
"""

from typing import Any

TEXT = {"type": "string"}
CONTEXT = {"type": "object", "properties": {"context": {"type": "object"}}}
# A flag has a value of one of four JSON types, or none: then the client takes the default of its code (ADR 6 of OFREP).
EVALUATED = {
    "type": "object",
    "required": ["key", "reason", "variant"],  # the last two are optional; the provider for Python needs them
    "properties": {
        "key": TEXT,
        "reason": TEXT,
        "variant": TEXT,
        "value": {"type": ["boolean", "string", "number", "object"]},
        "metadata": {"type": "object", "additionalProperties": {"type": ["boolean", "string", "number"]}},
    },
}


def failure(codes: list[str] | None, *required: str) -> dict[str, Any]:
    code = TEXT if codes is None else {"enum": codes}
    properties = {"key": TEXT, "errorCode": code, "errorDetails": TEXT}
    return {"type": "object", "required": [*required, "errorCode"], "properties": properties}


FAILED = failure(["PARSE_ERROR", "TARGETING_KEY_MISSING", "INVALID_CONTEXT", "GENERAL"], "key")
NOT_FOUND = failure(["FLAG_NOT_FOUND"], "key")
BROKEN = {"type": "object", "properties": {"errorDetails": TEXT}}
BULK = {"type": "object", "required": ["flags"], "properties": {"flags": {"items": {"anyOf": [EVALUATED, FAILED]}}}}


def answers(**schemas: Any) -> dict[str, Any]:
    """Answers by status; those without a schema may have any body."""
    shown: dict[str, Any] = {"401": {"description": ""}, "403": {"description": ""}, "429": {"description": ""}}
    for status, schema in schemas.items():
        content = {} if schema is None else {"content": {"application/json": {"schema": schema}}}
        shown[status.removeprefix("of_")] = {"description": "", **content}
    return shown


BODY = {"content": {"application/json": {"schema": CONTEXT}}}
KEY = {"name": "key", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "OFREP", "version": "0.1.0"},
    "paths": {
        "/ofrep/v1/evaluate/flags/{key}": {
            "post": {
                "parameters": [KEY],
                "requestBody": BODY,
                "responses": answers(of_200=EVALUATED, of_400=FAILED, of_404=NOT_FOUND, of_500=BROKEN),
            }
        },
        "/ofrep/v1/evaluate/flags": {
            "post": {
                "parameters": [{"name": "If-None-Match", "in": "header", "schema": TEXT}],
                "requestBody": BODY,
                "responses": answers(of_200=BULK, of_304=None, of_400=failure(None), of_500=BROKEN),
            }
        },
        "/ofrep/v1/configuration": {
            "get": {
                "parameters": [{"name": "If-None-Match", "in": "header", "schema": TEXT}],
                "responses": answers(
                    of_200={"type": "object", "properties": {"name": TEXT, "capabilities": {"type": "object"}}},
                    of_304=None,
                    of_500=BROKEN,
                ),
            }
        },
    },
}
