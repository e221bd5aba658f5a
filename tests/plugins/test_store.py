"""BotDatabase: five methods on a file, in memory, and under each name that a database can have."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import keyloft
from keyloft import HistoryGone, ManualClock, limits
from keyloft.core import values
from keyloft.core.records import Scan, Space
from keyloft.plugins import BotDatabase
from tests.support.examples import examples
from tests.support.postgres import IN_MEMORY, database_url


@pytest.fixture(params=["memory", "sqlite file", "sqlite in memory", "postgresql", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def db(url: str | None, clock: ManualClock) -> AsyncIterator[BotDatabase]:
    db = BotDatabase(url, clock=clock)
    await db.create_tables()
    yield db
    await db.close()


class TestUse:
    async def test_a_list_can_be_awaited_and_iterated(self, db: BotDatabase) -> None:
        keys = [f"{number:04}" for number in range(1100)]
        await asyncio.gather(*[db.kv_set("test", key, 1) for key in keys])
        page = await db.kv_list("test")
        assert (page["keys"], page["count"], page["truncated"]) == (keys[:1000], 1000, True)
        assert [key async for key in db.kv_list("test")] == keys
        assert [key async for key in db.kv_list("test", "00", 7)] == keys[:7]
        assert [key async for key in db.kv_list("test", after="1097")] == ["1098", "1099"]

    async def test_it_is_a_context_manager_that_shows_where_it_points_and_no_password(self, tmp_path: Path) -> None:
        async with BotDatabase(tmp_path / "bot.db") as db:
            assert repr(db) == f"<BotDatabase at {tmp_path}/bot.db, open>"
        assert repr(db) == f"<BotDatabase at {tmp_path}/bot.db, closed>"
        with pytest.raises(keyloft.Closed):
            await db.kv_get("test", "k")
        for url in ("postgresql://me:secret@host/app", "postgres:/me:secret@host/app"):
            assert "secret" not in repr(BotDatabase(url))


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            {"key": "value"},
            [1, 2, 3],
            "hello world",
            42,
            3.14,
            True,
            False,
            None,
            {"users": [{"name": "Ada", "n": 95}]},
        ],
        ids=repr,
    )
    async def test_every_type_is_read_back(self, db: BotDatabase, value: Any) -> None:
        assert await db.kv_set("test", "k", value) is None  # type: ignore[func-returns-value]
        found = await db.kv_get("test", "k")
        assert found == {"exists": True, "value": value}
        assert type(found["value"]) is type(value)

    @pytest.mark.parametrize("levels", [129, 899, 900])
    async def test_a_value_of_900_levels_is_read_back(self, db: BotDatabase, levels: int) -> None:
        data = "[" * levels + "]" * levels
        await db.kv_set("test", "k", values.decode_json(data.encode()))
        found = await db.kv_get("test", "k")
        assert values.encode_json(found["value"], len(data), levels).decode() == data

    @pytest.mark.parametrize("levels", [901, 30_000])
    @IN_MEMORY
    async def test_a_deeper_value_is_refused(self, db: BotDatabase, levels: int) -> None:
        value: Any = []
        for _ in range(levels - 1):
            value = [value]
        with pytest.raises(ValueError, match="nests more than 900"):
            await db.kv_set("test", "k", value)

    async def test_a_set_replaces_value_and_ttl(self, db: BotDatabase, clock: ManualClock) -> None:
        await db.kv_set("test", "counter", 1, ttl_seconds=1)
        await db.kv_set("test", "counter", 2)
        clock.advance(10)
        assert await db.kv_get("test", "counter") == {"exists": True, "value": 2}
        assert (await db.kv_list("test"))["count"] == 1

    async def test_the_limit_counts_bytes_of_utf8(self, db: BotDatabase) -> None:
        await db.kv_set("test", "k", "x" * 65_534)
        await db.kv_set("test", "k", "é" * 32_767)
        with pytest.raises(ValueError, match="exceeds 64KB limit: 65,537 bytes as stored, 65,536 allowed") as raised:
            await db.kv_set("test", "k", "x" * 65_535)
        assert isinstance(raised.value, keyloft.ValueTooLarge)
        assert (await db.kv_get("test", "k"))["value"] == "é" * 32_767

    @pytest.mark.parametrize(
        "value", [object, {1, 2}, b"bytes", {1: 2}, [float("nan")], float("inf"), "\ud800"], ids=repr
    )
    @IN_MEMORY
    async def test_what_json_does_not_hold_is_refused(self, db: BotDatabase, value: Any) -> None:
        kind = TypeError if not isinstance(value, (float, str, list)) else ValueError
        with pytest.raises(kind, match="not JSON-serializable"):
            await db.kv_set("test", "bad", value)
        assert await db.kv_get("test", "bad") == {"exists": False}

    async def test_an_error_names_the_argument_once(self, db: BotDatabase) -> None:
        for value, where in (({1, 2}, ""), ([{1, 2}], r"value\[0\]: ")):
            with pytest.raises(TypeError, match=rf"^value is not JSON-serializable: {where}the type set would not"):
                await db.kv_set("test", "bad", value)
        with pytest.raises(keyloft.InvalidKey, match=r"^key must be a non-empty string, not None$"):
            await db.kv_get("test", None)  # type: ignore[arg-type]

    async def test_stored_json_is_readable_by_sql(self, tmp_path: Path) -> None:
        db = BotDatabase(tmp_path / "bot.db")
        await db.kv_set("trivia", "user", {"näme": "Ada", "n": 1}, ttl_seconds=2147483647)
        await db.close()
        connection = apsw.Connection(str(tmp_path / "bot.db"))
        [row] = connection.execute(
            "SELECT plugin_name, key, value_json, expires_at > CURRENT_TIMESTAMP, length(expires_at), "
            "length(created_at), created_at = updated_at, julianday('now') - julianday(updated_at) < 0.01 "
            "FROM plugin_kv_storage"
        ).fetchall()
        connection.close()
        assert row == ("trivia", "user", '{"näme":"Ada","n":1}', 1, 26, 26, 1, 1)


class TestPluginExpiry:
    async def test_an_entry_ends_to_the_millisecond(self, db: BotDatabase, clock: ManualClock) -> None:
        await db.kv_set("test", "k", 1, ttl_seconds=1)
        clock.advance(0.999)
        assert (await db.kv_get("test", "k"))["exists"]
        clock.advance(0.001)
        assert await db.kv_get("test", "k") == {"exists": False}
        assert await db.kv_list("test") == {"keys": [], "count": 0, "truncated": False}
        assert await db.kv_delete("test", "k") is False

    async def test_clean_up_counts_what_it_removed_of_plugins_alone(self, db: BotDatabase, clock: ManualClock) -> None:
        store = keyloft.Store(await db.engine())
        await store.set(("not", "a plugin's"), 1, expire_in=1)
        for number in range(600):
            await db.kv_set("test", f"expires{number}", number, ttl_seconds=1)
        for number in range(3):
            await db.kv_set("test", f"keep{number}", number)
        clock.advance(1)
        assert await db.kv_cleanup_expired() == 600
        assert await db.kv_cleanup_expired() == 0
        assert (await db.kv_list("test"))["keys"] == ["keep0", "keep1", "keep2"]
        assert await store.sweep() == 1

    async def test_a_ttl_has_two_names(self, db: BotDatabase, clock: ManualClock) -> None:
        await db.kv_set("test", "a", 1, 10)
        await db.kv_set("test", "b", 1, ttl=10)
        await db.kv_set("test", "c", 1, ttl_seconds=10, ttl=10)
        await db.kv_set("test", "d", 1, ttl_seconds=None, ttl=None)
        with pytest.raises(ValueError, match=r"^ttl and ttl_seconds: expected one of them"):
            await db.kv_set("test", "e", 1, ttl_seconds=10, ttl=11)
        with pytest.raises(ValueError, match=r"^ttl must be a whole number"):
            await db.kv_set("test", "e", 1, ttl=0)
        assert (await db.kv_list("test"))["keys"] == ["a", "b", "c", "d"]
        clock.advance(10)
        assert (await db.kv_list("test"))["keys"] == ["d"]

    @pytest.mark.parametrize("ttl", [0, -1, 2147483648, True, 1.5, "5", float("nan")])
    @IN_MEMORY
    async def test_a_ttl_out_of_range_is_refused(self, db: BotDatabase, ttl: Any) -> None:
        not_int = "" if type(ttl) is int else f", not {type(ttl).__name__}"
        rule = (
            f"^ttl_seconds must be a whole number of seconds from 1 to 2147483647{not_int}; None is for an entry that"
        )
        with pytest.raises(ValueError, match=rule):
            await db.kv_set("test", "k", 1, ttl_seconds=ttl)
        assert await db.kv_get("test", "k") == {"exists": False}


class TestLists:
    async def test_a_prefix_is_literal_and_keys_are_sorted(self, db: BotDatabase) -> None:
        for key in ("user_b", "user_a", "userX", "USER_a", "user%", "zebra", "user_\U0010ffff", "user_é"):
            await db.kv_set("test", key, 1)
        await db.kv_set("other", "user_x", 1)
        found = await db.kv_list("test", prefix="user_")
        assert found == {"keys": ["user_a", "user_b", "user_é", "user_\U0010ffff"], "count": 4, "truncated": False}
        assert (await db.kv_list("test", "user%"))["keys"] == ["user%"]
        assert (await db.kv_list("test", "user_\U0010ffff"))["keys"] == ["user_\U0010ffff"]
        assert (await db.kv_list("test", "user__"))["keys"] == []

    async def test_a_truncated_list_is_marked_and_can_be_continued(self, db: BotDatabase) -> None:
        await asyncio.gather(*[db.kv_set("test", f"key{number:04d}", number) for number in range(1500)])
        first = await db.kv_list("test")
        assert (first["count"], first["truncated"]) == (1000, True)
        second = await db.kv_list("test", after=first["keys"][-1])
        assert (second["count"], second["truncated"]) == (500, False)
        assert first["keys"] + second["keys"] == [f"key{number:04d}" for number in range(1500)]
        assert (await db.kv_list("test", limit=1500))["truncated"] is False
        assert (await db.kv_list("test", limit=1499))["truncated"] is True

    @pytest.mark.parametrize("limit", [0, -1, 10_001, True, "10", 1.0])
    @IN_MEMORY
    async def test_a_limit_out_of_range_is_refused(self, db: BotDatabase, limit: Any) -> None:
        with pytest.raises(ValueError, match="limit: expected a whole number from 1 to"):
            await db.kv_list("test", limit=limit)


class TestNames:
    @pytest.mark.parametrize("name", ["", "Trivia", "a.b", "a b", "é", "x" * 101, None, 5, "a\n", "*", ">"])
    @IN_MEMORY
    async def test_a_name_that_no_plugin_has_is_refused(self, db: BotDatabase, name: Any) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: db.kv_set(name, "k", 1),
            lambda: db.kv_get(name, "k"),
            lambda: db.kv_delete(name, "k"),
            lambda: db.kv_list(name),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="plugin_name must") as raised:
                await call()
            assert isinstance(raised.value, keyloft.InvalidPluginName)

    @pytest.mark.parametrize("key", ["", "x" * 256, None, 5, "a\x00b", "\udfff", b"k", ("k",)])
    @IN_MEMORY
    async def test_a_key_that_no_database_holds_is_refused(self, db: BotDatabase, key: Any) -> None:
        for call in (db.kv_set("test", key, 1), db.kv_get("test", key), db.kv_delete("test", key)):
            with pytest.raises(ValueError, match="key must") as raised:
                await call
            assert isinstance(raised.value, keyloft.InvalidKey)

    async def test_plugins_do_not_see_each_other(self, db: BotDatabase) -> None:
        await db.kv_set("plugin-a", "secret", "a")
        await db.kv_set("plugin-b", "secret", "b")
        assert (await db.kv_get("plugin-a", "secret"))["value"] == "a"
        assert await db.kv_delete("plugin-a", "secret") is True
        assert (await db.kv_get("plugin-b", "secret"))["value"] == "b"
        assert (await db.kv_list("plugin-a"))["count"] == 0

    async def test_sql_in_a_key_or_value_is_just_text(self, db: BotDatabase) -> None:
        nasty = "'; DROP TABLE plugin_kv_storage; --"
        await db.kv_set("test", nasty, nasty)
        assert (await db.kv_get("test", nasty))["value"] == nasty
        assert (await db.kv_list("test", nasty))["keys"] == [nasty]

    async def test_the_tuple_store_and_the_plugins_share_a_file_and_no_key(self, db: BotDatabase) -> None:
        store = keyloft.Store(await db.engine())
        await store.set(("plugin", "trivia", "k"), 1)
        await db.kv_set("trivia", "k", 2)
        assert [entry.key async for entry in store.list(prefix=())] == [("plugin", "trivia", "k")]
        assert await store.delete_range(prefix=()) == 1
        assert (await db.kv_get("trivia", "k"))["value"] == 2


class TestOpening:
    @pytest.mark.parametrize("url", ["sqlite:///{}", "sqlite+aiosqlite:///{}", "{}"])
    async def test_a_database_has_several_names(self, tmp_path: Path, url: str) -> None:
        db = BotDatabase(url.format(tmp_path / "bot.db"))
        await db.kv_set("test", "k", 1)
        await db.close()
        again = BotDatabase(str(tmp_path / "bot.db"))
        await again.create_tables()
        assert (await again.kv_get("test", "k"))["value"] == 1
        await again.close()

    async def test_the_first_calls_open_it_once(self, tmp_path: Path) -> None:
        db = BotDatabase(tmp_path / "bot.db")
        await asyncio.gather(*[db.kv_set("test", f"{number}", number) for number in range(20)])
        assert (await db.kv_list("test"))["count"] == 20
        await db.close()
        await db.close()
        with pytest.raises(keyloft.Closed):
            await db.kv_get("test", "1")

    async def test_a_file_that_is_no_database_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "bot.db").write_text("these are notes, and more than enough of them to be no database" * 20)
        db = BotDatabase(tmp_path / "bot.db")
        with pytest.raises(keyloft.NotADatabase, match=r"bot\.db"):
            await db.create_tables()
        await db.close()

    async def test_a_row_made_by_hand_is_read_like_any_other(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        db = BotDatabase(tmp_path / "bot.db", clock=clock)
        engine: Any = await db.engine()
        now = engine.connection.execute("SELECT datetime(?, 'unixepoch')", (clock.now() / 1000,)).fetchall()[0][0]
        rows = [
            ("plain", '{"a": 1}', None),
            ("broken", "{", None),
            ("due", "1", now),
            ("later", "2", "2999-01-01 00:00:00"),
            ("zone", "3", "2999-01-01T00:00:00+02:00"),
            ("nonsense", "4", "whenever"),
            ("number", "5", 12345),
        ]
        engine.connection.executemany(
            "INSERT INTO plugin_kv_storage (plugin_name, key, value_json, expires_at) VALUES ('hand', ?, ?, ?)", rows
        )
        await asyncio.sleep(0)
        listed = (await db.kv_list("hand"))["keys"]
        assert listed == ["broken", "later", "nonsense", "plain", "zone"]
        found = {key: (await db.kv_get("hand", key)).get("value") for key, _, _ in rows}
        assert found == {
            "plain": {"a": 1},
            "broken": None,
            "due": None,
            "later": 2,
            "zone": 3,
            "nonsense": 4,
            "number": None,
        }
        assert "not JSON" in caplog.text
        assert caplog.records[0].levelno == logging.ERROR
        assert await db.kv_cleanup_expired() == 2
        assert await db.kv_delete("hand", "plain") is True
        await db.close()


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=8)


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(names, max_size=30, unique=True), prefix=names | st.just(""))
async def test_a_list_has_the_keys_that_startswith_finds(keys: list[str], prefix: str) -> None:
    db = BotDatabase("sqlite:///:memory:")
    for key in keys:
        await db.kv_set("p", key, key)
    found = await db.kv_list("p", prefix=prefix)
    assert found["keys"] == sorted(key for key in keys if key.startswith(prefix))
    if len(found["keys"]) > 1:
        rest = await db.kv_list("p", prefix=prefix, after=found["keys"][0])
        assert rest["keys"] == found["keys"][1:]
    await db.close()


@pytest.mark.parametrize(("history_seconds", "is_kept"), [(60.0, False), (86_400.0, True)])
async def test_the_change_log_reaches_back_as_far_as_it_should(
    history_seconds: float, is_kept: bool, clock: ManualClock, tmp_path: Path
) -> None:
    async with BotDatabase(tmp_path / "bot.db", clock=clock, history_seconds=history_seconds) as db:
        for number in range(3 * limits.TRIM_EVERY):
            await db.kv_set("trivia", "k", number)
            clock.advance(1)
        engine = await db.engine()
        changes = engine.watch(Scan(Space.PLUGINS, ("trivia", ""), ("trivia", "z"), 1), since=1)
        if is_kept:
            assert [change.key for change in await anext(aiter(changes))] == [("trivia", "k")]
        else:
            with pytest.raises(HistoryGone):
                await anext(aiter(changes))
