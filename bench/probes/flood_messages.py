"""The messages of each flood: what a hostile plugin or tenant may send within its permissions."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from msgspec import Struct

Message: TypeAlias = tuple[str, bytes]
"""A subject and a payload."""

MESSAGE_BYTES: Final = 1024 * 1024 - 1024
"""Just below the largest message that nats-server takes."""
VALUE_BYTES: Final = 60_000
LISTED_ENTRIES: Final = 20
TENANT_NAMES: Final = 60_000
_KEYS: Final = 5000


class Flood(Struct, frozen=True):
    """One kind of flood."""

    name: str
    title: str
    messages: Callable[[str], list[Message]]
    """Of the owner with this name."""
    is_semantic: bool = False
    """Whether tenants send it, rather than plugins."""
    is_published: bool = False
    """Without a reply subject."""
    has_entries: bool = False
    """Whether each owner has LISTED_ENTRIES entries of VALUE_BYTES before it begins."""
    by_operator: bool = False
    """Sent by the user ADMIN, who may name any owner."""
    pause: float = 0.5
    """Seconds from the end of the messages to their repetition."""


def _to_plugin(operation: str, *payloads: bytes) -> Callable[[str], list[Message]]:
    return lambda owner: [(f"db.kv.{owner}.{operation}", payload) for payload in payloads]


def _to_tenant(operation: str, *payloads: bytes) -> Callable[[str], list[Message]]:
    return lambda owner: [(f"db.semantic.{owner}.web.{operation}", payload) for payload in payloads]


def _set(number: int, value: bytes) -> bytes:
    return b'{"key":"%d","value":%b}' % (number, value)


def _filled(opening: bytes, item: bytes, closing: bytes, size: int) -> bytes:
    """JSON of about this size: many times one item."""
    items = b",".join([item] * ((size - len(opening) - len(closing)) // (len(item) + 1)))
    return opening + items + closing


def _unknown_names() -> bytes:
    return b"{" + b",".join(b'"expectedVersio%d":0' % number for number in range(42_000)) + b"}"


def _kept(number: int) -> bytes:
    """A request that keeps a dead letter."""
    about = b'"expectedVersion":0,"lastWriter":"w","semantics":{"purpose":"cursor"}'
    puts = [b'{"operation":"put","key":"k%d","value":"%b",%b}' % (one, b"x" * VALUE_BYTES, about) for one in range(16)]
    about = b'"batch":true,"errorCode":"BUSY","error":"busy","attempts":5'
    return b'{"action":"keep","id":"%024x","operations":[%b],%b}' % (number, b",".join(puts), about)


_DELETES: Final = b'{"operations":[%b]}' % b",".join(
    b'{"operation":"delete","key":"k%d","expectedVersion":"*","lastWriter":"w"}' % number for number in range(20)
)
_NESTED: Final = _filled(b"[", b"[" * 400 + b"]" * 400, b"]", VALUE_BYTES)
_DUPLICATES: Final = _filled(b"{", b'"a":1', b"}", VALUE_BYTES)
_DIGITS: Final = _filled(b"[", b"7" * 4000, b"]", VALUE_BYTES)
_INTEGERS: Final = _filled(b'{"operations":[', b"1", b"]}", MESSAGE_BYTES)
_OBJECTS: Final = _filled(b'{"key":"large","value":[', b'{"a":1}', b"]}", MESSAGE_BYTES)
_TEXT: Final = b'{"key":"large","value":"' + b"x" * (MESSAGE_BYTES - 40) + b'"}'

_MANY: Final = b'{"requests":[%b]}' % b",".join(
    [b'{"op":"set","key":"%d","value":"%b"}' % (number, b"x" * VALUE_BYTES) for number in range(16)]
    + [b'{"key":"%d","op":"get"}' % (number % 16) for number in range(984)]
)

FLOODS: Final = (
    Flood(
        "many",
        "8 messages of 16 sets and 984 gets of 60 KB",
        _to_plugin("many", *[_MANY] * 8),
    ),
    Flood(
        "published",
        "10,000 published sets",
        lambda owner: [(f"db.kv.{owner}.set", _set(number % _KEYS, b"%d" % number)) for number in range(10_000)],
        is_published=True,
    ),
    Flood(
        "lists",
        "1,000 semantic lists with values, of 20 entries of 60 KB",
        _to_tenant("list", *[b'{"values":true,"limit":10000}'] * 1000),
        is_semantic=True,
        has_entries=True,
    ),
    Flood(
        "names",
        "8 semantic messages of 1 MB with unknown names of fields",
        _to_tenant("batch", *[_unknown_names()] * 8),
        is_semantic=True,
    ),
    Flood(
        "audits",
        "300 semantic batches of 20 deletes, and 300 audits of them",
        lambda owner: [
            *_to_tenant("batch", *[_DELETES] * 300)(owner),
            *_to_tenant("audit", *[b'{"limit":10000}'] * 300)(owner),
        ],
        is_semantic=True,
    ),
    Flood(
        "dead-letters",
        "4 dead letters of 1 MB, and 200 lists of them",
        lambda owner: [
            *_to_tenant("dead_letters", *[_kept(number) for number in range(4)])(owner),
            *_to_tenant("dead_letters", *[b'{"values":true,"limit":10000}'] * 200)(owner),
        ],
        is_semantic=True,
    ),
    Flood(
        "nested",
        "200 sets of 60 KB of nested lists",
        _to_plugin("set", *[_set(number, _NESTED) for number in range(200)]),
    ),
    Flood(
        "duplicates",
        "60 sets of 60 KB with duplicate names",
        _to_plugin("set", *[_set(number, _DUPLICATES) for number in range(60)]),
    ),
    Flood(
        "integers",
        "100 sets of 60 KB of 4,000-digit integers",
        _to_plugin("set", *[_set(number, _DIGITS) for number in range(100)]),
    ),
    Flood(
        "batches",
        "8 semantic batches of 500,000 integers",
        _to_tenant("batch", *[_INTEGERS] * 8),
        is_semantic=True,
    ),
    Flood("json", "8 sets of 1 MiB of JSON", _to_plugin("set", *[_OBJECTS, _TEXT] * 4)),
    Flood(
        "tenants",
        "60,000 names of tenants",
        lambda owner: [
            (f"db.semantic.{owner}-{number}.web.get", b'{"key":"docs/a/b"}') for number in range(TENANT_NAMES)
        ],
        is_semantic=True,
        by_operator=True,
        pause=3.0,
    ),
)


# Fuzz

_VALID: Final[dict[str, bytes]] = {
    "set": b'{"key":"k","value":{"a":[1,2.5,null,"x"]},"ttl":60}',
    "get": b'{"key":"k"}',
    "delete": b'{"key":"k"}',
    "list": b'{"prefix":"k","limit":5,"after":"a"}',
}
_PUT: Final = {
    "key": "docs/a/b",
    "value": {"token": "abc"},
    "expectedVersion": "*",
    "lastWriter": "harvester:sync",
    "semantics": {"purpose": "cursor", "producer": "harvester", "consumerHints": ["search"], "ttlSeconds": 3600},
}
_DELETE: Final = {"key": "docs/a/b", "expectedVersion": "*", "lastWriter": "harvester:sync"}
_OPERATIONS: Final = [{"operation": "put", **_PUT}, {"operation": "delete", **_DELETE}]
_LOCK: Final = {"key": "locks/a", "lastWriter": "harvester:sync"}
_GIVEN_UP: Final = {"operations": _OPERATIONS, "batch": True, "errorCode": "BUSY", "error": "busy", "attempts": 5}
_VALID_SEMANTIC: Final[dict[str, tuple[bytes, ...]]] = {
    "put": (json.dumps(_PUT).encode(),),
    "get": (b'{"key":"docs/a/b"}',),
    "delete": (json.dumps(_DELETE).encode(),),
    "restore": (b'{"key":"docs/a/b","lastWriter":"harvester:sync","requestId":"r","specRef":"s"}',),
    "list": (b'{"prefix":"docs/","values":true,"limit":3}',),
    "batch": (json.dumps({"operations": _OPERATIONS}).encode(),),
    "audit": (b'{"key":"docs/a/b","limit":3,"reverse":true,"after":5,"cursor":"00000000000000090000"}', b"{}"),
    "locks": (
        b'{"values":true,"limit":3,"after":7}',
        json.dumps({"action": "acquire", "semantics": {"purpose": "lock", "ttlSeconds": 5}, **_LOCK}).encode(),
        b'{"action":"renew","key":"locks/a","fence":7,"ttlSeconds":5}',
        json.dumps({"action": "release", "fence": 7, "requestId": "r", **_LOCK}).encode(),
    ),
    "dead_letters": (
        b'{"values":true,"limit":3,"after":"000000000000000000000000"}',
        json.dumps({"action": "keep", "id": "0123456789abcdef01234567", **_GIVEN_UP}).encode(),
        b'{"action":"retry","id":"0123456789abcdef01234567","expectedVersion":"*"}',
        b'{"action":"drop","id":"0123456789abcdef01234567"}',
    ),
}
_PIECES: Final = (
    *(
        b"null",
        b"true",
        b"NaN",
        b"-0",
        b"1e999",
        b"99999999999999999999",
        b'""',
        b"[]",
        b"{}",
        b'"\\ud800"',
        b'"\\u0000"',
    ),
    *(b"\xff", b"\xed\xa0\x80", b"\x00", b"\\", b'"', b"[" * 2000, b'{"a":' * 1000, b"9" * 5000, b"\xef\xbb\xbf", b" "),
)
_ODD_NAMES: Final = ("K", "a.b", "*", ">", "ü", "x" * 300, "a-b", "_", "$SRV", "\x1b[31m", "PING", "1", "set")


def fuzzed(chances: random.Random, plugin: str, tenant: str) -> Iterator[Message]:
    """Random bytes, changed valid messages, and odd subjects below the prefixes of the services; without end."""
    while True:
        if is_semantic := chances.random() < 0.5:
            operation = chances.choice(list(_VALID_SEMANTIC))
            subject = f"db.semantic.{tenant}.web.{operation}"
            payload = chances.choice(_VALID_SEMANTIC[operation])
        else:
            operation = chances.choice(list(_VALID))
            subject, payload = f"db.kv.{plugin}.{operation}", _VALID[operation]
        kind = chances.random()
        if kind < 0.15:
            payload = chances.randbytes(chances.choice((0, 1, 2, 10, 100, 3000)))
        elif kind < 0.85:
            for _ in range(chances.choice((1, 1, 2, 5))):
                payload = _changed(chances, payload)
        if chances.random() < 0.1:
            parts = subject.split(".")
            first = 3 if is_semantic else 2
            match chances.randrange(3):
                case 0:
                    parts[chances.randrange(first, len(parts))] = chances.choice(_ODD_NAMES)
                case 1:
                    parts.append(chances.choice(_ODD_NAMES))
                case 2:
                    del parts[first:]
                    parts.append("x")
            subject = ".".join(parts)
        yield subject, payload


def _changed(chances: random.Random, payload: bytes) -> bytes:
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
