"""Refusals name the argument as the caller wrote it: in Python the argument, over NATS the field of the request."""

import difflib
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest

import keyloft
from keyloft import Store, limits
from keyloft.errors import InvalidArgument, InvalidInput, InvalidJson, InvalidKey, ValueTooLarge
from keyloft.semantic import (
    Intent,
    SemanticClient,
    Semantics,
    SemanticService,
    SemanticStore,
    key_of,
    rules,
    shortened,
    wire,
)
from keyloft.semantic.intents import WriteRequest
from keyloft.semantic.keys import Project

from .entries import CURSOR, KEY, LOCK, PROJECT, WRITER

TTL = "expected a whole number of seconds from 1 to 2,147,483,647"
IDS = "1 to 64 lowercase letters, digits, _ and - (a-z 0-9 _ -)"
PARTS = "lowercase letters, digits, dots, _ and - (a-z 0-9 . _ -)"
KEYS = "expected tenant/<tenant>/project/<project>/<path>, as in tenant/acme/project/web/docs/onedrive/delta"
VERSION = 'expected the version of the stored entry, 0 if there must be none, or "*" for either'
SECONDS = "expected a number of seconds above 0, at most 31,622,400,000"
PURPOSE = "expected a name such as cursor: a-z 0-9 _, a letter first, at most 64 characters"
HINTS = "expected a list of at most 32 texts"
PROJECT_RULE = "expected a tenant and a project, as in tenant/acme/project/web, and perhaps the beginning of a path"

LIST: Any = [7]
GOOD: dict[str, Any] = {"expected_version": "*", "writer": WRITER}
FIELDS: dict[str, Any] = {"key": "docs/delta", "expectedVersion": "*", "lastWriter": WRITER}
PUT: dict[str, Any] = {**FIELDS, "value": 1, "semantics": {"purpose": "cursor"}}

# The argument of a Python caller, what it is, the message; then the field of a request, and its message.
BOTH: list[tuple[str, Any, str, str, str]] = [
    ("writer", 7, "expected a non-empty str, got int", "lastWriter", "expected a non-empty string, got a number"),
    ("writer", "", "expected a non-empty str", "lastWriter", "expected a non-empty string"),
    ("writer", None, "expected a non-empty str, got None", "lastWriter", "expected a non-empty string, got null"),
    ("writer", "x" * 129, "expected at most 128 characters, got 129", "lastWriter", ""),
    ("writer", "a\nb", "expected no control characters and no lone surrogates, got U+000A", "lastWriter", ""),
    ("expected_version", None, f"{VERSION}, got None", "expectedVersion", f"{VERSION}, got null"),
    ("expected_version", "1", f"{VERSION}, got str", "expectedVersion", f"{VERSION}, got a string"),
    ("expected_version", True, f"{VERSION}, got bool", "expectedVersion", f"{VERSION}, got a boolean"),
    ("expected_version", -1, VERSION, "expectedVersion", ""),
    ("request_id", 7, "expected a non-empty str, got int", "requestId", "expected a non-empty string, got a number"),
    ("request_id", "x" * 129, "expected at most 128 characters, got 129", "requestId", ""),
    ("spec_ref", [], "expected a non-empty str, got list", "specRef", "expected a non-empty string, got an array"),
    ("spec_ref", "x" * 257, "expected at most 256 characters, got 257", "specRef", ""),
    ("fence", "7", "expected the fencing token of a lock, a whole number, got str", "fence",
     "expected the fencing token of a lock, a whole number, got a string"),
    ("fence", -1, "expected the fencing token of a lock, a whole number", "fence", ""),
]  # fmt: skip

SEMANTICS: list[tuple[str, Any, str, str, str]] = [
    ("purpose", 7, f"{PURPOSE}, got int", "purpose", f"{PURPOSE}, got a number"),
    ("purpose", "Cursor", PURPOSE, "purpose", ""),
    ("producer", {}, "expected a non-empty str, got dict", "producer", "expected a non-empty string, got an object"),
    ("consumer_hints", "ab", f"{HINTS}, got str", "consumerHints", f"{HINTS}, got a string"),
    ("consumer_hints", ["a"] * 33, HINTS, "consumerHints", ""),
    ("consumer_hints[1]", ["a", 1], "expected a non-empty str, got int", "consumerHints[1]",
     "expected a non-empty string, got a number"),
    ("ttl_seconds", 0, f"{TTL}; leave it out for no expiry", "ttlSeconds", ""),
    ("ttl_seconds", "60", f"{TTL}, got str; leave it out for no expiry", "ttlSeconds",
     f"{TTL}, got a string; leave it out for no expiry"),
]  # fmt: skip


@pytest.fixture
async def store() -> AsyncIterator[SemanticStore]:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        yield store


@pytest.fixture
async def asking(nats_url: str, store: SemanticStore) -> AsyncIterator[Any]:
    """Sends a request, and returns the code and the message of its refusal."""
    connection = await nats.connect(nats_url)

    async def ask(operation: str, fields: Any) -> tuple[str, str]:
        data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        reply = json.loads((await connection.request(f"refusing.acme.web.{operation}", data, timeout=20)).data)
        assert reply["success"] is False
        return reply["error_code"], reply["message"]

    async with SemanticService(connection, store, prefix="refusing"):
        yield ask
    await connection.close()


async def refusal(call: Any) -> str:
    """The message with which an awaitable, or the call of a function, is refused."""
    with pytest.raises(InvalidInput) as refused:
        await (call() if callable(call) else call)
    return str(refused.value)


async def test_every_write_names_the_argument_in_python_and_the_field_over_nats(
    store: SemanticStore, asking: Any
) -> None:
    for argument, given, rule, field, wire_rule in BOTH:
        arguments, expected = {**GOOD, argument: given}, f"{argument}: {rule}"
        assert await refusal(store.put(KEY, 1, semantics=CURSOR, **arguments)) == expected
        assert await refusal(store.delete(KEY, **arguments)) == expected
        sent = ("VALIDATION_ERROR", f"{field}: {wire_rule or rule}")
        assert await asking("put", {**PUT, field: given}) == sent
        assert await asking("delete", {**FIELDS, field: given}) == sent
        if argument == "request_id":
            assert await refusal(store.batch([Intent.delete(KEY, **GOOD)], request_id=given)) == expected
            assert await asking("batch", {"operations": [], field: given}) == sent
            continue
        with pytest.raises(InvalidInput) as refused:
            Intent.put(KEY, 1, semantics=CURSOR, **arguments)
        assert str(refused.value) == expected
        operations = [{"operation": "put", **PUT}, {"operation": "delete", **FIELDS, "key": "other", field: given}]
        assert await asking("batch", {"operations": operations}) == (sent[0], f"operations[1]: {sent[1]}")
    assert await store.audit(PROJECT) == []


@pytest.mark.parametrize(("argument", "given", "rule", "field", "wire_rule"), SEMANTICS)
async def test_semantics_name_the_argument_in_python_and_the_field_over_nats(
    store: SemanticStore, asking: Any, argument: str, given: Any, rule: str, field: str, wire_rule: str
) -> None:
    name = argument.partition("[")[0]
    arguments: dict[str, Any] = {"purpose": "cursor", name: given}
    with pytest.raises(InvalidArgument) as refused:
        Semantics(**arguments)
    assert str(refused.value) == f"{argument}: {rule}"
    if name != "purpose":
        flags = store.flags("acme", "web")
        assert await refusal(flags.set("x", 1, writer=WRITER, **{name: given})) == f"{argument}: {rule}"
    sent = {"purpose": "cursor", field.partition("[")[0]: given}
    expected = f"semantics.{field}: {wire_rule or rule}"
    assert await asking("put", {**PUT, "semantics": sent}) == ("VALIDATION_ERROR", expected)
    batch = {"operations": [{**PUT, "operation": "put", "semantics": sent}]}
    assert await asking("batch", batch) == ("VALIDATION_ERROR", f"operations[0]: {expected}")


async def test_a_value_is_named_once_and_its_limit_in_kibibytes(store: SemanticStore, asking: Any) -> None:
    message = await refusal(store.put(KEY, {1}, semantics=CURSOR, **GOOD))
    assert message.startswith("value: the type set would not be read back equal")
    for value in ("x" * 65_535, 10**65_536):
        with pytest.raises(ValueTooLarge) as refused:
            await store.put(KEY, value, semantics=CURSOR, **GOOD)
        assert str(refused.value) == (
            "value: expected at most 64 KiB (65,536 bytes) of compact JSON, got 65,537 bytes; store less"
        )
        assert (refused.value.size, refused.value.limit) == (65_537, 65_536)
    rule = "value: expected at most 64 KiB (65,536 bytes) of compact JSON, got"
    assert await asking("put", {**PUT, "value": "x" * 65_535}) == (
        "VALUE_TOO_LARGE",
        f"{rule} 65,537 bytes; store less",
    )
    long = json.dumps({**PUT, "value": 0}).encode().replace(b'"value": 0', b'"value": ' + b"7" * 65_537)
    assert await asking("put", long) == ("VALUE_TOO_LARGE", f"{rule} 65,537 bytes; store less")
    batch = {"operations": [{**PUT, "operation": "put", "value": "x" * 65_535}]}
    assert await asking("batch", batch) == ("VALUE_TOO_LARGE", f"operations[0]: {rule} 65,537 bytes; store less")


PATHS: list[tuple[Any, str, str]] = [
    (7, "expected a str, the path within the project, got int",
     "expected a string, the path within the project, got a number"),
    ("Docs", f"expected each part of the path to have {PARTS}, got 'Docs'", ""),
    ("", f"expected each part of the path to have {PARTS}, got ''", ""),
    ("x" * 128, "expected at most 128 characters, got 152; keyloft.semantic.shortened(…) makes a short part of a long "
     "identifier", ""),
    (KEY, "expected the path within the project, got more; leave tenant/…/project/…/ out", ""),
]  # fmt: skip


async def test_a_path_of_the_client_and_of_a_request_is_named(nats_url: str, asking: Any) -> None:
    async with await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix="refusing") as client:
        for path, rule, wire_rule in PATHS:
            for call in (
                client.get(path),
                client.put(path, 1, semantics=CURSOR, **GOOD),
                client.delete(path, **GOOD),
            ):
                assert await refusal(call) == f"key: {rule}"
            with pytest.raises(InvalidKey) as refused:
                await client.batch([Intent.delete("fine", **GOOD), Intent.delete(path, **GOOD)])
            assert str(refused.value) == f"operations[1]: key: {rule}"
            for operation, fields in {"get": {}, "put": PUT, "delete": FIELDS}.items():
                assert await asking(operation, {**fields, "key": path}) == (
                    "VALIDATION_ERROR",
                    f"key: {wire_rule or rule}",
                )
            assert await asking("list", {"after": path}) == ("VALIDATION_ERROR", f"after: {wire_rule or rule}")
        for prefix, rule in [(7, "expected a str, the path within the project, got int"), (PATHS[4][0], PATHS[4][1])]:
            bad: Any = prefix
            with pytest.raises(InvalidKey) as refused:
                client.list(bad)
            assert str(refused.value) == f"prefix: {rule}"


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        ("put", {**PUT, "semantics": "cursor"},
         'semantics: expected an object, as in {"purpose": "cursor"}, got a string'),
        ("put", {**PUT, "semantics": {"purpose": "lease"}},
         "semantics.purpose: expected one of checkpoint, config, cursor, feature_flag, index_version, lock, "
         "got 'lease'; SemanticStore(kv, purposes=[…]), or `keyloft serve --purposes …`, registers another one"),
        ("put", {**PUT, "semantics": {"purpose": "lock"}},
         f"semantics.ttlSeconds: {TTL}, got null; a lock becomes free this long after its holder died"),
        ("list", {"prefix": 5}, "prefix: expected a string, the path within the project, got a number"),
        ("list", {"prefix": "A"},
         f"prefix: expected the beginning of a path: {PARTS}, single slashes between the parts, "
         "at most 128 characters in all, got 'A'"),
        ("list", {"prefix": KEY},
         "prefix: expected the path within the project, got more; leave tenant/…/project/…/ out"),
        ("list", {"values": "yes"}, "values: expected true or false, got a string"),
        ("list", {"limit": 0}, "limit: expected a whole number from 1 to 10000"),
        ("list", {"limit": "9"}, "limit: expected a whole number from 1 to 10000"),
        ("batch", {"operations": {}}, "operations: expected an array of puts and deletes, got an object"),
        ("batch", {"operations": []}, "operations: expected 1 to 1,000 puts and deletes, got 0"),
        ("batch", {"operations": [5]},
         'operations[0]: expected an object, as in {"operation": "put", "key": …}, got a number'),
        ("batch", {"operations": [{**PUT, "operation": "get"}]}, "operations[0]: operation: expected put or delete"),
        ("batch", {"operations": [{**PUT, "operation": None}]},
         "operations[0]: operation: expected put or delete, got null"),
        ("batch", {"operations": [{**PUT, "operation": "put"}] * 2},
         "operations: expected each key once, got tenant/acme/project/web/docs/delta twice"),
    ],
)  # fmt: skip
async def test_a_request_is_refused_by_its_field(asking: Any, operation: str, fields: Any, message: str) -> None:
    assert await asking(operation, fields) == ("VALIDATION_ERROR", message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.lock(LOCK, writer=WRITER, ttl=0),
         f"ttl: {TTL}; a lock becomes free this long after its holder died"),
        (lambda s: s.lock(LOCK, writer=WRITER, ttl=None),
         f"ttl: {TTL}, got None; a lock becomes free this long after its holder died"),
        (lambda s: s.lock(LOCK, writer=WRITER, wait="5"),
         "wait: expected a number of seconds from 0 on, or None to wait until the lock is free, got str"),
        (lambda s: s.lock(LOCK, writer=7), "writer: expected a non-empty str, got int"),
        (lambda s: s.get(7), f"key: {KEYS}, got int"),
        (lambda s: s.get("docs"), f"key: {KEYS}, got 'docs'"),
        (lambda s: s.get("tenant/A/project/b/c"), f"key: expected a tenant of {IDS}, got 'A'"),
        (lambda s: s.get("tenant/a/project/B/c"), f"key: expected a project of {IDS}, got 'B'"),
        (lambda s: s.watch(None), f"key: {KEYS}, got None"),
        (lambda s: s.list("tenant/a"), f"prefix: {PROJECT_RULE}, got 'tenant/a'"),
        (lambda s: s.list(PROJECT, after="docs"), f"after: {KEYS}, got 'docs'"),
        (lambda s: s.changes(7), f"prefix: {PROJECT_RULE}, got int"),
        (lambda s: s.audit("web"), f"about: {PROJECT_RULE}, got 'web'"),
        (lambda s: s.audit(f"{PROJECT}/a/"), f"about: expected each part of the path to have {PARTS}, got ''"),
        (lambda s: s.audit(PROJECT, after="1"),
         "after: expected the sequence of an audit record, a whole number, got str"),
        (lambda s: s.audit(PROJECT, after=-1), "after: expected the sequence of an audit record, a whole number"),
        (lambda s: s.restore("docs", writer=WRITER), f"key: {KEYS}, got 'docs'"),
        (lambda s: s.restore(KEY, writer=""), "writer: expected a non-empty str"),
        (lambda s: s.put(KEY, 1, semantics=None, **GOOD),
         'semantics: expected a Semantics, as in Semantics("config"), got None'),
        (lambda s: s.update(KEY, lambda _: 1, writer=WRITER),
         f"semantics: expected a Semantics, since {KEY} has no entry yet, got None"),
        (lambda s: s.update(KEY, None, writer=WRITER),
         "change: expected a function that takes the value and returns the new one, got NoneType"),
        (lambda s: s.update(KEY, lambda _: 1, writer=WRITER, retry=3),
         "retry: expected a Retry, as in store.retrying(conflict_pauses=(1, 2)), got int"),
        (lambda s: s.batch(None),
         "operations: expected several, as in batch([Intent.put(…), Intent.delete(…)]), got None"),
        (lambda s: s.batch(Intent.delete(KEY, **GOOD)),
         "operations: expected several, as in batch([Intent.put(…), Intent.delete(…)]), got Intent"),
        (lambda s: s.batch([None]), "operations[0]: expected what Intent.put or Intent.delete returns, got None"),
        (lambda s: s.batch([Intent.delete("docs", **GOOD)]), f"operations[0]: key: {KEYS}, got 'docs'"),
        (lambda s: s.flags("acme", "web").get("New/UI"),
         f"name: expected each part of the path to have {PARTS}, got 'New/UI'"),
        (lambda s: s.flags("acme", "web").get(7), f"name: expected each part of the path to have {PARTS}, got int"),
        (lambda s: s.flags("acme", "web", ["new-ui"]),
         'defaults: expected a dict of names and values, as in {"new-ui": False}, got list'),
        (lambda s: s.flags("Acme", "web"), f"tenant: expected {IDS}, got 'Acme'"),
        (lambda s: s.flags("acme", 7), f"project: expected {IDS}, got int"),
        (lambda s: s.identifier("acme", "web", "A"), f"part: expected each part of the path to have {PARTS}, got 'A'"),
        (lambda s: s.shorten("acme", "web", 7, writer=WRITER), "identifier: expected a non-empty str, got int"),
        (lambda s: s.dead_letters.list("web"), f"project: {PROJECT_RULE}, got 'web'"),
        (lambda s: s.index_version(KEY).publish(1),
         "writer: expected a non-empty str, got None; publish needs it: index_version(key, writer=…)"),
        (lambda s: s.checkpoint(KEY, writer=7), "writer: expected a non-empty str, got int"),
        (lambda s: s.retrying(transient_attempts=0), "transient_attempts: expected a whole number of at least 1"),
        (lambda s: s.retrying()(s.lock), "function: expected a coroutine function: async def …, got method"),
        (lambda _: key_of("acme", "web"), "parts: expected at least one part of a path, each a str"),
        (lambda _: key_of("acme", "web", "A"), f"parts: expected each part of the path to have {PARTS}, got 'A'"),
        (lambda _: shortened(""), "identifier: expected a non-empty str"),
        (lambda s: SemanticStore(s),
         "kv: expected an open store, as in `async with keyloft.open(…) as kv`, got SemanticStore"),
    ],
)  # fmt: skip
async def test_a_call_is_refused_by_its_argument(store: SemanticStore, call: Any, message: str) -> None:
    assert await refusal(lambda: call(store)) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"purposes": "lease"}, "purposes: expected several names, as in ['lease'], got str"),
        ({"purposes": ["Lease"]}, f"purposes: {PURPOSE}"),
        ({"sweep_every": 0}, f"sweep_every: {SECONDS}"),
        ({"audit_key": LIST}, "audit_key: expected bytes or a str, got list"),
        ({"audit_key": ""}, "audit_key: expected a secret that is not empty"),
    ],
)
async def test_a_store_is_refused_by_its_argument(kv: Store, options: dict[str, Any], message: str) -> None:
    assert await refusal(lambda: SemanticStore(kv, **{"sweep_every": None} | options)) == message


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        ("get", {"key": "a", "values": True}, "values: there is no such field; the fields are key"),
        ("get", {"Key": "a"}, "Key: there is no such field; did you mean key?"),
        ("put", {**PUT, "request_id": "x"}, "request_id: there is no such field; did you mean requestId?"),
        ("put", {**PUT, "Fence": 5}, "Fence: there is no such field; did you mean fence?"),
        ("put", {**PUT, "ttlSeconds": 5}, "ttlSeconds: there is no such field; it belongs into semantics"),
        ("put", {**PUT, "semantics": {"purpose": "cursor", "ttl_seconds": 5}},
         "semantics.ttl_seconds: there is no such field; did you mean ttlSeconds?"),
        ("put", {**PUT, "semantics": {"purpose": "cursor", "note": 5}},
         "semantics.note: there is no such field; the fields are purpose, producer, consumerHints, ttlSeconds"),
        ("delete", {**FIELDS, "tenant": "other"},
         "tenant: there is no such field; the fields are key, expectedVersion, lastWriter, requestId, specRef, fence"),
        ("delete", {**FIELDS, "\n": 1},
         r"\n: there is no such field; the fields are key, expectedVersion, lastWriter, requestId, specRef, fence"),
        ("list", {"prefx": "docs/"}, "prefx: there is no such field; did you mean prefix?"),
        ("batch", {"operations": [], "note": 1}, "note: there is no such field; the fields are operations, requestId"),
        ("batch", {"operations": [{**FIELDS, "operation": "delete", "expected_version": 0}]},
         "operations[0]: expected_version: there is no such field; did you mean expectedVersion?"),
    ],
)  # fmt: skip
async def test_an_unknown_field_is_refused_by_name(asking: Any, operation: str, fields: Any, message: str) -> None:
    assert await asking(operation, fields) == ("VALIDATION_ERROR", message)


@pytest.mark.parametrize("names", [[f"expectedVersio{n}" for n in range(40_000)], ["expectedVersion" * 65_000]])
def test_of_a_megabyte_of_unknown_names_at_most_one_is_compared(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare takes microseconds a name (`scripts/bench nats`, row «readers» measures it)."""
    compared: list[str] = []

    def compare(name: str, *_: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    fields = dict.fromkeys(names, 1)
    for sent in (fields, {"operations": [{"operation": "delete", **FIELDS, **fields}]}):
        compared.clear()
        with pytest.raises(InvalidArgument, match="there is no such field") as refused:
            wire.read("batch", Project("acme", "web"), json.dumps(sent).encode())
        assert len(str(refused.value)) < 300
        assert compared == [name for name in names[:1] if len(name) <= limits.COMPARED_NAME_CHARACTERS]


def test_the_values_of_a_batch_are_stored_as_they_were_sent() -> None:
    sent = [1, '\u00e9\\"', {"a": [0.5, None]}, 7**2000, -(7**2000), str(7**2000), 2**64, [[7**2000]]]
    operations = [{"operation": "put", **PUT, "key": f"docs/{at}", "value": value} for at, value in enumerate(sent)]
    request = wire.read("batch", Project("acme", "web"), json.dumps({"operations": operations}).encode())
    assert isinstance(request, WriteRequest)
    assert [intent.value for intent in request.intents] == sent
    assert [bytes(intent.value_json) for intent in request.intents] == [rules.value_json(value) for value in sent]


@pytest.mark.parametrize("field", ["expectedVersion", "fence"])
def test_a_very_long_number_is_refused_like_any_other_that_is_too_large(field: str) -> None:
    for digits in (20, 300, 5000):
        data = json.dumps({**FIELDS, field: 5}).encode().replace(b": 5", b": " + b"9" * digits)
        with pytest.raises(InvalidArgument, match=f"^{field}: expected"):
            wire.read("delete", Project("acme", "web"), data)


def test_a_batch_of_too_many_operations_is_refused_before_they_are_read() -> None:
    data = json.dumps({"operations": [5] * 1001}).encode()
    with pytest.raises(InvalidArgument, match="expected 1 to 1,000 puts and deletes, got 1,001"):
        wire.read("batch", Project("acme", "web"), data)


@pytest.mark.parametrize("payload", [b"", b" \r\n\t"])
def test_an_empty_payload_lists_all_and_is_no_other_request(payload: bytes) -> None:
    project = Project("acme", "web")
    assert wire.read("list", project, payload) == wire.read("list", project, b"{}")
    for operation in ("get", "put", "delete", "batch"):
        with pytest.raises(InvalidJson, match="Invalid JSON: the payload is empty"):
            wire.read(operation, project, payload)
