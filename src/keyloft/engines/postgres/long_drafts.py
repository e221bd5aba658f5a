"""Settles a long batch in parts, so that no step of its commit holds the event loop for long.

Of each part, only the arguments of the function are kept. Arrays are kept as text, which the server casts: the driver
would encode the elements of all parts at once.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from keyloft import limits
from keyloft.core.records import Append, Batch, Committed, LoggedChange, Space
from keyloft.core.schema import LAST_MOMENT
from keyloft.engines import change_log
from keyloft.engines.commit.long_batches import GatheredVerdict, divided
from keyloft.engines.commit.outcomes import NO_VERSION, Outcome
from keyloft.engines.postgres.drafts import DRAFTED, Arrays, Draft
from keyloft.engines.postgres.pooled_call import element


class LongDraft:
    """A long batch that is settled and not committed yet. No two of its mutations may have the same key."""

    versions = 1
    has_text = True
    """All arrays are text."""

    def __init__(self, read_at: int) -> None:
        self.read_at = read_at
        self.valid = (0, LAST_MOMENT + 1)
        """From when on, and before when, the batch can be committed as it was settled."""
        self._gathered = GatheredVerdict(DRAFTED, read_at)
        self._arrays: dict[Space, dict[str, list[_TextArray]]] = {}
        self._parts: list[bytes] = []
        self._unpacked: list[LoggedChange] = []

    @property
    def gathered(self) -> GatheredVerdict:
        """The verdicts of the parts so far."""
        return self._gathered

    def add(self, draft: Draft) -> None:
        """Add a part that was settled."""
        settled = draft.settled
        self._gathered.add(settled)
        self.valid = max(self.valid[0], settled.valid_from), min(self.valid[1], settled.valid_until)
        if not draft.versions:
            return
        for space, kinds in draft.arrays().items():
            arrays = self._arrays.setdefault(space, {})
            for kind, columns in kinds.items():
                if kind not in arrays:
                    arrays[kind] = [_TextArray() for _ in columns]
                for array, column in zip(arrays[kind], columns, strict=True):
                    array.add(column, len(columns[0]))
        if settled.appended:
            self._parts += draft.parts()
            return
        self._unpacked += settled.changes
        if len(self._unpacked) >= limits.LONG_BATCH_OPERATIONS:
            self._pack()

    def _pack(self) -> None:
        self._parts += change_log.pack(self._unpacked, DRAFTED)
        self._unpacked = []

    def parts(self) -> list[bytes]:
        """The changes of the batch, as the change log is to hold them."""
        if self._unpacked or not self._parts:
            self._pack()
        return self._parts

    async def finish(self) -> None:
        """Make the texts of the arrays, one at a time, once all parts were added."""
        for kinds in self._arrays.values():
            for columns in kinds.values():
                for array in columns:
                    array.join()
                    await asyncio.sleep(0)

    def arrays(self) -> dict[Space, Arrays]:
        """The rows that the batch has read, and those that it writes, by space."""
        return {
            space: {kind: [array.text for array in columns] for kind, columns in kinds.items()}
            for space, kinds in self._arrays.items()
        }

    def completed(self, base: int, now: int) -> Outcome:
        """The outcome of the batch, which was committed after version `base`; watches read its changes in the log."""
        verdict = self._gathered.verdict
        assert isinstance(verdict, Committed), "no other is committed"
        return Outcome([Committed(base + 1, verdict.found, now, verdict.values)], NO_VERSION, base + 1)


class _TextArray:
    """An array of SQL as text, which grows part by part."""

    text: str | None = None
    """Once it is joined; None for an array of nothing but NULLs, as `integers` has it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._is_empty = True

    def add(self, column: Sequence[Any] | str | None, count: int) -> None:
        """Add elements: as values, as the text of an array, or None for so many NULLs."""
        self._pieces.append("," if self._pieces else "{")
        if column is None:
            self._pieces.append(",".join(["NULL"] * count))
            return
        self._is_empty = False
        self._pieces.append(column[1:-1] if isinstance(column, str) else ",".join(map(element, column)))

    def join(self) -> None:
        if not self._is_empty:
            self.text = "".join([*self._pieces, "}"])
        self._pieces = []


async def can_be_divided(batch: Batch) -> bool:
    """Whether a long batch can be settled in parts: no two mutations have the same key, and its values fit a text."""
    keys: dict[Space, set[Any]] = {}
    size = 0
    for part in divided(batch):
        size += part.size
        for mutation in part.mutations:
            key = mutation.at(DRAFTED).key if type(mutation) is Append else mutation.key
            keys.setdefault(mutation.space, set()).add(key)
        await asyncio.sleep(0)
    return size <= limits.POSTGRES_TEXT_BYTES and sum(map(len, keys.values())) == len(batch.mutations)
