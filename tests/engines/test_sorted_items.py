"""Items in order, in chunks."""

import random

from keyloft.engines.sorted_items import SortedItems


def test_items_of_a_range_are_counted_as_they_are_listed() -> None:
    chances = random.Random(1)
    items = SortedItems()
    assert items.count(0, 1) == 0
    stored: set[int] = set()
    for _ in range(5000):
        item = chances.randrange(20_000)
        if item in stored:
            stored.remove(item)
            items.remove(item)
        else:
            stored.add(item)
            items.add(item)
    for _ in range(500):
        start, end = chances.randrange(-10, 20_010), chances.randrange(-10, 20_010)
        assert items.count(start, end) == len([item for item in stored if start <= item < end])
