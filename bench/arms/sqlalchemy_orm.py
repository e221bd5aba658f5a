"""An arm for SQLAlchemy's ORM over aiosqlite used the ordinary way: a session per call."""

import json
from collections.abc import Awaitable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import DateTime, Index, String, Text, event, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bench.harness.contest import Contestant, Entrant, Operation, StoreSetup
from bench.harness.data import Key, Pair, Value

_MOST_BYTES = 65_536


def _now() -> datetime:
    return datetime.now(UTC)


class OrmBase(DeclarativeBase):
    """Base of the models."""


class OrmRow(OrmBase):
    """A table for the keys and values of many plugins."""

    __tablename__ = "plugin_kv_storage"

    plugin_name: Mapped[str] = mapped_column(String(100), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    value_json: Mapped[str] = mapped_column(Text)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now, onupdate=_now)

    __table_args__ = (
        Index("idx_plugin_kv_expires", "expires_at"),
        Index("idx_plugin_kv_prefix", "plugin_name", "key"),
    )

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and _now() >= self.expires_at.replace(tzinfo=UTC)


class Database:
    """Gets and sets as most services write them: one engine, the default pool, a session per call."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._session_factory = async_sessionmaker(engine, class_=AsyncSession, expire_on_commit=False)

    async def kv_get(self, plugin_name: str, key: str) -> dict[str, Any]:
        async with self._session_factory() as session:
            statement = select(OrmRow).where(OrmRow.plugin_name == plugin_name, OrmRow.key == key)
            result = await session.execute(statement)
            row = result.scalar_one_or_none()
            if row is None or row.is_expired:
                return {"exists": False}
            try:
                value: Value = json.loads(row.value_json)
            except json.JSONDecodeError:
                return {"exists": False}
            return {"exists": True, "value": value}

    async def kv_set(self, plugin_name: str, key: str, value: Any, ttl: int | None = None) -> None:
        encoded = json.dumps(value)
        if len(encoded.encode()) > _MOST_BYTES:
            raise ValueError("value size exceeds 64 KB")
        expires_at = datetime.now(UTC) + timedelta(seconds=ttl) if ttl is not None and ttl > 0 else None
        async with self._session_factory() as session:
            statement = insert(OrmRow).values(
                plugin_name=plugin_name, key=key, value_json=encoded, expires_at=expires_at
            )
            statement = statement.on_conflict_do_update(
                index_elements=["plugin_name", "key"],
                set_={"value_json": encoded, "expires_at": expires_at, "updated_at": func.now()},
            )
            await session.execute(statement)
            await session.commit()

    async def close(self) -> None:
        await self.engine.dispose()


class Orm(Contestant):
    """The database; each group of keys is a plugin."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, key: Key) -> dict[str, Any]:
        return await self._database.kv_get(*key)

    async def set(self, pair: Pair) -> None:
        (plugin, key), value = pair
        await self._database.kv_set(plugin, key, value)

    def seen(self, operation: Operation, answer: Any) -> Any:
        return answer["value"]

    def close(self) -> Awaitable[None]:
        return self._database.close()


async def _enter(setup: StoreSetup) -> Orm:
    return Orm(Database(await filled(setup.folder / "orm.db", setup.pairs())))


ENTRANT = Entrant("SQLAlchemy ORM over aiosqlite", _enter, frozenset({"get", "set"}), durable="on disk (WAL, synced)")


async def filled(path: Path, pairs: Iterable[Pair]) -> AsyncEngine:
    """A file with these entries, in WAL mode and with `synchronous=FULL`."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    event.listen(engine.sync_engine, "connect", _durable)
    async with engine.begin() as connection:
        await connection.run_sync(OrmBase.metadata.create_all)
        await connection.execute(insert(OrmRow), [_row(*pair) for pair in pairs])
    return engine


def _row(key: Key, value: Value) -> dict[str, str]:
    return {"plugin_name": key[0], "key": key[1], "value_json": json.dumps(value)}


def _durable(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()
