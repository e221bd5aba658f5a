"""Feature flags: set for everybody, with defaults, and live."""

import asyncio
from typing import Any

import pytest

import keyloft
from keyloft import InvalidArgument, InvalidKey, ManualClock
from keyloft.semantic import Semantics, SemanticStore, VersionConflict
from tests.semantic.unreliable_network import PATIENCE_SECONDS, PROJECT, until
from tests.support.fork_server import run


async def test_a_flag_has_its_default_until_it_is_set_and_after_it_is_unset(store: SemanticStore) -> None:
    flags = store.flags("acme", "web", {"new-ui": False})
    assert await flags.get("new-ui") is False
    entry = await flags.set("new-ui", True, writer="console:rollout", consumer_hints=("web",), spec_ref="adr-1")
    assert entry.key == f"{PROJECT}/flags/new-ui"
    assert entry.semantics == Semantics("feature_flag", None, ("web",))
    assert await flags.get("new-ui") is True
    assert await flags.unset("new-ui", writer="console") is True
    assert await flags.unset("new-ui", writer="console") is False
    assert await flags.get("new-ui") is False


async def test_a_flag_with_a_ttl_falls_back_at_its_due_moment(store: SemanticStore, clock: ManualClock) -> None:
    flags = store.flags("acme", "web", {"beta": "off"})
    await flags.set("beta", "on", writer="console", ttl_seconds=60)
    clock.advance(59.999)
    assert await flags.all() == {"beta": "on"}
    clock.advance(0.001)
    assert await flags.get("beta") == "off"
    assert await flags.all() == {"beta": "off"}


async def test_a_flag_without_value_and_default_is_a_mistake(store: SemanticStore) -> None:
    flags = store.flags("acme", "web")
    with pytest.raises(InvalidArgument, match="no default"):
        await flags.get("unheard-of")
    await flags.set("unheard-of", None, writer="console")
    assert await flags.get("unheard-of") is None


async def test_flags_of_projects_and_tenants_are_their_own(store: SemanticStore) -> None:
    await store.flags("acme", "web").set("x", 1, writer="w")
    for tenant, project in (("acme", "web2"), ("acme", "we"), ("other", "web")):
        assert await store.flags(tenant, project).all() == {}


async def test_a_flag_set_with_a_version_respects_what_is_there(store: SemanticStore) -> None:
    flags = store.flags("acme", "web")
    entry = await flags.set("x", 1, writer="w", expected_version=0)
    with pytest.raises(VersionConflict):
        await flags.set("x", 2, writer="w", expected_version=0)
    await flags.set("x", 2, writer="w", expected_version=entry.version)


@pytest.mark.parametrize("name", ["", "a/b", "Upper", "a b", 1])
async def test_a_name_that_is_no_part_of_a_path_is_refused(name: Any) -> None:
    async with keyloft.open() as kv, SemanticStore(kv) as store:
        with pytest.raises((InvalidArgument, InvalidKey), match=r"^name: "):
            await store.flags("acme", "web").get(name)
        with pytest.raises((InvalidArgument, InvalidKey), match=r"^defaults: "):
            store.flags("acme", "web", {name: 1})


class TestLive:
    async def test_live_flags_follow_every_change(self, store: SemanticStore, clock: ManualClock) -> None:
        flags = store.flags("acme", "web", {"new-ui": False})
        await flags.set("old", 1, writer="w")
        async with asyncio.timeout(PATIENCE_SECONDS), flags.live() as now:
            assert dict(now) == {"new-ui": False, "old": 1}
            for change, expected in (
                (flags.set("new-ui", True, writer="w", ttl_seconds=5), {"new-ui": True, "old": 1}),
                (flags.unset("old", writer="w"), {"new-ui": True}),
            ):
                changed = asyncio.ensure_future(now.changed())
                await asyncio.sleep(0)
                await change
                await changed
                assert dict(now) == expected
            changed = asyncio.ensure_future(now.changed())
            await asyncio.sleep(0)
            clock.advance(5)
            await changed
            assert now["new-ui"] is False
            assert len(now) == 1

    async def test_a_change_of_another_process_is_heard(self, store: SemanticStore, url: str | None) -> None:
        if url is None:
            pytest.skip("memory belongs to one process")
        code = (
            "import asyncio, keyloft, sys\n"
            "from keyloft.semantic import SemanticStore\n"
            "async def main():\n"
            "    async with keyloft.open(sys.argv[1]) as kv, SemanticStore(kv) as store:\n"
            "        await store.flags('acme', 'web').set('new-ui', 'another', writer='other')\n"
            "asyncio.run(main())\n"
        )
        async with asyncio.timeout(PATIENCE_SECONDS), store.flags("acme", "web", {"new-ui": 0}).live() as now:
            changed = asyncio.ensure_future(now.changed())
            assert (await asyncio.to_thread(run, ["-c", code, url])).returncode == 0
            await changed
            assert now["new-ui"] == "another"

    async def test_a_cancelled_entry_leaves_nothing_running(self, store: SemanticStore) -> None:
        for steps in range(1, 4):
            entering = asyncio.create_task(store.flags("acme", "web").live().__aenter__())
            for _ in range(steps):
                await asyncio.sleep(0)
            entering.cancel()
            try:
                now = await entering
            except asyncio.CancelledError:
                pass
            else:
                await now.__aexit__(None, None, None)  # it was faster

            async def is_over() -> bool:
                return not [task for task in asyncio.all_tasks() if task.get_name() == "keyloft live flags"]

            await until(is_over)

    async def test_a_closed_store_has_no_live_flags(self) -> None:
        kv = await keyloft.open()
        async with SemanticStore(kv) as store:
            await kv.aclose()
            with pytest.raises(keyloft.Closed):
                async with store.flags("acme", "web", {"x": 1}).live():
                    pass

    async def test_a_watch_yields_all_flags_at_each_change(self, store: SemanticStore) -> None:
        flags = store.flags("acme", "web", {"a": 0})
        watch = flags.watch()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await anext(watch) == {"a": 0}
            await flags.set("b", 1, writer="w")
            assert await anext(watch) == {"a": 0, "b": 1}
            await flags.set("a", 2, writer="w")
            assert await anext(watch) == {"a": 2, "b": 1}
        await watch.aclose()  # type: ignore[attr-defined]
