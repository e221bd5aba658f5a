"""A group of plain sets is written in fewer steps than others, and no caller sees a difference."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyloft import ManualClock, limits
from keyloft.core import schema
from keyloft.core.records import Batch, Check, Delete, Key, Mutation, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.sqlite import writes
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.plain_sets import plain_sets
from keyloft.engines.sqlite.writes import SqliteWriter

TABLES = (schema.PLUGIN_TABLE, schema.TUPLE_TABLE, f"{schema.TUPLE_TABLE}_large", schema.CHANGES_TABLE)
LARGE = b'"' + b"x" * limits.ROW_BYTES + b'"'


def key(space: Space, number: int) -> Key:
    return ("trivia", f"key-{number}") if space is Space.PLUGINS else b"key-%d" % number


def put(number: int, value: bytes = b"1", space: Space = Space.PLUGINS, **options: Any) -> Set:
    return Set(space, key(space, number), value, Encoding.JSON, **options)


def batches(*mutations: Mutation) -> list[Batch]:
    return [Batch((one,)) for one in mutations]


def written(groups: list[list[Batch]]) -> tuple[list[Outcome], list[list[tuple[Any, ...]]]]:
    """What becomes of groups that are committed a second apart, and the rows that they leave behind."""
    clock = ManualClock()
    with tempfile.TemporaryDirectory() as folder:
        file = SqliteFile(str(Path(folder) / "store.db"))
        connection = file.open_writer()
        try:
            writer = SqliteWriter(file, clock, connection, KeptHistory())
            outcomes = []
            for group in groups:
                outcomes.append(writer.commit(group))
                clock.advance(1)
            return outcomes, [connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES]
        finally:
            connection.close()


def written_by_settle(groups: list[list[Batch]]) -> tuple[list[Outcome], list[list[tuple[Any, ...]]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writes, "plain_sets", lambda group: None)
        return written(groups)


SETS = st.builds(
    put,
    st.integers(0, 5),
    st.sampled_from((b"1", b'"\xc3\xa9"', b'{"a":[]}', LARGE)),
    st.sampled_from((Space.PLUGINS, Space.TUPLES)),
    expire_in=st.sampled_from((None, None, None, 500)),
)


class TestPlainSets:
    @given(st.lists(st.lists(SETS, min_size=1, max_size=6), min_size=1, max_size=3))
    @example([[put(1, expire_in=500)], [put(2), put(1)]])  # over an expired entry, which restarts created_at
    @example([[put(1)], [put(2), put(1)]])  # over a live one, which keeps it
    @example([[put(1)], [put(1, b"2"), put(2), put(1, b"3")]])  # a key twice
    @example([[put(1, expire_in=500)], [put(1, b"2"), put(1, b"3")]])  # a key twice, over an expired entry
    @example([[put(1, LARGE, Space.TUPLES)], [put(2, b"2", Space.TUPLES), put(1, b"1", Space.TUPLES)]])
    def test_are_written_as_settle_decides(self, sets: list[list[Set]]) -> None:
        groups = [batches(*some) for some in sets]
        assert written(groups) == written_by_settle(groups)

    def test_long_groups_are_logged_and_trimmed_as_others(self) -> None:
        groups = [batches(*[put(number) for number in range(first, first + 1200)]) for first in (0, 600)]
        assert written(groups) == written_by_settle(groups)

    def test_are_recognised(self) -> None:
        sets = [put(1), put(2), put(1, b"2")]
        assert plain_sets(batches(*sets)) == sets

    @pytest.mark.parametrize(
        "other",
        [
            Batch((put(2, expire_in=5),)),
            Batch((put(2, expire_at=5),)),
            Batch((put(2, if_absent=True),)),
            Batch((put(2, keep_expiry=True),)),
            Batch((put(2, space=Space.TUPLES),)),
            Batch((put(2), put(3))),
            Batch((put(2),), (Check(Space.PLUGINS, key(Space.PLUGINS, 2), None),)),
            Batch((Delete(Space.PLUGINS, key(Space.PLUGINS, 2)),)),
            Batch(()),
        ],
    )
    def test_what_depends_on_something_is_none(self, other: Batch) -> None:
        assert plain_sets([Batch((put(1),)), other]) is None
        assert plain_sets([other, Batch((put(1),))]) is None

    def test_a_large_value_is_none(self) -> None:
        large = Batch((put(2, LARGE, Space.TUPLES),))
        assert plain_sets([Batch((put(1, space=Space.TUPLES),)), large]) is None
