"""Stored values as the admin page shows them once they are asked for: JSON with indents, bytes as hex and text."""

from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from keyloft import limits
from keyloft.core.values import BYTES, COUNTER, JSON, unpack_counter

_KINDS: Final = {int(JSON): "JSON", int(BYTES): "bytes", int(COUNTER): "U64"}
_ROW: Final = 16


class ShownValue(Struct, frozen=True, kw_only=True):
    """A value that was asked for."""

    text: str
    is_cut: bool
    """Whether there is more of it than shown."""


def kind_of(encoding: int) -> str:
    """What a stored value is."""
    return _KINDS.get(encoding, "damaged" if encoding < 0 else f"of kind {encoding}")


def show(data: bytes, encoding: int) -> ShownValue:
    """A stored value for a person to read."""
    cut = data[: limits.PAGE_VALUE_BYTES]
    is_cut = len(cut) < len(data)
    if encoding == JSON:
        if not is_cut:
            with suppress(msgspec.MsgspecError, RecursionError):  # damaged, or nested too deeply: as it is stored
                cut = msgspec.json.format(data, indent=2)
        return ShownValue(text=cut.decode("utf-8", "backslashreplace"), is_cut=is_cut)
    if encoding == COUNTER and len(data) == 8:
        return ShownValue(text=f"{unpack_counter(data)}", is_cut=False)
    rows = [_hex_row(cut, at) for at in range(0, len(cut), _ROW)]
    return ShownValue(text="\n".join(rows) or "(no bytes)", is_cut=is_cut)


def _hex_row(data: bytes, at: int) -> str:
    row = data[at : at + _ROW]
    text = "".join([chr(byte) if 32 <= byte < 127 else "." for byte in row])
    return f"{at:06x}  {row.hex(' '):<{3 * _ROW - 1}}  {text}"
