"""The messages of each flood: what a hostile plugin or tenant may send within its permissions."""

from collections.abc import Callable
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

_THOUSAND: Final = b",".join([b'"key-%d"' % number for number in range(1000)])
_SET_MANY: Final = b'{"entries":{%b}}' % b",".join([b'"key-%d":%d' % (number, number) for number in range(1000)])


def _each(count: int, payload: bytes, *operations: str) -> Callable[[str], list[Message]]:
    """So many messages to plugins, of these operations by turns."""
    return lambda owner: [(f"db.kv.{owner}.{operation}", payload) for _ in range(count) for operation in operations]


def _lock(number: int) -> bytes:
    about = b'"lastWriter":"w","semantics":{"purpose":"lock","ttlSeconds":60}'
    return b'{"action":"acquire","key":"locks/%d",%b}' % (number, about)


FLOODS: Final = (
    Flood(
        "many",
        "8 messages of 16 sets and 984 gets of 60 KB",
        _to_plugin("many", *[_MANY] * 8),
    ),
    Flood(
        "counters",
        "10,000 increments of 100 counters",
        _to_plugin("incr", *[b'{"key":"counter-%d"}' % (number % 100) for number in range(10_000)]),
    ),
    Flood(
        "counts",
        "sets of 5,000 keys, then 2,000 counts and requests for the usage",
        lambda owner: [
            *_to_plugin("set_many", *[_SET_MANY.replace(b"key-", b"k%d-" % number) for number in range(5)])(owner),
            *_each(1000, b"{}", "count", "usage")(owner),
        ],
    ),
    Flood(
        "touches",
        "a set, then 10,000 touches of one key",
        lambda owner: [
            (f"db.kv.{owner}.set", _set(1, b"1")),
            *_to_plugin("touch", *[b'{"key":"1","ttl":60}'] * 10_000)(owner),
        ],
    ),
    Flood(
        "conditions",
        "a value of 60 KB, then 3,000 sets whose condition fails, and which are answered with it",
        lambda owner: [
            (f"db.kv.{owner}.set", _set(1, b'"%b"' % (b"x" * VALUE_BYTES))),
            *_to_plugin("set", *[b'{"key":"1","value":0,"expected_version":7}'] * 3000)(owner),
        ],
    ),
    Flood(
        "bulk",
        "100 times set_many, get_many and delete_many of 1,000 keys, and a delete_many by prefix",
        lambda owner: [
            message
            for _ in range(100)
            for message in (
                (f"db.kv.{owner}.set_many", _SET_MANY),
                (f"db.kv.{owner}.get_many", b'{"keys":[%b]}' % _THOUSAND),
                (f"db.kv.{owner}.delete_many", b'{"keys":[%b]}' % _THOUSAND),
                (f"db.kv.{owner}.delete_many", b'{"prefix":"key-9"}'),
            )
        ],
    ),
    Flood(
        "ordered",
        "10,000 sets and gets of one key by turns",
        lambda owner: [
            (f"db.kv.{owner}.{operation}", payload)
            for number in range(5000)
            for operation, payload in (("set", _set(1, b"%d" % number)), ("get", b'{"key":"1"}'))
        ],
    ),
    Flood(
        "watches",
        "400 watches, more than an owner may have, and 1,000 sets of what they watch",
        lambda owner: [
            *_to_plugin("watch", *[b'{"prefix":""}'] * 400)(owner),
            *_to_plugin("set", *[_set(number, b"1") for number in range(1000)])(owner),
        ],
    ),
    Flood(
        "locks",
        "1,000 locks acquired, and 200 lists of them",
        lambda owner: [
            *_to_tenant("locks", *[_lock(number) for number in range(1000)])(owner),
            *_to_tenant("locks", *[b'{"values":true,"limit":10000}'] * 200)(owner),
        ],
        is_semantic=True,
    ),
    Flood(
        "flag-watches",
        "300 watches of flags, and 1,000 writes of them",
        lambda owner: [
            *_to_tenant("watch", *[b'{"prefix":"flags/"}'] * 300)(owner),
            *_to_tenant(
                "put",
                *[
                    b'{"key":"flags/%d","value":true,"expectedVersion":"*","lastWriter":"w",'
                    b'"semantics":{"purpose":"feature_flag"}}' % (number % 50)
                    for number in range(1000)
                ],
            )(owner),
        ],
        is_semantic=True,
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
    Flood("large", "50 sets of 1 MB", _to_plugin("set", *[_TEXT] * 50), pause=0.0),
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
