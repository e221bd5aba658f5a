"""Dead letters: write requests that were given up, kept until a person retries or drops them."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from msgspec.structs import asdict, replace

from keyloft import limits
from keyloft.core.lazy import ClosableSource, SourceList, check_limit
from keyloft.core.paging import Pages
from keyloft.core.records import Batch, Check, Committed, Delete, Get, Scan, Set
from keyloft.core.values import Encoding
from keyloft.errors import Closed, InvalidArgument, KeyloftError
from keyloft.semantic.commits import DEAD_LETTER_GONE, Committer
from keyloft.semantic.envelope import Envelope, datetime_of, row_reader, to_json
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.keys import SPACE, Project, parse_project, rows_below
from keyloft.semantic.monitoring import logger
from keyloft.semantic.rules import ExpectedVersion, check_expected_version
from keyloft.semantic.writes import FAILURES


class StoredDeadLetter(WriteRequest, frozen=True, kw_only=True):
    """A dead letter as its row holds it: a write request that was given up, and why."""

    error_code: str
    error: str
    attempts: int


class DeadLetter(StoredDeadLetter, frozen=True, kw_only=True):
    """A write request that was given up, with the reason, its id, and since when it is kept."""

    id: str
    tenant: str
    project: str
    at: datetime

    @property
    def operations(self) -> tuple[Intent, ...]:
        """The same as `intents`."""
        return self.intents

    @property
    def row(self) -> bytes:
        return Project(self.tenant, self.project).dead_letter(self.id)


read_dead_letter = row_reader(StoredDeadLetter, "the dead letter {!r} is damaged")
"""What the row of a dead letter holds."""


class DeadLetterKeeper:
    """Keeps write requests that were given up. While the store fails, they wait in memory.

    Subclasses store them, list them, and carry out or remove one that is stored.
    """

    def __init__(self) -> None:
        self._unsaved: dict[str, StoredDeadLetter] = {}

    async def keep(self, request: WriteRequest, error_code: str, error: str, attempts: int) -> str | None:
        """Keep a request that was given up; returns the dead letter's id.

        None if it waits for the store, or can't be kept.
        """
        asked = {name: getattr(request, name) for name in WriteRequest.__struct_fields__}
        # The id is known before the save, so that a save whose answer was lost can be repeated.
        name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._unsaved[name] = StoredDeadLetter(**asked, error_code=error_code, error=error, attempts=attempts)
        try:
            await self._save(name)
        except FAILURES as failure:
            logger.error("[KV] a dead letter waits for the store (%s)", failure.code)
            if len(self._unsaved) > limits.UNSAVED_DEAD_LETTERS:
                del self._unsaved[next(iter(self._unsaved))]
            return None
        except KeyloftError as refusal:
            del self._unsaved[name]
            logger.error("[KV] a dead letter can't be kept (%s)", refusal.code)  # its message may name parts of a value
            return None
        return name

    async def save(self) -> None:
        """Store the dead letters that wait for the store.

        Raises:
            DatabaseError: The database still fails.
            Unanswered: The service still can't be reached.
        """
        for name in list(self._unsaved):
            await self._save(name)

    async def save_last(self) -> None:
        """Store the dead letters that wait, before the store is closed; an error is logged."""
        try:
            await self.save()
        except (Closed, *FAILURES) as error:
            logger.error("[KV] %d dead letters could not be stored: %s", self.unsaved, error)

    async def _save(self, name: str) -> None:
        if (letter := self._unsaved.get(name)) is not None:
            await self._store(name, letter)
            self._unsaved.pop(name, None)

    async def _store(self, name: str, letter: StoredDeadLetter) -> None:
        """Store a dead letter under an id, unless it is stored already."""
        raise NotImplementedError

    async def retry(
        self, letter: DeadLetter, *, expected_version: ExpectedVersion | None = None
    ) -> Sequence[Envelope | None]:
        """Carry out the request of a dead letter once more; the commit that does so removes the dead letter.

        Args:
            letter: As `list` returned it.
            expected_version: Replaces what the writes expected when they were given up; "*" for any version or none.

        Raises:
            VersionConflict: The request still conflicts with what is stored; the dead letter stays.
            InvalidArgument: Another caller has retried or dropped it meanwhile.
        """
        raise NotImplementedError

    async def drop(self, letter: DeadLetter) -> bool:
        """Remove a dead letter; returns whether it was still stored."""
        raise NotImplementedError

    @property
    def unsaved(self) -> int:
        """How many dead letters wait for the store."""
        return len(self._unsaved)


class DeadLetters(DeadLetterKeeper):
    """The dead letters of a database."""

    def __init__(self, committer: Committer) -> None:
        super().__init__()
        self._committer = committer

    async def _store(self, name: str, letter: StoredDeadLetter) -> None:
        await self.store(letter.intents[0].entry_key.project.dead_letter(name), letter)

    async def store(self, row: bytes, letter: StoredDeadLetter) -> None:
        """Store a dead letter as this row, unless the row is there already."""
        put = Set(SPACE, row, to_json(letter), Encoding.JSON)
        # A conflict means that it is stored: an earlier answer got lost.
        await self._committer.commit(Batch((put,), (Check(SPACE, row, None),)))

    def list(self, project: str, *, limit: int | None = None, after: str | None = None) -> "DeadLetterList":
        """The dead letters of `tenant/<tenant>/project/<project>`, the oldest first: await it, or use `async for`.

        Args:
            project: The project that they belong to.
            limit: How many to return at most.
            after: Only those after the one with this id.
        """
        return DeadLetterList(self._committer, parse_project(project), check_limit(limit), after)

    async def retry(
        self, letter: DeadLetter, *, expected_version: ExpectedVersion | None = None
    ) -> Sequence[Envelope | None]:
        return await self.retry_row(letter.row, expected_version)

    async def retry_row(self, row: bytes, expected_version: ExpectedVersion | None) -> Sequence[Envelope | None]:
        """`retry` of the dead letter that is stored as this row."""
        [record] = await self._committer.read(Get(SPACE, row))
        if record is None:  # perhaps a standby has answered that is behind
            await self._committer.catch_up()
            [record] = await self._committer.read(Get(SPACE, row))
        if record is None:
            raise InvalidArgument(DEAD_LETTER_GONE)
        request = read_dead_letter(record)
        if expected_version is not None:
            expected = check_expected_version(expected_version)
            request = replace(request, intents=tuple([replace(one, expected=expected) for one in request.intents]))
        return await self._committer.carry_out(request, dead_letter=record)

    async def drop(self, letter: DeadLetter) -> bool:
        return await self.drop_row(letter.row)

    async def drop_row(self, row: bytes) -> bool:
        """`drop` of the dead letter that is stored as this row."""
        done = await self._committer.commit(Batch((Delete(SPACE, row),)))
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return done.found[0]


class DeadLetterList(SourceList[DeadLetter]):
    """The dead letters of a project: iterate them with `async for`, or `await` them all."""

    what = "dead letters"

    def __init__(self, source: ClosableSource, project: Project, limit: int, after: str | None) -> None:
        super().__init__(source)
        self._project = project
        self._limit = limit
        self._after = after

    async def __aiter__(self) -> AsyncIterator[DeadLetter]:
        start, end = rows_below(self._project.dead_letters)
        is_later = self._after is not None
        start = start if self._after is None else self._project.dead_letter(self._after)
        async for page in Pages(self._engine, Scan(SPACE, start, end, self._limit, after=is_later, keys_only=True)):
            for row in page.keys:
                # One at a time: a dead letter may hold a batch of many megabytes.
                [record] = await self._engine.read(Get(SPACE, row))
                await asyncio.sleep(0)
                if record is not None:
                    yield DeadLetter(
                        **asdict(read_dead_letter(record)),
                        id=row.rpartition(b"/")[2].decode(),
                        tenant=self._project.tenant,
                        project=self._project.name,
                        at=datetime_of(record.updated_at),
                    )
