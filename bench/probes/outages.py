"""For how long a store can't be written, or read, after a node of its cluster died."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

import keyloft
from bench.harness.figures import Figure, Row, Verdict, within

_CALLERS: Final = 8
_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.005


class Outage(Struct, frozen=True):
    """The longest time between two successes after a fault, in seconds."""

    writes: float
    reads: float


async def outage(url: str, fault: Callable[[], Any], seconds: float, **options: Any) -> Outage:
    """Reads and writes for so many seconds after a fault, and until both have succeeded again.

    Args:
        url: Of the store.
        fault: What kills a node; it is called on a thread.
        seconds: How long to go on.
        options: Of `keyloft.open`.
    """
    written, read = list[float](), list[float]()
    over = asyncio.Event()
    async with keyloft.open(url, patience=_PATIENCE_SECONDS, sweep_every=None, **options) as kv:

        async def call(use: Callable[[], Awaitable[object]], done: list[float]) -> None:
            while not over.is_set():
                # What a caller sees of a fault is another question: here, only when it can go on counts.
                with suppress(keyloft.DatabaseError):
                    await use()
                    done.append(time.monotonic())
                await asyncio.sleep(_PAUSE_SECONDS)

        def writing(number: int) -> Callable[[], Awaitable[object]]:
            return lambda: kv.set(("outage", number), number)

        def reading(number: int) -> Callable[[], Awaitable[object]]:
            return lambda: kv.get(("outage", number))

        callers = [asyncio.create_task(call(writing(number), written)) for number in range(_CALLERS)]
        callers += [asyncio.create_task(call(reading(number), read)) for number in range(_CALLERS)]
        await _until(lambda: bool(written and read))
        began = time.monotonic()
        await asyncio.to_thread(fault)
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        await _until(lambda: written[-1] > ended and read[-1] > ended)
        over.set()
        await asyncio.gather(*callers)
    return Outage(_longest(written, began), _longest(read, began))


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(2 * _PATIENCE_SECONDS):
        while not is_so():  # noqa: ASYNC110 (moments of many callers)
            await asyncio.sleep(_PAUSE_SECONDS)


def _longest(done: list[float], began: float) -> float:
    return max(later - earlier for earlier, later in pairwise([began, *[one for one in done if one > began]]))


def outage_row(title: str, found: list[Outage], *, writes: float | None, reads: float | None) -> Row:
    """The figures of several deaths, and what they must keep within."""
    figures = {
        "writes": Figure("longest time without a write", "s", tuple(one.writes for one in found)),
        "reads": Figure("longest time without a read", "s", tuple(one.reads for one in found)),
    }
    verdicts: list[Verdict] = []
    for what, bar in (("writes", writes), ("reads", reads)):
        if bar is not None:
            verdicts.append(within(figures[what], bar))
    shown = tuple(figure for what, figure in figures.items() if (writes if what == "writes" else reads) is None)
    return Row(title, figures=shown, verdicts=tuple(verdicts))
