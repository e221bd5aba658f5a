"""A bit that changed on the disk is never served as data, and a check finds it."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

import keyloft
from keyloft import ClockSetBack, DatabaseError, KeyloftError, Undecodable, admin
from keyloft.core.keys import TupleKey
from keyloft.core.records import Get, Space
from keyloft.core.values import DAMAGED
from keyloft.engines.sqlite.engine import SqliteEngine
from tests.support.examples import TIMES

ROWS = (
    "SELECT key, encoding, coalesce(value, (SELECT value FROM keyloft_tuples_large WHERE id = large)) "
    "FROM keyloft_tuples"
)
NEWEST_LOGGED = "SELECT version, base, at FROM keyloft_changes ORDER BY version DESC, part DESC LIMIT 1"


@pytest.fixture
async def stored(tmp_path: Path) -> dict[TupleKey, Any]:
    """The entries of a file without a write-ahead log, small ones of all kinds."""
    entries: dict[TupleKey, Any] = {}
    for number in range(60):
        entries["text", number] = "abc" * (number % 40)
        entries["number", number] = number**number
        entries["bytes", number] = bytes(range(number))
        entries["counter", number] = keyloft.U64(number)
    async with keyloft.open(tmp_path / "app.db", sweep_every=None) as kv:
        for key, value in entries.items():
            await kv.set(key, value, expire_in=1e6 if key[1] == 3 else None)
    return entries


async def problems(path: Path) -> int:
    """How many problems a check of a file finds."""
    try:
        return (await admin.check(path)).problems
    except KeyloftError:
        return 1  # it can't even be opened


def flipped(path: Path, rng: random.Random, times: int) -> Iterator[Path]:
    """Copies of a file, each with one bit changed behind its header."""
    content = path.read_bytes()
    copy = path.with_name("flipped.db")
    for _ in range(times):
        at, bit = rng.randrange(100, len(content)), 1 << rng.randrange(8)
        copy.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        yield copy
        for part in ("-wal", "-shm"):
            Path(f"{copy}{part}").unlink(missing_ok=True)


@pytest.mark.blocks_the_loop  # it copies files
@pytest.mark.slow
async def test_no_changed_bit_is_served_as_data(
    stored: dict[TupleKey, Any], tmp_path: Path, rng: random.Random
) -> None:
    refused = 0
    for path in flipped(tmp_path / "app.db", rng, 150 * TIMES):
        try:
            async with keyloft.open(path, sweep_every=None) as kv:
                for at_once in (False, True):
                    for key, value in stored.items():
                        try:
                            many = [key] * 6 if at_once else [key]
                            found = await kv.get_many(many) if at_once else [await kv.get(key)]
                            assert all(entry.value == value for entry in found if entry), path
                        except KeyloftError as error:
                            refused += not isinstance(error, Undecodable) or str(key) in str(error)
        except KeyloftError:
            refused += 1
    assert refused > 10


@pytest.mark.blocks_the_loop  # it copies files
async def test_a_check_finds_every_changed_row(stored: dict[TupleKey, Any], tmp_path: Path, rng: random.Random) -> None:
    async with keyloft.open(tmp_path / "app.db", sweep_every=None) as kv:
        await kv.set(("large",), rng.randbytes(20_000))
    with closing(apsw.Connection(str(tmp_path / "app.db"))) as connection:
        before = connection.execute(ROWS).fetchall()
    assert await problems(tmp_path / "app.db") == 0
    changed = 0
    for path in flipped(tmp_path / "app.db", rng, 300 * TIMES):
        try:
            with closing(apsw.Connection(str(path))) as connection:
                rows = connection.execute(ROWS).fetchall()
        except (apsw.Error, UnicodeDecodeError):
            changed += 1
            assert await problems(path)
            continue
        if rows != before:
            changed += 1
            assert await problems(path), sorted(set(rows) ^ set(before))
    assert changed > 20


async def test_a_counter_that_is_no_number_is_reported(stored: dict[TupleKey, Any], tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(
            "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, 'NOT NULL', '') "
            "WHERE name = 'keyloft_changes'"
        )
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(
            "UPDATE keyloft_changes SET at = NULL WHERE version = (SELECT max(version) FROM keyloft_changes)"
        )
    async with keyloft.open(path, sweep_every=None) as kv:
        assert (await kv.get(("text", 3))).value == stored["text", 3]
        for attempt in (kv.set(("text", 3), "new"), kv.delete_many([("text", 3), ("text", 4)])):
            with pytest.raises(DatabaseError, match=r"the newest row of keyloft_changes is damaged.*restore a backup"):
                await attempt
    assert await problems(path)


@pytest.mark.blocks_the_loop  # it copies files
async def test_no_changed_bit_of_the_counter_lets_a_version_be_given_twice(
    stored: dict[TupleKey, Any], tmp_path: Path
) -> None:
    path, copy = tmp_path / "app.db", tmp_path / "changed.db"
    with closing(apsw.Connection(str(path))) as connection:
        row: tuple[Any, ...] = connection.execute(NEWEST_LOGGED).fetchall()[0]
    last, base, at = row
    columns = last.to_bytes(2) + base.to_bytes(2) + at.to_bytes(6)
    content = path.read_bytes()
    [begin] = [at for at in range(len(content)) if content.startswith(columns, at)]
    refused = 0
    for bit in range(8 * (begin - 8), 8 * (begin + len(columns))):  # the header of the row, too
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        copy.write_bytes(changed)
        try:
            async with keyloft.open(copy, sweep_every=None) as kv:
                assert await kv.set(("text", 3), "new") > last
        except KeyloftError:
            refused += 1
            assert await problems(copy), (bit // 8 - begin, bit % 8)
        for part in ("-wal", "-shm"):
            Path(f"{copy}{part}").unlink(missing_ok=True)
    assert refused > 20


async def test_a_log_that_ends_in_the_future_is_reported_and_begun_again_by_a_restore(
    stored: dict[TupleKey, Any], tmp_path: Path
) -> None:
    path, backup = tmp_path / "app.db", tmp_path / "backup.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(
            "UPDATE keyloft_changes SET at = at + 1000000000 WHERE version = (SELECT max(version) FROM keyloft_changes)"
        )
    async with keyloft.open(path, sweep_every=None) as kv:
        with pytest.raises(ClockSetBack):
            await kv.set(("text", 3), "new")
    [finding] = (await admin.check(path)).findings
    assert finding.code == "log"
    assert "s ahead of this machine's clock, so writes are refused" in finding.what
    await admin.backup(path, backup)
    await admin.restore(backup, path, replace=True)
    assert not await problems(path)
    async with keyloft.open(path, sweep_every=None) as kv:
        await kv.set(("text", 3), "new")


async def test_a_row_with_a_column_of_another_type_can_be_replaced_and_deleted(
    stored: dict[TupleKey, Any], tmp_path: Path
) -> None:
    path = tmp_path / "app.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("UPDATE keyloft_tuples SET expires_at = x'0102' WHERE value = CAST('\"abcabc\"' AS BLOB)")
        assert connection.changes() == 2
    async with keyloft.open(path, sweep_every=None) as kv:
        await kv.atomic().set(("text", 2), "again").sum(("counter", 2), keyloft.U64(1)).commit()
        assert (await kv.get(("text", 2))).value == "again"
        await kv.delete_many([("text", 42), ("text", 43)])
        assert not (await kv.get(("text", 42))).exists


async def test_one_damaged_row_hides_no_other(stored: dict[TupleKey, Any], tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(
            "UPDATE keyloft_tuples SET value = CAST(replace(value, 'abcabc', 'abcabd') AS BLOB) "
            "WHERE instr(value, CAST('abcabc' AS BLOB))"
        )
    async with keyloft.open(path, sweep_every=None) as kv:
        engine = kv.engine
        assert isinstance(engine, SqliteEngine)
        keys = [key for key in stored if key[0] == "text"]
        with pytest.raises(
            Undecodable, match=r"\('text', 2\) is damaged: the stored value does not match its checksum"
        ):
            await kv.get(("text", 2))
        records = await engine.read(*[Get(Space.TUPLES, keyloft.core.keys.encode(key)) for key in keys])
        damaged = [record.encoding == DAMAGED for record in records if record is not None]
        assert damaged == [number % 40 >= 2 for number in range(60)]
        assert (await kv.get(("text", 1))).value == "abc"
        await kv.set(("text", 2), "again")
        assert (await kv.get(("text", 2))).value == "again"
    assert await problems(path) == sum(damaged) - 1


async def test_a_watch_that_is_continued_after_a_damaged_entry_misses_none_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path, sweep_every=None) as kv, asyncio.timeout(60):
        watch = kv.watch(prefix=("k",))
        version = await kv.set_many({("k", number): f"value {number}" for number in range(5)})
        with closing(apsw.Connection(str(path))) as connection:
            connection.execute(
                "UPDATE keyloft_tuples SET value = CAST('\"value 3\"' AS BLOB) "
                "WHERE value = CAST('\"value 2\"' AS BLOB)"
            )
        seen: list[TupleKey] = []
        while len(seen) < 5:
            try:
                seen += [entry.key for entry in await anext(watch)]
            except Undecodable:
                seen.append(("damaged",))
            if len(seen) < 5:
                assert (watch.reported_to or 0) < version, seen
        assert seen == [("k", 0), ("k", 1), ("damaged",), ("k", 3), ("k", 4)]
        assert watch.reported_to == version


@pytest.mark.parametrize(("size", "table"), [(100, "keyloft_tuples"), (20_000, "keyloft_tuples_large")])
async def test_bytes_that_became_a_text_are_damage(size: int, table: str, tmp_path: Path) -> None:
    """One bit of a row's header tells bytes from a text: of the same length, and rarely UTF-8."""
    path = tmp_path / "app.db"
    async with keyloft.open(path, sweep_every=None) as kv:
        await kv.set_many({("k", number): b"\xff" * size for number in range(6)})
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(
            f"UPDATE {table} SET value = CAST(value AS TEXT) WHERE key = ?", (keyloft.core.keys.encode(("k", 4)),)
        )
    others = [("k", number) for number in (0, 1, 2, 3, 5)]
    async with keyloft.open(path, sweep_every=None) as kv:
        for call in (lambda: kv.get(("k", 4)), lambda: kv.get_many([*others, ("k", 4)])):
            with pytest.raises(Undecodable, match=r"\('k', 4\) is damaged"):
                await call()
        assert [entry.value for entry in await kv.get_many(others)] == [b"\xff" * size] * 5
        with pytest.raises(KeyloftError):
            await kv.list()
    with keyloft.open_sync(path, sweep_every=None) as sync:
        with pytest.raises(Undecodable, match=r"\('k', 4\) is damaged"):
            sync.get(("k", 4))
        async with keyloft.open(path, sweep_every=None) as other:
            await other.set(("other",), 1)
        sync.set(("k", 1), 1)  # the get that failed keeps no old view open
        with pytest.raises(KeyloftError):
            sync.list().all()
    assert await problems(path)


async def test_a_row_written_by_hand_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 1)
    shutil.copy(path, tmp_path / "copy.db")
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("UPDATE keyloft_tuples SET value = x'37', checksum = NULL")
    assert await problems(path) == 0
    async with keyloft.open(path) as kv:
        assert (await kv.get(("k",))).value == 7
        assert await kv.get_many([("k",)] * 6) == [await kv.get(("k",))] * 6
