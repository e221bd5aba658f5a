"""Examines a table `plugin_kv_storage` that another program made, through asyncpg."""

from typing import Any

from keyloft.core.adoption import Adoption, examine_postgres
from keyloft.core.records import Space
from keyloft.engines.postgres import tables


async def find_adoption(connection: Any) -> Adoption | None:
    """How an existing plugins' table is to be adopted; None if there is no such table. Nothing is changed."""
    examination = examine_postgres(tables.LAYOUTS[Space.PLUGINS].create)
    query = next(examination)
    async with connection.transaction(readonly=True):
        while True:
            rows = await connection.fetch(query)
            try:
                query = examination.send([tuple(row) for row in rows])
            except StopIteration as end:
                found: Adoption | None = end.value
                return found
