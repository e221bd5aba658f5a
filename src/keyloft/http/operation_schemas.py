"""Describes the operations of the services for the OpenAPI document, from the tables that describe them over NATS."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from keyloft import limits
from keyloft.http.descriptions import HttpOperation, answer, header, operation, parameter
from keyloft.nats.events import WATCH
from keyloft.nats.schemas import BOOLEAN, COUNT, TEXT, Messages, Schema, array_of, object_of

_ID: Final = {"type": "string", "pattern": f"^[a-z0-9_-]{{1,{limits.SEMANTIC_ID_CHARACTERS}}}$"}
_NAMES: Final[Mapping[str, tuple[str, Schema]]] = {
    "plugin": (
        "Whose storage it is.",
        {"type": "string", "pattern": f"^[a-z0-9_-]{{1,{limits.PLUGIN_NAME_CHARACTERS}}}$"},
    ),
    "tenant": ("Whose state it is.", _ID),
    "project": ("Of which project.", _ID),
}
_REFUSALS: Final = (404, 412, 413, 415)
_EVENT: Final = object_of({"key": TEXT, "version": COUNT, "deleted": BOOLEAN})


def path_parameters(names: Sequence[str]) -> list[dict[str, Any]]:
    """The parameters of a path that name an owner: a plugin, or a tenant and a project."""
    return [parameter(name, *_NAMES[name], place="path") for name in names]


def described_operations(
    base: str, tag: str, names: Sequence[str], messages: Mapping[str, Messages]
) -> dict[str, dict[str, HttpOperation]]:
    """The operations of a service except `watch`, by path and method.

    Args:
        base: The beginning of their paths.
        tag: The service.
        names: The parameters of these paths.
        messages: Their requests and replies.
    """
    return {
        f"{base}/{name}": {"POST": _operation(name, tag, names, described)}
        for name, described in messages.items()
        if name != WATCH
    }


def _operation(name: str, tag: str, names: Sequence[str], described: Messages) -> HttpOperation:
    reply = described.reply
    if name == "many":
        reply = described.reply["anyOf"][0]  # over HTTP, all replies arrive in one
    return operation(
        f"{tag}.{name}",
        described.summary.removesuffix("."),
        answers={200: answer("It was carried out.", reply)},
        refusals=_REFUSALS,
        parameters=path_parameters(names),
        body=_body(described.request, described.examples),
        tag=tag,
    )


def described_watch(tag: str, names: Sequence[str], described: Messages) -> dict[str, HttpOperation]:
    """The operation `watch` by method: over HTTP, events arrive in the response."""
    fields = described.request["properties"]
    body = object_of({}, {name: fields[name] for name in ("prefix", "keys", "since")})
    shared: dict[str, Any] = {
        "answers": {200: answer("Events: `ready`, then `change`.", _EVENT, "text/event-stream")},
        "refusals": (404, 410, 413),
        "tag": tag,
    }
    owner = [*path_parameters(names), header("Last-Event-ID", "The id of the last event that the client has.")]
    query = [
        parameter("key", "A key; may be given several times.", array_of(TEXT, limits.LEASE_KEYS)),
        parameter("prefix", "What the keys begin with."),
        parameter("since", "A version, after which changes are reported.", COUNT),
    ]
    what = "Watch keys, or what begins with a prefix, as server-sent events"
    return {
        "GET": operation(f"{tag}.watch", what, parameters=[*owner, *query], **shared),
        "POST": operation(
            f"{tag}.watch_posted",
            f"{what}; with the body of a watch over NATS",
            parameters=owner,
            body=_body(body),
            **shared,
        ),
    }


def _body(schema: Schema, examples: Sequence[Any] = ()) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": schema}
    if examples:
        content["examples"] = {str(number): {"value": example} for number, example in enumerate(examples, 1)}
    return {"content": {"application/json": content}}
