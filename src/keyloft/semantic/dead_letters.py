"""Dead letters: writes that were given up, kept until a person retries or drops them."""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from keyloft.core.engine import Engine
from keyloft.core.paging import Pages
from keyloft.core.records import EVERYTHING, Batch, Check, Committed, Get, Record, Scan, Set, Space
from keyloft.core.records import Delete as Remove
from keyloft.core.values import Encoding, decode_json
from keyloft.errors import DatabaseError, InvalidArgument, Undecodable
from keyloft.semantic import keys
from keyloft.semantic.commits import Attempt, Writer
from keyloft.semantic.envelope import ANY, Envelope, ExpectedVersion, Semantics, expected, moment
from keyloft.semantic.keys import place
from keyloft.semantic.planning import Change

logger = logging.getLogger("keyloft.semantic")

_SEMANTIC: Final = Space.SEMANTIC
_MOST_UNSAVED: Final = 1000


class GivenUp(Struct, frozen=True):
    """One write of a dead letter."""

    action: Literal["put", "delete", "restore"]
    key: str
    value: Any
    expected_version: ExpectedVersion
    writer: str
    semantics: Semantics | None
    spec_ref: str | None
    fence: int | None

    def __repr__(self) -> str:
        return f"<{self.action} {self.key} by {self.writer}>"  # no value, as with envelopes


class DeadLetter(Struct, frozen=True):
    """Writes that were to be made together, and were given up."""

    id: str
    tenant: str
    project: str
    operations: tuple[GivenUp, ...]
    request_id: str | None
    error_code: str
    error: str
    attempts: int
    at: datetime


class _Kept(Struct, frozen=True):
    """A write as it is stored."""

    action: Literal["put", "delete", "restore"]
    key: str
    expected: int | None
    writer: str
    semantics: Semantics | None
    value: Raw
    spec_ref: str | None
    fence: int | None

    def change(self) -> Change:
        value = b"" if self.action != "put" else bytes(self.value)
        return Change(
            self.action,
            place(self.key),
            self.expected,
            self.writer,
            self.semantics,
            value,
            self.spec_ref,
            self.fence,
        )


class _Letter(Struct, frozen=True):
    """A dead letter as it is stored."""

    operations: tuple[_Kept, ...]
    request_id: str | None
    error_code: str
    error: str
    attempts: int
    is_batch: bool


_to_json = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(_Letter).decode


class DeadLetters:
    """The dead letters of a database."""

    def __init__(self, engine: Engine, writer: Writer) -> None:
        self._engine = engine
        self._writer = writer
        self._unsaved: dict[str, Set] = {}

    async def keep(self, given_up: Attempt, error_code: str, error: str, attempts: int) -> str | None:
        """Keep writes that were given up; returns the letter's id, or None if it has to wait for the database."""
        operations = tuple(
            _Kept(
                change.action,
                change.place.key,
                change.expected,
                change.writer,
                change.semantics,
                Raw(change.value or b"null"),
                change.spec_ref,
                change.fence,
            )
            for change in given_up.changes
        )
        is_batch = given_up.row is not None
        letter = _to_json(_Letter(operations, given_up.request_id, error_code, error, attempts, is_batch))
        at = given_up.changes[0].place
        # An id of its own, not the commit's version: if an answer gets lost, the same letter is saved again.
        name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        row = keys.dead_letters(at.tenant, at.project) + name.encode()
        self._unsaved[name] = Set(_SEMANTIC, row, letter, Encoding.JSON)
        try:
            await self._save(name)
        except DatabaseError as failure:
            logger.error("[KV] a dead letter waits for the database (%s)", failure.code)
            if len(self._unsaved) > _MOST_UNSAVED:
                del self._unsaved[next(iter(self._unsaved))]
            return None
        return name

    async def save(self) -> None:
        """Store what has waited for the database.

        Raises:
            DatabaseError: It is still away.
        """
        for name in list(self._unsaved):
            await self._save(name)

    async def _save(self, name: str) -> None:
        if (letter := self._unsaved.get(name)) is not None:
            # A conflict tells that it is there: an earlier answer got lost.
            await self._writer.commit(Batch((letter,), (Check(_SEMANTIC, letter.key, None),)))
            self._unsaved.pop(name, None)

    @property
    def unsaved(self) -> int:
        """How many wait for the database."""
        return len(self._unsaved)

    async def list(self, project: str) -> AsyncIterator[DeadLetter]:
        """The dead letters of `tenant/<tenant>/project/<project>`, the oldest first."""
        within = keys.below(project)
        start, end = keys.rows_below(keys.dead_letters(within.tenant, within.project))
        async for page in Pages(self._engine, Scan(_SEMANTIC, start, end, EVERYTHING)):
            for record in page:
                yield _shown(record, within.tenant, within.project)

    async def retry(
        self, letter: DeadLetter, *, expected_version: ExpectedVersion | None = None
    ) -> Sequence[Envelope | None]:
        """Try once more what a dead letter is about; once that is made, the letter is gone.

        Args:
            letter: As `list` gave it.
            expected_version: Instead of what the writes expected when they were given up; "*" for whatever is there.

        Raises:
            VersionConflict: It still stands against what is stored; the letter stays.
            InvalidArgument: Somebody has retried or dropped it meanwhile.
        """
        row = self._row(letter)
        [record] = await self._engine.read(Get(_SEMANTIC, row))
        if record is None:
            raise InvalidArgument("this dead letter is gone: somebody has retried or dropped it meanwhile")
        stored = read_letter(record)
        changes = [kept.change() for kept in stored.operations]
        if expected_version is not None:
            version = expected(expected_version)
            changes = [msgspec.structs.replace(change, expected=version) for change in changes]
        memory = None
        if stored.request_id is not None and stored.is_batch:
            memory = keys.batch_request(letter.tenant, letter.project, stored.request_id)
        return await self._writer.carry_out(changes, stored.request_id, memory, (row, record.version))

    async def drop(self, letter: DeadLetter) -> bool:
        """Remove a dead letter; returns whether it was still there."""
        row = self._row(letter)
        done = await self._engine.commit(Batch((Remove(_SEMANTIC, row),)))
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return done.found[0]

    def _row(self, letter: DeadLetter) -> bytes:
        return keys.dead_letters(letter.tenant, letter.project) + letter.id.encode()


def read_letter(record: Record) -> _Letter:
    """What a row holds.

    Raises:
        Undecodable: It is none of ours.
    """
    try:
        return _read(record.value)
    except msgspec.MsgspecError as error:
        raise Undecodable(f"the dead letter {record.key!r} is damaged") from error


def _shown(record: Record, tenant: str, project: str) -> DeadLetter:
    letter = read_letter(record)
    operations = tuple(
        GivenUp(
            kept.action,
            kept.key,
            decode_json(bytes(kept.value)) if kept.action == "put" else None,
            ANY if kept.expected is None else kept.expected,
            kept.writer,
            kept.semantics,
            kept.spec_ref,
            kept.fence,
        )
        for kept in letter.operations
    )
    return DeadLetter(
        record.key.rpartition(b"/")[2].decode(),
        tenant,
        project,
        operations,
        letter.request_id,
        letter.error_code,
        letter.error,
        letter.attempts,
        moment(record.updated_at),
    )
