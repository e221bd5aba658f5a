"""An expired entry is absent, from its very millisecond, and a sweep removes its row."""

import asyncio

import pytest

from keyloft import InvalidArgument, ManualClock, limits
from keyloft.core.engine import Engine
from keyloft.core.records import (
    Append,
    Batch,
    Check,
    Committed,
    Conflict,
    Count,
    Delete,
    Due,
    Expired,
    Get,
    Key,
    Mutation,
    Purge,
    Record,
    Scan,
    Set,
    Sum,
    Touch,
)
from keyloft.core.schema import LAST_MOMENT
from keyloft.core.values import Encoding
from tests.engines.contract.calls import END, START, A, B, P, commit, get, put, scan, stored, write


class ExpiryContract:
    async def test_an_expiry_can_be_absolute(self, engine: Engine, clock: ManualClock) -> None:
        due = clock.now() + 1500
        await write(
            engine,
            Set(A, b"set", b"1", Encoding.JSON, expire_at=due),
            put(b"touched"),
            Set(P, ("p", "k"), b"1", Encoding.JSON, expire_at=due),
            Append(B, b"log/", b"1", Encoding.JSON, expire_at=due),
            Sum(A, b"sum", 1, expire_at=due),
        )
        await write(engine, Touch(A, b"touched", expire_at=due))
        for key in (b"set", b"touched", b"sum"):
            assert (await stored(engine, key)).expires_at == due
        [plugin, page] = await engine.read(Get(P, ("p", "k")), Scan(B, b"log/", b"log0", 9))
        assert (plugin.expires_at, list(page.expiries)) == (due, [due])
        clock.advance(1.5)
        assert await scan(engine) == []

    async def test_an_absolute_expiry_in_the_past_leaves_no_entry(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"touched"))
        past = clock.now() - 1
        await write(engine, Set(A, b"set", b"1", Encoding.JSON, expire_at=past), Touch(A, b"touched", expire_at=past))
        assert await scan(engine) == []

    @pytest.mark.parametrize("moment", [-1, LAST_MOMENT + 1, 3 * 2**61 + 1, 2**63])
    async def test_an_expiry_that_no_database_holds_is_refused_and_harms_no_other_batch(
        self, engine: Engine, moment: int
    ) -> None:
        await write(engine, put(b"touched"))
        refused: list[Mutation] = [
            Set(A, b"set", b"1", Encoding.JSON, expire_at=moment),
            Set(P, ("p", "k"), b"1", Encoding.JSON, expire_at=moment),
            Append(B, b"log/", b"1", Encoding.JSON, expire_at=moment),
            Sum(A, b"sum", 1, expire_at=moment),
            Touch(A, b"touched", expire_at=moment),
        ]
        done = await asyncio.gather(
            *[engine.commit(Batch((put(b"half"), one))) for one in refused],
            *[engine.commit(Batch((one,))) for one in refused],
            write(engine, put(b"other")),
            return_exceptions=True,
        )
        assert [type(one) for one in done] == [InvalidArgument] * 10 + [Committed]
        with pytest.raises(InvalidArgument):
            await engine.commit(Batch((refused[0],)))
        assert await scan(engine) == [b"other", b"touched"]

    async def test_due_gives_what_expired_after_a_moment_and_what_is_next(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        began = clock.now()
        for at in range(1, 8):
            keys = [Set(P, ("p", f"{at}{part}"), b"1", Encoding.JSON, 1000 * at) for part in "ab"]
            await write(engine, put(b"%d" % at, expire_in=1000 * at), *keys)
        [nothing] = await engine.read(Due(A, began, 10))
        assert (list(nothing.keys), nothing.is_last, nothing.next_expiry) == ([], True, began + 1000)
        clock.advance(5)
        [page] = await engine.read(Due(A, began + 2000, 10))
        assert (sorted(page.keys), page.up_to, page.is_last) == ([b"3", b"4", b"5"], clock.now(), True)
        assert page.next_expiry == began + 6000
        seen, after = list[Key](), began
        while True:
            [page] = await engine.read(Due(P, after, 3))
            seen += page.keys
            after = page.up_to
            if page.is_last:
                break
        assert sorted(seen) == [("p", f"{at}{part}") for at in range(1, 6) for part in "ab"]
        clock.advance(5)
        [rest] = await engine.read(Due(A, after, 10))
        assert (sorted(rest.keys), rest.next_expiry) == ([b"6", b"7"], None)

    async def test_an_entry_is_gone_from_its_very_millisecond(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1500))
        clock.advance(1.499)
        assert await get(engine, b"k") is not None
        assert await scan(engine) == [b"k"]
        clock.advance(0.001)
        assert await get(engine, b"k") is None
        assert await scan(engine) == []
        assert await scan(engine, keys_only=True) == []
        assert await engine.read(Count(A, START, END)) == [0]

    async def test_an_expired_key_fails_a_check_for_its_version(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"k", expire_in=1000))
        clock.advance(1)
        result = await engine.commit(Batch((put(b"k"),), (Check(A, b"k", first.version),)))
        assert isinstance(result, Conflict)
        assert result.failed[0].current is None
        assert isinstance(await engine.commit(Batch((put(b"k"),), (Check(A, b"k", None),))), Committed)

    async def test_deleting_or_touching_an_expired_key_finds_nothing(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1000))
        clock.advance(1)
        assert (await write(engine, Delete(A, b"k"), Touch(A, b"k", None))).found == (False, False)
        assert await get(engine, b"k") is None

    async def test_a_get_can_include_the_expired_record(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"k", b"[7]", expire_in=1000))
        clock.advance(1)
        [record] = await engine.read(Get(A, b"k", include_expired=True))
        assert record is not None
        assert (record.value, record.version) == (b"[7]", first.version)

    async def test_set_replaces_the_expiry(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1000))
        await write(engine, put(b"k"))
        clock.advance(10)
        assert (await stored(engine, b"k")).expires_at is None

    async def test_touch_changes_the_expiry_and_keeps_the_version(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"k", expire_in=1000))
        assert (await write(engine, Touch(A, b"k", 5000))).found == (True,)
        record = await stored(engine, b"k")
        assert (record.version, record.expires_at) == (first.version, clock.now() + 5000)
        await write(engine, Touch(A, b"k", None))
        clock.advance(10)
        assert (await stored(engine, b"k")).version == first.version

    async def test_touch_after_set_in_one_batch(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", b"[1]"), Touch(A, b"k", 1000))
        record = await stored(engine, b"k")
        assert (record.value, record.expires_at) == (b"[1]", clock.now() + 1000)

    async def test_expired_lists_what_is_due_the_longest_overdue_first(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        await write(engine, put(b"c", expire_in=3000), put(b"a", expire_in=1000), put(b"b", expire_in=2000), put(b"d"))
        clock.advance(2)
        [due] = await engine.read(Expired(A, 10))
        assert [record.key for record in due] == [b"a", b"b"]
        [due] = await engine.read(Expired(A, 1))
        assert [record.key for record in due] == [b"a"]
        assert await engine.read(Expired(B, 10)) == [[]]

    async def test_purge_removes_only_that_version_and_only_if_expired(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        old = await write(engine, put(b"alive"), put(b"due", expire_in=1000), put(b"again", expire_in=1000))
        clock.advance(1)
        new = await write(engine, put(b"again", expire_in=1000))
        done = await write(
            engine,
            Purge(A, b"alive", old.version),
            Purge(A, b"due", old.version - 1),
            Purge(A, b"due", old.version),
            Purge(A, b"again", old.version),
            Purge(A, b"again", new.version),
        )
        assert done.found == (False, False, True, False, False)
        assert await scan(engine) == [b"again", b"alive"]
        assert await engine.read(Get(A, b"due", include_expired=True)) == [None]

    @pytest.mark.parametrize("others", [0, limits.LONG_BATCH_OPERATIONS])
    async def test_the_expiry_that_a_purge_names_decides_nothing(
        self, engine: Engine, clock: ManualClock, others: int
    ) -> None:
        more = [b"more %d" % number for number in range(others)]
        names = (*more, b"again", b"due", b"gone", b"later", b"sooner")
        large = put(b"large", b'"%s"' % bytes(limits.ROW_BYTES).hex().encode(), expire_in=1000)
        old = await write(engine, large, *[put(key, expire_in=1000) for key in names])
        named = clock.now() + 1000
        await write(engine, put(b"again"), Delete(A, b"gone"), Touch(A, b"later", 9000), Touch(A, b"sooner", 500))
        clock.advance(1)
        found = dict.fromkeys(more, True) | {b"again": False, b"due": True, b"gone": False, b"large": True}
        found |= {b"later": False, b"sooner": True}
        done = await write(engine, *[Purge(A, key, old.version, named) for key in found])
        assert done.found == tuple(found.values())
        assert await scan(engine) == [b"again", b"later"]
        assert await engine.read(Expired(A, 1)) == [[]]

    @pytest.mark.parametrize("expire_in", [None, 1000])
    async def test_a_checked_set_replaces_that_version_of_an_entry_whatever_their_sizes(
        self, engine: Engine, clock: ManualClock, expire_in: int | None
    ) -> None:
        small, large = b'"s"', b'"%s"' % bytes(limits.ROW_BYTES).hex().encode()
        made = clock.now()
        last = await write(engine, put(b"k", small, expire_in))
        for value in (small, large, large, small, small):
            clock.advance(0.1)
            replacing = Batch((put(b"k", value, expire_in),), (Check(A, b"k", last.version),))
            last = await commit(engine, replacing)
            [page] = await engine.read(Scan(A, START, END, 10, times=True))
            expires_at = None if expire_in is None else clock.now() + expire_in
            assert list(page) == [Record(b"k", value, Encoding.JSON, last.version, expires_at, made, clock.now())]
            refused = await engine.commit(replacing)
            assert isinstance(refused, Conflict)
            assert [failed.current for failed in refused.failed] == await engine.read(Get(A, b"k"))

    async def test_a_check_can_ask_for_an_expired_entry(self, engine: Engine, clock: ManualClock) -> None:
        old = await write(engine, put(b"k", expire_in=1000))
        clock.advance(1)
        guarded = Batch((put(b"taken"),), (Check(A, b"k", old.version, include_expired=True),))
        assert isinstance(await engine.commit(guarded), Committed)
        refused = await engine.commit(Batch((put(b"k"),), (Check(A, b"k", None, include_expired=True),)))
        assert isinstance(refused, Conflict)
        assert refused.failed[0].current is not None
        await write(engine, Purge(A, b"k", old.version))
        assert isinstance(await engine.commit(guarded), Conflict)
