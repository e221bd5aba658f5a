"""The ordinary way as an arm: SQLAlchemy's ORM over aiosqlite, a session per call."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import DateTime, Index, String, Text, event, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bench import plans
from bench.data import Key, Value, key_of, shuffled, value_of
from bench.harness import Arm
from bench.plans import Reads, as_tuple, same

Answers: TypeAlias = list[dict[str, Any]]


def _now() -> datetime:
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """The models of the bot."""


class PluginKVStorage(Base):
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
    """A get as most services write it: one engine, the default pool, a session per call."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._session_factory = async_sessionmaker(engine, class_=AsyncSession, expire_on_commit=False)

    async def kv_get(self, plugin_name: str, key: str) -> dict[str, Any]:
        async with self._session_factory() as session:
            statement = select(PluginKVStorage).where(
                PluginKVStorage.plugin_name == plugin_name, PluginKVStorage.key == key
            )
            result = await session.execute(statement)
            row = result.scalar_one_or_none()
            if row is None or row.is_expired:
                return {"exists": False}
            try:
                value: Value = json.loads(row.value_json)
            except json.JSONDecodeError:
                return {"exists": False}
            return {"exists": True, "value": value}

    async def close(self) -> None:
        await self.engine.dispose()


def getting(stored: int, operations: int) -> Arm[Database, Reads[Key], Answers]:
    async def set_up(folder: Path) -> Database:
        return Database(await filled(folder / "orm.db", stored))

    async def run(database: Database, plan: Reads[Key]) -> Answers:
        return [await database.kv_get(plugin, key) for plugin, key in plan.keys]

    return Arm(
        name="SQLAlchemy ORM over aiosqlite",
        operations=operations,
        set_up=set_up,
        plan=plans.reads(stored, as_tuple),
        run=run,
        check=lambda _, plan, found: same(found, [{"exists": True, "value": value} for value in plan.expected]),
        tear_down=Database.close,
    )


async def filled(path: Path, stored: int) -> AsyncEngine:
    """A file with so many keys, in WAL mode and with `synchronous=FULL`."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    event.listen(engine.sync_engine, "connect", _durable)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.execute(insert(PluginKVStorage), [_row(index) for index in shuffled(stored)])
    return engine


def _row(index: int) -> dict[str, str]:
    plugin, key = key_of(index)
    return {"plugin_name": plugin, "key": key, "value_json": json.dumps(value_of(index))}


def _durable(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()
