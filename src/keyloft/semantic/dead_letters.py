"""Dead letters: write requests that were given up, kept until a person retries or drops them."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from msgspec.structs import asdict, replace

from keyloft import limits
from keyloft.core.lazy import ClosableSource, SourceList
from keyloft.core.paging import Pages
from keyloft.core.records import NO_LIMIT, Batch, Check, Committed, Delete, Get, Scan, Set
from keyloft.core.values import Encoding
from keyloft.errors import DatabaseError, InvalidArgument
from keyloft.semantic.commits import DEAD_LETTER_GONE, Committer
from keyloft.semantic.envelope import Envelope, moment, row_reader, to_json
from keyloft.semantic.intents import Intent, WriteRequest
from keyloft.semantic.keys import SPACE, Project, parse_prefix, rows_below
from keyloft.semantic.monitoring import logger
from keyloft.semantic.rules import ExpectedVersion, check_expected_version


class _StoredLetter(WriteRequest, frozen=True, kw_only=True):
    """The value of a dead letter's row: the request, and why it was given up."""

    error_code: str
    error: str
    attempts: int


class DeadLetter(_StoredLetter, frozen=True, kw_only=True):
    """A write request that was given up, and why."""

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
        return Project(self.tenant, self.project).dead_letters + self.id.encode()


read_letter = row_reader(_StoredLetter, "the dead letter {!r} is damaged")
"""What the row of a dead letter holds."""


class DeadLetters:
    """The dead letters of a database."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._unsaved: dict[str, Set] = {}

    async def keep(self, request: WriteRequest, error_code: str, error: str, attempts: int) -> str | None:
        """Keep a request that was given up; returns the dead letter's id, or None if it waits for the database."""
        asked = {name: getattr(request, name) for name in WriteRequest.__struct_fields__}
        letter = _StoredLetter(**asked, error_code=error_code, error=error, attempts=attempts)
        # A random id, not the commit's version: if the answer to a save gets lost, the same row is saved again.
        name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        row = request.intents[0].entry_key.project.dead_letters + name.encode()
        self._unsaved[name] = Set(SPACE, row, to_json(letter), Encoding.JSON)
        try:
            await self._save(name)
        except DatabaseError as failure:
            logger.error("[KV] a dead letter waits for the database (%s)", failure.code)
            if len(self._unsaved) > limits.UNSAVED_DEAD_LETTERS:
                del self._unsaved[next(iter(self._unsaved))]
            return None
        return name

    async def save(self) -> None:
        """Store the dead letters that wait for the database.

        Raises:
            DatabaseError: It still fails.
        """
        for name in list(self._unsaved):
            await self._save(name)

    async def _save(self, name: str) -> None:
        if (letter := self._unsaved.get(name)) is not None:
            # A conflict means that it is stored: an earlier answer got lost.
            await self._committer.commit(Batch((letter,), (Check(SPACE, letter.key, None),)))
            self._unsaved.pop(name, None)

    @property
    def unsaved(self) -> int:
        """How many dead letters wait for the database."""
        return len(self._unsaved)

    def list(self, project: str) -> "DeadLetterList":
        """The dead letters of `tenant/<tenant>/project/<project>`, the oldest first: await it, or use `async for`."""
        return DeadLetterList(self._committer, parse_prefix(project, "project").project)

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
        [record] = await self._committer.read(Get(SPACE, letter.row))
        if record is None:
            raise InvalidArgument(DEAD_LETTER_GONE)
        request = read_letter(record)
        if expected_version is not None:
            expected = check_expected_version(expected_version)
            request = replace(request, intents=tuple([replace(one, expected=expected) for one in request.intents]))
        return await self._committer.carry_out(request, dead_letter=record)

    async def drop(self, letter: DeadLetter) -> bool:
        """Remove a dead letter; returns whether it was still stored."""
        done = await self._committer.commit(Batch((Delete(SPACE, letter.row),)))
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return done.found[0]


class DeadLetterList(SourceList[DeadLetter]):
    """The dead letters of a project: iterate them with `async for`, or `await` them all."""

    what = "dead letters"

    def __init__(self, source: ClosableSource, project: Project) -> None:
        super().__init__(source)
        self._project = project

    async def __aiter__(self) -> AsyncIterator[DeadLetter]:
        scan = Scan(SPACE, *rows_below(self._project.dead_letters), NO_LIMIT, times=True)
        async for page in Pages(self._engine, scan):
            for record in page:
                yield DeadLetter(
                    **asdict(read_letter(record)),
                    id=record.key.rpartition(b"/")[2].decode(),
                    tenant=self._project.tenant,
                    project=self._project.name,
                    at=moment(record.updated_at),
                )
