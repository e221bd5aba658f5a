"""A database with something of everything, for screenshots of the admin page and for its tests."""

import keyloft
from keyloft.plugins import BotDatabase
from keyloft.semantic import Intent, Semantics, SemanticStore
from keyloft.semantic.intents import WriteRequest

SECRETS = ("hunter2-tuple", "hunter2-plugin", "hunter2-checkpoint", "hunter2-cursor", "hunter2-index", "hunter2-lock")
"""They are in values, and must be on no page that no one has asked to show them."""


async def fill(database: str) -> None:
    """Store the data in a database that has none yet."""
    async with keyloft.open(database) as kv:
        await _fill_tuples(kv)
        async with SemanticStore(kv, sweep_every=None) as store:
            await fill_project(store, "web")
            meaning, key = Semantics("config"), "tenant/zeta/project/ops/config/region"
            await store.put(key, "eu", expected_version=0, writer="ops", semantics=meaning)
    async with keyloft.open(database, name="shop") as shop:
        await shop.set(("carts", 1), {"items": 3}, expire_in=1800)
    async with BotDatabase(database) as db:
        for plugin, keys in (("playlist", 140), ("quotes", 35), ("trivia", 12)):
            values = {f"{plugin}-{number}": {"note": SECRETS[1], "number": number} for number in range(keys)}
            await db.kv_set_many(plugin, values)
        await db.kv_set("trivia", "round", SECRETS[1], ttl_seconds=7200)


async def _fill_tuples(kv: keyloft.Store) -> None:
    for name in ("alice", "bob", "carol"):
        await kv.set(("users", name), {"name": name.title(), "password": SECRETS[0]})
        await kv.set(("users", name, "sessions", 1), {"token": SECRETS[0]}, expire_in=3600)
    for number in range(250):
        await kv.set(("orders", number), {"total": number})
    await kv.set(("visits",), keyloft.U64(1_204))
    await kv.set(("logo",), b"\x89PNG\r\n")


async def fill_project(store: SemanticStore, project: str) -> None:
    """Something of everything that a project can have."""
    prefix, reader = f"tenant/acme/project/{project}/", ("indexer",)
    for source in ("gdrive", "onedrive", "sharepoint"):
        meaning = Semantics("checkpoint", producer="harvester", consumer_hints=reader)
        await store.put(
            f"{prefix}docs/{source}/delta",
            {"delta": SECRETS[2]},
            expected_version=0,
            writer="harvester:sync",
            semantics=meaning,
            request_id=f"2026-11-17T08:00Z-{source}",
            spec_ref="specs/harvest.md",
        )
    cursor = Semantics("cursor", producer="mailer", ttl_seconds=86_400)
    key = f"{prefix}mail/inbox/position"
    await store.put(key, {"uid": SECRETS[3]}, expected_version=0, writer="mailer:poll", semantics=cursor)
    index = store.index_version(f"{prefix}search/index/docs/version", writer="indexer:rebuild")
    await index.publish(SECRETS[4])
    flags = store.flags("acme", project)
    await flags.set("new-ui", False, writer="console:rollout", consumer_hints=("web", "mobile"))
    await flags.set("fast-search", True, writer="console:rollout", consumer_hints=("web",))
    await flags.set("upload-limit", 25, writer="console:limits")
    lock = Intent.put(
        f"{prefix}locks/harvest",
        {"holder": "harvester:sync", "host": SECRETS[5], "pid": 4711},
        expected_version=0,
        writer="harvester:sync",
        semantics=Semantics("lock", ttl_seconds=3000),
    )
    await store.lock_keeper.acquire(WriteRequest(intents=(lock,), request_id=f"demo-{project}"))
    for number in (1, 2):
        put = Intent.put(
            f"{prefix}docs/onedrive/delta",
            {"delta": SECRETS[2]},
            expected_version=1,
            writer="harvester:sync",
            semantics=Semantics("checkpoint"),
        )
        request = WriteRequest(intents=(put,), request_id=f"demo-{number}")
        await store.dead_letters.keep(request, "VERSION_CONFLICT", "expected version 1, got another one", 6 + number)
