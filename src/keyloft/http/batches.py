"""The routes of several keys at once: read them as of one moment, and write them all or not at all."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

from keyloft import limits
from keyloft.core import key_text, keys
from keyloft.core.engine import Engine
from keyloft.core.records import (
    Add,
    Append,
    Batch,
    Check,
    Committed,
    Delete,
    Get,
    Latest,
    Max,
    Min,
    Mutation,
    Record,
    Set,
    Space,
    Sum,
    Touch,
)
from keyloft.errors import CommitUnknown, InvalidArgument, KeyTooLarge, ReplyTooLarge, VersionConflict
from keyloft.http import audit_log
from keyloft.http.context import HttpContext
from keyloft.http.descriptions import ATOMIC, GET_MANY
from keyloft.http.kv import BASES, touched_expiry
from keyloft.http.problems import Problem
from keyloft.http.replies import HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.tokens import AccessToken
from keyloft.http.wire import (
    WireValue,
    read_key,
    read_prefix,
    read_time,
    read_u64,
    read_value,
    read_versionstamp,
    shown_key,
    shown_time,
    to_json,
    wire_entry,
)
from keyloft.tuples.atomic import check_number, commit
from keyloft.tuples.expiries import expiry

_TUPLES: Final = Space.TUPLES
_COUNTERS: Final[dict[str, type[Sum | Min | Max]]] = {"sum": Sum, "min": Min, "max": Max}


class WantedKeys(Struct, forbid_unknown_fields=True):
    """The body of /get."""

    keys: list[str]


class WireCheck(Struct, forbid_unknown_fields=True):
    """The batch is committed only if the entry at a key has this versionstamp; null: only if there is none."""

    key: str
    versionstamp: str | None


class WireMutation(WireValue, kw_only=True, forbid_unknown_fields=True):
    """One write of an atomic; which fields it takes depends on `op`."""

    op: Literal["set", "delete", "sum", "min", "max", "add", "touch", "append"]
    key: str | UnsetType = UNSET
    prefix: str | UnsetType = UNSET
    by: int | UnsetType = UNSET
    if_absent: bool = False
    keep_expiry: bool = False
    expire_in: float | UnsetType | None = UNSET
    expire_at: str | UnsetType | None = UNSET


class WireBatch(Struct, forbid_unknown_fields=True):
    """The body of /atomic."""

    checks: list[WireCheck] = []
    mutations: list[WireMutation] = []


class KeyBatches:
    """Handlers of the routes of several keys."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._reads = asyncio.Semaphore(limits.HTTP_GETS)
        self._large_answer = asyncio.Lock()

    async def get(self, request: HttpRequest) -> HttpReply:
        """Several entries as of one moment."""
        request.expect_query()
        store = request.parameter("store")
        engine = self._context.store(store).engine
        wanted = await request.message(WantedKeys, limits.HTTP_BODY_BYTES)
        assert isinstance(wanted, WantedKeys)
        if len(wanted.keys) > limits.HTTP_GET_KEYS:
            raise InvalidArgument(f"keys: expected at most {limits.HTTP_GET_KEYS:,}, got {len(wanted.keys):,}")
        encoded = [read_key(text, f"keys[{at}]") for at, text in enumerate(wanted.keys)]
        for key in encoded:
            request.token.check_key(store, key)
        texts = list(map(shown_key, encoded))
        body = await self._answer(request, engine, [Get(_TUPLES, key) for key in encoded], texts)
        audit_log.read(request.token, "read", store, texts)
        return HttpReply(body)

    async def _answer(self, request: HttpRequest, engine: Engine, gets: list[Get], texts: Sequence[str]) -> bytes:
        """The answer with some entries. A small answer waits for the reads of large ones, not for their sending."""
        async with self._reads:
            records = await _read(engine, gets)
            if _size_of(records) <= limits.HTTP_LARGE_VALUE_BYTES:
                entries = [wire_entry(text, record) for text, record in zip(texts, records, strict=True)]
                return to_json({"entries": entries})
        if self._large_answer.locked() or request.must_wait():
            records = []  # so that they are not in memory while this waits; they are read again
        async with self._large_answer:
            while not records or request.must_wait():
                records = []
                await request.room()
                records = await _read(engine, gets)
            # Each record is dropped as soon as its part is made, and other requests are answered between two parts.
            parts: list[bytes] = []
            records.reverse()
            weight = 0
            for text in texts:
                record = records.pop()
                weight += 0 if record is None else len(record.value)
                if weight > limits.HTTP_LARGE_VALUE_BYTES:
                    await self._context.large_parts.turn()
                    weight = 0
                parts += (b"," if parts else b'{"entries":[', to_json(wire_entry(text, record)))
                del record
            return b"".join([*parts, b"]}"])

    async def atomic(self, request: HttpRequest) -> HttpReply:
        """Checks and writes, all or nothing."""
        request.expect_query()
        store = request.parameter("store")
        engine = self._context.store(store).engine
        given = await request.message(WireBatch, limits.HTTP_BODY_BYTES)
        assert isinstance(given, WireBatch)
        if len(given.checks) + len(given.mutations) > limits.HTTP_BATCH_OPERATIONS:
            raise InvalidArgument(
                f"checks, mutations: expected at most {limits.HTTP_BATCH_OPERATIONS:,} in all; send several batches"
            )
        batch = read_batch(given, store, request.token)
        shown = map(_shown_mutation, batch.mutations)
        try:
            outcome = await commit(engine, batch)
        except CommitUnknown:
            audit_log.wrote(request.token, "atomic", store, shown, outcome=audit_log.CONNECTION_LOST)
            raise
        if isinstance(outcome, Committed):
            audit_log.wrote(request.token, "atomic", store, shown, outcome.version)
            body = {
                "ok": True,
                "versionstamp": str(outcome.version),
                "committed_at": shown_time(outcome.at),
                "values": new_values(given, outcome),
            }
            return HttpReply(to_json(body))
        conflicts = [wire_entry(shown_key(failed.check.key), failed.current) for failed in outcome.failed]
        found = [shown_key(failed.check.key) for failed in outcome.failed if failed.current is not None]
        if found:
            audit_log.read(request.token, "read", store, found)
        detail = "an entry has another versionstamp than a check expects; nothing was written"
        raise Problem(412, VersionConflict.code, detail, more={"ok": False, "conflicts": conflicts})


async def _read(engine: Engine, gets: list[Get]) -> list[Record | None]:
    """The records at keys as of one moment. Too large ones are refused before all of them are in memory.

    Raises:
        ReplyTooLarge: The values together don't fit one answer.
    """
    if not gets:
        return []
    if len(gets) <= limits.HTTP_PAGE_ROWS:
        records: list[Record | None] = await engine.read(*gets)
        _check_size(records)
        return records
    [before] = await engine.read(Latest())
    records = []
    for at in range(0, len(gets), limits.HTTP_PAGE_ROWS):
        records += await engine.read(*gets[at : at + limits.HTTP_PAGE_ROWS])
        _check_size(records)
    [after] = await engine.read(Latest())
    if before != after or any([record is not None and record.expires_at is not None for record in records]):
        # Something may have changed between two reads, so all are read again: it is known now that they fit.
        records = []
        records = await engine.read(*gets)
        _check_size(records)
    return records


def _size_of(records: Sequence[Record | None]) -> int:
    return sum([len(record.value) for record in records if record is not None])


def _check_size(records: list[Record | None]) -> None:
    if _size_of(records) > limits.HTTP_REPLY_BYTES:
        raise ReplyTooLarge("keys: the values together are too large for one answer; ask for fewer keys at a time")


def _shown_mutation(mutation: Mutation) -> str:
    name = type(mutation).__name__.lower()
    return f"{name}:{key_text.write(keys.decode(mutation.key))}"


def read_batch(given: WireBatch, store: str | None, token: AccessToken) -> Batch:
    """The batch of a body, if the token may commit it.

    Raises:
        InvalidInput: A check or a mutation can't be used; the message names which.
        NotPermitted: A key, or a batch without mutations, is out of the token's scopes.
    """
    checks = []
    for at, check in enumerate(given.checks):
        key = read_key(check.key, f"checks[{at}].key")
        token.check_key(store, key)
        version = (
            None if check.versionstamp is None else read_versionstamp(check.versionstamp, f"checks[{at}].versionstamp")
        )
        checks.append(Check(_TUPLES, key, version))
    if not given.mutations:
        token.check_store(store)  # a commit without mutations takes a versionstamp, too
    mutations = []
    appends = Counter[bytes]()
    for at, mutation in enumerate(given.mutations):
        name = f"mutations[{at}]"
        made = _append(mutation, name, appends) if mutation.op == "append" else _mutation(mutation, name)
        token.check_key(store, made.key, write=True)
        mutations.append(made)
    return Batch(tuple(mutations), tuple(checks))


def _mutation(given: WireMutation, name: str) -> Mutation:
    if given.key is UNSET or given.prefix is not UNSET:
        raise InvalidArgument(f"{name}: {given.op} takes a key, and no prefix")
    key = read_key(given.key, f"{name}.key")
    has_value = any([part is not UNSET for part in (given.value, given.bytes, given.u64)])
    if (given.by is not UNSET) != (given.op == "add"):
        raise InvalidArgument(f"{name}.by: add takes it, and no other operation")
    if given.if_absent and given.op != "set":
        raise InvalidArgument(f"{name}.if_absent: set takes it, and no other operation")
    if given.keep_expiry and given.op != "set":
        raise InvalidArgument(f"{name}.keep_expiry: set takes it, and no other operation")
    match given.op:
        case "set":
            return Set(_TUPLES, key, *read_value(given), *_due(given), given.if_absent, given.keep_expiry)
        case "sum" | "min" | "max":
            if given.u64 is UNSET or given.value is not UNSET or given.bytes is not UNSET:
                raise InvalidArgument(f"{name}.u64: {given.op} takes it, and no other value")
            return _COUNTERS[given.op](_TUPLES, key, read_u64(given.u64, f"{name}.u64"), *_due(given))
    if has_value:
        raise InvalidArgument(f"{name}: {given.op} takes no value")
    match given.op:
        case "add":
            assert given.by is not UNSET
            return Add(_TUPLES, key, check_number("by", given.by, -limits.U64_MAX), *_due(given))
        case "touch":
            if given.expire_at is None and given.expire_in is UNSET:
                return Touch(_TUPLES, key)
            moment = UNSET if given.expire_at is None else given.expire_at
            return Touch(_TUPLES, key, *touched_expiry(given.expire_in, moment))
    if given.expire_in is not UNSET or given.expire_at is not UNSET:
        raise InvalidArgument(f"{name}: delete takes no expiry")
    return Delete(_TUPLES, key)


def _append(given: WireMutation, name: str, appends: Counter[bytes]) -> Append:
    if given.prefix is UNSET or given.key is not UNSET or given.by is not UNSET or given.if_absent or given.keep_expiry:
        raise InvalidArgument(f"{name}: append takes a prefix and a value")
    before = keys.encode_prefix(read_prefix(given.prefix, f"{name}.prefix"))
    number = appends[before]
    appends[before] += 1
    suffix = keys.encode_prefix((number,)) if number else b""
    size = len(before) + keys.VERSION_BYTES + len(suffix)
    if size > limits.KEY_BYTES:
        raise KeyTooLarge(f"{name}.prefix: {size:,} bytes with a versionstamp, and the limit is {limits.KEY_BYTES:,}")
    value, encoding = read_value(given)
    relative, moment = _due(given)
    return Append(_TUPLES, before, value, encoding, relative, suffix, moment)


def _due(given: WireMutation) -> tuple[int | None, int | None]:
    """The expiry of a value that is stored; null is the same as none."""
    relative = None if given.expire_in is UNSET else given.expire_in
    moment = None if given.expire_at is UNSET or given.expire_at is None else read_time(given.expire_at)
    return expiry(relative, moment, "null")


def new_values(given: WireBatch, done: Committed) -> list[object]:
    """The answer for each mutation: a new number, whether it found or stored an entry, or null."""
    found, numbers = iter(done.found), iter(done.values)
    answered: list[object] = []
    for mutation in given.mutations:
        match mutation.op:
            case "sum" | "min" | "max":
                answered.append(str(next(numbers)))
            case "add":
                answered.append(next(numbers))
            case "delete" | "touch":
                answered.append(next(found))
            case "set" if mutation.if_absent:
                answered.append(not next(found))
            case _:
                answered.append(None)
    return answered


def routes(context: HttpContext) -> Sequence[ApiRoute]:
    """The routes of several keys."""
    batches = KeyBatches(context)
    made = []
    for base in BASES:
        made.append(ApiRoute(path=f"{base}/get", handlers={"POST": batches.get}, described=GET_MANY))
        made.append(ApiRoute(path=f"{base}/atomic", handlers={"POST": batches.atomic}, described=ATOMIC))
    return made
