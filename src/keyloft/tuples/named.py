"""Named tuple stores: several stores in one database, each below a name that its keys don't show.

A named store's keys stand in the space of the tuples behind a byte that no tuple key begins with, so that the unnamed
store never sees them. Its name costs nothing but those bytes: it is made by its first write.
"""

import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from keyloft import limits
from keyloft.core import keys
from keyloft.core.engine import Engine, LogWatch, Submission, Verdict, Watch
from keyloft.core.health import ServerHealth
from keyloft.core.records import (
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
from keyloft.errors import CounterOutOfRange, InvalidArgument, NotACounter

Operation = TypeVar("Operation", bound=Check | Mutation)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


def check_name(name: object) -> str:
    """The name of a store, as a caller gave it.

    Raises:
        InvalidArgument: It is not one.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= limits.STORE_NAME_CHARACTERS:
        return name
    raise InvalidArgument(
        f"name: expected 1 to {limits.STORE_NAME_CHARACTERS} characters, each one of A-Z a-z 0-9 . - _"
    )


class NamedEngine:
    """An engine that shows the tuples of one named store, with keys that begin after the name."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.database = engine
        """The whole database; sweeping is done there, for all stores at once."""
        self.name = name
        self._before = keys.store_prefix(name)

    @property
    def location(self) -> str:
        return f"{self.database.location}, store {self.name}"

    @property
    def is_closed(self) -> bool:
        return self.database.is_closed

    def health(self) -> ServerHealth | None:
        return self.database.health()

    async def read(self, *asks: Ask) -> list[Any]:
        inside = await in_slices(self._in_database, asks)
        answers = await self.database.read(*inside)
        await free_in_slices(inside)
        shown = await in_slices(self._shown, answers)
        await free_in_slices(answers)
        return shown

    async def commit(self, batch: Batch) -> Committed | Conflict:
        mutations = await in_slices(self._inside, batch.mutations)
        checks = await in_slices(self._inside, batch.checks)
        try:
            return self._verdict(await self.database.commit(Batch(tuple(mutations), tuple(checks))))
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
        return self.database.submit(Batch(tuple(mutations), tuple(checks)), report)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        return _NamedWatch(self.database.watch(*map(self._in_database, asks), since=since), self._change)

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        raise NotImplementedError("the change log of a named store has the keys of the whole database")

    async def aclose(self) -> None:
        await self.database.aclose()

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


class _NamedWatch:
    """A watch whose changes have keys that begin after the name."""

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

    async def aclose(self) -> None:
        await self._watch.aclose()
