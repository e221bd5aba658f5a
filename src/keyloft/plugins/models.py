"""The plugins' table as an SQLAlchemy model, for programs that read and write it themselves.

Keyloft does not use it; a test makes sure that both have the same schema.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, Dialect, Index, PrimaryKeyConstraint, String, Text, TypeDecorator, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, validates
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement
from sqlalchemy.sql.functions import FunctionElement

from keyloft import limits
from keyloft.core import values
from keyloft.core.log_text import field
from keyloft.errors import InvalidArgument, Undecodable
from keyloft.plugins import rules


class UtcDateTime(TypeDecorator[datetime]):
    """A time, aware and in UTC on the Python side; a naive one counts as UTC.

    SQLite holds it as text of one width without a time zone, so that texts sort as times.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return _in_utc(value)

    process_result_value = process_bind_param


class _SqlNow(FunctionElement[datetime]):
    """The database's time, for rows that are inserted with SQL."""

    inherit_cache = True


@compiles(_SqlNow)
def _sql_now(element: _SqlNow, compiler: SQLCompiler, **options: Any) -> str:
    # SQLite's CURRENT_TIMESTAMP has no fraction of a second, and would sort before all other times of the same second.
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')" if compiler.dialect.name == "sqlite" else "CURRENT_TIMESTAMP"


def _sorted_by_code_point(characters: int) -> String:
    """Text that PostgreSQL sorts as SQLite does, whatever the locale of its database."""
    return String(characters).with_variant(String(characters, collation="C"), "postgresql")


def utc_now() -> datetime:
    return datetime.now(UTC)


def _in_utc(moment: datetime | None) -> datetime | None:
    if not isinstance(moment, datetime):
        return moment  # None or an SQL expression; SQLAlchemy refuses what is neither
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


_EXPIRES = text("expires_at IS NOT NULL")


class Base(DeclarativeBase):
    """The base of Keyloft's models; `Base.metadata` is for a program that creates its tables itself."""


class PluginKVStorage(Base):
    """One entry of one plugin. An entry that has expired is absent for Keyloft, even while its row is still there.

    Keyloft numbers its writes in `version`; a row that another program inserted has 0, which counts as version 1.

    Example:
        entry = PluginKVStorage(plugin_name="trivia", key="score")
        entry.set_value({"alice": 3})
        session.add(entry)
    """

    __tablename__ = "plugin_kv_storage"

    plugin_name: Mapped[str] = mapped_column(_sorted_by_code_point(limits.PLUGIN_NAME_CHARACTERS))
    key: Mapped[str] = mapped_column(_sorted_by_code_point(limits.PLUGIN_KEY_CHARACTERS))
    value_json: Mapped[str] = mapped_column(Text)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, server_default=_SqlNow())
    updated_at: Mapped[datetime] = mapped_column(
        UtcDateTime, default=utc_now, onupdate=utc_now, server_default=_SqlNow()
    )
    version: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))

    __table_args__ = (
        PrimaryKeyConstraint("plugin_name", "key", name="pk_plugin_kv_storage"),
        Index("idx_plugin_kv_expires", "expires_at", sqlite_where=_EXPIRES, postgresql_where=_EXPIRES),
        Index("idx_plugin_kv_prefix", "plugin_name", "key"),
    )

    def __init__(self, **columns: Any) -> None:
        now = utc_now()
        super().__init__(**{"created_at": now, "updated_at": now, "version": 0, **columns})

    def __repr__(self) -> str:
        expired = " [EXPIRED]" if self.is_expired else ""
        # Escaped, because bots log this text, and a key can be any text.
        return f"<PluginKVStorage(plugin={self.plugin_name}, key={field(self.key)}{expired})>"

    @property
    def is_expired(self) -> bool:
        """Whether its expiry has passed; an entry without `expires_at` never expires."""
        return self.expires_at is not None and utc_now() >= self.expires_at

    def get_value(self) -> Any:
        """Decode the stored value.

        Returns:
            What `set_value` was given: a dict, list, string, number, boolean or None.

        Raises:
            json.JSONDecodeError: What is stored is not JSON.
        """
        try:
            return values.decode_json(self.value_json.encode(errors="surrogatepass"))
        except Undecodable as error:
            # An empty document instead of the text: errors are logged, and values must not be.
            raise json.JSONDecodeError(str(error), "", 0) from error

    def set_value(self, value: object) -> None:
        """Store a value as compact JSON.

        Args:
            value: Anything that JSON can hold.

        Raises:
            TypeError: It holds something that JSON does not have.
            ValueError: It exceeds 64 KB as stored, or would not be read back as an equal value.
        """
        self.value_json = rules.value(value).decode()

    @validates("plugin_name", "key", "expires_at", "created_at", "updated_at")
    def _check(self, column: str, value: Any) -> Any:
        checks: dict[str, Callable[[Any], Any]] = {"plugin_name": rules.plugin_name, "key": rules.key}
        is_moment = (
            value is None or isinstance(value, (datetime, ClauseElement)) or hasattr(value, "__clause_element__")
        )
        if column not in checks and not is_moment:
            raise InvalidArgument(
                f"{column}: expected a datetime, got {type(value).__name__}; "
                "datetime.fromtimestamp(seconds, UTC) makes one of Unix seconds"
            )
        return checks.get(column, _in_utc)(value)
