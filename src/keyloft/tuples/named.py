"""Stores within a database: named stores beside each other, and scoped stores, whose keys leave out a prefix.

In the database, the key of a named store's entry begins with a byte that no tuple key begins with, then the name. So
the unnamed store never sees it. A named store is nothing but this beginning of its keys: its first write makes it.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from keyloft import limits
from keyloft.core import keys
from keyloft.core.engine import Engine, LogWatch, PacedWatch, Submission, Verdict, Watch
from keyloft.core.health import ServerHealth
from keyloft.core.keys import InnerKey, KeyLike, Part, TupleKey
from keyloft.core.records import (
    Append,
    Ask,
    Batch,
    Change,
    Check,
    Committed,
    Conflict,
    Count,
    FailedCheck,
    Get,
    Mutation,
    Page,
    Record,
    Scan,
    Space,
)
from keyloft.core.slices import free_in_slices, in_slices
from keyloft.errors import CounterOutOfRange, InvalidArgument, KeyTooLarge, NotACounter

Operation = TypeVar("Operation", bound=Check | Mutation)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


def check_name(name: object) -> str:
    """The name of a store, as a caller gave it.

    Raises:
        InvalidArgument: No store can have this name.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= limits.STORE_NAME_CHARACTERS:
        return name
    raise InvalidArgument(
        f"name: expected 1 to {limits.STORE_NAME_CHARACTERS} characters, each one of A-Z a-z 0-9 . - _"
    )


def origin(key: TupleKey) -> bytes:
    """What stands before the key of an entry in the database; empty in the unnamed store."""
    return key.before if isinstance(key, InnerKey) else b""


class InnerEngine:
    """A part of another engine: the tuples whose encoded keys begin with certain bytes, without those bytes."""

    def __init__(self, engine: Engine, before: bytes, shown: str) -> None:
        self._engine = engine
        self._before = before
        self.origin: bytes = (engine.origin if isinstance(engine, InnerEngine) else b"") + before
        """What stands before its keys in the database."""
        self._location = shown

    def own_key(self, parts: Iterable[Part]) -> InnerKey:
        """The key of an entry that is read here."""
        key = InnerKey(parts)
        key.before = self.origin
        return key

    @property
    def database(self) -> Engine:
        """The whole database; sweeping is done there, for all stores at once."""
        return self._engine.database if isinstance(self._engine, InnerEngine) else self._engine

    @property
    def location(self) -> str:
        return f"{self._engine.location}, {self._location}"

    @property
    def is_closed(self) -> bool:
        return self._engine.is_closed

    @property
    def reads_at_once(self) -> bool:
        return self._engine.reads_at_once

    def health(self) -> ServerHealth | None:
        return self._engine.health()

    async def read(self, *asks: Ask) -> list[Any]:
        inside = await in_slices(self._in_database, asks)
        answers = await self._engine.read(*inside)
        await free_in_slices(inside)
        shown = await in_slices(self._shown, answers)
        await free_in_slices(answers)
        return shown

    async def commit(self, batch: Batch) -> Committed | Conflict:
        mutations = await in_slices(self._inside, batch.mutations)
        checks = await in_slices(self._inside, batch.checks)
        try:
            return self._verdict(await self._engine.commit(Batch(tuple(mutations), tuple(checks))))
        except (NotACounter, CounterOutOfRange) as error:
            raise error.at(self._key(error.key)) from None
        finally:
            await free_in_slices(mutations)
            await free_in_slices(checks)

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        def report(verdict: Verdict) -> None:
            if isinstance(verdict, (NotACounter, CounterOutOfRange)):
                done(verdict.at(self._key(verdict.key)))
            else:
                done(verdict if isinstance(verdict, Exception) else self._verdict(verdict))

        mutations, checks = map(self._inside, batch.mutations), map(self._inside, batch.checks)
        return self._engine.submit(Batch(tuple(mutations), tuple(checks)), report)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        return _InnerWatch(self._engine.watch(*map(self._in_database, asks), since=since), self._change)

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        raise NotImplementedError("the change log has the keys of the whole database")

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _in_database(self, ask: Any) -> Any:
        match ask:
            case Get(space=Space.TUPLES):
                return replace(ask, key=self._before + ask.key)
            case Scan(space=Space.TUPLES) | Count(space=Space.TUPLES):
                return replace(ask, start=self._before + ask.start, end=self._before + ask.end)
        return ask

    def _inside(self, operation: Operation) -> Operation:
        """A check or a mutation with the key that the database has."""
        return replace(operation, key=self._before + operation.key)

    def _verdict(self, verdict: Committed | Conflict) -> Committed | Conflict:
        if isinstance(verdict, Committed):
            return verdict
        failed = [
            FailedCheck(replace(failure.check, key=self._key(failure.check.key)), self._record(failure.current))
            for failure in verdict.failed
        ]
        return Conflict(tuple(failed))

    def _shown(self, answer: Any) -> Any:
        if isinstance(answer, Record):
            return self._record(answer)
        if isinstance(answer, Page):
            return replace(answer, keys=[self._key(key) for key in answer.keys])
        return answer

    def _change(self, change: Change) -> Change:
        return Change(self._key(change.key), self._record(change.record))

    def _record(self, record: Record | None) -> Record | None:
        return None if record is None else replace(record, key=self._key(record.key))

    def _key(self, key: bytes) -> bytes:
        return key[len(self._before) :]


class NamedEngine(InnerEngine):
    """An engine that shows the tuples of one named store, with keys that begin after the name."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, keys.store_prefix(name), f"store {name}")
        self.name = name


class ScopedEngine(InnerEngine):
    """An engine that shows the tuples below a prefix. Closing it does not close the database."""

    def __init__(self, engine: Engine, prefix: KeyLike) -> None:
        super().__init__(engine, keys.encode_prefix(prefix), f"below {tuple(prefix)!r}")

    async def aclose(self) -> None:
        """Does nothing: the store that this part was made of closes the database."""

    def _inside(self, operation: Operation) -> Operation:
        longer = keys.VERSION_BYTES + len(operation.suffix) if isinstance(operation, Append) else 0
        self._check_length(operation.key, longer)
        return super()._inside(operation)

    def _in_database(self, ask: Any) -> Any:
        if isinstance(ask, Get):
            self._check_length(ask.key)
        return super()._in_database(ask)

    def _check_length(self, key: bytes, longer: int = 0) -> None:
        size = len(self._before) + len(key) + longer
        if size > limits.KEY_BYTES:
            raise KeyTooLarge(
                f"key: {size:,} bytes encoded with the prefix of the scoped store, and the limit is "
                f"{limits.KEY_BYTES:,}; shorten one of them"
            )


def key_maker(engine: Engine) -> Callable[[Iterable[Part]], TupleKey]:
    """The function that makes the keys of entries that an engine reads."""
    return engine.own_key if isinstance(engine, InnerEngine) else tuple


def whole_database(engine: Engine) -> Engine:
    """The engine of the whole database, if this engine shows a part of it; else this engine."""
    return engine.database if isinstance(engine, InnerEngine) else engine


class _InnerWatch:
    """A watch whose changes have keys as an inner engine shows them."""

    def __init__(self, watch: Watch, show: Callable[[Change], Change]) -> None:
        self._watch = watch
        self._show = show

    @property
    def reported_to(self) -> int | None:
        return self._watch.reported_to

    def __aiter__(self) -> AsyncIterator[list[Change]]:
        return self

    async def __anext__(self) -> list[Change]:
        return [self._show(change) for change in await self._watch.__anext__()]

    @property
    def has_ended(self) -> bool:
        return self._paced.has_ended

    async def wait(self) -> None:
        await self._paced.wait()

    async def take(self) -> list[Change]:
        return [self._show(change) for change in await self._paced.take()]

    @property
    def _paced(self) -> PacedWatch:
        assert isinstance(self._watch, PacedWatch), "only services wait, and their engines have such watches"
        return self._watch

    async def aclose(self) -> None:
        await self._watch.aclose()
