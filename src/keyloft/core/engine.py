"""The contract between interfaces and engines: three verbs.

The rules that every engine keeps are the tests of `tests/engines/contract/`.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

from keyloft.core import records
from keyloft.core.health import ServerHealth
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
    """A watch that can be waited for without its entries being read: for one who bounds what is in memory."""

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or the engine."""

    async def wait(self) -> None:
        """Return once there may be something to take, or it has ended."""

    async def take(self) -> list[records.Change]:
        """What there is to report now: perhaps nothing, and nothing once it has ended.

        Raises:
            HistoryGone: As by the iteration.
        """


class LogWatch(Protocol):
    """Changes as the change log has them, to be taken when there are some."""

    @property
    def reached(self) -> int | None:
        """The version up to which there is nothing left to report, for another one to continue; None if unknown.

        Unlike what a Watch has reported, it moves on with the commits of others that don't concern it.
        """

    @property
    def is_woken(self) -> bool:
        """Whether there may be something to take."""

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or the engine."""

    async def take(self) -> list[records.LoggedChange]:
        """What there is to report now: perhaps nothing, and nothing once it has ended.

        Raises:
            HistoryGone: The change log no longer reaches back to what is to be reported.
        """

    async def aclose(self) -> None: ...


class Submission(Protocol):
    """A batch that was handed in."""

    def withdraw(self) -> bool:
        """Don't write it, and don't call `done`.

        Returns False if it is being written already; `done` is then called anyway.
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
        """Whether it mostly reads entries without waiting; a read that does wait has not begun to read by then."""

    async def commit(self, batch: records.Batch) -> records.Committed | records.Conflict:
        """Write the whole batch or nothing of it; once this returns Committed, it is durable.

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
        """Report changes to some keys (Gets), or in a range (one Scan). Changes to one key may be joined.

        For Gets: first the state of all keys, then again the state of all whenever one changed, in the order given.
        For a Scan: the keys that changed since the watch was made. What a watch reports, together with what a read made
        after `watch` returned has shown, is always the current state: puts, deletes and expiries, by any process.

        Args:
            asks: Gets, or one Scan.
            since: Report what changed after this version instead; Gets then report nothing before the first change.

        Raises:
            HistoryGone: By the iteration: the change log no longer reaches back to `since`, or to what a slow watch of
                a range has reported so far. List, then watch again.
        """

    def follow(
        self, *asks: records.Get | records.Scan, woken: Callable[[], None], since: int | None = None
    ) -> LogWatch:
        """Like `watch`, without the entries: each put, delete and expiry as the change log has it, none of them joined.

        Changes are reported in the order of their versions; touches are left out. An expiry that was not yet swept has
        the version up to which all changes are reported before it. What was reported may be reported again.

        Args:
            asks: Gets, or one Scan, of one space.
            woken: Called, in the event loop, when there is something to take; then again once that was taken.
            since: Report what changed after this version; None for what changes from now on.
        """

    def health(self) -> ServerHealth | None:
        """What it knows of the servers of the database; None if there are none, or if it does not track them."""

    async def aclose(self) -> None:
        """Finish or refuse the calls under way, end the watches, close the database."""


def shown(engine: Engine) -> str:
    """Where its data is, and whether it is closed, for `repr`."""
    return f"{engine.location}, {'closed' if engine.is_closed else 'open'}"


async def write(engine: Engine, *mutations: records.Mutation) -> records.Committed:
    """Commit mutations without checks."""
    done = await engine.commit(records.Batch(mutations))
    assert isinstance(done, records.Committed), "a batch without checks has nothing to conflict with"
    return done
