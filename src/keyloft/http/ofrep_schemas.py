"""What requests and answers of OFREP look like, for the OpenAPI document."""

from collections.abc import Mapping
from typing import Any, Final

from keyloft.http.descriptions import HttpOperation, answer, header, operation, parameter
from keyloft.http.operation_schemas import path_parameters
from keyloft.nats.schemas import BOOLEAN, TEXT, Schema, array_of, either, map_of, object_of

_CONTEXT: Final[Schema] = object_of({}, {"targetingKey": TEXT}, others=True)
_BODY: Final = {
    "content": {"application/json": {"schema": object_of({}, {"context": _CONTEXT}, others=True)}},
}
_EVALUATION: Final[Schema] = object_of(
    {
        "key": TEXT,
        "reason": {"enum": ["STATIC", "DEFAULT"]},
        "variant": TEXT,
        "metadata": map_of(either(BOOLEAN, TEXT, {"type": "number"})),
    },
    {"value": {"description": "the stored value; without it, a client takes the default of its code"}},
)
_FAILURE: Final[Schema] = object_of(
    {"errorCode": {"enum": ["PARSE_ERROR", "INVALID_CONTEXT", "FLAG_NOT_FOUND", "GENERAL"]}, "errorDetails": TEXT},
    {"key": TEXT},
)
_CONFIGURATION: Final[Schema] = object_of({"name": TEXT, "capabilities": {"type": "object"}})
_FAILURES: Final = {
    "400": answer("The body can't be used.", _FAILURE),
    "413": answer("The body is too large.", _FAILURE),
    "429": answer("Too much at a time: try again later.", _FAILURE),
    "500": answer("The flags can't be evaluated.", _FAILURE),
    "503": answer("The service or its database is not up.", _FAILURE),
}
_TAG: Final = {"headers": {"ETag": {"description": "Changes with the answer.", "schema": TEXT}}}
_IF_NONE_MATCH: Final = header("If-None-Match", "The ETag of an answer that the client has.")
_OWNER: Final = path_parameters(("tenant", "project"))
_NOT_MODIFIED: Final = {**answer("The client has the same answer already."), **_TAG}


def _evaluation(
    name: str, summary: str, parameters: list[Any], answers: Mapping[int, Any], failures: Mapping[str, Any]
) -> Mapping[str, HttpOperation]:
    made = operation(name, summary, answers=answers, parameters=[*_OWNER, *parameters], body=_BODY, tag="flags")
    return {"POST": {**made, "responses": dict(sorted({**made["responses"], **failures}.items()))}}


ONE: Final = _evaluation(
    "flags.evaluate",
    "Evaluate a feature flag (OFREP)",
    [parameter("key", "The name of the flag.", place="path")],
    {200: answer("The flag.", _EVALUATION)},
    {**_FAILURES, "404": answer("There is no such flag.", _FAILURE)},
)
ALL: Final = _evaluation(
    "flags.evaluate_all",
    "Evaluate all feature flags of a project (OFREP)",
    [_IF_NONE_MATCH],
    {200: {**answer("The flags.", object_of({"flags": array_of(_EVALUATION)})), **_TAG}, 304: _NOT_MODIFIED},
    _FAILURES,
)
CONFIGURATION: Final[Mapping[str, HttpOperation]] = {
    "GET": operation(
        "flags.configuration",
        "What providers of OpenFeature may use (OFREP)",
        answers={200: {**answer("The capabilities.", _CONFIGURATION), **_TAG}, 304: _NOT_MODIFIED},
        parameters=[*_OWNER, _IF_NONE_MATCH],
        tag="flags",
    )
}
