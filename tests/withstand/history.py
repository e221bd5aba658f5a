"""What a worker did and saw, one line of JSON per call; all processes of a machine share its monotonic clock."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from keyloft import Busy, KeyloftError, ReadOnly, Unreachable

Outcome: TypeAlias = Literal["done", "unknown", "failed", "begun"]
"""`unknown` is a write that may have been made; `failed` is a read, or a write that certainly was not made; `begun` is
a write whose worker may die before it ends."""

BEGUN: Final = b'"outcome":"begun"'
"""A line with this is not that of a call that has ended."""
_NOT_WRITTEN: Final = (Unreachable, Busy, ReadOnly)


class Entered(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call."""

    worker: str
    kind: str
    """register, counter, own, lock, or watch: what was seen of a register without asking."""
    key: str
    does: str
    given: Any = None
    seen: Any = None
    began: float
    ended: float
    version: int | None = None
    fence: int | None = None
    outcome: Outcome = "done"
    error: str | None = None
    number: int | None = None
    """Of a write, among those of its worker: it is entered when it begins, and when it ends."""


class Recorder:
    """Writes the calls of one worker to a file."""

    def __init__(self, file: Path, worker: str) -> None:
        self._file = file.open("ab", buffering=0)
        self.worker = worker
        self._writes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def call(self, kind: str, key: str, does: str, given: Any = None) -> "CallInProgress":
        return CallInProgress(self, kind, key, does, given)

    def number_write(self) -> int:
        self._writes += 1
        return self._writes

    def enter(self, **what: Any) -> None:
        self._file.write(msgspec.json.encode(Entered(worker=self.worker, **what)) + b"\n")


class CallInProgress:
    """A call from its begin to its end: the block makes it, and says what it saw; an error of Keyloft ends it, too."""

    def __init__(self, recorder: Recorder, kind: str, key: str, does: str, given: Any) -> None:
        self._recorder = recorder
        self.kind, self.key, self.does, self.given = kind, key, does, given
        self.seen: Any = None
        self.version: int | None = None
        self.fence: int | None = None
        self._number: int | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self.does != "get":
            self._number = self._recorder.number_write()
            self._enter(ended=self._began, outcome="begun")
        return self

    def _enter(self, **more: Any) -> None:
        self._recorder.enter(
            kind=self.kind,
            key=self.key,
            does=self.does,
            given=self.given,
            began=self._began,
            number=self._number,
            **more,
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        outcome: Outcome = "done"
        if error is not None:
            if not isinstance(error, KeyloftError):
                return False
            outcome = "failed" if self.does == "get" or isinstance(error, _NOT_WRITTEN) else "unknown"
        self._enter(
            seen=self.seen,
            ended=time.monotonic(),
            version=self.version,
            fence=self.fence,
            outcome=outcome,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        return True


def read_history(folder: Path) -> list[Entered]:
    """What all workers entered. A line that was cut off by the end of its worker is left out.

    A write whose worker died before it ended may have been made.
    """
    decode = msgspec.json.Decoder(Entered).decode
    found = [decode(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().split(b"\n")[:-1]]
    ended = {(one.worker, one.number) for one in found if one.outcome != "begun"}
    whole = [one for one in found if one.outcome != "begun" or (one.worker, one.number) not in ended]
    return [replace(one, outcome="unknown") if one.outcome == "begun" else one for one in whole]
