"""A group settles as if its batches had been committed one by one."""

from hypothesis import given
from hypothesis import strategies as st

from keyloft import KeyloftError
from keyloft.core.records import (
    Add,
    Address,
    Append,
    Batch,
    Check,
    Delete,
    Head,
    Max,
    Min,
    Purge,
    Record,
    Set,
    Space,
    Sum,
    Touch,
    appended_key,
)
from keyloft.core.values import Encoding, pack_counter
from keyloft.engines import change_log
from keyloft.engines.commit.settle import PutRow, RemoveRow, Settled, Write, deciding, settle, unread, with_values

NOW = 1000

spaces = st.sampled_from(Space)
names = st.sampled_from([b"a", b"b", b"c"])
versions = st.integers(0, 12)
expiries = st.none() | st.integers(1, 3)
operands = st.integers(0, 5)
flags = st.booleans()
payloads = st.sampled_from([(b"1", Encoding.JSON), (b"x", Encoding.BYTES), (pack_counter(3), Encoding.U64)])

mutations = st.one_of(
    st.builds(lambda s, k, p, e, a: Set(s, k, p[0], p[1], e, if_absent=a), spaces, names, payloads, expiries, flags),
    st.builds(lambda s, k, p, e: Set(s, k, p[0], p[1], expire_at=e and NOW + e - 2), spaces, names, payloads, expiries),
    st.builds(lambda s, k, p, e: Append(s, k, p[0], p[1], e, k), spaces, names, payloads, expiries),
    st.builds(Delete, spaces, names),
    st.builds(Sum, spaces, names, operands),
    st.builds(Add, spaces, names, st.integers(-5, 5)),
    st.builds(Min, spaces, names, operands),
    st.builds(Max, spaces, names, operands),
    st.builds(Touch, spaces, names, expiries),
    st.builds(Purge, spaces, names, versions),
)
batches = st.builds(
    lambda ms, cs: Batch(tuple(ms), tuple(cs)),
    st.lists(mutations, max_size=4),
    st.lists(st.builds(Check, spaces, names, st.none() | versions, st.booleans()), max_size=2),
)
records = st.builds(
    lambda k, p, v, e: Record(k, p[0], p[1], v, e, NOW - 50, NOW - 20),
    names,
    payloads,
    versions,
    st.none() | st.sampled_from([NOW - 1, NOW, NOW + 1]),
)
databases = st.dictionaries(st.tuples(spaces, names), records).map(
    lambda rows: {
        (s, k): Record(k, r.value, r.encoding, r.version, r.expires_at, r.created_at, r.updated_at)
        for (s, k), r in rows.items()
    }
)


def apply(database: dict[Address, Record], writes: dict[Address, Write]) -> None:
    """What an engine does with writes, in the plainest form: the SQL of the layouts, on a dict."""
    for address, write in writes.items():
        old = database.get(address)
        if isinstance(write, RemoveRow):
            database.pop(address, None)
        elif isinstance(write, PutRow):
            new = write.record
            created = old.created_at if old and not write.is_new_entry and old.is_alive(NOW) else new.created_at
            database[address] = Record(
                new.key, new.value, new.encoding, new.version, new.expires_at, created, new.updated_at
            )
        elif old:
            database[address] = Record(
                old.key, old.value, old.encoding, old.version, write.expires_at, old.created_at, old.updated_at
            )


def commit(database: dict[Address, Record], group: list[Batch], version: int) -> Settled:
    needed = deciding(group)
    current = {
        address: record if needed[address] else head_of(record)
        for address, record in database.items()
        if address in needed
    }
    settled = settle(group, current, version, NOW)
    settled = with_values(settled, {address: database[address] for address in unread(settled)})
    apply(database, settled.writes)
    return settled


def head_of(record: Record) -> Head:
    return Head(
        record.key, b"", record.encoding, record.version, record.expires_at, record.created_at, record.updated_at
    )


def comparable(verdict: object) -> object:
    return (type(verdict), str(verdict)) if isinstance(verdict, KeyloftError) else verdict


@given(databases, st.lists(batches, max_size=6))
def test_grouped_equals_one_by_one(database: dict[Address, Record], group: list[Batch]) -> None:
    grouped, one_by_one = database.copy(), database.copy()
    together = commit(grouped, group, version=20)
    version = 20
    verdicts = []
    for batch in group:
        alone = commit(one_by_one, [batch], version)
        version = alone.version
        verdicts += alone.verdicts
    assert [comparable(verdict) for verdict in together.verdicts] == [comparable(verdict) for verdict in verdicts]
    assert together.version == version
    assert grouped == one_by_one


@given(databases, batches)
def test_a_failed_batch_writes_nothing(database: dict[Address, Record], batch: Batch) -> None:
    settled = settle([batch], database, 20, NOW)
    if settled.version == 20:
        assert settled.writes == {}


def test_a_plain_set_needs_nothing_loaded() -> None:
    assert deciding([Batch((Set(Space.TUPLES, b"k", b"1", Encoding.JSON),))]) == {}


def test_only_counters_need_a_value_loaded() -> None:
    at = Space.TUPLES, b"k"
    assert deciding([Batch((Delete(*at), Touch(*at), Purge(*at, 1)), (Check(*at, 1),))]) == {at: False}
    assert deciding([Batch((Set(*at, b"1", Encoding.JSON, if_absent=True),))]) == {at: False}
    assert deciding([Batch((Delete(*at), Add(*at, 1), Touch(*at)), (Check(*at, 1),))]) == {at: True}


@given(databases, st.lists(batches, max_size=6))
def test_the_log_names_each_key_that_changed(database: dict[Address, Record], group: list[Batch]) -> None:
    before = database.copy()
    settled = commit(database, group, version=20)
    logged = {(change.space, change.key) for change in settled.changes}
    changed = {at for at in before.keys() | database.keys() if before.get(at) != database.get(at)}
    assert changed <= logged
    assert logged == settled.writes.keys()
    versions = [change.version for change in settled.changes]
    assert versions == sorted(versions)
    assert all(20 < version <= settled.version for version in versions)


@given(databases, st.lists(batches, max_size=6), st.integers(0, 2**40))
def test_a_packed_log_is_read_back_whatever_version_it_is_given(
    database: dict[Address, Record], group: list[Batch], base: int
) -> None:
    settled = commit(database, group, version=20)
    parts = change_log.pack(settled.changes, 20, settled.appended)
    found = [change for part in parts for change in change_log.unpack(20, NOW, part)]
    assert found == settled.changes
    moved = [change for part in parts for change in change_log.unpack(base, NOW, part)]
    assert [change.version - base for change in moved] == [change.version - 20 for change in found]
    for one, other in zip(found, moved, strict=True):
        if around := settled.appended.get((one.space, one.key)):
            assert other.key == appended_key(one.space, around[0], other.version, around[1])
        else:
            assert other.key == one.key
