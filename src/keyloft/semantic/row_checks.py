"""The rows of the semantic store as whoever runs it meets them: whose they are, and what is wrong with them."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from keyloft.core.records import Record
from keyloft.core.values import Encoding
from keyloft.errors import InvalidKey, Undecodable
from keyloft.semantic import keys
from keyloft.semantic.audit import ENDING_BYTES, read_fact
from keyloft.semantic.dead_letters import read_letter
from keyloft.semantic.envelope import LOCK, envelope_of
from keyloft.semantic.planning import remembered

_TOKEN_BYTES: Final = 8


class Defect(Struct, frozen=True):
    """What is wrong with a row; it never tells a value."""

    kind: str
    """key, value or orphan"""
    told: str


def project_of(row: bytes) -> tuple[str, str] | None:
    """The tenant and project that a row belongs to; None if it belongs to none."""
    words = row.split(b"/", 3)
    if len(words) < 4:
        return None
    try:
        return keys.tenant_id(words[1].decode()), keys.project_id(words[2].decode())
    except (InvalidKey, UnicodeDecodeError):
        return None


class Examiner:
    """Says what is wrong with rows that come in the order of their keys.

    That order puts records before the pointers to them, and locks before their tokens. Ten bytes are kept of each audit
    record, and the key of each lock.
    """

    def __init__(self, now: int) -> None:
        self._now = now
        self._recorded: dict[bytes, _Endings] = defaultdict(_Endings)
        self._locks: set[bytes] = set()
        self._by_kind: dict[bytes, Callable[[Record], Defect | None]] = {
            b"a/": self._audit_record,
            b"d/": self._deleted,
            b"e/": self._entry,
            b"f/": self._token,
            b"h/": self._audit_key,
            b"k/": self._pointer,
            b"r/": self._request,
            b"x/": self._dead_letter,
        }

    def defect(self, record: Record) -> Defect | None:
        """What is wrong with a row, if anything is."""
        examine = self._by_kind.get(record.key[:2])
        if examine is None:
            return Defect("key", "no row of the semantic store begins like this")
        try:
            return examine(record)
        except Undecodable:
            return Defect("value", "what it holds can't be read")
        except ValueError:
            return Defect("key", "it is no key of the semantic store")

    def _entry(self, record: Record) -> Defect | None:
        if _place(record.key).entry != record.key:
            raise InvalidKey("of another entry")
        # Before it is read: what can't be read is no reason to call its token an orphan, too.
        self._locks.add(record.key)
        _check_encoding(record, Encoding.JSON)
        if envelope_of(record).semantics.purpose != LOCK:
            self._locks.remove(record.key)
        return None

    def _deleted(self, record: Record) -> Defect | None:
        place = _place(record.key)
        _check_encoding(record, Encoding.JSON)
        envelope_of(record, place.key)
        return None

    def _audit_record(self, record: Record) -> Defect | None:
        inside, ending = _within_project(record.key, ENDING_BYTES)
        self._recorded[inside].append(ending)
        _check_encoding(record, Encoding.JSON)
        read_fact(record)
        return None

    def _pointer(self, record: Record) -> Defect | None:
        trace, ending = record.key[:-ENDING_BYTES], record.key[-ENDING_BYTES:]
        place = _place(trace[:-1])
        if place.trace != trace:
            raise InvalidKey("of no entry")
        # Both were written by one commit, to expire at the same moment; but a sweep may remove one before the other.
        if record.is_alive(self._now) and ending not in self._recorded[place.inside]:
            return Defect("orphan", "the audit record that it points to is not there")
        return None

    def _token(self, record: Record) -> Defect | None:
        inside, _ = _within_project(record.key, _TOKEN_BYTES)
        try:
            lock = _place(b"e/%b/%b" % (inside, record.value))
        except ValueError:
            raise Undecodable("a token that names no lock") from None
        if lock.entry not in self._locks:
            return Defect("orphan", "the lock that this fencing token is of is not there")
        return None

    def _request(self, record: Record) -> Defect | None:
        about, nul, request_id = record.key.partition(b"\x00")
        if not about.endswith(b"/"):
            _place(about)
        elif project_of(record.key) is None:
            raise InvalidKey("of no project")
        if not nul or not request_id.decode():
            raise InvalidKey("no request")
        remembered(record)
        return None

    def _dead_letter(self, record: Record) -> Defect | None:
        if project_of(record.key) is None:
            raise InvalidKey("of no project")
        read_letter(record)
        return None

    def _audit_key(self, record: Record) -> Defect | None:
        if record.key != keys.AUDIT_KEY:
            raise InvalidKey("another key")
        if not record.value:
            raise Undecodable("no key")
        return None


def _place(row: bytes) -> keys.Place:
    """What the beginning of a row names: a tenant, a project and a path."""
    return keys.place(keys.key_of_row(row))


def _within_project(row: bytes, ending_bytes: int) -> tuple[bytes, bytes]:
    """The project that a row is of, and the numbers that its key ends with."""
    project = project_of(row)
    beginning, ending = row[:-ending_bytes], row[-ending_bytes:]
    if project is None or beginning[2:] != keys.project_bytes(*project) + b"/":
        raise InvalidKey("of no project")
    return beginning[2:-1], ending


def _check_encoding(record: Record, encoding: Encoding) -> None:
    if record.encoding != encoding:
        raise Undecodable("of another encoding")


class _Endings:
    """Endings of keys in their order, without the room that as many objects would take."""

    def __init__(self) -> None:
        self._joined = bytearray()

    def append(self, ending: bytes) -> None:
        self._joined += ending

    def __len__(self) -> int:
        return len(self._joined) // ENDING_BYTES

    def __getitem__(self, at: int) -> bytes:
        return bytes(self._joined[at * ENDING_BYTES : (at + 1) * ENDING_BYTES])

    def __contains__(self, ending: bytes) -> bool:
        at = bisect_left(self, ending)
        return at < len(self) and self[at] == ending
