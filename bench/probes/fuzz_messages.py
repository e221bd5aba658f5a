"""Fuzzed messages for the services on NATS: changed examples of every operation, random bytes, odd subjects."""

import json
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

from bench.probes.flood_messages import Message
from keyloft.nats.schemas import Messages
from keyloft.plugins.schemas import MESSAGES as PLUGIN_MESSAGES
from keyloft.semantic.schemas import MESSAGES as SEMANTIC_MESSAGES

_ABOUT: Final = {"lastWriter": "harvester:sync", "requestId": "r", "specRef": "s"}
_MORE: Final[Mapping[str, tuple[dict[str, Any], ...]]] = {
    "list": ({"prefix": "k", "limit": 5, "after": "a", "values": True},),
    "watch": (
        {"subject": "db.kv.flood0.events.0123456789abcdef", "since": 3},
        {"subject": "db.semantic.flood0.web.events.0123456789abcdef", "end": True},
    ),
    "audit": ({"key": "docs/a/b", "limit": 3, "reverse": True, "after": 5, "cursor": "00000000000000090000"},),
    "restore": ({"key": "docs/a/b", **_ABOUT},),
    "locks": (
        {"values": True, "limit": 3, "after": "locks/a"},
        {"action": "acquire", "key": "locks/a", "semantics": {"purpose": "lock", "ttlSeconds": 5}, **_ABOUT},
        {"action": "renew", "key": "locks/a", "fence": 7, "ttlSeconds": 5},
        {"action": "release", "key": "locks/a", "fence": 7, **_ABOUT},
    ),
    "dead_letters": (
        {"values": True, "limit": 3, "after": "000000000000000000000000"},
        {"action": "retry", "id": "0123456789abcdef01234567", "expectedVersion": "*"},
        {"action": "drop", "id": "0123456789abcdef01234567"},
    ),
}
"""Requests that the examples leave out, by operation."""


def _valid(messages: Mapping[str, Messages]) -> list[tuple[str, dict[str, Any]]]:
    """Operations, each as often as any other, with a request."""
    found = {name: [dict(example) for example in one.examples] for name, one in messages.items()}
    for name in found:
        found[name] += _MORE.get(name, ())
    most = max(map(len, found.values()))
    return [(name, requests[number % len(requests)]) for name, requests in found.items() for number in range(most)]


_PLUGIN: Final = _valid(PLUGIN_MESSAGES)
_SEMANTIC: Final = _valid(SEMANTIC_MESSAGES)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, -0.0, 0.5, 1e300, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30),
    *("", " ", "k", "K", "*", ">", "a.b", "\x00", "\x1b[31m", "\u202e", "\U0010ffff", "x" * 256, "k" * 3000, "é" * 255),
    *([], [[]], [None], [1, "k"], ["k"] * 1001, ["k", "k"], {}, {"a": {}}, {"": 1}, {"k" * 256: 1}, {"value": None}),
    *("00000000000000000000", "0123456789abcdef01234567", "../x", "$SRV.PING", "db.kv.victim.events.a", "locks/a"),
)
_PIECES: Final = (
    *(b"null", b"true", b"NaN", b"Infinity", b"-0", b"1e999", b"99999999999999999999", b'""', b"[]", b"{}"),
    *(b'"\\ud800"', b'"\\u0000"', b"\xff", b"\xed\xa0\x80", b"\x00", b"\\", b'"', b"\xef\xbb\xbf", b" ", b",", b":"),
    *(
        b"[" * 2000,
        b'{"a":' * 1000,
        b"9" * 5000,
        b'"op":"get",',
        b'"\\u006fp":"set",',
        b'"key":"k",',
        b'{"op":"many"},',
    ),
)
_ODD_NAMES: Final = ("K", "a.b", "*", ">", "ü", "x" * 300, "a-b", "_", "$SRV", "\x1b[31m", "PING", "1", "set", "events")


def fuzzed(chances: random.Random, plugin: str, tenant: str) -> Iterator[Message]:
    """Messages below the prefixes of the services, most of them wrong in some way; without end."""
    while True:
        is_semantic = chances.random() < 0.5
        operation, request = chances.choice(_SEMANTIC if is_semantic else _PLUGIN)
        subject = f"db.semantic.{tenant}.web.{operation}" if is_semantic else f"db.kv.{plugin}.{operation}"
        yield _odd_subject(chances, subject, 3 if is_semantic else 2), _payload(chances, request)


def _payload(chances: random.Random, request: dict[str, Any]) -> bytes:
    kind = chances.random()
    if kind < 0.08:
        return chances.randbytes(chances.choice((0, 1, 2, 10, 100, 3000)))
    if kind < 0.6:
        request = json.loads(json.dumps(request))
        for _ in range(chances.choice((1, 1, 1, 2, 4))):
            _change_member(chances, request)
    payload = json.dumps(request, separators=chances.choice(((",", ":"), (", ", ": ")))).encode()
    if 0.45 < kind < 0.9:
        for _ in range(chances.choice((1, 1, 2, 5))):
            payload = _changed(chances, payload)
    return payload


def _change_member(chances: random.Random, request: dict[str, Any]) -> None:
    """Change, remove, rename or add a field of a request, or of an object within it."""
    objects = list(_objects(request))
    within = chances.choice(objects)
    name = chances.choice([*within, "key"])
    value = deepcopy(chances.choice(_VALUES))  # a later change may be one within it
    match chances.randrange(5):
        case 0 | 1:
            within[name] = value
        case 2:
            within.pop(name, None)
        case 3:
            within[chances.choice((name.upper(), f"{name}_", name.replace("_", ""), "unknown"))] = within.pop(
                name, value
            )
        case _:
            within[chances.choice(("op", "action", "ttl", "since", "limit", "parts", "expected_version"))] = value


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(one)


def _changed(chances: random.Random, payload: bytes) -> bytes:
    """A payload with some of its bytes removed, replaced or doubled."""
    at = chances.randrange(len(payload) + 1)
    to = min(len(payload), at + chances.choice((0, 1, 1, 2, 8)))
    match chances.randrange(4):
        case 0:
            return payload[:at] + payload[to:]
        case 1:
            return payload[:at] + chances.choice(_PIECES) + payload[to:]
        case 2:
            return payload[:at] + chances.randbytes(chances.randrange(1, 4)) + payload[to:]
        case _:
            return payload[:at] + payload[at : at + 20] + payload[at:]


def _odd_subject(chances: random.Random, subject: str, first: int) -> str:
    """Mostly the subject itself; else one with odd words after the first few."""
    if chances.random() >= 0.1:
        return subject
    parts = subject.split(".")
    match chances.randrange(3):
        case 0:
            parts[chances.randrange(first, len(parts))] = chances.choice(_ODD_NAMES)
        case 1:
            parts.append(chances.choice(_ODD_NAMES))
        case _:
            del parts[first:]
            parts.append("x")
    return ".".join(parts)
