"""The replies of the plugin service as JSON, made from what the engine has stored or found."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from keyloft import limits
from keyloft.core import json_text
from keyloft.core.records import Get, Record
from keyloft.nats import payloads
from keyloft.plugins.entries import UsedStorage, entry_fields
from keyloft.plugins.stored import is_readable, report_broken

STORED: Final = b'{"success":true}'
DELETED: Final = b'{"success":true,"deleted":true}'
NOT_DELETED: Final = b'{"success":true,"deleted":false}'
ABSENT: Final = b'{"success":true,"exists":false}'
TOUCHED: Final = b'{"success":true,"exists":true}'
_FOUND: Final = b'{"success":true,"exists":true,"value":%b}'


_split = msgspec.json.Decoder(list[Raw]).decode


def got(content: Get, record: Record | None) -> bytes:
    """The reply to a get."""
    if record is None:
        return ABSENT
    value = record.value
    try:
        # Another program may have written to the table. Skimming is faster than decoding, but overlooks broken UTF-8.
        if not value.isascii():
            value.decode()
        json_text.skim(value)
        is_broken = json_text.is_deeper(value, limits.PLUGIN_VALUE_DEPTH)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        is_broken = not json_text.is_json(value)
    if is_broken:
        report_broken(record)
        return ABSENT
    return _FOUND % value


def values_found(records: Sequence[Record | None]) -> bytes | None:
    """The values that several gets have found, with commas between them; None if `got` has to look at each of them."""
    values = [record.value for record in records if record is not None]
    return None if len(values) < len(records) else _joined(values)


def got_each(records: Sequence[Record | None]) -> list[bytes] | None:
    """The replies to several gets, whose values are checked together; None if `got` has to look at each of them."""
    values = [record.value for record in records if record is not None]
    if values and _joined(values) is None:
        return None
    return [ABSENT if record is None else _FOUND % record.value for record in records]


def _joined(values: Sequence[bytes]) -> bytes | None:
    """Stored values with commas between them, if each of them is JSON that callers can read."""
    try:
        joined, lengths = b",".join(values), list(map(len, values))
        # As in `got`. If an array of them has items of these very lengths, each of them is JSON.
        if not joined.isascii():
            joined.decode()
        if list(map(len, _split(b"[%b]" % joined))) != lengths:
            return None
    except (TypeError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        return None
    if max(lengths) > (most := limits.PLUGIN_VALUE_DEPTH) and any([json_text.is_deeper(one, most) for one in values]):
        return None
    return joined


def listed(keys: list[str], truncated: bool, most_bytes: int) -> bytes:
    """The reply to a list; with fewer keys, and marked as truncated, if it would be too large for a message."""
    while True:
        reply = payloads.to_json({"success": True, "keys": keys, "count": len(keys), "truncated": truncated})
        if len(reply) <= most_bytes or len(keys) <= 1:
            return reply
        # As many keys as fit in proportion, less a tenth, because keys differ in length.
        keys = keys[: max(1, len(keys) * most_bytes * 9 // (len(reply) * 10))]
        truncated = True


def entry(record: Record | None, now: int) -> bytes:
    """The reply to a get that asks for more than the value; `now` is the time of the read."""
    if record is None or not is_readable(record):
        return ABSENT
    fields = {"success": True, "exists": True, "value": Raw(record.value), **entry_fields(record, now)}
    return payloads.to_json(fields)


def stored_as(version: int) -> bytes:
    """The reply to a set with a condition."""
    return b'{"success":true,"version":%d}' % version


def incremented(value: int) -> bytes:
    """The reply to an incr. msgspec can't write ints over 64 bits."""
    return b'{"success":true,"value":%d}' % value


def counted(count: int, truncated: bool | None = None) -> bytes:
    """The reply with a number of keys; `truncated` is for a request with a limit."""
    more = b"" if truncated is None else b',"truncated":true' if truncated else b',"truncated":false'
    return b'{"success":true,"count":%d%b}' % (count, more)


def used(storage: UsedStorage) -> bytes:
    """The reply to a usage."""
    fields: dict[str, Any] = {"success": True, "keys": storage.keys, "bytes": storage.bytes}
    if storage.most_keys is not None or storage.most_bytes is not None:
        fields["quota"] = {"keys": storage.most_keys, "bytes": storage.most_bytes}
    return payloads.to_json(fields)


class ValuesReply:
    """The reply to a get_many: as many values as one message holds, at least one; the other keys are its `rest`."""

    def __init__(self, keys: Sequence[str], most_bytes: int) -> None:
        self._keys = keys
        self._values: dict[str, Raw] = {}
        self._missing: list[str] = []
        self._read = 0
        # Each key with two quotes, a colon and a comma; and the names of the fields.
        self._left = most_bytes - len(payloads.to_json(self._keys)) - 2 * len(keys) - 128

    def add(self, records: Iterable[Record | None]) -> bool:
        """Add the entries of the next keys; returns whether there is room for more."""
        for key, record in zip(self._keys[self._read :], records, strict=False):
            if record is None or not is_readable(record):
                self._missing.append(key)
            else:
                self._left -= len(record.value)
                if self._left < 0 and self._values:
                    return False
                self._values[key] = Raw(record.value)
            self._read += 1
        return self._left >= 0

    @property
    def found(self) -> int:
        return len(self._values)

    def text(self) -> bytes:
        rest = self._keys[self._read :]
        fields = {"success": True, "values": self._values, "missing": self._missing}
        return payloads.to_json(fields | {"rest": rest} if rest else fields)


def listed_entries(entries: Sequence[tuple[str, bytes]], truncated: bool) -> bytes:
    """The reply to a list with values."""
    shown = [{"key": key, "value": Raw(value)} for key, value in entries]
    return payloads.to_json({"success": True, "entries": shown, "count": len(shown), "truncated": truncated})
