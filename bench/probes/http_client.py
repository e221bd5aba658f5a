"""Keyloft's client of the HTTP API beside a bare one: lone gets, and many at once, from a real `keyloft serve`."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter, process_time

import aiohttp

import keyloft
from bench.harness.contest import same
from bench.harness.figures import CPU, PERCENTS, RATE, Figure, Reached, Row, Verdict, compare, percentile
from bench.probes.http_service import TOKEN, serving

AT_ONCE = 64
BARE, CLIENT = "aiohttp, plain GET", "Keyloft's client, get"

_VALUE = {"name": "Alice", "score": 42}


async def gets(folder: Path, rounds: int, seconds: float, *, at_once: int = 1) -> Row:
    """Gets of the same keys by both, in turns; the next ones are made when the last have been answered."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        async with serving(Path(own)) as (_, port):
            url = f"http://127.0.0.1:{port}"
            async with (
                keyloft.open(url, token=TOKEN) as kv,
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
            ):
                await kv.set_many({("bench", number): _VALUE for number in range(at_once)})

                async def bare(number: int) -> None:
                    async with session.get(f"{url}/v1/kv/bench/={number}") as response:
                        await response.read()
                        same(response.status, 200)

                async def by_client(number: int) -> None:
                    same((await kv.get(("bench", number))).value, _VALUE)

                found = await _in_turns({BARE: bare, CLIENT: by_client}, rounds, seconds, at_once)
    return Row(
        "a lone get over HTTP, by the client" if at_once == 1 else f"{at_once} gets at once over HTTP, by the client",
        arms=tuple(found.values()),
        base=BARE,
        verdicts=_verdicts(found, at_once),
    )


def _verdicts(found: dict[str, Reached], at_once: int) -> tuple[Verdict, ...]:
    return (compare(found[CLIENT].rate, found[BARE].rate, 0.7),) if at_once == 1 else ()


async def _in_turns(
    arms: dict[str, Callable[[int], Awaitable[None]]], rounds: int, seconds: float, at_once: int
) -> dict[str, Reached]:
    figures: dict[str, list[tuple[list[float], float, float]]] = {name: [] for name in arms}
    for arm in arms.values():
        await _made(arm, min(seconds, 0.5), at_once)
    for _ in range(rounds):
        for name, arm in arms.items():
            figures[name].append(await _made(arm, seconds, at_once))
    return {name: _reached(name, measured, at_once) for name, measured in figures.items()}


async def _made(
    get: Callable[[int], Awaitable[None]], seconds: float, at_once: int
) -> tuple[list[float], float, float]:
    """The seconds that each step took, all together, and of CPU time."""
    times: list[float] = []
    began, before = perf_counter(), process_time()
    while (now := perf_counter()) - began < seconds:
        if at_once == 1:
            await get(0)
        else:
            await asyncio.gather(*map(get, range(at_once)))
        times.append(perf_counter() - now)
    return times, perf_counter() - began, process_time() - before


def _reached(name: str, rounds: list[tuple[list[float], float, float]], at_once: int) -> Reached:
    rates = tuple([at_once * len(times) / seconds for times, seconds, _ in rounds])
    figures = {RATE: Figure(name, "/s", rates)}
    for percent in PERCENTS:
        steps = tuple([1000 * percentile(times, percent) for times, _, _ in rounds])
        figures[f"p{percent}"] = Figure(f"{name}, p{percent}", "ms", steps)
    used = tuple([1e6 * cpu / (at_once * len(times)) for times, _, cpu in rounds])
    figures[CPU] = Figure(f"{name}, CPU", "µs", used)
    return Reached(name, figures, "")
