"""The SQLAlchemy model of the plugins' table keeps its promises on both databases."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Protocol, TypeVar

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, event, func, insert, inspect, literal, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

from keyloft import InvalidKey, InvalidPluginName, InvalidValue, ValueTooLarge
from keyloft.plugins import models
from keyloft.plugins.models import Base, PluginKVStorage
from tests.support.examples import examples

T = TypeVar("T")
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
INDIA = timezone(timedelta(hours=5, minutes=30))

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
moments = st.datetimes(
    min_value=datetime(2, 1, 1), max_value=datetime(9998, 12, 31), timezones=st.one_of(st.none(), st.timezones())
)


class Run(Protocol):
    """Does something in a session of its own, commits, and gives back the outcome."""

    def __call__(self, work: Callable[[Session], T]) -> T: ...


@pytest.fixture(params=["sqlite", "postgresql"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    if request.param == "sqlite":
        engine = create_engine("sqlite://", poolclass=StaticPool)
        Base.metadata.create_all(engine)

        def on_sqlite(work: Callable[[Session], T]) -> T:
            with Session(engine) as session, session.begin():
                return work(session)

        yield on_sqlite
        engine.dispose()
        return
    url = request.getfixturevalue("postgres_url")

    async def connect() -> Any:
        return await asyncpg.connect(url)

    postgres = create_async_engine("postgresql+asyncpg://", poolclass=NullPool, async_creator=connect)

    def on_postgres(work: Callable[[Session], T]) -> T:
        async def inner() -> T:
            async with AsyncSession(postgres) as session, session.begin():
                return await session.run_sync(work)

        return asyncio.run(inner())

    on_postgres(lambda session: Base.metadata.create_all(session.connection()))
    yield on_postgres


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "utc_now", lambda: NOON)


def entry(**columns: Any) -> PluginKVStorage:
    return PluginKVStorage(**{"plugin_name": "trivia", "key": "score", "value_json": "1", **columns})


def utc(moment: datetime) -> datetime:
    # Compared in UTC: a wall time that its zone skips or repeats equals nothing in another zone.
    return moment.astimezone(UTC) if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def the_only(session: Session) -> PluginKVStorage:
    return session.scalars(select(PluginKVStorage)).one()


def test_the_columns_are_those_of_the_table() -> None:
    assert list(inspect(PluginKVStorage).columns.keys()) == (
        "plugin_name key value_json expires_at created_at updated_at version".split()
    )
    assert PluginKVStorage.__tablename__ == "plugin_kv_storage"


def test_an_entry_needs_a_plugin_a_key_and_a_value_only() -> None:
    made = entry(value_json='{"theme": "dark"}')
    assert (made.plugin_name, made.key, made.value_json) == ("trivia", "score", '{"theme": "dark"}')
    assert made.expires_at is None
    assert made.version == 0


def test_times_are_set_at_construction() -> None:
    before = datetime.now(UTC)
    made = entry()
    assert before <= made.created_at == made.updated_at <= datetime.now(UTC)
    assert entry(created_at=NOON).created_at == NOON


@pytest.mark.parametrize("name", ["test", "my-plugin", "plugin_123", "a", "0", "x" * 100])
def test_these_are_names_of_plugins(name: str) -> None:
    assert entry(plugin_name=name).plugin_name == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "non-empty string"),
        (None, "non-empty string"),
        (7, "non-empty string"),
        ("x" * 101, "≤100 characters"),
        ("TestPlugin", "lowercase"),
        ("a.b", "lowercase"),
        ("a\n", "lowercase"),
        ("é", "lowercase"),
    ],
)
def test_these_are_no_names_of_plugins(name: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        entry(plugin_name=name)
    assert isinstance(caught.value, InvalidPluginName)


@pytest.mark.parametrize("key", ["valid-key_123", "user:1", "a b", "ключ", "%_", "x" * 255, "é" * 255])
def test_these_are_keys(key: str) -> None:
    assert entry(key=key).key == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "non-empty string"),
        (None, "non-empty string"),
        ("x" * 256, "≤255 characters"),
        ("a\x00b", "NUL"),
        ("\ud800", "surrogates"),
    ],
)
def test_these_are_no_keys(key: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        entry(key=key)
    assert isinstance(caught.value, InvalidKey)


def test_a_name_or_key_is_checked_whenever_it_is_assigned() -> None:
    made = entry()
    with pytest.raises(InvalidPluginName):
        made.plugin_name = "Trivia"
    with pytest.raises(InvalidKey):
        made.key = ""
    assert (made.plugin_name, made.key) == ("trivia", "score")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"count": 42, "active": True}, '{"count":42,"active":true}'),
        ([1, 2, 3], "[1,2,3]"),
        ("hello", '"hello"'),
        ("é", '"é"'),
        (123, "123"),
        (None, "null"),
        ({}, "{}"),
    ],
)
def test_a_value_is_stored_as_compact_json(value: object, stored: str) -> None:
    made = entry()
    made.set_value(value)
    assert made.value_json == stored
    assert made.get_value() == value


@given(json_values)
def test_a_value_is_read_back_as_an_equal_one(value: Any) -> None:
    made = entry()
    made.set_value(value)
    assert made.get_value() == value


def test_an_integer_of_any_length_is_read_back() -> None:
    made = entry()
    made.set_value(10**5000)
    assert made.get_value() == 10**5000


def test_a_value_of_64_kb_is_the_largest() -> None:
    made = entry()
    made.set_value("x" * 65_534)  # and two quotes
    assert len(made.value_json) == 65_536
    made.set_value("é" * 32_767)
    with pytest.raises(ValueError, match="exceeds 64KB limit") as caught:
        made.set_value("x" * 65_535)
    assert isinstance(caught.value, ValueTooLarge)
    with pytest.raises(ValueError, match="exceeds 64KB limit"):
        made.set_value("é" * 32_768)
    assert made.get_value() == "é" * 32_767


@pytest.mark.parametrize("value", [{1, 2}, object(), NOON, b"bytes", {1: "one"}, [{"at": NOON}]])
def test_what_json_does_not_have_is_a_type_error(value: object) -> None:
    made = entry()
    with pytest.raises(TypeError):
        made.set_value(value)
    assert made.value_json == "1"


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800"])
def test_what_would_not_come_back_equal_is_refused(value: object) -> None:
    with pytest.raises(InvalidValue):
        entry().set_value(value)


@pytest.mark.parametrize("broken", ["not valid json", "", "{", "NaN", '{"secret": 1', '"\ud800"', "[" * 100_000])
def test_broken_json_is_an_error_that_does_not_show_it(broken: str) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        entry(value_json=broken).get_value()
    assert caught.value.doc == ""
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("noon")
@pytest.mark.parametrize(
    ("expires_at", "expired"),
    [
        (None, False),
        (NOON + timedelta(hours=1), False),
        (NOON + timedelta(microseconds=1), False),
        (NOON, True),
        (NOON - timedelta(hours=1), True),
        (datetime(2026, 3, 1, 12, 0), True),
        (datetime(2026, 3, 1, 12, 0, 1), False),
        (datetime(2026, 3, 1, 17, 30, tzinfo=INDIA), True),
        (datetime(2026, 3, 1, 17, 31, tzinfo=INDIA), False),
    ],
)
def test_an_entry_expires_at_the_very_moment(expires_at: datetime | None, expired: bool) -> None:
    assert entry(expires_at=expires_at).is_expired is expired


def test_expiry_goes_by_the_real_time() -> None:
    assert entry(expires_at=datetime.now(UTC) - timedelta(seconds=1)).is_expired
    assert not entry(expires_at=datetime.now(UTC) + timedelta(hours=1)).is_expired


@pytest.mark.usefixtures("noon")
def test_the_repr_names_plugin_and_key_and_never_the_value() -> None:
    made = entry(value_json='"secret"')
    assert repr(made) == "<PluginKVStorage(plugin=trivia, key=score)>"
    made.expires_at = NOON
    assert repr(made) == "<PluginKVStorage(plugin=trivia, key=score [EXPIRED])>"
    made = PluginKVStorage(plugin_name="trivia", key="two words\x1b[2J")
    assert repr(made) == r"<PluginKVStorage(plugin=trivia, key='two words\x1b[2J')>"


@given(moments)
def test_a_time_is_aware_and_in_utc_as_soon_as_it_is_assigned(moment: datetime) -> None:
    made = entry(expires_at=moment, created_at=moment, updated_at=moment)
    for kept in (made.expires_at, made.created_at, made.updated_at):
        assert kept is not None
        assert kept.tzinfo is UTC
        assert kept == utc(moment)


def test_an_entry_is_read_back_as_it_was_stored(run: Run) -> None:
    made = entry(key="ключ%_", expires_at=datetime(2026, 3, 1, 17, 30, 0, 123456, tzinfo=INDIA), created_at=NOON)
    made.set_value({"name": "Alice\x00", "scores": [95, 8.7, None]})
    wanted = (made.key, made.value_json, NOON.replace(microsecond=123456), NOON, made.updated_at)
    run(lambda session: session.add(made))

    def inspect(session: Session) -> None:
        found = the_only(session)
        assert (found.key, found.value_json, found.expires_at, found.created_at, found.updated_at) == wanted
        assert found.get_value() == {"name": "Alice\x00", "scores": [95, 8.7, None]}
        assert found.expires_at is not None
        assert {found.expires_at.tzinfo, found.created_at.tzinfo, found.updated_at.tzinfo} == {UTC}
        assert found.version == 0

    run(inspect)


def test_any_time_is_read_back_equal_from_the_database(run: Run) -> None:
    @examples(20)
    @given(moments)
    def check(moment: datetime) -> None:
        def there_and_back(session: Session) -> datetime | None:
            session.merge(entry(expires_at=moment))
            session.flush()
            session.expire_all()
            return the_only(session).expires_at

        found = run(there_and_back)
        assert found is not None
        assert found.tzinfo is UTC
        assert found == utc(moment)

    check()


def test_a_second_entry_at_the_same_key_is_refused(run: Run) -> None:
    run(lambda session: session.add_all([entry(), entry(plugin_name="quotes"), entry(key="other")]))
    with pytest.raises(IntegrityError):
        run(lambda session: session.add(entry(value_json="2")))
    assert run(lambda session: len(session.scalars(select(PluginKVStorage)).all())) == 3


def test_a_value_is_required(run: Run) -> None:
    with pytest.raises(IntegrityError):
        run(lambda session: session.add(PluginKVStorage(plugin_name="trivia", key="score")))


def test_an_update_moves_updated_at_alone(run: Run) -> None:
    run(lambda session: session.add(entry(created_at=NOON, updated_at=NOON)))
    before = datetime.now(UTC)

    def change(session: Session) -> None:
        the_only(session).set_value(2)

    run(change)
    first = run(lambda session: (the_only(session).created_at, the_only(session).updated_at))
    assert first[0] == NOON
    assert before <= first[1] <= datetime.now(UTC)
    run(lambda session: session.execute(update(PluginKVStorage).values(value_json="3")))
    assert run(lambda session: the_only(session).updated_at) > first[1]


def test_a_row_inserted_by_hand_is_whole(run: Run) -> None:
    sql = "INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES ('trivia', 'score', '7')"
    before = datetime.now(UTC) - timedelta(milliseconds=1)  # SQLite's clock has milliseconds
    run(lambda session: session.execute(text(sql)))
    after = datetime.now(UTC)

    def inspect(session: Session) -> None:
        found = the_only(session)
        assert before <= found.created_at <= after
        assert before <= found.updated_at <= after
        assert (found.get_value(), found.version, found.is_expired) == (7, 0, False)

    run(inspect)


def test_rows_inserted_without_the_constructor_are_whole(run: Run) -> None:
    rows = [{"plugin_name": "trivia", "key": key, "value_json": "1"} for key in "ab"]
    run(lambda session: session.execute(insert(PluginKVStorage), rows))
    found = run(lambda session: [row.version for row in session.scalars(select(PluginKVStorage))])
    assert found == [0, 0]


def test_a_naive_time_in_a_query_counts_as_utc(run: Run) -> None:
    run(lambda session: session.add(entry(expires_at=NOON)))
    column = PluginKVStorage.expires_at

    def found(condition: Any) -> int | None:
        return run(lambda session: session.scalar(select(func.count()).where(condition)))

    assert found(column <= datetime(2026, 3, 1, 12, 0)) == 1
    assert found(column < datetime(2026, 3, 1, 12, 0)) == 0
    assert found(column == datetime(2026, 3, 1, 17, 30, tzinfo=INDIA)) == 1


def test_a_time_may_be_an_sql_expression(run: Run) -> None:
    def postpone(session: Session) -> None:
        session.add(made := entry())
        session.flush()
        made.expires_at = literal(NOON, models.UtcDateTime)

    run(postpone)
    assert run(lambda session: the_only(session).expires_at) == NOON


def test_keys_sort_by_code_point(run: Run) -> None:
    keys = ["Zebra", "apple", "a-b", "a_b", "aB", "ab", "é", "\U0001f600", "\uffff"]
    run(lambda session: session.add_all([entry(key=key) for key in keys]))
    listed = run(lambda session: session.scalars(select(PluginKVStorage.key).order_by(PluginKVStorage.key)).all())
    assert listed == sorted(keys)


def test_sqlite_holds_times_as_utc_text_of_one_width() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(entry(key="made", created_at=datetime(2026, 3, 1, 17, 30, tzinfo=INDIA)))
        session.flush()
        session.execute(text("INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES ('a', 'b', '1')"))
        made, by_hand = session.scalars(text("SELECT created_at FROM plugin_kv_storage ORDER BY key DESC"))
    engine.dispose()
    assert made == "2026-03-01 12:00:00.000000"
    assert len(by_hand) == len(made)
    assert by_hand.endswith("000")


def test_sqlite_uses_the_indexes() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def explained(
        connection: object, cursor: object, statement: str, parameters: object, *rest: object
    ) -> tuple[str, object]:
        return f"EXPLAIN QUERY PLAN {statement}", parameters

    def plan(*conditions: Any) -> str:
        with engine.connect() as connection:
            return str(connection.execute(select(PluginKVStorage.__table__).where(*conditions)).cursor.fetchall())

    model = PluginKVStorage
    assert "idx_plugin_kv_expires" in plan(model.expires_at <= NOON)
    by_prefix = plan(model.plugin_name == "a", model.key >= "b", model.key < "c")
    assert "plugin_name=? AND key>? AND key<?" in by_prefix
    engine.dispose()


def test_the_library_alone_does_not_load_sqlalchemy() -> None:
    code = "import sys, keyloft, keyloft.plugins; sys.exit('sqlalchemy' in sys.modules or 'alembic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
