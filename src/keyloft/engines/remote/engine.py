"""The engine on a running service: reads, commits and watches of one tuple store, over HTTP."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.records import (
    Add,
    Ask,
    Batch,
    Committed,
    Conflict,
    Count,
    Expired,
    Get,
    Latest,
    Now,
    Page,
    Scan,
    StoreId,
)
from keyloft.engines.commit.submitted import report
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.remote import batches, ranges
from keyloft.engines.remote.api import HttpApi
from keyloft.engines.remote.entries import ApiEntry, ServiceInfo, milliseconds, page_of
from keyloft.engines.remote.gets import GatheredGets
from keyloft.engines.remote.watch import StreamedWatch
from keyloft.errors import InvalidArgument, KeyloftError, NotACounter


class RemoteEngine(ClosableEngine):
    """An engine on a tuple store of a running service. The service removes what has expired, and keeps the history."""

    @classmethod
    async def open(cls, api: HttpApi) -> "RemoteEngine":
        """Ask the service who it is.

        Raises:
            NotPermitted: It does not accept the token.
            DatabaseError: It can't be reached, or is no service of Keyloft; the message says why.
        """
        engine = cls(api)
        try:
            await api.info()
        except BaseException:
            await api.aclose()
            raise
        return engine

    def __init__(self, api: HttpApi) -> None:
        super().__init__()
        self._api = api
        self.location = api.name
        self._gets = GatheredGets(api)
        self._starting = set[asyncio.Task[None]]()
        """Tasks of new watches, until the service says from which version on it reports changes."""
        self._watches = set[StreamedWatch]()
        self._submitted = deque["_Submitted"]()
        self._committing: asyncio.Task[None] | None = None

    async def read(self, *asks: Ask) -> list[Any]:
        self.check_usable()
        await self._watches_have_started()
        if all(isinstance(ask, Get) for ask in asks):
            return await self._read_gets(asks)  # type: ignore[arg-type]
        if all(isinstance(ask, (Latest, Now, StoreId)) for ask in asks):
            info = await self._api.info()
            return [_answer(info, ask) for ask in asks]
        if len(asks) > 1:
            raise InvalidArgument("over HTTP, only gets can be read together, from one view")
        [ask] = asks
        match ask:
            case Scan():
                return [await self._scan(ask)]
            case Count():
                return [await self._count(ask)]
            case Expired():
                batches.check_space(ask.space)
                return [[]]  # the service removes what has expired
        return batches.refuse_other(ask)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self.check_usable()
        while self._committing is not None:
            await asyncio.wait([self._committing])
            self.check_usable()
        return await self._commit(batch)

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        self.check_usable()
        submitted = _Submitted(self._submitted, batch, done)
        self._submitted.append(submitted)
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_submitted(), name="keyloft writer")
        return submitted

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        self.check_usable()
        for ask in asks:
            batches.check_space(ask.space)
        keys = [ask.key for ask in asks if isinstance(ask, Get)]
        prefix = "" if keys else ranges.prefix_of(asks[0].start, asks[0].end)  # type: ignore[union-attr]
        watch = StreamedWatch(self._api, keys=keys, prefix=prefix, since=since, ended=self._watches.discard)
        self._watches.add(watch)
        self._starting.add(watch.starting)
        watch.starting.add_done_callback(self._starting.discard)
        return watch

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        self.check_usable()
        raise InvalidArgument("over HTTP, the change log can't be followed; watch keys or a prefix")

    async def _commit(self, batch: Batch) -> Committed | Conflict:
        await self._watches_have_started()
        try:
            return await self._api.commit(batch)
        except NotACounter as error:
            takes_json = any(isinstance(one, Add) and one.key == error.key for one in batch.mutations)
            raise NotACounter(error.key, takes_json=takes_json) from None

    async def _read_gets(self, gets: Sequence[Get]) -> list[Any]:
        for get in gets:
            batches.check_space(get.space)
            if get.include_expired:
                batches.refuse_other(get)
        if len(gets) == 1:
            return [await self._gets.get(gets[0].key)]
        return list(await self._gets.get_many([get.key for get in gets])) if gets else []

    async def _scan(self, ask: Scan) -> Page:
        batches.check_space(ask.space)
        entries: list[ApiEntry] = []
        rest = ask
        while rest.limit > 0 and rest.start < rest.end:
            reply = await self._api.page(_list_parameters(rest))
            entries += reply.entries
            if reply.cursor is None or not reply.entries:
                break
            # A page ends early if its values are large.
            last = page_of(reply.entries[-1:], ask).keys[0]
            rest = replace(rest, limit=rest.limit - len(reply.entries))
            rest = replace(rest, end=last) if ask.reverse else replace(rest, start=last, after=True)
        return page_of(entries, ask)

    async def _count(self, ask: Count) -> int:
        batches.check_space(ask.space)
        if ask.start >= ask.end:
            return 0
        return await self._api.count(ranges.parameters(ask.start, ask.end))

    async def _watches_have_started(self) -> None:
        """Wait until new watches have begun, so that they report what is written next; for a bounded time."""
        if self._starting:
            await asyncio.wait(self._starting, timeout=self._api.patience / 4)
            self.check_usable()

    async def _commit_submitted(self) -> None:
        """Commit submitted batches one after the other, so that batches that share a key keep their order."""
        try:
            while self._submitted:
                submitted = self._submitted.popleft()
                try:
                    verdict: Verdict = await self._commit(submitted.batch)
                except KeyloftError as error:
                    verdict = error
                report(submitted.done, verdict)
        finally:
            self._committing = None  # also if this task was cancelled: commits wait for its end

    async def _close(self) -> None:
        if self._committing is not None:
            await asyncio.wait([self._committing])
        for watch in list(self._watches):
            await watch.aclose()
        await self._api.aclose()


class _Submitted:
    """A batch that waits to be sent."""

    def __init__(self, queue: "deque[_Submitted]", batch: Batch, done: Callable[[Verdict], None]) -> None:
        self._queue = queue
        self.batch = batch
        self.done = done

    def withdraw(self) -> bool:
        if self not in self._queue:
            return False
        self._queue.remove(self)
        return True


def _list_parameters(ask: Scan) -> dict[str, str]:
    made = ranges.parameters(ask.start, ask.end, after=ask.after)
    made["limit"] = str(min(ask.limit, limits.HTTP_CLIENT_PAGE_ENTRIES))
    if ask.reverse:
        made["reverse"] = "true"
    if ask.keys_only:
        made["keys"] = "true"
    return made


def _answer(info: ServiceInfo, ask: Ask) -> int | str:
    match ask:
        case Latest():
            return int(info.versionstamp)
        case Now():
            return milliseconds(info.now) or 0
    return info.store
