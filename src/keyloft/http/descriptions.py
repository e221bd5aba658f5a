"""The operations of the HTTP API as OpenAPI describes them: parameters, bodies and answers of each route."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from keyloft import limits

HttpOperation: TypeAlias = Mapping[str, Any]
"""An operation as OpenAPI has it."""

_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "string", "enum": ["true", "false", "1", "0", ""]}
_DECIMAL: Final = {"type": "string", "pattern": "^[0-9]{1,20}$"}
_PROBLEM_TYPE: Final = "application/problem+json"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_U64: Final = "application/vnd.keyloft.u64"
_OCTETS: Final = "application/octet-stream"

PROBLEMS: Final = {
    400: "The body is not JSON, or the request is not one of HTTP/1.1.",
    401: "No valid token was sent.",
    403: "The token's scopes don't allow it, or the page of another site sent it.",
    404: "Nothing is stored there, or there is no such path.",
    405: "The path does not take this method.",
    406: "The value is not bytes.",
    410: "The change log does not reach back so far: list, then watch again.",
    412: "Another version is stored than the request expects; nothing was read or written.",
    413: "The body, the value or the answer is too large.",
    415: "The Content-Type is not one that the path takes.",
    421: "The Host is not a name of this service.",
    422: "A parameter, a header or a field can't be used; `detail` names it.",
    429: "Too much at a time, or more than a quota allows.",
    431: "The path or the headers are too long.",
    500: "A defect of the service; its log has the reason.",
    503: "The database can't be used now.",
}
"""What each refusal means."""

_ALWAYS: Final = (400, 401, 403, 405, 421, 422, 429, 431, 500, 503)


def ref(name: str) -> dict[str, Any]:
    """The schema of a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def fields(**named: Any) -> dict[str, Any]:
    """The schema of an object that has all of these fields."""
    return {"type": "object", "properties": named, "required": list(named)}


def parameter(name: str, explained: str, schema: Any = _TEXT, place: str = "query", **more: Any) -> dict[str, Any]:
    """A parameter of a query or path, or a header."""
    is_required = place == "path"
    return {"name": name, "in": place, "description": explained, "schema": schema, "required": is_required, **more}


def header(name: str, explained: str) -> dict[str, Any]:
    return parameter(name, explained, place="header")


def answer(explained: str, schema: Any = None, content_type: str = _JSON, *others: str) -> dict[str, Any]:
    """An answer with its schema; `others` are further content types, without a schema."""
    if schema is None:
        return {"description": explained}
    content = {content_type: {"schema": schema}, **{other: {"schema": {}} for other in others}}
    return {"description": explained, "content": content}


def json_body(schema: Any) -> dict[str, Any]:
    return {"required": True, "content": {_JSON: {"schema": schema}}}


def operation(
    name: str,
    summary: str,
    *,
    answers: Mapping[int, Any],
    refusals: Sequence[int] = (),
    parameters: Sequence[Any] = (),
    body: Any = None,
    is_public: bool = False,
    tag: str = "tuples",
) -> HttpOperation:
    """An operation with its answers and its refusals, besides those that every operation has.

    Args:
        name: Its id.
        summary: What it does.
        answers: By status.
        refusals: Further statuses of `PROBLEMS`.
        parameters: Of its query, and its headers; those of the path are added.
        body: The request's.
        is_public: Whether it needs no token.
        tag: The part of the API that it belongs to.
    """
    known = {status for status in (*_ALWAYS, *refusals) if not (is_public and status in (401, 403, 421))}
    refused = {str(status): {"$ref": f"#/components/responses/Problem{status}"} for status in sorted(known)}
    made: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "tags": [tag],
        "parameters": list(parameters),
        "responses": {**{str(status): each for status, each in answers.items()}, **refused},
    }
    if body is not None:
        made["requestBody"] = body
    if is_public:
        made["security"] = []
    return made


def problem_answer(status: int) -> dict[str, Any]:
    """The answer of a refusal."""
    return answer(PROBLEMS[status], ref("Problem"), _PROBLEM_TYPE)


_SELECTORS: Final = (
    parameter("prefix", "Keys below this one, as text; empty for all."),
    parameter("start", "The lowest key."),
    parameter("end", "The key before which the range ends."),
)
_EXPIRIES: Final = (
    parameter("expire_in", "Seconds after which the entry is gone.", {"type": "string", "pattern": "^[0-9.]+$"}),
    parameter("expire_at", "The time in RFC 3339 at which it is gone.", {"type": "string", "format": "date-time"}),
)
_IF_MATCH: Final = header("If-Match", "ETags of which one must be that of the stored entry; * for any entry.")
_IF_NONE: Final = header(
    "If-None-Match", "*: only if nothing is stored; or ETags of which none may be that of the stored entry."
)
_TAG: Final = {"headers": {"ETag": {"description": "The versionstamp, in quotes.", "schema": _TEXT}}}

ENTRY: Final = {
    "GET": operation(
        "getEntry",
        "The entry at a key",
        parameters=[
            header("If-None-Match", "ETags that the client has: then 304."),
            _IF_MATCH,
            header("Accept", "application/octet-stream gives a value of bytes as it is."),
        ],
        answers={
            200: {**answer("The entry.", ref("WireEntry"), _JSON, _OCTETS), **_TAG},
            304: answer("The client has it."),
        },
        refusals=(404, 406, 412),
    ),
    "PUT": operation(
        "putEntry",
        "Store a value",
        parameters=[*_EXPIRIES, _IF_MATCH, _IF_NONE],
        body={
            "required": True,
            "content": {
                _JSON: {"schema": {}},
                _OCTETS: {"schema": {}},
                _U64: {"schema": _DECIMAL},
            },
        },
        answers={
            status: {**answer(text, fields(versionstamp=_DECIMAL)), **_TAG}
            for status, text in {200: "It was stored.", 201: "It was stored under a key without an entry."}.items()
        },
        refusals=(412, 413, 415),
    ),
    "DELETE": operation(
        "deleteEntry",
        "Remove an entry",
        parameters=[_IF_MATCH, _IF_NONE],
        answers={200: answer("Whether there was one.", fields(found={"type": "boolean"}))},
        refusals=(412,),
    ),
    "PATCH": operation(
        "touchEntry",
        "Give an entry another expiry; `expire_in` null removes it",
        parameters=[_IF_MATCH, _IF_NONE],
        body=json_body(ref("NewExpiry")),
        answers={200: answer("It has that expiry.", fields(found={"type": "boolean"}))},
        refusals=(404, 412, 413, 415),
    ),
}

RANGE: Final = {
    "GET": operation(
        "listEntries",
        "The entries of a range, a page at a time; or their keys, the children of a prefix, or a number",
        parameters=[
            *_SELECTORS,
            parameter("after", "Instead of start: begin after this key."),
            parameter("past", "Instead of start: begin after this key and all keys below it."),
            parameter(
                "limit",
                f"How many at most; {limits.HTTP_LIST_ENTRIES} if not given.",
                {"type": "integer", "minimum": 1, "maximum": limits.HTTP_LONGEST_LIST},
            ),
            parameter("reverse", "The last ones first.", _FLAG),
            parameter("cursor", "From where an earlier list with the same parameters ended."),
            parameter("keys", "Entries without their values.", _FLAG),
            parameter("children", "The keys one part below the prefix, each once.", _FLAG),
            parameter("count", "Their number alone.", _FLAG),
        ],
        answers={
            200: answer(
                "Entries, or children, and the cursor of what follows them, or null; or a count.",
                {
                    "anyOf": [
                        fields(
                            entries={"type": "array", "items": ref("WireEntry")}, cursor={"type": ["string", "null"]}
                        ),
                        fields(children={"type": "array", "items": _TEXT}, cursor={"type": ["string", "null"]}),
                        fields(count={"type": "integer"}),
                    ]
                },
            )
        },
    ),
    "DELETE": operation(
        "deleteRange",
        "Remove all entries of a range, in slices; it needs one of prefix, start and end",
        parameters=_SELECTORS,
        answers={200: answer("How many there were.", fields(deleted={"type": "integer"}))},
    ),
}

GET_MANY: Final = {
    "POST": operation(
        "getEntries",
        f"Up to {limits.HTTP_GET_KEYS:,} entries, in the order asked for, as of one moment",
        body=json_body(ref("WantedKeys")),
        answers={200: answer("The entries.", fields(entries={"type": "array", "items": ref("WireEntry")}))},
        refusals=(413, 415),
    )
}

ATOMIC: Final = {
    "POST": operation(
        "commitAtomic",
        "Checks and writes, all of them or none",
        body=json_body(ref("WireBatch")),
        answers={
            200: answer(
                "All was written. `values`: per mutation a new number, whether it found or stored something, or null.",
                fields(ok={"const": True}, versionstamp=_DECIMAL, committed_at=_TEXT, values={"type": "array"}),
            )
        },
        refusals=(412, 413, 415),
    )
}

WATCH: Final = {
    "GET": operation(
        "watchKeys",
        "Changes of keys, or below a prefix, as server-sent events: `ready`, then `change` with the versionstamp as id",
        parameters=[
            parameter(
                "key",
                "A key; all of them are reported at first, then whenever one changed.",
                {"type": "array", "items": _TEXT},
                explode=True,
            ),
            _SELECTORS[0],
            parameter("since", "A versionstamp: report what changed after it.", _DECIMAL),
            header("Last-Event-ID", "The same, as browsers send it."),
        ],
        answers={200: answer("Events.", _TEXT, _EVENTS)},
        refusals=(410, 413),
    )
}

INFO: Final = {
    "GET": operation(
        "getInfo",
        "Which store this is, its version and its time",
        answers={
            200: answer(
                "About the service.",
                fields(
                    store=_TEXT, version=_TEXT, now=_TEXT, versionstamp=_DECIMAL, max_value_bytes={"type": "integer"}
                ),
            )
        },
    )
}


def text_operation(name: str, summary: str) -> Mapping[str, HttpOperation]:
    """An operation that needs no token and answers with text."""
    answers = {
        200: answer("The text.", _TEXT, "text/plain"),
        503: answer("The service is starting or ending, or its database fails.", _TEXT, "text/plain"),
    }
    made = dict(operation(name, summary, answers=answers, is_public=True, tag="monitoring"))
    made["responses"] = {status: made["responses"][status] for status in ("200", "405", "500")} | {
        "503": answers[503],
        "400": made["responses"]["400"],
        "431": made["responses"]["431"],
    }
    return {"GET": made}
