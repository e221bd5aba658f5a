"""The contract between interfaces and engines: three verbs.

The rules that every engine keeps are the tests of `tests/engines/contract/`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

from keyloft.core import records
from keyloft.core.health import ServerHealth
from keyloft.core.own_commits import note_commit
from keyloft.errors import KeyloftError


class Watch(Protocol):
    """Changes as they happen; the iteration ends when the engine closes."""

    @property
    def reported_to(self) -> int | None:
        """The version up to which all changes were reported, for another watch to continue; None if unknown."""

    def __aiter__(self) -> AsyncIterator[list[records.Change]]: ...

    async def __anext__(self) -> list[records.Change]: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PacedWatch(Watch, Protocol):
    """A watch whose reader decides when entries are read, so that it can bound what is in memory."""

    @property
    def has_ended(self) -> bool:
        """Whether the watch, or the engine, was closed."""

    async def wait(self) -> None:
        """Return once there may be something to take, or the watch has ended."""

    async def take(self) -> list[records.Change]:
        """The changes to report now; perhaps none, and none once the watch has ended.

        Raises:
            HistoryGone: As the iteration does.
        """


class LogWatch(Protocol):
    """Changes as the change log has them, to be taken when there are some."""

    @property
    def reached(self) -> int | None:
        """The version up to which there is nothing left to report, for another watch to continue; None if unknown.

        Unlike `reported_to` of a Watch, it also moves with commits that don't concern this watch.
        """

    @property
    def is_woken(self) -> bool:
        """Whether there may be something to take."""

    @property
    def has_ended(self) -> bool:
        """Whether the watch, or the engine, was closed."""

    async def take(self) -> list[records.LoggedChange]:
        """The changes to report now; perhaps none, and none once the watch has ended.

        Raises:
            HistoryGone: The change log no longer reaches back to what is to be reported.
        """

    async def aclose(self) -> None: ...


class Submission(Protocol):
    """A batch that was submitted."""

    def withdraw(self) -> bool:
        """Don't write the batch, and don't call `done`.

        Returns False if the batch is being written already; `done` is then called anyway.
        """


Verdict: TypeAlias = records.Committed | records.Conflict | KeyloftError
"""What became of a batch; an error is raised to its caller, and to no other."""


class Reader(Protocol):
    """The part of an engine that reads."""

    @overload
    async def read(self, *asks: records.Get) -> list[records.Record | None]: ...
    @overload
    async def read(self, *asks: records.Scan) -> list[records.Page]: ...
    @overload
    async def read(self, *asks: records.Expired) -> list[list[records.Record]]: ...
    @overload
    async def read(self, *asks: records.Count | records.Latest | records.Now) -> list[int]: ...
    @overload
    async def read(self, *asks: records.StoreId) -> list[str]: ...
    @overload
    async def read(self, *asks: records.Usage) -> list[records.UsageSlice]: ...
    @overload
    async def read(self, *asks: records.Due) -> list[records.DuePage]: ...
    @overload
    async def read(self, *asks: records.Changes) -> list[records.LogSlice]: ...
    @overload
    async def read(self, *asks: records.Ask) -> list[Any]: ...
    async def read(self, *asks: records.Ask) -> list[Any]:
        """Answer all requests from one consistent view, in their order. Expired entries are absent."""


class Engine(Reader, Protocol):
    """An ordered, versioned, durable store of records."""

    @property
    def location(self) -> str:
        """Where the data is, for people: a file, a server and its database, or memory; never a password."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def reads_at_once(self) -> bool:
        """Whether most reads of entries complete without waiting. A read that waits does so before it has begun."""

    async def commit(self, batch: records.Batch) -> records.Committed | records.Conflict:
        """Write the whole batch or nothing of it; once this returns Committed, the batch is durable.

        Raises:
            NotACounter: A Sum, Min or Max met a value that is not a U64.
            InvalidArgument: An expiry lies before 1970, or after what the database can hold.
            CommitUnknown: The connection was lost during the commit; the whole batch was written, or nothing of it.
            DatabaseError: The database failed in any other way; nothing was written.
            Closed: The engine is closed.
        """

    def submit(self, batch: records.Batch, done: Callable[[Verdict], None]) -> Submission:
        """Like `commit`, without a task or a future per batch: `done` is called with the verdict, in the event loop.

        Batches that share a key, checks included, are committed in the order in which they were submitted. A `done`
        that raises is logged, and harms no other caller.

        Raises:
            Closed: The engine is closed.
        """

    def watch(self, *asks: records.Get | records.Scan, since: int | None = None) -> Watch:
        """Report changes to some keys (Gets), or in a range (one Scan). Several changes to one key may become one.

        For Gets: first the state of all keys, then again the state of all whenever one changed, in the order given.
        For a Scan: the keys that changed since the watch was made. A caller that makes a watch, then reads, and applies
        what the watch reports, always has the current state: puts, deletes and expiries, by any process.

        Args:
            asks: Gets, or one Scan.
            since: Report what changed after this version instead; Gets then report nothing before the first change.

        Raises:
            HistoryGone: Raised by the iteration: the change log no longer reaches back to `since`, or to what a slow
                watch of a range has reported so far. List, then watch again.
        """

    def follow(
        self, *asks: records.Get | records.Scan, woken: Callable[[], None], since: int | None = None
    ) -> LogWatch:
        """Like `watch`, without the entries: every single put, delete and expiry, as the change log has it.

        Changes are reported in the order of their versions. The log has no version for an expiry that was not yet
        swept: it is reported with the version up to which all changes were reported before it. Touches are left out,
        but for those that may have been seen only after the expiry that they put off: they are reported as puts, with
        the versions of their commits. Changes may be reported twice.

        Args:
            asks: Gets, or one Scan, of one space.
            woken: Called, in the event loop, when there is something to take; not again before that was taken.
            since: Report what changed after this version; None for what changes from now on.
        """

    def health(self) -> ServerHealth | None:
        """What the engine knows about the database's servers; None if there are none, or if it does not track them."""

    async def aclose(self) -> None:
        """Finish or refuse the calls under way, end the watches, close the database."""


class SeveralSubmitted(Submission, Protocol):
    """Batches that were submitted together."""

    def withdraw_one(self, position: int) -> bool:
        """Don't write one of the batches; `done` is called nevertheless, and its verdict means nothing.

        Returns False if the batches are being written already.
        """


@runtime_checkable
class TakesSeveral(Protocol):
    """An engine that takes several batches in less time than one after the other."""

    def submit_each(
        self, batches: Sequence[records.Batch], done: Callable[[Sequence[Verdict]], None]
    ) -> SeveralSubmitted:
        """Like `submit` of each, none of them long: each is committed or refused by itself.

        `done` is called once, with the verdict on each. All of them are withdrawn, or some, or none.

        Raises:
            Closed: The engine is closed.
        """


def shown(engine: Engine) -> str:
    """Where an engine's data is, and whether it is closed, for `repr`."""
    return f"{engine.location}, {'closed' if engine.is_closed else 'open'}"


async def catch_up(engine: Reader) -> None:
    """Let later reads show all that is committed now: until then, a standby that is behind may answer them."""
    await engine.read(records.Latest())


async def write(engine: Engine, *mutations: records.Mutation) -> records.Committed:
    """Commit mutations without checks."""
    done = await engine.commit(records.Batch(mutations))
    assert isinstance(done, records.Committed), "a batch without checks has nothing to conflict with"
    note_commit(done.version)
    return done
