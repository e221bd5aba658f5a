"""What a worker did and saw, one line of JSON per call; all processes of a machine share its monotonic clock."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec
from msgspec import Struct

from keyloft import Busy, KeyloftError, ReadOnly, Unreachable

Outcome: TypeAlias = Literal["done", "unknown", "failed"]
"""`unknown` is a write that may have been made; `failed` is a read, or a write that certainly was not made."""

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


class Recorder:
    """Writes the calls of one worker to a file."""

    def __init__(self, file: Path, worker: str) -> None:
        self._file = file.open("ab", buffering=0)
        self.worker = worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def call(self, kind: str, key: str, does: str, given: Any = None) -> "CallInProgress":
        return CallInProgress(self, kind, key, does, given)

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

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        outcome: Outcome = "done"
        if error is not None:
            if not isinstance(error, KeyloftError):
                return False
            outcome = "failed" if self.does == "get" or isinstance(error, _NOT_WRITTEN) else "unknown"
        self._recorder.enter(
            kind=self.kind,
            key=self.key,
            does=self.does,
            given=self.given,
            seen=self.seen,
            began=self._began,
            ended=time.monotonic(),
            version=self.version,
            fence=self.fence,
            outcome=outcome,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        return True


def read_history(folder: Path) -> list[Entered]:
    """What all workers entered. A line that was cut off by the end of its worker is left out."""
    decode = msgspec.json.Decoder(Entered).decode
    return [decode(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().split(b"\n")[:-1]]
