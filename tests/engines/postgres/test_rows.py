"""What PostgreSQL stores: the largest values, the longest keys, unusual texts and times, and rows written by hand."""

import logging
import random
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft import InvalidKey, KeyloftError, ManualClock, Store, limits
from keyloft.core.keys import encode
from keyloft.plugins import BotDatabase
from tools.postgres import query

_INSERT = "INSERT INTO plugin_kv_storage (plugin_name, key, value_json, expires_at) VALUES ('trivia', '{}', '1', {})"


@pytest.fixture
def postgres_url(emptied_postgres_url: str) -> str:
    """With Keyloft's tables, which takes less time: no test here is about making them."""
    return emptied_postgres_url


@pytest.fixture
async def kv(postgres_url: str, clock: ManualClock) -> AsyncIterator[Store]:
    async with keyloft.open(postgres_url, clock=clock, sweep_every=None) as store:
        yield store


@pytest.fixture
async def db(postgres_url: str, clock: ManualClock) -> AsyncIterator[BotDatabase]:
    db = BotDatabase(postgres_url, clock=clock)
    await db.create_tables()
    yield db
    await db.close()


class TestSizes:
    async def test_the_largest_value_under_the_longest_key(self, kv: Store) -> None:
        # Random, so that nothing of it is compressed away: an index row of PostgreSQL has 2,704 bytes at most.
        rng = random.Random(7)
        longest = (bytes(rng.choices(range(1, 256), k=limits.KEY_BYTES - 2)),)
        assert len(encode(longest)) == limits.KEY_BYTES
        value = rng.randbytes(limits.VALUE_BYTES)
        await kv.set(longest, value, expire_in=60)
        assert (await kv.get(longest)).value == value
        await kv.atomic().check(await kv.get(longest)).set(longest, value[::-1]).commit()
        assert [entry.value async for entry in kv.list()] == [value[::-1]]
        assert await kv.touch(longest, expire_in=60)
        assert await kv.delete(longest)

    async def test_many_of_the_longest_keys(self, kv: Store) -> None:
        rng = random.Random(8)
        keys = sorted((bytes(rng.choices(range(1, 256), k=limits.KEY_BYTES - 2)),) for _ in range(100))
        await kv.set_many(dict.fromkeys(keys, 1))
        assert [key async for key in kv.keys()] == keys
        assert await kv.delete_many(keys) == 100

    async def test_the_longest_names_and_keys_of_plugins(self, db: BotDatabase) -> None:
        rng = random.Random(9)
        plugin = "x" * limits.PLUGIN_NAME_CHARACTERS
        keys = sorted("".join(chr(rng.randrange(0x10000, 0x110000)) for _ in range(255)) for _ in range(50))
        for key in keys:
            await db.kv_set(plugin, key, "é" * 32_767)
        assert (await db.kv_list(plugin))["keys"] == keys
        assert (await db.kv_list(plugin, prefix=keys[7]))["keys"] == [keys[7]]
        assert (await db.kv_list(plugin, after=keys[7]))["keys"] == keys[8:]
        assert (await db.kv_get(plugin, keys[3]))["value"] == "é" * 32_767
        assert await db.kv_delete(plugin, keys[3])

    async def test_the_longest_times(self, postgres_url: str, kv: Store, db: BotDatabase, clock: ManualClock) -> None:
        await db.kv_set("trivia", "k", 1, ttl_seconds=limits.LONGEST_TTL_SECONDS)
        due = datetime.fromtimestamp(clock.now() / 1000, UTC) + timedelta(seconds=limits.LONGEST_TTL_SECONDS)
        assert query(postgres_url, "SELECT expires_at FROM plugin_kv_storage") == [(due,)]
        await kv.set(("k",), 1, expire_in=limits.LONGEST_EXPIRY_SECONDS)
        expires_at = (await kv.get(("k",))).expires_at
        clock.advance(limits.LONGEST_TTL_SECONDS - 0.001)
        assert await db.kv_get("trivia", "k") == {"exists": True, "value": 1}
        clock.advance(0.001)
        assert await db.kv_get("trivia", "k") == {"exists": False}
        clock.advance(limits.LONGEST_EXPIRY_SECONDS - limits.LONGEST_TTL_SECONDS - 0.001)
        assert (await kv.get(("k",))).expires_at == expires_at
        clock.advance(0.001)
        assert not (await kv.get(("k",))).exists
        assert await db.kv_cleanup_expired() == 1


class TestText:
    @pytest.mark.parametrize("text", ["a\x00b", "\x00", "\ud800", "a\udfffb"], ids=ascii)
    async def test_what_the_server_can_not_hold_never_gets_there(self, db: BotDatabase, kv: Store, text: str) -> None:
        for call in (
            lambda: db.kv_set("trivia", text, 1),
            lambda: db.kv_get("trivia", text),
            lambda: db.kv_delete("trivia", text),
            lambda: db.kv_list("trivia", prefix=text),
            lambda: db.kv_list("trivia", after=text),
            lambda: db.kv_set(text, "k", 1),
            lambda: db.kv_get(text, "k"),
            lambda: db.kv_delete(text, "k"),
            lambda: db.kv_list(text),
        ):
            with pytest.raises(KeyloftError, match=r"NUL|surrogate|plugin_name") as raised:
                await call()
            assert isinstance(raised.value, ValueError)
        assert (await db.kv_list("trivia"))["count"] == 0

    async def test_a_nul_is_part_of_a_tuple_key_and_a_lone_surrogate_is_not(self, kv: Store) -> None:
        await kv.set(("a\x00b", b"\x00"), "\x00")
        assert (await kv.get(("a\x00b", b"\x00"))).value == "\x00"
        for call in (kv.set(("\ud800",), 1), kv.get(("a\udfff",)), kv.delete(("\ud800",)), kv.count(("\ud800",))):
            with pytest.raises(InvalidKey, match="surrogate"):
                await call

    async def test_a_nul_in_a_plugins_value_comes_back(self, db: BotDatabase) -> None:
        await db.kv_set("trivia", "k", {"a\x00": "\x00"})
        assert (await db.kv_get("trivia", "k"))["value"] == {"a\x00": "\x00"}

    async def test_a_prefix_is_no_pattern(self, db: BotDatabase) -> None:
        for key in ("user_1", "userX1", "user%1", r"user\1", "USER_1", "user"):
            await db.kv_set("trivia", key, 1)
        for prefix, found in {"user_": ["user_1"], "user%": ["user%1"], "user\\": [r"user\1"], "_": []}.items():
            assert (await db.kv_list("trivia", prefix=prefix))["keys"] == found


@pytest.fixture
def english_url(postgres_server: str) -> Iterator[str]:
    """A database that sorts text as English dictionaries do, where PostgreSQL was built with them."""
    name = f"keyloft_{uuid4().hex}"
    try:
        query(postgres_server, f"CREATE DATABASE {name} TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'")
    except asyncpg.PostgresError:
        query(postgres_server, f"CREATE DATABASE {name}")
    yield re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", postgres_server)
    query(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


async def test_text_keys_sort_as_in_sqlite_whatever_the_databases_language(english_url: str, tmp_path: Path) -> None:
    words = ["a", "B", "b", "A", "Ä", "ä", "a\u0308", "z", "Z", "é", "e", "ß", "ss", "😀", "\uffff", "\U00010000"]
    words += ["Жук", "жук", "א", "ا", "日本", "にほん", "ニホン", "한국", "𐍈", "_", "-", " ", "~", "1", "10", "2", "٣"]
    words += ["a b", "ab", "a-b", "a_b", "co-op", "coop", "\x01", "\x7f", "\u0080", "i", "I", "\u0131", "İ"]
    listed: list[Any] = []
    for url in (english_url, str(tmp_path / "bot.db")):
        db = BotDatabase(url)
        for word in words:
            await db.kv_set("trivia", word, 1)
        pages = [
            await db.kv_list("trivia", prefix=prefix, after=after) for prefix in ("", "a") for after in (None, "a")
        ]
        listed.append([page["keys"] for page in pages])
        await db.close()
    assert listed[0] == listed[1]
    assert listed[0][0] == sorted(words)


class TestRowsByHand:
    async def test_a_row_inserted_by_hand_counts_like_any_other(self, db: BotDatabase, postgres_url: str) -> None:
        query(postgres_url, _INSERT.format("k", "NULL"))
        assert await db.kv_get("trivia", "k") == {"exists": True, "value": 1}
        assert (await db.kv_list("trivia"))["keys"] == ["k"]
        await db.kv_set("trivia", "k", 2)
        assert await db.kv_get("trivia", "k") == {"exists": True, "value": 2}
        query(postgres_url, "UPDATE plugin_kv_storage SET version = 0")
        assert await db.kv_delete("trivia", "k")
        assert not await db.kv_delete("trivia", "k")

    async def test_what_expires_never_or_hardly_ever_is_there(self, db: BotDatabase, postgres_url: str) -> None:
        for due in ("infinity", "294276-12-31 23:59:59.999999Z", "9999-12-31"):
            query(postgres_url, _INSERT.format("k", f"'{due}'"))
            assert await db.kv_get("trivia", "k") == {"exists": True, "value": 1}, due
            assert (await db.kv_list("trivia"))["keys"] == ["k"]
            assert await db.kv_cleanup_expired() == 0
            assert await db.kv_delete("trivia", "k")

    async def test_what_expired_long_ago_is_gone(self, db: BotDatabase, postgres_url: str) -> None:
        for due in ("-infinity", "4713-01-01 BC", "1969-07-20", "epoch"):
            for key in ("k", "other"):
                query(postgres_url, _INSERT.format(key, f"'{due}'"))
            assert await db.kv_get("trivia", "k") == {"exists": False}, due
            assert (await db.kv_list("trivia"))["keys"] == []
            assert not await db.kv_delete("trivia", "k")
            await db.kv_set("trivia", "k", 2)
            assert (await db.kv_list("trivia"))["keys"] == ["k"]
            fresh = "SELECT created_at = updated_at FROM plugin_kv_storage WHERE key = 'k'"
            assert query(postgres_url, fresh) == [(True,)]
            assert await db.kv_cleanup_expired() == 1
            assert await db.kv_delete("trivia", "k")

    async def test_a_microsecond_counts_until_the_next_millisecond(
        self, db: BotDatabase, postgres_url: str, clock: ManualClock
    ) -> None:
        now = datetime.fromtimestamp(clock.now() / 1000, UTC)
        for key, due in {
            "before": now - timedelta(microseconds=1),
            "at": now,
            "after": now + timedelta(microseconds=1),
            "next": now + timedelta(milliseconds=1),
        }.items():
            query(postgres_url, _INSERT.format(key, f"'{due.isoformat()}'"))
        assert (await db.kv_list("trivia"))["keys"] == ["after", "next"]
        assert [(await db.kv_get("trivia", key))["exists"] for key in ("before", "at", "after")] == [False, False, True]
        assert not await db.kv_delete("trivia", "at")
        clock.advance(0.001)
        assert (await db.kv_list("trivia"))["keys"] == []
        assert await db.kv_cleanup_expired() == 4

    async def test_what_is_no_json_does_not_exist_and_is_logged(
        self, db: BotDatabase, postgres_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for key, value in {"bad": "secret {", "nan": "NaN", "empty": "", "good": '{"é": [1, 2.5]}'}.items():
            query(postgres_url, _INSERT.format(key, "NULL").replace("'1'", f"'{value}'"))
        for key in ("bad", "nan", "empty"):
            assert await db.kv_get("trivia", key) == {"exists": False}
        assert await db.kv_get("trivia", "good") == {"exists": True, "value": {"é": [1, 2.5]}}
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 3
        assert "secret" not in caplog.text
