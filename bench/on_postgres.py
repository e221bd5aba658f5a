"""Keyloft on PostgreSQL against asyncpg used the ordinary way, row by row: `scripts/bench postgres`.

Everybody uses the same server at a time of his own, over a Unix socket and on uvloop: one of our own that waits for the
disk, as servers do by default, or the one that KEYLOFT_TEST_POSTGRES names.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import postgres_ours as ours
from bench import postgres_peers as peers
from bench.data import GROUP
from bench.disk import syncing
from bench.harness import Arm, Figure, Row, compare, race, ratio
from tools import postgres

WORKERS = 64


class Scale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    share: float
    """Of the operations of a full run's round."""


FULL = Scale(100_000, 9, 1.0)
QUICK = Scale(20_000, 3, 0.25)


class Place(Struct, frozen=True):
    """A server to measure on."""

    url: str
    is_named: bool
    """Whether it is somebody else's, and its disk may be elsewhere."""

    def software(self) -> dict[str, str]:
        """What the figures depend on, beside what all benchmarks have in common.

        Raises:
            SystemExit: The server does not wait for the disk, so that its figures would say nothing.
        """
        names = ("server_version", "fsync", "synchronous_commit", "wal_sync_method", "shared_buffers")
        settings = {name: postgres.query(self.url, f"SHOW {name}")[0][0] for name in names}
        if settings["fsync"] != "on" or settings["synchronous_commit"] == "off":
            raise SystemExit(
                "this server acknowledges commits before they are on disk: set fsync and synchronous_commit"
            )
        shown = ", ".join(f"{name} {setting}" for name, setting in settings.items() if name != "server_version")
        return {
            "server": f"PostgreSQL {settings['server_version']}, {shown}",
            "asyncpg": version("asyncpg"),
            "uvloop": version("uvloop"),
        }


@contextmanager
def serving(folder: Path) -> Iterator[Place]:
    """The server that the environment names, or one whose files are in a folder of ours."""
    if named := postgres.named_server():
        yield Place(named, is_named=True)
        return
    folder.chmod(0o711)  # the server may have to run as another user
    with postgres.own_server(durable=True, within=folder) as url:
        yield Place(url, is_named=False)


@contextmanager
def rows(scale: Scale, folder: Path, place: Place) -> Iterator[dict[str, Callable[[], Row]]]:
    """What there is to measure, by name."""
    with ExitStack() as closing:
        measure = _Measure(scale, folder, place.url, closing)
        yield {
            **({} if place.is_named else {"fsync": lambda: syncing(folder, scale.rounds)}),
            "get": measure.gets,
            "set": measure.sets,
            "get-lone": measure.lone_gets,
            "set-lone": measure.lone_sets,
            "list": measure.lists,
            "get_many": measure.many_gets,
            "atomic": measure.swaps,
            "watch": measure.watches,
        }


class _Measure:
    def __init__(self, scale: Scale, folder: Path, server: str, closing: ExitStack) -> None:
        self._stored = scale.stored
        self._rounds = scale.rounds
        self._share = scale.share
        self._folder = folder
        self._server = server
        self._closing = closing

    @cached_property
    def _to_read(self) -> str:
        return self._filled()

    @cached_property
    def _to_write(self) -> str:
        return self._filled()

    def _filled(self) -> str:
        """A database with the same keys and values in Keyloft's tables and in that of the ordinary way."""
        url = self._closing.enter_context(postgres.fresh_database(self._server))
        asyncio.run(ours.fill(url, self._stored))
        asyncio.run(peers.fill(url, self._stored))
        postgres.query(url, "VACUUM ANALYZE")
        return url

    def _operations(self, operations: int) -> int:
        return max(1, int(operations * self._share))

    def _run(self, arms: Sequence[Arm[Any, Any, Any]]) -> dict[str, Figure]:
        return race(arms, self._folder, self._rounds)

    def gets(self) -> Row:
        url, stored = self._to_read, self._stored
        found = self._run(
            [
                ours.getting(url, stored, self._operations(16_000), WORKERS),
                peers.getting(url, stored, self._operations(4000), WORKERS),
                peers.getting(url, stored, self._operations(4000), WORKERS, name=peers.WITHOUT_RESET),
                ours.getting_of_plugins(url, stored, self._operations(16_000), WORKERS),
            ]
        )
        return _row(f"get, {WORKERS} concurrent", found, at_least=5)

    def sets(self) -> Row:
        url, stored = self._to_write, self._stored
        found = self._run(
            [
                ours.setting(url, stored, self._operations(8000), WORKERS),
                peers.setting(url, stored, self._operations(2000), WORKERS),
                peers.setting(url, stored, self._operations(2000), WORKERS, name=peers.WITHOUT_RESET),
                ours.setting_of_plugins(url, stored, self._operations(8000), WORKERS),
            ]
        )
        return _row(f"durable set, {WORKERS} concurrent", found, at_least=3)

    def lone_gets(self) -> Row:
        url, stored, operations = self._to_read, self._stored, self._operations(2000)
        found = self._run(
            [
                ours.getting(url, stored, operations, 1),
                peers.getting(url, stored, operations, 1),
                peers.getting(url, stored, operations, 1, name=peers.WITHOUT_RESET),
                peers.getting_held(url, stored, operations),
            ]
        )
        return _row("get, one after the other", found, at_least=1)

    def lone_sets(self) -> Row:
        url, stored, operations = self._to_write, self._stored, self._operations(800)
        found = self._run(
            [
                ours.setting(url, stored, operations, 1),
                peers.setting(url, stored, operations, 1),
                peers.setting(url, stored, operations, 1, name=peers.WITHOUT_RESET),
            ]
        )
        return _row("durable set, one after the other", found)

    def lists(self) -> Row:
        url, stored, operations = self._to_read, self._stored, self._operations(120)
        found = self._run(
            [
                ours.listing(url, stored, operations),
                peers.listing(url, stored, operations),
                peers.listing(url, stored, operations, name=peers.WITHOUT_RESET),
                peers.listing_held(url, stored, operations),
            ]
        )
        return _row(f"list of {GROUP:,} entries with values, one after the other", found, at_least=1)

    def many_gets(self) -> Row:
        url, stored, operations = self._to_read, self._stored, self._operations(1000)
        found = self._run([ours.getting_many(url, stored, operations), peers.getting_many(url, stored, operations)])
        return _row("get_many of 10, one after the other", found)

    def swaps(self) -> Row:
        url, stored = self._to_write, self._stored
        found = self._run(
            [
                ours.swapping(url, stored, self._operations(4000), WORKERS),
                peers.swapping(url, stored, self._operations(1000), WORKERS),
            ]
        )
        return _row(f"durable check-and-set of different keys, {WORKERS} concurrent", found)

    def watches(self) -> Row:
        url, operations = self._to_write, self._operations(500)
        found = self._run([ours.watching(url, operations), peers.hearing(url, operations)])
        return Row("from the call of a durable set until a watch elsewhere shows it", tuple(found.values()))


def _row(title: str, found: dict[str, Figure], at_least: float | None = None) -> Row:
    """Keyloft against each of the others; against the ordinary way, with a bar."""
    keyloft = found[ours.NAME]
    others = [name for name in (peers.WITHOUT_RESET, peers.HELD) if name in found]
    if at_least is None:
        others.insert(0, peers.NAME)
    verdicts = () if at_least is None else (compare(keyloft, found[peers.NAME], at_least),)
    return Row(title, (*found.values(), *(ratio(keyloft, found[name]) for name in others)), verdicts)
