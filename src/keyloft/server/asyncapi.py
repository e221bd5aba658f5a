"""Describes the services on NATS as an AsyncAPI 3 document, from the tables of their operations."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import keyloft
from keyloft import limits
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.nats.schemas import Messages, Schema, refusal_of
from keyloft.nats.service import NatsService
from keyloft.plugins.rules import PREFIXES, QUEUE
from keyloft.plugins.service import DatabaseService
from keyloft.semantic.keys import PREFIX
from keyloft.semantic.service import SemanticService

_VERSION: Final = "3.0.0"
_SERVICES: Final[Mapping[str, type[NatsService]]] = {"plugins": DatabaseService, "semantic": SemanticService}
_ID: Final = f"1 to {limits.SEMANTIC_ID_CHARACTERS} characters of a-z 0-9 _ -"
_PARAMETERS: Final = {
    "plugin": f"whose storage: 1 to {limits.PLUGIN_NAME_CHARACTERS} characters of a-z 0-9 - _",
    "tenant": f"whose state: {_ID}",
    "project": f"of which project: {_ID}",
    "id": "the last part of the subject that the reply to watch names",
}
_DESCRIPTION: Final = (
    "Requests and replies are NATS messages with JSON in UTF-8. A message with a reply subject is answered there; one "
    "without is carried out, and its errors are logged. Every reply has success; if that is false, error_code and "
    "message say why. Numbers keep all their digits in the service: a client may have to read them as text."
)


def document(prefix: str = PREFIXES[0], semantic_prefix: str = PREFIX) -> dict[str, Any]:
    """The AsyncAPI document of both services.

    Args:
        prefix: The beginning of the subjects of the plugins' storage.
        semantic_prefix: The beginning of the subjects of the semantic store.
    """
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for name, begins in (("plugins", prefix), ("semantic", semantic_prefix)):
        service = _SERVICES[name]
        owner = f"{begins}.{'.'.join([f'{{{part}}}' for part in service.subject_names])}"
        for operation, described in service.messages.items():
            at = f"{name}.{operation}"
            shown = _messages(operation, described)
            messages |= {f"{at}.{kind}": message for kind, message in shown.items()}
            channels[at] = _channel(f"{owner}.{operation}", [f"{at}.request"], service.subject_names)
            channels[f"{at}.replies"] = _channel(None, [f"{at}.reply", f"{at}.refusal"])
            operations[at] = _operation(service, at, described)
            if described.event is not None:
                channels[f"{at}.events"] = _channel(
                    f"{owner}.events.{{id}}", [f"{at}.event"], (*service.subject_names, "id")
                )
                operations[f"{at}.event"] = {
                    "action": "send",
                    "channel": _reference("channels", f"{at}.events"),
                    "summary": "Report a change to the client that watches.",
                }
    return {
        "asyncapi": _VERSION,
        "info": {"title": "Keyloft", "version": keyloft.__version__, "description": _DESCRIPTION},
        "defaultContentType": "application/json",
        "servers": {"local": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages},
    }


def _messages(operation: str, described: Messages) -> dict[str, Any]:
    """The messages of an operation, by kind."""
    refusal = refusal_of(list(WIRE_ERRORS), described.refusal_fields)
    examples = [{"payload": example} for example in described.examples]
    shown = {
        "request": {**_message(f"{operation} request", described.request), "examples": examples},
        "reply": _message(f"{operation} reply", described.reply),
        "refusal": _message(f"{operation} refusal", refusal),
    }
    return shown if described.event is None else {**shown, "event": _message(f"{operation} event", described.event)}


def _message(name: str, payload: Schema) -> dict[str, Any]:
    return {"name": name, "contentType": "application/json", "payload": payload}


def _channel(address: str | None, messages: Sequence[str], parameters: Sequence[str] = ()) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": address,
        "messages": {name.rpartition(".")[2]: _reference("components", "messages", name) for name in messages},
    }
    if address is None:
        return {**channel, "description": "the reply subject of the request's message"}
    return {**channel, "parameters": {name: {"description": _PARAMETERS[name]} for name in parameters}}


def _operation(service: type[NatsService], at: str, described: Messages) -> dict[str, Any]:
    return {
        "action": "receive",
        "channel": _reference("channels", at),
        "title": at,
        "summary": described.summary,
        "tags": [{"name": service.name, "description": service.description}],
        "bindings": {"nats": {"queue": QUEUE, "bindingVersion": "0.1.0"}},
        "reply": {"channel": _reference("channels", f"{at}.replies")},
    }


def _reference(*parts: str) -> dict[str, str]:
    return {"$ref": "/".join(["#", *parts])}
