"""The routes of single keys: read, store, delete an entry, and change its expiry."""

import re
from collections.abc import Sequence
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Check, Committed, Conflict, Delete, Get, Mutation, Record, Set, Space, Touch
from keyloft.core.values import BYTES
from keyloft.errors import CommitUnknown, InvalidArgument, VersionConflict
from keyloft.http import audit_log
from keyloft.http.conditions import EntryCondition, is_conditional, is_known, is_wanted
from keyloft.http.context import HttpContext
from keyloft.http.descriptions import ENTRY
from keyloft.http.problems import Problem, absent
from keyloft.http.replies import BYTES_TYPE, HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.wire import (
    U64_TYPE,
    bytes_value,
    etag,
    json_value,
    read_path_key,
    read_seconds,
    read_time,
    to_json,
    u64_value,
    wire_entry,
)
from keyloft.tuples.expiries import expiry

BASES: Final = ("/v1", "/v1/db/{store}")
"""Before the paths of the unnamed store, and of named ones."""

_TUPLES: Final = Space.TUPLES
_OCTETS: Final = BYTES_TYPE.decode()
_UNWANTED: Final = re.compile(r"q=0(\.0*)?", re.ASCII)
_CONFLICT: Final = "another version is stored than the request expects; nothing was written"


class NewExpiry(Struct, forbid_unknown_fields=True):
    """The body of a PATCH."""

    expire_in: float | UnsetType | None = UNSET
    expire_at: str | UnsetType = UNSET


class SingleKeys:
    """Handlers of the routes of single keys."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def get(self, request: HttpRequest) -> HttpReply:
        """The entry at a key."""
        store, text, key, engine = self._at(request)
        request.token.check_key(store, key)
        request.expect_query()
        [record] = await engine.read(Get(_TUPLES, key))
        if record is not None and len(record.value) > limits.HTTP_LARGE_VALUE_BYTES and request.must_wait():
            record = None  # so that it is not in memory while this waits; it is read again
            await request.room()
            [record] = await engine.read(Get(_TUPLES, key))
        if record is None:
            raise absent(text)
        tag = etag(record.version)
        if is_conditional(request):
            if not is_wanted(request, record.version):
                detail = "another version is stored than the request expects"
                raise Problem(412, VersionConflict.code, detail, headers=(tag,))
            if is_known(request, record.version):
                return HttpReply(status=304, headers=(tag,))
        audit_log.read(request.token, "read", store, (text,))
        kinds = _accepted(request)
        if _OCTETS in kinds and not kinds & {"application/json", "application/*"}:
            if record.encoding == BYTES:
                return HttpReply(record.value, content_type=BYTES_TYPE, headers=(tag,))
            if "*/*" not in kinds:
                raise Problem(
                    406, "NOT_ACCEPTABLE", "Accept: the value is not bytes; application/json gives it with its kind"
                )
        return HttpReply(to_json(wire_entry(text, record)), headers=(tag,))

    async def put(self, request: HttpRequest) -> HttpReply:
        """Store a value."""
        store, text, key, engine = self._at(request)
        request.token.check_key(store, key, write=True)
        request.expect_query("expire_in", "expire_at")
        condition = EntryCondition(request)
        due = _due(request)
        value, encoding = await _value(request)
        new = Set(_TUPLES, key, value, encoding, *due)
        # Touch reports whether there was an entry, which Set does not.
        mutations = (Touch(_TUPLES, key), new) if condition.takes_both else (new,)
        done = await _write(request, "put", engine, key, text, condition, *mutations)
        audit_log.wrote(request.token, "put", store, (text,), done.version)
        is_new = condition.must_not_exist or (condition.takes_both and not done.found[0])
        return HttpReply(b'{"versionstamp":"%d"}' % done.version, 201 if is_new else 200, headers=(etag(done.version),))

    async def delete(self, request: HttpRequest) -> HttpReply:
        """Remove an entry."""
        store, text, key, engine = self._at(request)
        request.token.check_key(store, key, write=True)
        request.expect_query()
        done = await _write(request, "delete", engine, key, text, EntryCondition(request), Delete(_TUPLES, key))
        audit_log.wrote(request.token, "delete", store, (text,), done.version)
        return HttpReply(to_json({"found": done.found[0]}))

    async def patch(self, request: HttpRequest) -> HttpReply:
        """Give an entry another expiry."""
        store, text, key, engine = self._at(request)
        request.token.check_key(store, key, write=True)
        request.expect_query()
        condition = EntryCondition(request)
        given = await request.message(NewExpiry, limits.HTTP_SMALL_BODY_BYTES)
        assert isinstance(given, NewExpiry)
        touch = Touch(_TUPLES, key, *touched_expiry(given.expire_in, given.expire_at))
        done = await _write(request, "touch", engine, key, text, condition, touch)
        if not done.found[0]:
            raise absent(text)
        audit_log.wrote(request.token, "touch", store, (text,))
        return HttpReply(b'{"found":true}')

    def _at(self, request: HttpRequest) -> tuple[str | None, str, bytes, Engine]:
        """The store, the key as text and encoded, and the engine."""
        parameters = request.scope["path_params"]
        store: str | None = parameters.get("store")
        text, key = read_path_key(parameters["key"])
        return store, text, key, self._context.store(store).engine


def touched_expiry(expire_in: float | UnsetType | None, expire_at: str | UnsetType) -> tuple[int | None, int | None]:
    """The expiry that a body names for an entry that is there already.

    Raises:
        InvalidArgument: The body names none, or two.
    """
    if (expire_in is UNSET) == (expire_at is UNSET):
        raise InvalidArgument("expire_in, expire_at: expected one of them; expire_in null is for no expiry")
    if expire_at is not UNSET:
        return expiry(None, read_time(expire_at))
    return expiry(None if expire_in is UNSET else expire_in, None, "null")


def _due(request: HttpRequest) -> tuple[int | None, int | None]:
    if not request.scope["query_string"]:
        return None, None
    seconds, moment = request.one("expire_in"), request.one("expire_at")
    relative = None if seconds is None else read_seconds(seconds)
    return expiry(relative, None if moment is None else read_time(moment), "no expire_in")


async def _value(request: HttpRequest) -> tuple[bytes, int]:
    """The stored form of the body."""
    kind = request.content_type()
    if kind == "application/json" or kind.endswith("+json"):
        return json_value(await request.body(limits.HTTP_JSON_BYTES))
    if kind == "application/octet-stream":
        return bytes_value(await request.body(limits.VALUE_BYTES))
    if kind == U64_TYPE:
        return u64_value((await request.body(limits.HTTP_SMALL_BODY_BYTES)).decode("latin-1").strip(), "body")
    raise request.wrong_type(f"application/json (for text, too, in quotes), application/octet-stream or {U64_TYPE}")


def _accepted(request: HttpRequest) -> set[str]:
    """The types that the client accepts, if bytes are among them; empty for most clients, which don't ask for bytes."""
    accepted = request.header(b"accept")
    if accepted is None or "octet-stream" not in accepted:
        return set()
    kinds = set()
    for part in accepted.lower().split(","):
        kind, *parameters = [text.strip() for text in part.split(";")]
        if not any([_UNWANTED.fullmatch(text) for text in parameters]):
            kinds.add(kind)
    return kinds


async def _write(
    request: HttpRequest,
    action: str,
    engine: Engine,
    key: bytes,
    text: str,
    condition: EntryCondition,
    *mutations: Mutation,
) -> Committed:
    """Commit if the condition is met; a commit whose outcome is unknown leaves a line in the audit log.

    Raises:
        Problem: The condition is not met.
    """
    try:
        return await _commit(request, engine, key, text, condition, *mutations)
    except CommitUnknown:
        store = request.parameter("store")
        audit_log.wrote(request.token, action, store, (text,), outcome=audit_log.CONNECTION_LOST)
        raise


async def _commit(
    request: HttpRequest, engine: Engine, key: bytes, text: str, condition: EntryCondition, *mutations: Mutation
) -> Committed:
    """Commit if the condition is met.

    Raises:
        Problem: The condition is not met.
    """
    if condition.is_unconditional:
        done = await engine.commit(Batch(mutations))
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return done
    expected = condition.expected
    while True:
        if condition.needs_read:
            [record] = await engine.read(Get(_TUPLES, key))
            if not condition.is_met(None if record is None else record.version):
                raise _refusal(request, text, record)
            expected = None if record is None else record.version
        outcome = await engine.commit(Batch(mutations, (Check(_TUPLES, key, expected),)))
        if isinstance(outcome, Committed):
            return outcome
        assert isinstance(outcome, Conflict)
        current = outcome.failed[0].current
        # Another writer was faster. Try again if the condition allows its version as well.
        if not (condition.needs_read and condition.is_met(None if current is None else current.version)):
            raise _refusal(request, text, current)


def _refusal(request: HttpRequest, text: str, current: Record | None) -> Problem:
    if current is not None:
        audit_log.read(request.token, "read", request.parameter("store"), (text,))
    entry = wire_entry(text, current)
    headers = () if current is None else (etag(current.version),)
    return Problem(412, VersionConflict.code, _CONFLICT, headers=headers, more={"current": entry})


def routes(context: HttpContext) -> Sequence[ApiRoute]:
    """The routes of single keys."""
    keys = SingleKeys(context)
    handlers = {"GET": keys.get, "PUT": keys.put, "DELETE": keys.delete, "PATCH": keys.patch}
    return [ApiRoute(path=f"{base}/kv/{{key:path}}", handlers=handlers, described=ENTRY) for base in BASES]
