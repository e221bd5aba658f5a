"""What the tests of the semantic store write, in few words.

PYTEST_DONT_REWRITE: modules may import from here, too.
"""

from typing import Any

import pytest

from keyloft import Store
from keyloft.core.records import Get, Space
from keyloft.semantic import AuditRecord, Envelope, Intent, Semantics, SemanticStore
from keyloft.semantic.keys import parse

ON_EVERY_ENGINE = pytest.mark.parametrize("url", ["memory", "sqlite file", "postgresql", "etcd"], indirect=True)
"""For tests that depend on how an engine commits; for the others, `and_etcd` decides."""

PROJECT = "tenant/acme/project/web"
KEY = f"{PROJECT}/docs/onedrive/delta"
OTHER = f"{PROJECT}/docs/onedrive/snapshot"
LOCK = f"{PROJECT}/locks/sync"
WRITER = "harvester:sync"
CURSOR = Semantics("cursor", producer="harvester", consumer_hints=("indexer", "search"))


def living(seconds: int) -> Semantics:
    return Semantics("cursor", producer="harvester", consumer_hints=("indexer", "search"), ttl_seconds=seconds)


def locked(seconds: int = 30) -> Semantics:
    return Semantics("lock", ttl_seconds=seconds)


async def put(
    store: SemanticStore,
    key: str = KEY,
    value: Any = 1,
    expected: int | str = "*",
    semantics: Semantics = CURSOR,
    writer: str = WRITER,
    **options: Any,
) -> Envelope:
    return await store.put(key, value, expected_version=expected, writer=writer, semantics=semantics, **options)


async def delete(store: SemanticStore, key: str = KEY, expected: int | str = "*", **options: Any) -> Envelope | None:
    return await store.delete(key, expected_version=expected, writer=WRITER, **options)


async def restore(store: SemanticStore, key: str = KEY, **options: Any) -> Envelope:
    return await store.restore(key, writer=WRITER, **options)


def putting(key: str, value: Any = 1, expected: int | str = "*", semantics: Semantics = CURSOR, **more: Any) -> Intent:
    return Intent.put(key, value, expected_version=expected, writer=WRITER, semantics=semantics, **more)


def deleting(key: str, expected: int | str = "*", **more: Any) -> Intent:
    return Intent.delete(key, expected_version=expected, writer=WRITER, **more)


async def trail(store: SemanticStore, about: str = KEY, **options: Any) -> list[AuditRecord]:
    return [record async for record in store.audit(about, **options)]


async def actions(store: SemanticStore, about: str = KEY, **options: Any) -> list[str]:
    return [record.action for record in await trail(store, about, **options)]


async def agreeing_trail(kv: Store, store: SemanticStore, key: str) -> list[AuditRecord]:
    """The trail of a key, if each change begins with what the one before it left, and the last one left what is stored.

    What has expired is stored until that is recorded.
    """
    records = await trail(store, key)
    there: tuple[int | None, str | None] = (None, None)
    for record in records:
        if record.action != "conflict":
            assert (record.version_before, record.before_hash) == there, record
            there = (record.version_after, record.after_hash)
    [stored] = await kv.engine.read(Get(Space.SEMANTIC, parse(key).entry, include_expired=True))
    assert there[0] == (None if stored is None else stored.version)
    return records
