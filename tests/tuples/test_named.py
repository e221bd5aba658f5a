"""Named stores: several stores in one database that never see each other."""

import asyncio
from pathlib import Path

import pytest

import keyloft
from keyloft import U64, InvalidArgument, NotACounter, Store


async def test_two_names_share_a_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as plain, keyloft.open(path, name="shop") as shop, keyloft.open(path, name="s") as s:
        stores: list[Store] = [plain, shop, s]
        for number, kv in enumerate(stores):
            await kv.set(("k",), number)
            await kv.set((b"\xff", -1, 1.5, True), number)
            await kv.set_many({("n", part): part for part in range(number + 1)})
        for number, kv in enumerate(stores):
            assert (await kv.get(("k",))).value == number
            assert [entry.key for entry in await kv.list(prefix=())] == [
                (b"\xff", -1, 1.5, True),
                ("k",),
                *[("n", part) for part in range(number + 1)],
            ]
            assert await kv.count(prefix=("n",)) == number + 1
            assert [key async for key in kv.keys(prefix=("n",), reverse=True, limit=1)] == [("n", number)]
        assert await shop.delete_range(prefix=()) == 4
        assert [await kv.count() for kv in stores] == [3, 0, 5]


async def test_atomic_writes_watches_and_errors_show_the_stores_own_keys() -> None:
    async with keyloft.open(name="shop") as kv:
        watch = kv.watch(prefix=("stock",))
        entry = await kv.get(("stock", "apples"))
        assert await kv.atomic().check(entry).set(entry.key, 5).commit()
        [change] = await asyncio.wait_for(watch.__anext__(), 10)
        assert (change.key, change.value) == (("stock", "apples"), 5)
        lost = await kv.atomic().check(entry).delete(entry.key).commit()
        assert [(conflict.key, conflict.value) for conflict in lost.conflicts] == [(("stock", "apples"), 5)]
        with pytest.raises(NotACounter, match=r"\('stock', 'apples'\)"):
            await kv.atomic().sum(("stock", "apples"), 1).commit()
        await kv.atomic().sum(("sold",), 2).commit()
        assert (await kv.get(("sold",))).value == U64(2)
        page = await kv.list(limit=1)
        assert [found.key for found in await kv.list(cursor=page.cursor)] == [("stock", "apples")]
        assert repr(kv) == "<Store on memory, store shop, open>"


async def test_what_expired_in_any_store_is_swept() -> None:
    clock = keyloft.ManualClock()
    async with keyloft.open(name="shop", clock=clock, sweep_every=None) as kv:
        await kv.set(("k",), 1, expire_in=1)
        clock.advance(1)
        assert await kv.sweep() == 1


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "a\x00", "x" * 65, 5, b"x"])
async def test_a_name_that_is_none_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgument, match="name: expected 1 to 64 characters, each one of"):
        await keyloft.open(name=name)  # type: ignore[arg-type]
