"""The keys one part below a prefix, found by seeking: what lies below each of them is skipped."""

from collections.abc import AsyncIterator

from keyloft import limits
from keyloft.core import keys
from keyloft.core.engine import Engine
from keyloft.core.keys import KeyLike, TupleKey
from keyloft.core.lazy import LazyList, check_limit
from keyloft.core.records import Scan
from keyloft.tuples.selector import Selector


class Children(LazyList[TupleKey]):
    """Keys `(*prefix, part)` at or below which something is stored: await them as a list, or iterate them."""

    what = "children"

    def __init__(
        self,
        engine: Engine,
        prefix: KeyLike,
        limit: int | None,
        *,
        reverse: bool = False,
        within: Selector | None = None,
    ) -> None:
        # `within` is a range of keys below the prefix, for a part of its children.
        super().__init__(engine)
        self._engine = engine
        keys.encode_prefix(prefix)  # refuses None, which a selector takes for no prefix
        self._parts = len(prefix) + 1
        self._selector = within or Selector.of(prefix, None, None, reverse=reverse)
        self._limit = check_limit(limit)

    async def __aiter__(self) -> AsyncIterator[TupleKey]:
        scan, left = self._selector.scan(1, keys_only=True), self._limit
        while left > 0:
            [page] = await self._engine.read(scan)
            met, below, end = 0, b"", b""
            for key in page.keys:
                # Not `startswith`: the encoded "a" is also the beginning of the encoded "a\0b".
                if below <= key < end:
                    continue
                child = keys.decode(key)[: self._parts]
                below = keys.encode_prefix(child)
                end = below + keys.LAST
                met += 1
                yield child
                if met == left:
                    return
            if len(page) < scan.limit:
                return
            left -= met
            scan = self._after(below, _next_page(len(page), met))

    def _after(self, child: bytes, limit: int) -> Scan:
        """The scan that continues after a child and everything below it."""
        wanted = self._selector.scan(limit, keys_only=True)
        if wanted.reverse:
            return Scan(wanted.space, wanted.start, child, limit, reverse=True, keys_only=True)
        return Scan(wanted.space, child + keys.LAST, wanted.end, limit, keys_only=True)


def _next_page(read: int, children: int) -> int:
    """How many keys to read next: more while most keys are of different children, fewer where one child has many."""
    return min(limits.SCAN_ROWS, 2 * read) if 2 * children >= read else max(1, read // 8)
