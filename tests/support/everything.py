"""Databases with something of every kind in them, and all that is stored in one."""

import asyncio
import io
import time
from pathlib import Path
from typing import Any, Final

import apsw
import pytest

import keyloft
from keyloft import U64
from keyloft.core.maintenance import EVERYTHING
from keyloft.engines import open_maintenance
from keyloft.plugins import BotDatabase
from keyloft.semantic import Semantics, SemanticStore
from tools.postgres import connected, query

WEB = "tenant/acme/project/web"
API = "tenant/acme/project/api"
_FLAG = Semantics("feature_flag")


async def fill(url: str) -> None:
    """Store entries of all faces and encodings; one of them has expired, others will within the hour."""
    async with keyloft.open(url, sweep_every=None) as kv:
        await kv.set(("users", "alice"), {"name": "Alice"})
        await kv.set(("users", 5), b"\x00\xff", expire_in=1800)
        await kv.set(("visits",), U64(7), expire_in=10 * 86_400)
        await kv.set(("users", "essay"), "words " * 1000)
        await kv.set(("gone",), 1, expire_in=0.001)
        async with SemanticStore(kv, sweep_every=None) as store:
            for name in ("a", "b", "c"):
                await _put(store, f"{WEB}/flags/{name}", _FLAG, request_id=f"request-{name}")
            await _put(store, f"{WEB}/flags/a", _FLAG)
            await store.delete(f"{WEB}/flags/b", expected_version="*", writer="tests:fill")
            await _put(store, f"{API}/locks/nightly", Semantics("lock", ttl_seconds=600))
    async with keyloft.open(url, name="shop", sweep_every=None) as shop:
        await shop.set(("users", "alice"), {"cart": [1, 2]})
    plugins = BotDatabase(url if "://" in url else f"sqlite:///{url}")
    await plugins.kv_set("trivia", "score", {"points": 100})
    await plugins.kv_set("trivia", "näme/é", "x", ttl_seconds=600)
    await plugins.kv_set("quotes", "1", None)
    await plugins.close()


async def _put(store: SemanticStore, key: str, semantics: Semantics, request_id: str | None = None) -> None:
    await store.put(key, True, expected_version="*", writer="tests:fill", semantics=semantics, request_id=request_id)


def filled(url: str) -> None:
    asyncio.run(fill(url))


class FilledCopies:
    """Fills databases with copies of what `fill` has stored once: that takes a fraction of the time."""

    _TABLES: Final = (
        "keyloft_tuples",
        "keyloft_semantic",
        "plugin_kv_storage",
        "keyloft_changes",
        "keyloft_version_counter",
    )

    _KEPT_SECONDS: Final = 200.0
    """Entries expire 600 s after they were stored."""

    def __init__(self) -> None:
        self._made_at = 0.0
        self._file: bytes | None = None
        self._tables: dict[str, bytes] | None = None

    def fill(self, url: str) -> None:
        """Fill an empty database; on PostgreSQL, it has Keyloft's tables."""
        if time.monotonic() - self._made_at > self._KEPT_SECONDS:
            self._made_at, self._file, self._tables = time.monotonic(), None, None
        if url.startswith("etcd:"):
            filled(url)
        elif "://" in url:
            self._copy_tables(url)
        elif self._file is None:
            filled(url)
            self._file = Path(url).read_bytes()
        else:
            Path(url).write_bytes(self._file)

    def _copy_tables(self, url: str) -> None:
        if self._tables is None:
            filled(url)
            self._tables = connected(url, self._read_tables)
        else:
            connected(url, self._write_tables)

    async def _read_tables(self, connection: Any) -> dict[str, bytes]:
        read = {}
        for table in self._TABLES:
            rows = io.BytesIO()
            await connection.copy_from_table(table, output=rows, format="binary")
            read[table] = rows.getvalue()
        return read

    async def _write_tables(self, connection: Any) -> None:
        assert self._tables is not None
        for table, rows in self._tables.items():
            await connection.execute(f"DELETE FROM {table}")
            await connection.copy_to_table(table, source=io.BytesIO(rows), format="binary")


def stored(url: str | Path) -> list[Any]:
    """All rows of a database with all that is stored of them, and its clock."""

    async def read() -> list[Any]:
        maintenance = await open_maintenance(str(url))
        try:
            async with maintenance.snapshot() as snapshot:
                return [
                    snapshot.version,
                    *[row for part in EVERYTHING async for rows in snapshot.rows(part) for row in rows],
                ]
        finally:
            await maintenance.aclose()

    return asyncio.run(read())


def run_sql(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run a statement on a database; a binary literal is written x'00'. On etcd, the test is skipped."""
    if url.startswith("etcd:"):
        pytest.skip("etcd has no SQL")
    if "://" in url:
        return query(url, sql.replace("x'", "'\\x"))
    connection = apsw.Connection(url)
    try:
        return list(connection.execute(sql).fetchall())
    finally:
        connection.close()
