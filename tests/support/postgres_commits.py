"""Engines on PostgreSQL for tests of commits, and acts between the read and the commit of a group."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from keyloft import ManualClock
from keyloft.core.records import Get, Record, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.postgres.connections import Transaction
from keyloft.engines.postgres.engine import PostgresEngine
from keyloft.engines.postgres.tables import LAYOUTS

A = Space.TUPLES


@asynccontextmanager
async def opened(url: str, clock: ManualClock | None = None, *, by: str = "function") -> AsyncIterator[PostgresEngine]:
    engine = await open_engine(url, clock)
    assert isinstance(engine, PostgresEngine)
    engine.server.has_function = by == "function"
    try:
        yield engine
    finally:
        await engine.aclose()


def put(key: bytes, value: bytes = b"1", expire_in: int | None = None) -> Set:
    return Set(A, key, value, Encoding.JSON, expire_in)


async def stored(engine: PostgresEngine, key: bytes) -> Record:
    [record] = await engine.read(Get(A, key))
    assert isinstance(record, Record)
    return record


def before_commit(engine: PostgresEngine, act: Callable[[], Awaitable[object]]) -> None:
    """Act once after the next group was read and settled, before it is committed."""
    way: Any = engine.writer.by_function
    call = way.call

    async def acting(*arguments: Any) -> Any:
        way.call = call
        await act()
        return await call(*arguments)

    way.call = acting


def reads(engine: PostgresEngine) -> list[int]:
    """How many keys each read of the groups from now on asks for."""
    slot: Any = engine.writer.slot
    begin, asked = slot.transaction, list[int]()
    heads = {layout.load_heads for layout in LAYOUTS.values()}

    def counting(fetch: Callable[..., Awaitable[list[Any]]]) -> Callable[..., Awaitable[list[Any]]]:
        def counted(statement: str, *arguments: Any) -> Awaitable[list[Any]]:
            if statement in heads:
                asked.append(len(arguments[0]))
            return fetch(statement, *arguments)

        return counted

    @asynccontextmanager
    async def counted_transaction(how: str) -> AsyncIterator[Transaction]:
        async with begin(how) as transaction:
            yield Transaction(transaction.execute, counting(transaction.fetch))

    slot.fetch, slot.transaction = counting(slot.fetch), counted_transaction
    return asked
