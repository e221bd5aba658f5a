"""A group settles as if its batches had been committed one by one."""

from hypothesis import given
from hypothesis import strategies as st

from keyloft import KeyloftError
from keyloft.core.records import (
    Address,
    Append,
    Batch,
    Check,
    Delete,
    Max,
    Min,
    Purge,
    Record,
    Set,
    Space,
    Sum,
    Touch,
)
from keyloft.core.values import Encoding, pack_counter
from keyloft.engines.commit.settle import PutRow, RemoveRow, Settled, Write, deciding, settle

NOW = 1000

spaces = st.sampled_from(Space)
names = st.sampled_from([b"a", b"b", b"c"])
versions = st.integers(0, 12)
expiries = st.none() | st.integers(1, 3)
operands = st.integers(0, 5)
payloads = st.sampled_from([(b"1", Encoding.JSON), (b"x", Encoding.BYTES), (pack_counter(3), Encoding.U64)])

mutations = st.one_of(
    st.builds(lambda s, k, p, e: Set(s, k, p[0], p[1], e), spaces, names, payloads, expiries),
    st.builds(lambda s, k, p, e: Append(s, k, p[0], p[1], e, k), spaces, names, payloads, expiries),
    st.builds(Delete, spaces, names),
    st.builds(Sum, spaces, names, operands),
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
    current = {address: record for address, record in database.items() if address in needed}
    settled = settle(group, current, version, NOW)
    apply(database, settled.writes)
    return settled


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
    assert deciding([Batch((Set(Space.TUPLES, b"k", b"1", Encoding.JSON),))]) == set()
