"""Checks rows of the semantic store: the project that a row belongs to, and what is wrong with it."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from keyloft.core.records import SERVICE_ROWS, Record
from keyloft.core.values import Encoding
from keyloft.errors import InvalidKey, Undecodable
from keyloft.semantic import keys
from keyloft.semantic.audit import POSITION_BYTES, read_audit_record
from keyloft.semantic.dead_letters import read_dead_letter
from keyloft.semantic.envelope import envelope_of
from keyloft.semantic.keys import EntryKey, Project
from keyloft.semantic.replays import read_memory
from keyloft.semantic.rules import LOCK

_TOKEN_BYTES: Final = 8


def project_of(row: bytes) -> Project | None:
    """The project that a row belongs to; None if it belongs to none."""
    try:
        return _project(row)
    except ValueError:
        return None


def _project(row: bytes) -> Project:
    """The project that a row belongs to; raises a ValueError if it belongs to none."""
    _, tenant, project, _ = row.split(b"/", 3)
    return keys.checked_project(tenant.decode(), project.decode())


class RowChecker:
    """Finds what is wrong with rows, which must be passed in the order of their keys.

    In that order audit records precede the pointers to them, and locks precede their fencing tokens. The checker keeps
    ten bytes of each audit record, and the key of each lock.
    """

    def __init__(self, now: int) -> None:
        self._now = now
        self._recorded: dict[Project, bytearray] = defaultdict(bytearray)
        """The positions of the audit records as one bytearray, which takes less memory than as many objects."""
        self._locks: set[bytes] = set()
        self._by_kind: dict[bytes, Callable[[Record], str | None]] = {
            b"a/": self._audit_record,
            b"d/": self._deleted,
            b"e/": self._entry,
            b"f/": self._token,
            b"h/": self._audit_key,
            b"i/": self._index,
            b"k/": self._pointer,
            b"r/": self._request,
            b"x/": self._dead_letter,
            SERVICE_ROWS: _of_a_service,
        }

    def defect(self, record: Record) -> tuple[str, str] | None:
        """What is wrong with a row, if anything: its kind (key, value or orphan) and a message, without a value."""
        check = self._by_kind.get(record.key[:2])
        if check is None:
            return "key", "no row of the semantic store begins like this"
        try:
            missing = check(record)
        except Undecodable:
            return "value", "what it holds can't be read"
        except ValueError:
            return "key", "it is no key of the semantic store"
        return None if missing is None else ("orphan", missing)

    # Each check returns what is missing besides the row, or None; a wrong row raises InvalidKey or Undecodable.

    def _entry(self, record: Record) -> None:
        if _entry_key(record.key).entry != record.key:
            raise InvalidKey("the row belongs to another entry")
        # Noted before the row is decoded: a lock that can't be decoded still has a token, which is not an orphan.
        self._locks.add(record.key)
        _check_is_json(record)
        if envelope_of(record).semantics.purpose != LOCK:
            self._locks.remove(record.key)

    def _deleted(self, record: Record) -> None:
        key = _entry_key(record.key)
        _check_is_json(record)
        envelope_of(record, key.key)

    def _audit_record(self, record: Record) -> None:
        project, position = _within_project(record.key, POSITION_BYTES)
        self._recorded[project] += position
        _check_is_json(record)
        read_audit_record(record)

    def _index(self, record: Record) -> str | None:
        if len(record.value) % POSITION_BYTES:
            raise Undecodable("the row lists no whole record positions")
        return self._pointer(record)

    def _pointer(self, record: Record) -> str | None:
        beginning, position = record.key[:-POSITION_BYTES], record.key[-POSITION_BYTES:]
        key = _entry_key(beginning[:-1])
        if beginning not in (key.audit_index, key.conflicts):
            raise InvalidKey("the row belongs to no entry")
        # The pointer and its record expire at the same moment, but a sweep may remove the record first.
        if record.is_alive(self._now) and not self._is_recorded(key.project, position):
            return "the audit record that it points to is missing"
        return None

    def _is_recorded(self, project: Project, position: bytes) -> bool:
        joined = self._recorded[project]

        def nth(number: int) -> bytes:
            return bytes(joined[number * POSITION_BYTES : (number + 1) * POSITION_BYTES])

        return nth(bisect_left(range(len(joined) // POSITION_BYTES), position, key=nth)) == position

    def _token(self, record: Record) -> str | None:
        project, _ = _within_project(record.key, _TOKEN_BYTES)
        try:
            lock = _entry_key(project.rows(b"e/") + record.value)
        except ValueError:
            raise Undecodable("the fencing token names no lock") from None
        return None if lock.entry in self._locks else "the lock of this fencing token is missing"

    def _request(self, record: Record) -> None:
        about, nul, request_id = record.key.partition(b"\x00")
        if not about.endswith(b"/"):
            _entry_key(about)
        else:
            _project(record.key)
        if not nul or not request_id.decode():
            raise InvalidKey("the row names no request")
        read_memory(record)

    def _dead_letter(self, record: Record) -> None:
        _project(record.key)
        read_dead_letter(record)

    def _audit_key(self, record: Record) -> None:
        if record.key != keys.AUDIT_KEY:
            raise InvalidKey("the row is not the one of the audit key")
        if not record.value:
            raise Undecodable("the audit key is empty")


def _of_a_service(record: Record) -> None:
    """Rows of services are not checked: they last for seconds, and services check them when they read them."""


def _entry_key(row: bytes) -> EntryKey:
    """The key that a row of any kind begins with."""
    return keys.parse(keys.key_of_row(row))


def _within_project(row: bytes, number_bytes: int) -> tuple[Project, bytes]:
    """The project of a row, and the numbers that its key ends with."""
    project = _project(row)
    beginning, numbers = row[:-number_bytes], row[-number_bytes:]
    if beginning != project.rows(row[:2]):
        raise InvalidKey("the row belongs to no project")
    return project, numbers


def _check_is_json(record: Record) -> None:
    if record.encoding != Encoding.JSON:
        raise Undecodable("the row is not stored as JSON")
