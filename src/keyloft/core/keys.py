"""Tuple keys as bytes whose order is the order of the tuples, and back.

The encoding is that of FoundationDB's tuple layer and of Deno KV. Each part is self-delimiting, so a shorter
tuple sorts before every tuple that extends it, and all extensions of a tuple are neighbours.

    bytes   01, the data with 00 written 00 FF, 00
    str     02, UTF-8 with 00 written 00 FF, 00
    int     14+k (n > 0), 14 (zero) or 14-k (n < 0), then the k big-endian bytes of |n|, inverted if n < 0;
            beyond eight bytes 1D k … and 0B (k ^ FF) …
    float   21, the double's 8 bytes, sign bit flipped, or all bits inverted if negative; one NaN
    bool    26 False, 27 True

So bytes < str < int < float < bool. `0.0` and `-0.0` are two keys, and so are `1`, `1.0` and `True`.
"""

import contextlib
import math
import struct
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

from keyloft import limits
from keyloft.errors import InvalidKey, InvalidKeyType, KeyTooLarge, Undecodable

Part: TypeAlias = str | bytes | int | float | bool
TupleKey: TypeAlias = tuple[Part, ...]
KeyLike: TypeAlias = TupleKey | list[Any]
"""What callers may pass as a key: a tuple or a list of parts.

Not a `Sequence`, which a text is for type checkers; and not a `list[Part]`, which no `list[str]` is.
"""

FIRST: Final = b"\x00"
"""Sorts before every key."""
LAST: Final = b"\xff"
"""Sorts after every key."""

_BYTES, _STR, _FLOAT, _FALSE, _TRUE = 0x01, 0x02, 0x21, 0x26, 0x27
_ZERO, _LONG_NEGATIVE, _LONG_POSITIVE = 0x14, 0x0B, 0x1D
_NAN = b"\x21\xff\xf8\x00\x00\x00\x00\x00\x00"
_DOUBLE, _BITS = struct.Struct(">d"), struct.Struct(">Q")
_SIGN, _ALL_BITS = 2**63, 2**64 - 1
_MOST_BETWEEN = limits.KEY_BYTES - 2
"""How many bytes a key may have between its first and its last one."""
_join_texts = "\x00\x02".join
_BETWEEN_KEYS = "\x00\x01\x02"
_INVERT = bytes(255 - byte for byte in range(256))


class InnerKey(tuple[Part, ...]):
    """The key of an entry that a scoped or a named store has read, with what stands before it in the database.

    The same tuple names another entry in another store, so `Atomic.check` accepts such an entry only in its own store.
    """

    before: bytes


def encode(key: KeyLike, name: str = "key") -> bytes:
    """The bytes of a key that is to be stored or looked up.

    Args:
        key: A tuple or list of parts.
        name: The caller's argument that holds it, for messages.

    Raises:
        InvalidKey: The key is empty, too long, or has a part that keys can't have.
    """
    if type(key) is tuple:
        for part in key:
            if type(part) is not str:
                break
        else:
            # The common case, only texts, is encoded at once: if no text contains 00, each 00 ends a text.
            texts = "\x00\x02".join(key)  # type: ignore[arg-type]
            if texts.count("\x00") == len(key) - 1 and len(texts) <= _MOST_BETWEEN and texts.isascii():
                return f"\x02{texts}\x00".encode()
    encoded = encode_prefix(key, name)
    if not encoded:
        raise InvalidKey(f"{name}: expected at least one part; () can only be a prefix")
    if len(encoded) > limits.KEY_BYTES:
        raise KeyTooLarge(f"{name}: {len(encoded):,} bytes encoded, and the limit is {limits.KEY_BYTES:,}; shorten it")
    return encoded


def encode_many(many: Sequence[KeyLike], name: str = "key") -> list[bytes]:
    """The bytes of several keys. Short keys that consist of ASCII texts are encoded together, which is faster.

    Raises:
        InvalidKey: As `encode` does.
    """
    if set(map(type, many)) == {tuple}:
        with contextlib.suppress(TypeError):  # a part is not a text
            joined = f"\x02{_BETWEEN_KEYS.join(map(_join_texts, many))}\x00"  # type: ignore[arg-type]
            # If there are as many 00 as parts, none is within a text, and no key is empty; 01 only separates keys.
            if (
                joined.count("\x00") == sum(map(len, many))
                and joined.count("\x01") == len(many) - 1
                and len(joined) <= limits.KEY_BYTES
                and joined.isascii()
            ):
                return joined.encode().split(b"\x01")
    return [encode(key, name) for key in many]


def encode_prefix(prefix: KeyLike, name: str = "prefix") -> bytes:
    """The bytes that all keys below `prefix` begin with; empty for the empty prefix."""
    if type(prefix) is not tuple and not isinstance(prefix, (tuple, list)):
        bare = isinstance(prefix, (str, bytes, int, float))
        got = f"a bare {type(prefix).__name__}; write (part,), with the comma" if bare else type(prefix).__name__
        raise InvalidKeyType(f"{name}: expected a tuple of parts, got {got}")
    parts: list[bytes] = []
    try:
        for part in prefix:
            # The common cases are handled here, without a call per part.
            if type(part) is str and "\x00" not in part:
                parts.append(b"\x02%b\x00" % part.encode())
            elif type(part) is int:
                parts.append(encode_int(part))
            else:
                parts.append(_encode_part(part))
    except UnicodeEncodeError:
        raise InvalidKey(f"{name}: part {len(parts) + 1} holds a lone surrogate, which is not Unicode text") from None
    except InvalidKey as error:
        raise type(error)(f"{name}: part {len(parts) + 1} is {error}") from None
    return b"".join(parts)


def below(prefix: bytes) -> tuple[bytes, bytes]:
    """The range `[start, end)` of all keys that extend an encoded prefix; the key equal to it is not among them."""
    return prefix + FIRST, prefix + LAST


def store_prefix(name: str) -> bytes:
    """What stands before every key of a named store; it sorts after all keys of the unnamed one."""
    return LAST + name.encode() + FIRST


def split_store(encoded: bytes) -> tuple[str | None, bytes]:
    """The name of the store that a stored key belongs to, None for the unnamed one, and the encoded key in that store.

    Raises:
        Undecodable: These bytes begin like the key of a named store, but the name can't be read.
    """
    if not encoded.startswith(LAST):
        return None, encoded
    name, separator, key = encoded[1:].partition(FIRST)
    try:
        if separator:
            return name.decode("ascii"), key
    except UnicodeDecodeError:
        pass
    raise Undecodable(f"stored key {encoded.hex()} is not a key of a named store")


def decode(encoded: bytes) -> TupleKey:
    """The parts of an encoded key.

    Raises:
        Undecodable: These bytes are not a key.
    """
    if not isinstance(encoded, bytes):
        raise Undecodable("a stored key is not bytes: the database is damaged; run `keyloft check`")
    # The common case, only texts, is decoded at once: 02 is the first byte, and follows every 00 but the last.
    if encoded[:1] == b"\x02" and encoded[-1] == 0:
        try:
            text = encoded[1:-1].decode()
        except UnicodeDecodeError:
            pass  # an escaped NUL, a part of another type, or damage
        else:
            texts = text.split("\x00\x02")
            if text.count("\x00") == len(texts) - 1:
                return tuple(texts)
    parts: list[Part] = []
    position, size = 0, len(encoded)
    try:
        while position < size:
            code = encoded[position]
            position += 1
            if code == _STR or code == _BYTES:
                end = encoded.index(0, position)
                escaped = False
                while encoded[end + 1 : end + 2] == b"\xff":
                    escaped = True
                    end = encoded.index(0, end + 2)
                data = encoded[position:end]
                if escaped:
                    data = data.replace(b"\x00\xff", b"\x00")
                parts.append(data.decode() if code == _STR else data)
                position = end + 1
            elif _LONG_NEGATIVE <= code <= _LONG_POSITIVE:
                number, position = _decode_int(code, encoded, position)
                parts.append(number)
            elif code == _FLOAT:
                parts.append(_decode_float(encoded[position : position + 8]))
                position += 8
            elif code == _FALSE or code == _TRUE:
                parts.append(code == _TRUE)
            else:
                raise ValueError(f"no part begins with {code:#04x}")
    except (ValueError, IndexError, struct.error) as error:
        raise Undecodable(f"stored key {encoded.hex()} is not a tuple key: {error}") from error
    return tuple(parts)


def decode_many(many: Sequence[bytes]) -> list[TupleKey]:
    """The keys of a sorted list. If they differ only in a text or a number at their end, all are decoded at once.

    Raises:
        Undecodable: One of them is not a key.
    """
    if not many:
        return []
    with contextlib.suppress(TypeError, AttributeError):  # one of them is not bytes, which `decode` reports
        if (decoded := _decode_alike(many)) is not None:
            return decoded
    return [decode(encoded) for encoded in many]


def _decode_alike(many: Sequence[bytes]) -> list[TupleKey] | None:
    """The keys of a sorted list, if they differ only at their end; else None."""
    *parts, last = decode(many[0])
    if type(last) is int and last >= 0:
        end = len(many[0]) - 1 - (last.bit_length() + 7) // 8
        # In a sorted list, all keys have what the first and the last have in common. A number's code gives its length.
        if many[-1].startswith(many[0][:end]) and len(many[-1]) > end:
            size = end + 1 - _ZERO
            if all([_ZERO <= encoded[end] <= _ZERO + 8 and len(encoded) == size + encoded[end] for encoded in many]):
                numbers = [int.from_bytes(encoded[end + 1 :], "big") for encoded in many]
                return list(zip(*map(repeat, parts), numbers, strict=False))
    if many[0][-1:] == many[-1][-1:] == FIRST:
        head = many[0][: -len(last.encode()) - 1] if type(last) is str else LAST
        # The keys are joined with FF, which is never part of UTF-8. If the result can be decoded, each FF was between a
        # 00 and a head; and if it has no further 00, each key is the head and one text.
        if many[-1].startswith(head) and LAST not in head:
            with contextlib.suppress(UnicodeDecodeError):
                joined = LAST.join(many)[len(head) : -1].replace(FIRST + LAST + head, FIRST).decode()
                texts = joined.split("\x00")
                if len(texts) == len(many):
                    return list(zip(*map(repeat, parts), texts, strict=False))
    return None


def _encode_part(part: object) -> bytes:
    """The bytes of a part; an error says what the part is, and its caller says which part."""
    if isinstance(part, bool):
        return b"\x27" if part else b"\x26"
    if isinstance(part, str):
        return b"\x02%b\x00" % part.encode().replace(b"\x00", b"\x00\xff")
    if isinstance(part, int):
        return encode_int(part)
    if isinstance(part, bytes):
        return b"\x01%b\x00" % part.replace(b"\x00", b"\x00\xff")
    if isinstance(part, float):
        [bits] = _BITS.unpack(_DOUBLE.pack(part))
        return _NAN if math.isnan(part) else b"\x21" + _BITS.pack(bits ^ (_ALL_BITS if bits & _SIGN else _SIGN))
    kind = "None" if part is None else type(part).__name__
    raise InvalidKeyType(f"{kind}; expected a str, an int, a float, a bool or bytes")


def encode_int(number: int) -> bytes:
    """The bytes of an int as a part of a key."""
    size = (number.bit_length() + 7) // 8
    if size <= 8 and number >= 0:  # the common case
        return ((_ZERO + size << 8 * size) + number).to_bytes(size + 1, "big")
    magnitude = abs(number)
    if size > limits.KEY_INT_BYTES:
        raise InvalidKey(f"an int of {size:,} bytes; a key takes ints of at most {limits.KEY_INT_BYTES} bytes")
    data = magnitude.to_bytes(size, "big") if size <= 8 else bytes((size,)) + magnitude.to_bytes(size, "big")
    if number < 0:
        return bytes((_ZERO - min(size, 9),)) + data.translate(_INVERT)
    return bytes((_ZERO + min(size, 9),)) + data


def _decode_int(code: int, encoded: bytes, position: int) -> tuple[int, int]:
    negative = code < _ZERO
    if code == _LONG_POSITIVE or code == _LONG_NEGATIVE:
        size = encoded[position] ^ (0xFF if negative else 0)
        position += 1
    else:
        size = abs(code - _ZERO)
    data = encoded[position : position + size]
    if len(data) < size:
        raise ValueError("an int is cut short")
    number = -int.from_bytes(data.translate(_INVERT), "big") if negative else int.from_bytes(data, "big")
    return number, position + size


def _decode_float(data: bytes) -> float:
    [bits] = _BITS.unpack(data)
    number: float = _DOUBLE.unpack(_BITS.pack(bits ^ (_SIGN if bits & _SIGN else _ALL_BITS)))[0]
    return number


VERSION_BYTES: Final = len(encode_int(limits.LAST_VERSION))
"""The most bytes that a version takes in a key."""
