"""Several stores behind one nats-server, divided by its subject mapping: owners notice nothing of it."""

from contextlib import AsyncExitStack
from pathlib import Path

import nats

from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from tests.support.nats import private_server

CONFIG = Path(__file__).parents[2] / "deploy" / "nats-divided.conf"
PLUGINS = [f"plugin-{number}" for number in range(8)]


async def test_each_plugin_has_one_of_two_stores_and_watches_there(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(private_server(CONFIG))
        stores = []
        for number in range(2):
            connection = await nats.connect(server.url)
            stack.push_async_callback(connection.close)
            store = BotDatabase(f"sqlite:///{tmp_path / f'{number}.db'}")
            await store.create_tables()
            stack.push_async_callback(store.close)
            service = DatabaseService(connection, store, prefixes=[f"kv.{number}"], queue=f"kv-{number}")
            await stack.enter_async_context(service)
            stores.append(store)
        for plugin in PLUGINS:
            client = await DatabaseClient.connect(server.url, plugin_name=plugin)
            stack.push_async_callback(client.aclose)
            async with client.kv.watch(prefix="") as watch:
                await client.kv.set("name", plugin)
                event = await anext(watch)
            assert event.key == "name"
            assert await client.kv.get("name") == plugin
        holding = [[store for store in stores if (await store.kv_get(plugin, "name"))["exists"]] for plugin in PLUGINS]
        assert [len(found) for found in holding] == [1] * len(PLUGINS)
        assert {id(store) for [store] in holding} == {id(store) for store in stores}, "both stores are used"
