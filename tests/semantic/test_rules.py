"""What an entry has to say of itself: what breaks a rule is refused, with the field named, and nothing is written."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

import keyloft
from keyloft import InvalidArgument, InvalidValue, ValueTooLarge
from keyloft.errors import InvalidInput
from keyloft.semantic import Intent, Semantics, SemanticStore, VersionConflict

from .entries import CURSOR, KEY, OTHER, PROJECT, WRITER, actions, deleting, put, putting


class Name(str):
    """A subclass of str."""


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"purpose": ""}, "purpose"),
        ({"purpose": "Cursor"}, "purpose"),
        ({"purpose": "a-b"}, "purpose"),
        ({"purpose": "1st"}, "purpose"),
        ({"purpose": "x" * 65}, "purpose"),
        ({"purpose": "cursor\n"}, "purpose"),
        ({"purpose": None}, "purpose"),
        ({"producer": ""}, "producer"),
        ({"producer": "a\nb"}, "producer"),
        ({"producer": "x" * 129}, "producer"),
        ({"producer": 7}, "producer"),
        ({"consumer_hints": ["a"] * 33}, "consumer_hints"),
        ({"consumer_hints": [1]}, "consumer_hints"),
        ({"consumer_hints": "ab"}, "consumer_hints"),
        ({"consumer_hints": ("a",) * 33}, "consumer_hints"),
        ({"consumer_hints": ("",)}, "consumer_hints"),
        ({"consumer_hints": ("\ud800",)}, "consumer_hints"),
        ({"consumer_hints": (1,)}, "consumer_hints"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"ttl_seconds": 1.5}, "ttl_seconds"),
        ({"ttl_seconds": True}, "ttl_seconds"),
        ({"ttl_seconds": "60"}, "ttl_seconds"),
        ({"ttl_seconds": 2**31}, "ttl_seconds"),
    ],
)
def test_semantics_that_break_a_rule_are_refused_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{named}(\[0\])?: "):
        Semantics(**({"purpose": "cursor"} | fields))


def test_a_lock_must_have_a_ttl() -> None:
    with pytest.raises(InvalidArgument, match=r"^ttl_seconds: .*, got None; a lock"):
        Semantics("lock")
    assert Semantics("lock", ttl_seconds=1).expire_in == 1000


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"expected_version": None}, "expected_version"),
        ({"expected_version": -1}, "expected_version"),
        ({"expected_version": True}, "expected_version"),
        ({"expected_version": 1.0}, "expected_version"),
        ({"expected_version": "1"}, "expected_version"),
        ({"expected_version": ""}, "expected_version"),
        ({"expected_version": 2**63}, "expected_version"),
        ({"expected_version": b"*"}, "expected_version"),
        ({"writer": ""}, "writer"),
        ({"writer": None}, "writer"),
        ({"writer": "a\x00b"}, "writer"),
        ({"writer": "a\u2028b"}, "writer"),
        ({"writer": "\udfff"}, "writer"),
        ({"writer": "x" * 129}, "writer"),
        ({"spec_ref": ""}, "spec_ref"),
        ({"spec_ref": "x" * 257}, "spec_ref"),
        ({"spec_ref": 7}, "spec_ref"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "a\x7f"}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"fence": -1}, "fence"),
        ({"fence": "7"}, "fence"),
        ({"fence": True}, "fence"),
        ({"fence": 2**63}, "fence"),
    ],
)
async def test_a_write_that_breaks_a_rule_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {"expected_version": "*", "writer": WRITER}
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        with pytest.raises(InvalidArgument, match=f"^{named}: "):
            await store.put(KEY, 1, semantics=CURSOR, **good | fields)
        with pytest.raises(InvalidArgument, match=f"^{named}: "):
            await store.delete(KEY, **good | fields)
        assert await actions(store, PROJECT) == []


@pytest.mark.parametrize("semantics", [None, {"purpose": "cursor"}, "cursor"])
async def test_semantics_are_required(semantics: Any) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        with pytest.raises(InvalidArgument, match=r"^semantics: "):
            await put(store, semantics=semantics)


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, {1}, b"bytes", "\ud800", object(), [[{"a": math.nan}]]])
async def test_a_value_that_would_not_come_back_equal_is_refused(value: Any) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        with pytest.raises(InvalidValue, match=r"^value(\[.*\])?: "):
            await put(store, value=value)
        assert await store.get(KEY) is None


async def test_a_value_takes_64_kilobytes_at_most(store: SemanticStore) -> None:
    largest = "é" * (32 * 1024 - 1)
    await put(store, value=largest)
    with pytest.raises(ValueTooLarge) as refused:
        await put(store, value=largest + "x")
    assert (refused.value.size, refused.value.limit) == (65_537, 65_536)
    entry = await store.get(KEY)
    assert entry is not None
    assert entry.value == largest


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 10**40, 1.5, "\x00", {"": [None, {"é": 2**64}]}])
async def test_a_value_comes_back_equal(value: Any) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        written = await put(store, value=value)
        assert await store.get(KEY) == written
        assert written.value == value
        assert type(written.value) is type(value)


async def test_only_registered_purposes_can_be_written(kv: keyloft.Store, store: SemanticStore) -> None:
    lease = Semantics("lease")
    with pytest.raises(InvalidArgument, match=r"^semantics\.purpose: expected one of .*, got 'lease'; .*purposes="):
        await put(store, semantics=lease)
    async with SemanticStore(kv, sweep_every=None, purposes=["lease"]) as knowing:
        written = await put(knowing, semantics=lease)
    assert await store.get(KEY) == written, "a store that did not register the purpose can read it"
    with pytest.raises(InvalidArgument, match=r"^purposes: "):
        SemanticStore(kv, sweep_every=None, purposes=["Not One"])


@pytest.mark.parametrize("purpose", ["checkpoint", "feature_flag", "cursor", "config", "index_version"])
async def test_the_purposes_of_the_spec_need_no_registration(purpose: str) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        assert (await put(store, semantics=Semantics(purpose))).semantics.purpose == purpose


@pytest.mark.parametrize("field", ["writer", "request_id", "spec_ref"])
async def test_a_subclass_of_str_is_refused_before_it_reaches_the_codec(field: str) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        named: dict[str, Any] = {field: Name("agent:act")}
        with pytest.raises(InvalidArgument, match="expected a non-empty str, got Name"):
            await put(store, **named)
    for fields in ({"purpose": Name("cursor")}, {"purpose": "cursor", "producer": Name("p")}):
        with pytest.raises(InvalidArgument, match=r"^(purpose|producer): .*, got Name"):
            Semantics(**fields)


@pytest.mark.parametrize("operation", [None, "put", {"key": KEY}, (KEY, 1)])
async def test_a_batch_has_puts_and_deletes_alone(operation: Any) -> None:
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        with pytest.raises(InvalidArgument, match=r"^operations\[1\]: "):
            await store.batch([putting(KEY), operation])
        assert await store.get(KEY) is None


async def test_a_batch_names_each_key_once_and_at_least_one(store: SemanticStore) -> None:
    twice: list[Intent] = [putting(KEY), deleting(KEY)]
    too_many: list[Intent] = [putting(f"{PROJECT}/{number}") for number in range(1001)]
    for operations in ([], twice, too_many):
        with pytest.raises(InvalidArgument, match=r"^operations: "):
            await store.batch(operations)
    assert await actions(store, PROJECT) == []


async def test_a_bad_operation_of_a_batch_is_named_by_its_number(store: SemanticStore) -> None:
    bad = [putting(f"{PROJECT}/Bad"), putting(OTHER, semantics=Semantics("unheard_of"))]
    for operation in bad:
        with pytest.raises(InvalidInput, match=r"^operations\[1\]: "):
            await store.batch([putting(KEY), operation])
    assert await store.get(KEY) is None


def test_an_intent_that_breaks_a_rule_is_refused_where_it_is_made() -> None:
    with pytest.raises(InvalidValue, match=r"^value: "):
        putting(OTHER, math.nan)
    with pytest.raises(InvalidArgument, match=r"^expected_version: "):
        deleting(OTHER, -1)
    with pytest.raises(InvalidArgument, match=r"^writer: "):
        replace(deleting(OTHER), writer="")


@pytest.mark.parametrize("option", ["request_memory", "restore_within", "audit_retention", "sweep_every"])
@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, True, "60", 10**12])
async def test_a_time_of_the_store_is_a_number_above_0(option: str, seconds: Any) -> None:
    async with keyloft.open() as kv:
        with pytest.raises(InvalidArgument, match=f"^{option}: expected a number of seconds"):
            SemanticStore(kv, **{"sweep_every": None} | {option: seconds})


@pytest.mark.parametrize("audit_key", ["", b"", 7])
async def test_an_audit_key_is_not_empty(audit_key: Any) -> None:
    async with keyloft.open() as kv:
        with pytest.raises(InvalidArgument, match=r"^audit_key: "):
            SemanticStore(kv, sweep_every=None, audit_key=audit_key)


async def test_the_repr_of_an_object_shows_no_value(store: SemanticStore) -> None:
    operation = putting(KEY, "secret", expected=0)
    assert "secret" not in repr(operation)
    assert "secret" not in repr(await store.batch([operation]))
    with pytest.raises(VersionConflict) as refused:
        await store.batch([operation])
    assert "secret" not in f"{refused.value!r} {refused.value.conflicts!r}"
