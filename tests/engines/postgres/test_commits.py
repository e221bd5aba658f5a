"""PostgreSQL's commits: races between a read and its commit, clocks, and the change log."""

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft import ClockSetBack, ManualClock, NotACounter, limits
from keyloft.core.records import (
    Add,
    Batch,
    ChangeKind,
    Changes,
    Check,
    Committed,
    Conflict,
    Delete,
    Get,
    Latest,
    LogPosition,
    Mutation,
    Purge,
    Scan,
    Set,
    Space,
    Sum,
    Touch,
)
from keyloft.core.values import Encoding, unpack_counter
from keyloft.engines import open_engine
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.settle import settle
from keyloft.engines.postgres.attempts import load_values
from keyloft.engines.postgres.engine import PostgresEngine
from tests.support.postgres_commits import A, before_commit, opened, put, stored
from tools.postgres import query

P, S = Space.PLUGINS, Space.SEMANTIC


# Between a read and its commit


@pytest.fixture
def postgres_url(emptied_postgres_url: str) -> str:
    """With Keyloft's tables, which takes less time: no test here is about making them."""
    return emptied_postgres_url


async def test_a_lock_that_was_renewed_meanwhile_has_one_holder(postgres_url: str) -> None:
    """Renewing keeps the version. By the clock of the rival, the lock has expired."""
    holders, rivals = ManualClock(), ManualClock()
    rivals.advance(1)
    async with opened(postgres_url, holders) as holder, opened(postgres_url, rivals) as rival:
        await holder.commit(Batch((put(b"lock", b'"holder"', 1000),)))
        before_commit(rival, lambda: holder.commit(Batch((Touch(A, b"lock", 60_000),))))
        taken = await rival.commit(Batch((put(b"lock", b'"rival"', 60_000),), (Check(A, b"lock", None),)))
        assert isinstance(taken, Conflict)
        assert (await stored(holder, b"lock")).value == b'"holder"'


@pytest.mark.parametrize("then", ["check", "touch", "delete", "sum", "purge"])
async def test_an_entry_that_expires_before_the_commit_is_absent(
    postgres_url: str, clock: ManualClock, then: str
) -> None:
    async def expire() -> None:
        clock.advance(1)

    async with opened(postgres_url, clock) as engine:
        first = await engine.commit(Batch((Sum(A, b"k", 5, 1000),)))
        assert isinstance(first, Committed)
        before_commit(engine, expire)
        match then:
            case "check":
                done = await engine.commit(Batch((put(b"other"),), (Check(A, b"k", first.version),)))
                assert isinstance(done, Conflict)
            case "touch":
                assert (await engine.commit(Batch((Touch(A, b"k", 5000),)))).found == (False,)  # type: ignore[union-attr]
            case "delete":
                assert (await engine.commit(Batch((Delete(A, b"k"),)))).found == (False,)  # type: ignore[union-attr]
            case "sum":
                assert (await engine.commit(Batch((Sum(A, b"k", 1),)))).values == (1,)  # type: ignore[union-attr]
            case "purge":
                assert (await engine.commit(Batch((Purge(A, b"k", first.version),)))).found == (True,)  # type: ignore[union-attr]


@pytest.mark.parametrize("then", ["set", "touch", "sum", "long batch"])
async def test_an_entry_whose_expiry_passes_before_the_commit_is_logged_as_expired(
    postgres_url: str, clock: ManualClock, then: str
) -> None:
    """Who follows the log does not read the entry, and may have read the index of expiries by then."""

    async def expire() -> None:
        clock.advance(1)

    async with opened(postgres_url, clock) as engine:
        first = await engine.commit(Batch((put(b"touched"),)))
        assert isinstance(first, Committed)
        due = clock.now() + 1000
        wanted = Set(A, b"k", b"1", Encoding.JSON, expire_at=due)
        mutations: dict[str, tuple[Mutation, ...]] = {
            "set": (wanted,),
            "touch": (Touch(A, b"touched", expire_at=due),),
            "sum": (Sum(A, b"k", 1, expire_at=due),),
            "long batch": (*[put(b"%d" % number) for number in range(limits.LONG_BATCH_OPERATIONS)], wanted),
        }
        before_commit(engine, expire)
        await engine.commit(Batch(mutations[then]))
        [piece] = await engine.read(Changes(LogPosition(first.version)))
        assert piece.changes[-1].kind is ChangeKind.EXPIRED


async def test_an_entry_that_has_not_expired_by_the_clock_of_the_commit_is_logged_as_put(
    postgres_url: str, clock: ManualClock
) -> None:
    """The server's clock may be set back after its time was last known here."""

    async def set_back() -> None:
        clock.advance(-1)

    async with opened(postgres_url, clock) as engine:
        first = await engine.commit(Batch((put(b"first"),)))
        assert isinstance(first, Committed)
        clock.advance(1)
        before_commit(engine, set_back)
        await engine.commit(Batch((Set(A, b"k", b"1", Encoding.JSON, expire_at=clock.now() - 500),)))
        [piece] = await engine.read(Changes(LogPosition(first.version)))
        assert [change.kind for change in piece.changes] == [ChangeKind.PUT]
        assert (await stored(engine, b"k")).value == b"1"


async def test_expiries_count_from_the_commit_and_not_from_the_read(postgres_url: str, clock: ManualClock) -> None:
    async def wait() -> None:
        clock.advance(5)

    async with opened(postgres_url, clock) as engine:
        await engine.commit(Batch((put(b"touched"), put(b"kept", expire_in=9000))))
        due = (await stored(engine, b"kept")).expires_at
        before_commit(engine, wait)
        batch = Batch(
            (put(b"set", expire_in=1000), Touch(A, b"touched", 2000), Sum(A, b"sum", 1, 3000), Add(A, b"kept", 1)),
            (Check(A, b"absent", None),),
        )
        done = await engine.commit(batch)
        assert isinstance(done, Committed)
        assert done.at == clock.now()
        for key, expire_in in ((b"set", 1000), (b"touched", 2000), (b"sum", 3000)):
            assert (await stored(engine, key)).expires_at == clock.now() + expire_in
        assert (await stored(engine, b"kept")).expires_at == due
        assert (await stored(engine, b"set")).created_at == clock.now()


async def test_versions_and_conflicts_are_those_of_the_commit(postgres_url: str) -> None:
    """Another process commits between the read and the commit of a group in which one batch meets another's write."""
    async with opened(postgres_url) as engine, opened(postgres_url) as other:
        watch = engine.watch(Scan(A, b"", b"\xff", 10))
        await engine.read(Get(A, b"x"))
        before_commit(engine, lambda: other.commit(Batch((put(b"elsewhere"),))))
        claim = Batch((put(b"claimed", b'"mine"', 5000),), (Check(A, b"claimed", None),))
        won, lost = await asyncio.gather(engine.commit(claim), engine.commit(claim))
        assert isinstance(won, Committed)
        assert isinstance(lost, Conflict)
        [failed] = lost.failed
        assert failed.current == await stored(engine, b"claimed")
        assert won.version == (await stored(engine, b"claimed")).version
        seen: set[bytes] = set()
        async with asyncio.timeout(60):
            while seen != {b"claimed", b"elsewhere"}:
                seen |= {change.key for change in await anext(aiter(watch))}


async def test_a_conflict_names_the_version_of_a_row_that_a_person_inserted(postgres_url: str) -> None:
    """With a version that the version counter has not reached; meanwhile another process commits."""
    async with opened(postgres_url) as engine, opened(postgres_url) as other:
        columns = "(plugin_name, key, value_json, version)"
        query(postgres_url, f"INSERT INTO plugin_kv_storage {columns} VALUES ('p', 'k', '1', 5)")
        before_commit(engine, lambda: other.commit(Batch((put(b"elsewhere"),))))
        made, refused = await asyncio.gather(
            engine.commit(Batch((Add(P, ("p", "other"), 1),))),
            engine.commit(Batch((Set(P, ("p", "k"), b"2", Encoding.JSON),), (Check(P, ("p", "k"), None),))),
        )
        assert isinstance(made, Committed)
        assert made.version == 3
        assert isinstance(refused, Conflict)
        assert [failed.current and failed.current.version for failed in refused.failed] == [5]


async def test_a_conflict_shows_no_value_under_the_version_of_another(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large value is read after the version of its entry; another process replaces it in between."""
    values = [b'"' + letter * 5000 + b'"' for letter in (b"a", b"b")]
    async with opened(postgres_url) as engine, opened(postgres_url) as other:
        await other.commit(Batch((put(b"k", values[0]),)))

        async def replaced(*arguments: Any) -> Any:
            monkeypatch.undo()
            await other.commit(Batch((put(b"k", values[1]),)))
            return await load_values(*arguments)

        monkeypatch.setattr("keyloft.engines.postgres.by_function.load_values", replaced)
        refused = await engine.commit(Batch((put(b"k"),), (Check(A, b"k", None),)))
        assert isinstance(refused, Conflict)
        assert [failed.current for failed in refused.failed] == [await stored(other, b"k")]


async def test_a_conflict_shows_one_moment_of_several_spaces(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables are read one after the other; another process writes to both in between."""
    async with opened(postgres_url) as engine:
        keys = ((A, b"k"), (S, b"k"))
        done = await engine.commit(Batch(tuple([Set(space, key, b"1", Encoding.JSON) for space, key in keys])))
        assert isinstance(done, Committed)
        counter_row = engine.server.counter_row

        def between(rows: Sequence[Any]) -> Any:
            monkeypatch.undo()
            for table in ("keyloft_tuples", "keyloft_semantic"):
                query(postgres_url, f"UPDATE {table} SET version = 7")
            return counter_row(rows)

        monkeypatch.setattr(engine.server, "counter_row", between)
        refused = await engine.commit(Batch((), tuple([Check(space, key, None) for space, key in keys])))
        assert isinstance(refused, Conflict)
        assert [failed.current and failed.current.version for failed in refused.failed] == 2 * [done.version]


async def test_a_large_batch_that_takes_its_locks_first_has_more_time(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process decides it within the transaction, which the server ends if nothing happens for long."""
    decided = 0

    def slowly(*arguments: Any) -> Any:
        nonlocal decided
        decided += 1
        time.sleep(0.4)
        return settle(*arguments)

    monkeypatch.setattr("keyloft.limits.POSTGRES_TRANSACTION_SECONDS", 0.2)
    monkeypatch.setattr("keyloft.limits.POSTGRES_TRANSACTION_SECONDS_EACH", 0.002)
    async with opened(postgres_url, by="locking") as engine:
        monkeypatch.setattr("keyloft.engines.postgres.by_locking.settle", slowly)
        done = await engine.commit(Batch(tuple([put(b"%d" % number) for number in range(1000)])))
        assert isinstance(done, Committed)
        assert decided == 1, "the server has ended the first attempt"


async def test_a_plugins_row_that_a_person_changes_meanwhile_is_read_again(postgres_url: str) -> None:
    async def edit() -> None:
        query(postgres_url, "UPDATE plugin_kv_storage SET value_json = '40', updated_at = now()")

    async with opened(postgres_url) as engine:
        await engine.commit(Batch((Add(P, ("p", "n"), 1),)))
        before_commit(engine, edit)
        done = await engine.commit(Batch((Add(P, ("p", "n"), 2),)))
        assert isinstance(done, Committed)
        assert done.values == (42,)


async def test_large_values_are_read_where_they_are_needed(postgres_url: str) -> None:
    large = b'"' + b"x" * 5000 + b'"'
    number = b"9" * 3000
    async with opened(postgres_url) as engine:
        first = await engine.commit(Batch((put(b"text", large), put(b"number", number))))
        assert isinstance(first, Committed)
        refused = await engine.commit(Batch((put(b"text"),), (Check(A, b"text", None), Check(A, b"number", None))))
        assert isinstance(refused, Conflict)
        assert [failed.current and failed.current.value for failed in refused.failed] == [large, number]
        done = await engine.commit(Batch((Add(A, b"number", 1),), (Check(A, b"text", first.version),)))
        assert isinstance(done, Committed)
        assert done.values == (10**3000,)
        with pytest.raises(NotACounter):
            await engine.commit(Batch((Sum(A, b"text", 1),)))
        before_commit(engine, lambda: asyncio.sleep(0))
        assert (await engine.commit(Batch((Delete(A, b"text"),)))).found == (True,)  # type: ignore[union-attr]


# Clocks


@pytest.mark.parametrize("by", ["function", "locking"])
async def test_a_clock_that_is_set_back_brings_nothing_back_to_life(postgres_url: str, by: str) -> None:
    late, early = ManualClock(2_000_000_000_000), ManualClock(2_000_000_000_000 - 60_000)
    async with opened(postgres_url, late, by=by) as one, opened(postgres_url, early, by=by) as other:
        await other.commit(Batch((put(b"k", expire_in=60_000),)))
        await one.commit(Batch((put(b"later"),)))
        assert await other.read(Get(A, b"k")) == [None]
        done = await other.commit(Batch((put(b"new"),), (Check(A, b"k", None),)))
        assert isinstance(done, Committed)
        assert done.at == late.now()
        early.advance(-limits.CLOCK_AHEAD_SECONDS)
        for batch in (Batch((put(b"k"),)), Batch((Sum(A, b"n", 1),))):
            with pytest.raises(ClockSetBack, match="set the clock right"):
                await other.commit(batch)
        assert await one.read(Latest()) == [done.version]


# The change log


async def test_trimming_keeps_the_newest_row_and_gives_no_version_twice(postgres_url: str, clock: ManualClock) -> None:
    """Two engines write and trim at once, one in each way; then all is trimmed, and both open again."""
    history = KeptHistory(seconds=0, mib=0)
    versions: list[int] = []
    for _ in range(2):
        servers = [(await open_engine(postgres_url, clock)) for _ in range(2)]
        engines = [await PostgresEngine.open(engine.server, history) for engine in servers]  # type: ignore[attr-defined]
        engines[1].server.has_function = False
        for turn in range(4):
            batches = [Batch((Set(A, b"%d" % turn, b"1", Encoding.JSON),)) for _ in range(200)]
            done = await asyncio.gather(*[engine.commit(batch) for engine in engines for batch in batches])
            versions += [each.version for each in done if isinstance(each, Committed)]
            clock.advance(2 * limits.TRIM_SPARED_SECONDS)
        for engine in [*engines, *servers]:
            await engine.aclose()
        rows = query(postgres_url, "SELECT base, version, at FROM keyloft_changes ORDER BY version")
        assert rows[-1][1] == max(versions)
        assert all(one[1] == other[0] for one, other in pairwise(rows)), "the log has a gap"
        assert rows[0][2] > clock.now() - 8 * 1000 * limits.TRIM_SPARED_SECONDS
        assert rows[0][0] > 0, "nothing was trimmed"
    assert len(set(versions)) == len(versions) == 3200


@pytest.mark.parametrize("by", ["function", "locking"])
async def test_a_commit_with_more_rows_of_the_log_than_are_removed_at_once_is_trimmed(
    postgres_url: str, clock: ManualClock, by: str
) -> None:
    async with opened(postgres_url, clock, by=by) as engine:
        await engine.commit(Batch((put(b"k"),)))
        query(
            postgres_url,
            "INSERT INTO keyloft_changes (version, part, base, at, size, changes) "
            "SELECT version, number, base, at, size, changes FROM keyloft_changes, "
            f"generate_series(1, {limits.TRIM_ROWS}) AS number WHERE version > 1",
        )
        for _ in range(4):
            clock.advance(2 * limits.HISTORY_SECONDS)
            await asyncio.gather(*[engine.commit(Batch((put(b"k"),))) for _ in range(limits.TRIM_EVERY)])
        assert query(postgres_url, "SELECT count(*) FROM keyloft_changes WHERE part > 0") == [(0,)]


async def test_what_a_lost_commit_may_ask_for_is_not_trimmed(postgres_url: str, clock: ManualClock) -> None:
    engine = await open_engine(postgres_url, clock)
    small = await PostgresEngine.open(engine.server, KeptHistory(seconds=0, mib=0))  # type: ignore[attr-defined]
    for _ in range(3):
        await asyncio.gather(*[small.commit(Batch((put(b"k"),))) for _ in range(limits.TRIM_EVERY)])
        clock.advance(1)
    await small.aclose()
    await engine.aclose()
    assert query(postgres_url, "SELECT min(version) FROM keyloft_changes") == [(1,)]


async def test_rows_of_the_change_log_carry_the_id_of_their_commit_once(postgres_url: str) -> None:
    async with opened(postgres_url) as engine, opened(postgres_url, by="locking") as other:
        for each in (engine, other):
            await each.commit(Batch(tuple([put(b"%064d" % number) for number in range(3000)])))
    rows = query(postgres_url, "SELECT version, part, size, commit_id, octet_length(changes) FROM keyloft_changes")
    parts = [row for row in sorted(rows) if row[0] > 1]
    assert len({row[3] for row in parts if row[3] is not None}) == 2
    assert all((row[3] is not None) == (row[1] == 0) for row in parts)
    total = 0
    for _, _, size, _, length in parts:
        total += length
        assert size == total


async def test_a_mixed_load_of_both_ways_loses_nothing(postgres_url: str) -> None:
    async with (
        opened(postgres_url) as one,
        opened(postgres_url, by="locking") as other,
        keyloft.open(postgres_url) as kv,
    ):

        async def count(engine: PostgresEngine) -> None:
            for _ in range(50):
                await engine.commit(Batch((Sum(A, b"n", 1),)))

        async def check_and_set() -> None:
            for _ in range(20):
                async with asyncio.timeout(60):
                    while True:
                        entry = await kv.get(("n",))
                        if (await kv.atomic().check(entry).set(("n",), (entry.value or 0) + 1).commit()).ok:
                            break

        await asyncio.gather(count(one), count(other), count(one), check_and_set(), check_and_set())
        assert unpack_counter((await stored(one, b"n")).value) == 150
        assert (await kv.get(("n",))).value == 40


async def test_rows_locked_for_a_moment_are_waited_for(postgres_url: str) -> None:
    async with opened(postgres_url) as engine:
        await engine.commit(Batch((put(b"k"),)))
        rival = await asyncpg.connect(postgres_url)
        for _ in range(5):
            await rival.execute("BEGIN; SELECT * FROM keyloft_tuples FOR UPDATE")
            writing = asyncio.create_task(engine.commit(Batch((put(b"k"), Sum(A, b"n", 1)))))
            await asyncio.sleep(0.05)
            assert not writing.done()
            await rival.execute("COMMIT")
            async with asyncio.timeout(60):
                await writing
        await rival.close()


# On a new timeline


@pytest.mark.parametrize("by", ["function", "locking"])
async def test_the_first_of_all_commits_on_a_new_timeline_jumps(postgres_url: str, by: str) -> None:
    jump = limits.VERSION_JUMP
    async with opened(postgres_url, by=by) as one, opened(postgres_url, by=by) as two:
        await one.commit(Batch((put(b"k"), Sum(A, b"n", 1))))
        # As if the last commit had been made on another one.
        query(postgres_url, "UPDATE keyloft_version_counter SET timeline = 99")
        done = await asyncio.gather(*[each.commit(Batch((Sum(A, b"n", 1),))) for each in (one, two) for _ in range(3)])
        assert sorted(each.version for each in done if isinstance(each, Committed)) == [jump + n for n in range(1, 7)]
        assert unpack_counter((await stored(one, b"n")).value) == 7
        assert query(postgres_url, "SELECT version, timeline FROM keyloft_version_counter") == [(jump + 6, 1)]
        # What came before goes on; what the former primary may have given is not known.
        [log] = await one.read(Changes(LogPosition(2)))
        assert [change.version for change in log.changes] == [jump + n for n in range(1, 7)]
        for lost in (3, jump):
            with pytest.raises(
                keyloft.HistoryGone, match=f"version {lost} was given by another database, or by a primary"
            ):
                await one.read(Changes(LogPosition(lost)))
    # These keys are no tuples; the log has no defect.
    assert {finding.code for finding in (await keyloft.admin.check(postgres_url)).findings} == {"key"}
